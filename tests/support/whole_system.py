"""A whole system from one seed: a trainer, three nodes, their store and a control plane, in virtual time, in trouble.

The trainer is the real one from ``offload`` to the batch: its window, threads, caches, retries, hedges, balancing,
membership, HTTP client and reports to the control plane, over sockets in memory. Nodes speak the real messages and
frames, read a store, keep what they read, and fall in all the trouble that the seed draws; the control plane decides
with the real state. Not driven, since the seed has no say in them: what runs in processes of its own or on an event
loop (a node's pipeline, decoders, engines; the servers' HTTP), SQLite (features on disk), PyTorch's workers.

``python tests/support/whole_system.py --seeds 100000`` tries as many; ``--seed N`` tells one as it goes.
"""

import argparse
import io
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

import numpy as np

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from frostline.client.http import HttpTransport
from frostline.client.owners import Blocks
from frostline.control.messages import StageReport
from frostline.control.settings import ControlSettings
from frostline.control.shares import Amounts
from frostline.control.state import ControlState
from frostline.core import FeatureBatch, Skipped
from frostline.core.config import LoaderSettings
from frostline.core.errors import FrostlineError, Overloaded, StoreThrottled, StoreUnavailable
from frostline.core.system import crc32
from frostline.datasets import Dataset
from frostline.jobs import offload
from frostline.loaders import Epochs
from frostline.loaders.fetch import jitter
from frostline.ordering import Order
from frostline.prefetch.window import Window
from frostline.preprocess import imagenet
from frostline.wire.connection import Connection
from frostline.wire.framing import MEDIA_TYPE, Encoder
from frostline.wire.messages import CHECKSUM_HEADER, FeatureRequest, Health, error_to_json, retry_after, status_of
from frostline.wire.packing import pack
from support.virtual_threads import Process, Scheduler, in_virtual_time, on_one_core, running

# Samples of a job, small ones more often: what goes wrong does so with few; of a batch, and pixels of a side.
SIZES, BATCH, PIXELS = (4, 4, 5, 6, 7, 7, 9, 9, 13, 22), 3, 2
ROW_BYTES = 3 * PIXELS * PIXELS * 4
NODES = tuple(f"http://node-{number}:7070" for number in (1, 2, 3))
CONTROL = "http://control:7075"
RETRY_FOR_S, DEADLINE_S = 60.0, 12.0


@dataclass(frozen=True)
class Trouble:
    """Something that befalls one part from a time on, for so long."""

    at: float
    kind: str
    part: str
    seconds: float

    def __str__(self):
        return f"{self.at:.2f} s: {self.part} {self.kind} for {self.seconds:.1f} s"


@dataclass
class Plan:
    """All that a seed decides beforehand."""

    samples: int
    settings: LoaderSettings
    epochs: int
    order_seed: int
    step_s: float
    service_s: float
    latency_s: float
    troubles: list
    answers: float  # the share of answers that something happens to
    spoilt: int  # how many at most
    bad: frozenset  # samples that nobody can read
    lost: dict  # samples that one node cannot read
    kills: list
    restart_s: float
    checkpoint_every: int
    capacity: Amounts
    loses_state: bool
    is_hopeless: bool
    leaves: float

    @classmethod
    def of(cls, seed):
        chance = random.Random(f"plan {seed}")
        samples = chance.choice(SIZES)
        kinds = ("dies", "hangs", "vanishes", "is slow", "drains")
        troubles = [
            Trouble(chance.uniform(0, 6), chance.choice(kinds), chance.choice(NODES), chance.choice((0.3, 2, 6, 25)))
            for _ in range(chance.choice((0, 1, 2, 3, 5)))
        ]
        if chance.random() < 0.25:
            troubles.append(Trouble(chance.uniform(0, 4), "fails", "store", chance.choice((0.5, 3, 20))))
        has_control = chance.random() < 0.4
        if has_control:
            troubles += [
                Trouble(chance.uniform(0, 5), chance.choice(("dies", "hangs")), CONTROL, chance.choice((0.5, 3, 60)))
                for _ in range(chance.randrange(3))
            ]
        is_hopeless = chance.random() < 0.06
        if is_hopeless:
            at = chance.uniform(0.5, 3)
            troubles = [trouble for trouble in troubles if trouble.at < at and trouble.part in NODES]
            troubles += [Trouble(at, chance.choice(kinds[:3]), node, 1e6) for node in NODES]
        requests = chance.choice((1, 2, 3, None))
        settings = LoaderSettings(
            samples_per_request=chance.choice((2, 3, 4, 8)),
            requests_in_flight=requests,
            max_requests=4,
            window_bytes=chance.choice((1, 6 * ROW_BYTES, 12 * ROW_BYTES, 1 << 20)),
            cache_bytes=chance.choice((0, 0, 9 * ROW_BYTES, 1 << 20)),
            max_reorder=chance.choice((0, 0, 0, 3, None)),
            hedge_quantile=chance.choice((0.6, 0.95, 1.0)),
            ramp=chance.random() < 0.7,
            retry_for_s=RETRY_FOR_S,
            deadline_s=DEADLINE_S,
            max_skipped_fraction=0.75,
            control=CONTROL if has_control else "none",
        )
        bad = frozenset(chance.sample(range(samples), chance.choice((0, 0, 0, 1, 3))))
        lost = {chance.randrange(samples): chance.choice(NODES) for _ in range(chance.choice((0, 0, 1, 4)))}
        return cls(
            samples=samples,
            settings=settings,
            epochs=chance.choice((1, 1, 1, 2)),
            order_seed=chance.randrange(1000),
            step_s=chance.choice((0.0, 0.05, 0.4)),
            service_s=chance.choice((0.001, 0.05, 0.3)),
            latency_s=chance.choice((0.0005, 0.02)),
            troubles=sorted(troubles, key=lambda trouble: trouble.at),
            answers=chance.choice((0.0, 0.1, 0.4)),
            spoilt=chance.choice((1, 3, 8)),
            bad=bad,
            lost=lost,
            kills=sorted(chance.uniform(0, 4) for _ in range(chance.choice((0, 0, 1, 2)))),
            restart_s=chance.choice((0.0, 5.0)),
            checkpoint_every=chance.choice((1, 2, 5)),
            capacity=Amounts(requests_per_s=chance.choice((4.0, 50.0, 1e4)), memory_bytes=chance.choice((1e9, 500.0))),
            loses_state=chance.random() < 0.5,
            is_hopeless=is_hopeless,
            leaves=chance.choice((0.0, 0.05, 0.3)),
        )


class Socket(io.RawIOBase):
    """One side of a connection in memory, as ``socket.socket`` and as a file over it."""

    def __init__(self, network, server, timeout):
        self._network = network
        self._server = server
        self._timeout = timeout
        self._came = bytearray()
        self._waiting = deque()
        self._ended = None  # by an end of the stream, or by an error
        self._sent = bytearray()
        self.is_broken = False  # from this side

    def settimeout(self, seconds):
        self._timeout = seconds

    def gettimeout(self):
        return self._timeout

    def fileno(self):
        raise OSError("it is none of the system's")

    def makefile(self, *_):
        return io.BufferedReader(_Reading(self))

    def sendall(self, data, flags=0):
        running().leave()
        if self.is_broken or self._ended is not None:
            raise BrokenPipeError("the other side has gone")
        self._sent += bytes(data)
        self._network.sent(self, self._server, self._sent)

    def recv_into(self, buffer, nbytes=0, flags=0):
        scheduler = running()
        scheduler.leave()
        while not self._came and self._ended is None and not self.is_broken:
            if not scheduler.wait(self._waiting, self._timeout):
                raise TimeoutError("timed out")
        if self.is_broken:
            return 0
        if not self._came:
            if isinstance(self._ended, Exception):
                raise self._ended
            return 0
        view = memoryview(buffer).cast("B")
        found = min(len(view), nbytes or len(view), len(self._came))
        view[:found] = self._came[:found]
        del self._came[:found]
        return found

    def come(self, data):
        """Bytes reach this side."""
        if self._ended is None and not self.is_broken:
            self._came += data
            self._wake()

    def end(self, error=None):
        """The other side is gone."""
        if self._ended is None:
            self._ended = True if error is None else error
            self._wake()

    def shutdown(self, *_):
        self.is_broken = True
        self._wake()

    def close(self):
        self.is_broken = True

    def _wake(self):
        while self._waiting:
            self._network.scheduler.wake(self._waiting)


class _Reading(io.RawIOBase):
    def __init__(self, end):
        self._end = end

    def readable(self):
        return True

    def readinto(self, buffer):
        return self._end.recv_into(buffer)


class VirtualConnection(Connection):
    """The client's connection over a socket in memory."""

    def connect(self):
        self.sock = Network.now.connected(f"http://{self.host}:{self.port}", self.timeout)
        if self.is_broken:
            self.break_off()

    def break_off(self):
        self._is_broken = True
        if self.sock is not None:
            self.sock.shutdown()

    def close(self):
        if self.sock is not None:
            self.sock.close()
        super().close()


class Network:
    """Takes requests to servers and answers back, each after a while."""

    now = None

    def __init__(self, scheduler, plan, servers):
        self.scheduler = scheduler
        self._latency_s = plan.latency_s
        self._servers = servers

    def connected(self, address, timeout):
        server = self._servers[address]
        self.scheduler.sleep(2 * self._latency_s)
        if server.state == "vanished":
            self.scheduler.sleep(min(2.0, timeout))
            raise TimeoutError("timed out")
        if server.state == "dead":
            raise ConnectionRefusedError("nobody listens there")
        found = Socket(self, server, timeout)
        server.sockets.append(found)
        return found

    def sent(self, client, server, buffer):
        """Bytes were written; whole requests go on their way."""
        while (request := _request_of(buffer)) is not None:
            self.later(server, partial(server.asked, client, *request))

    def later(self, server, call, seconds=0.0):
        self.scheduler.at(self.scheduler.now + self._latency_s + seconds, partial(server.when_up, server.life, call))


def _request_of(buffer):
    head, mark, rest = bytes(buffer).partition(b"\r\n\r\n")
    if not mark:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    length = int(headers.get("content-length", 0))
    if len(rest) < length:
        return None
    del buffer[: len(head) + 4 + length]
    method, path, _ = first.split(" ")
    body = rest[:length]
    said = headers.get(CHECKSUM_HEADER.lower())
    assert said is None or said == f"{crc32(body):08x}"
    return method, path, body


class Server:
    """What is at an address: it may die, hang and vanish, and come back."""

    def __init__(self, address):
        self.address = address
        self.state = "up"
        self.life = 0
        self.network = None
        self.sockets = []
        self._held = []
        self._befell = 0

    def when_up(self, life, call):
        if life != self.life or self.state in ("dead", "vanished"):
            return
        if self.state == "hung":
            self._held.append(call)
        else:
            call()

    def befall(self, trouble):
        """Be in trouble, and out of it later, unless something else befell it meanwhile."""
        self._befell += 1
        scheduler, mark = self.network.scheduler, self._befell
        if trouble.kind == "dies":
            self._end_life("dead", ConnectionResetError("it died"))
        elif trouble.kind == "vanishes":
            self._end_life("vanished", None)
        elif trouble.kind == "hangs" and self.state == "up":
            self.state = "hung"
        else:
            self.weaken(trouble.kind)
        scheduler.at(scheduler.now + trouble.seconds, lambda: mark == self._befell and self.recover())

    def weaken(self, kind):
        pass

    def _end_life(self, state, error):
        self.state = state
        self.life += 1
        self._held.clear()
        sockets, self.sockets = self.sockets, []
        if error is not None:
            for client in sockets:
                client.end(error)
        self.restarted()

    def restarted(self):
        pass

    def recover(self):
        if self.state == "vanished":  # packets that come now are answered with a reset
            self.life += 1
        self.state = "up"
        held, self._held = self._held, []
        for call in held:
            call()

    def answer(self, client, status, body, media_type="application/json", more=None):
        head = {"content-type": media_type, "content-length": str(len(body)), **(more or {})}
        lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
        self.network.later(self, partial(client.come, f"HTTP/1.1 {status} x\r\n{lines}\r\n".encode() + body))

    def refuse(self, client, error):
        self.answer(client, status_of(error), json.dumps(error_to_json(error)).encode(), more=retry_after(error))


class Node(Server):
    """A node beside the store, with a cache of its own."""

    def __init__(self, address, world):
        super().__init__(address)
        self._world = world
        self._chance = random.Random(f"{address} {world.seed}")
        self._kept = {}
        self._slowness = 1.0
        self._trouble = ""
        self.under_way = 0

    def weaken(self, kind):
        self._slowness = 20.0 if kind == "is slow" else self._slowness
        self._trouble = "draining" if kind == "drains" else self._trouble

    def restarted(self):
        self._kept.clear()
        self.under_way = 0

    def recover(self):
        self._slowness, self._trouble = 1.0, ""
        super().recover()

    def asked(self, client, method, path, body):
        if path == "/v1/health":
            self.answer(client, 200, _health(self.address, self._trouble))
        elif path == "/v1/statistics":
            self.answer(client, 200, b'{"totals": {}}')
        elif path == "/v1/features":
            self._features(client, FeatureRequest.from_json(json.loads(body)))
        else:
            raise AssertionError(f"{method} {path}")

    def _features(self, client, request):
        world = self._world
        spoiling = world.spoiling(self._chance)
        if spoiling == "reset":
            client.end(ConnectionResetError("reset"))
            return
        error = _REFUSALS.get(spoiling)
        if error is not None:
            self.refuse(client, error())
            return
        if world.store_fails:
            self.refuse(client, StoreUnavailable("the store does not answer"))
            return
        if spoiling == "garbage":
            self.answer(client, 502, b"<html>bad gateway</html>", "text/html")
            return
        world.began(self)
        life = self.life
        after = self._slowness * world.plan.service_s
        parts = self._parts(request, shuffled=spoiling == "other rows")
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {MEDIA_TYPE}\r\ntransfer-encoding: chunked\r\n\r\n".encode()
        chunks = [head, *(b"%x\r\n%b\r\n" % (len(part), part) for part in parts), b"0\r\n\r\n"]
        chunks, cut_off = self._spoilt(chunks, spoiling)
        late_at = self._chance.randrange(len(chunks)) if spoiling == "late" else -1
        seconds = 0.0
        for number, chunk in enumerate(chunks):
            seconds += after / len(chunks) + (self._chance.choice((0.8, 4.0, 30.0)) if number == late_at else 0.0)
            self.network.later(self, partial(client.come, chunk), seconds)
        self.network.later(self, partial(self._ended, client, life, cut_off=cut_off), seconds)

    def _ended(self, client, life, *, cut_off):
        if life == self.life:
            self.under_way -= 1
        if cut_off:
            client.end()

    def _spoilt(self, chunks, spoiling):
        if spoiling == "short":
            whole = b"".join(chunks)
            return [whole[: self._chance.randrange(len(whole))]], True
        if spoiling == "damaged":
            number = self._chance.randrange(1, len(chunks))
            chunk = bytearray(chunks[number])
            chunk[self._chance.randrange(len(chunk))] ^= 1 << self._chance.randrange(8)
            chunks[number] = bytes(chunk)
        return chunks, False

    def _parts(self, request, *, shuffled):
        """An answer as parts, a few rows each."""
        assert request.cut == 1
        encoder, ids = Encoder(), request.samples.ids
        rows = self._chance.choice((2, 5))
        for start in range(0, len(ids), rows):
            some = ids[start : start + rows]
            unread = np.array([self._cannot_read(id) for id in some.tolist()])
            read = some[~unread][::-1] if shuffled else some[~unread]
            batch = FeatureBatch(
                ids=read,
                tensors=(np.stack([self._read(id) for id in read.tolist()]) if len(read) else _row(0)[None][:0],),
                skipped=tuple(
                    Skipped(id=int(some[row]), object=request.samples.objects[start + row], reason="it is no image")
                    for row in np.flatnonzero(unread).tolist()
                ),
            )
            yield b"".join(map(bytes, encoder.encode(pack(batch, request.codec, request.tolerance))))
        yield encoder.finish()

    def _cannot_read(self, id):
        return id in self._world.bad or self._world.lost.get(id) == self.address

    def _read(self, id):
        if id not in self._kept:
            self._kept[id] = _row(self._world.places[id])
        return self._kept[id]


@cache
def _health(address, trouble):
    health = Health(version="1", host=address, hardware="none", memory_bytes=1 << 30, roots=(), trouble=trouble)
    return json.dumps(health.to_json()).encode()


_REFUSALS = {
    "full": lambda: Overloaded("the node is full", retry_after_s=2.0),
    "throttled": lambda: StoreThrottled("the store asks to slow down", retry_after_s=1.0),
    "store": lambda: StoreUnavailable("the store does not answer"),
}
SPOILINGS = ("reset", "short", "damaged", "late", "garbage", "other rows", *_REFUSALS)


@cache
def _row(place):
    """The values of a sample: no two have the same."""
    return (place + np.arange(3 * PIXELS * PIXELS, dtype=np.float32) / 64).reshape(3, PIXELS, PIXELS)


class ControlServer(Server):
    """A control plane with the real state, which dies and comes back with it or without."""

    def __init__(self, world):
        super().__init__(CONTROL)
        self._world = world
        self._settings = ControlSettings(capacity=world.plan.capacity, lease_s=5.0)
        self._state = None

    def asked(self, client, method, path, body):
        assert (method, path) == ("POST", "/v1/stages")
        now_s = self.network.scheduler.now
        self._state = self._state or ControlState(self._settings, now_s=now_s)
        try:
            answer = self._state.receive("everybody", StageReport.from_json(json.loads(body)), now_s)
        except FrostlineError as error:
            self.refuse(client, error)
            return
        self._state.take_touched()
        capacity, held = self._world.plan.capacity.row, self._state.held.row
        assert all(part <= whole * (1 + 1e-9) for part, whole in zip(held, capacity, strict=True))
        self.answer(client, 200, json.dumps(answer.to_json()).encode())

    def restarted(self):
        if self._world.plan.loses_state or self._state is None:
            self._state = None
        else:
            self._state = ControlState(
                self._settings, self._state.remembered, events=(), now_s=self.network.scheduler.now
            )


class BoundedWindow(Window):
    """The real window, looked at whenever it has moved."""

    def __init__(self, requests, settings, **options):
        super().__init__(requests, settings, **options)
        self._most = max(settings.window_bytes, settings.samples_per_request * ROW_BYTES)
        self._requests = settings.last_requests

    def asks(self, now):
        found = super().asks(now)
        stands = self.statistics()
        held = stands.expected_bytes + stands.ready_bytes
        assert held <= self._most, f"{held} bytes in a window of {self._most}"
        assert stands.requests_in_flight <= 2 * self._requests + 1, stands
        return found


@dataclass
class World:
    """One run."""

    seed: int
    data: dict  # data sets by their sizes
    tells: bool = False
    plan: Plan = field(init=False)
    handed: list = field(default_factory=list)  # of (epoch, ids) of batches, up to now
    saved: tuple = (None, 0)  # the state of the loader, and how many batches it has seen
    error: Exception = None
    happened: Counter = field(default_factory=Counter)
    store_fails: bool = False

    def __post_init__(self):
        self.plan = Plan.of(self.seed)
        self._chance = random.Random(f"world {self.seed}")
        self._spoilt = 0
        self.data = self.data[self.plan.samples]
        ids = self.data.samples.ids.tolist()
        self.places = {id: place for place, id in enumerate(ids)}
        self.bad = {ids[place] for place in self.plan.bad}
        self.lost = {ids[place]: node for place, node in self.plan.lost.items()}
        self.scheduler = Scheduler(self.seed, leaves=self.plan.leaves)
        servers = [*(Node(address, self) for address in NODES), ControlServer(self)]
        self.nodes = servers[:3]
        self.servers = {server.address: server for server in servers}
        network = Network(self.scheduler, self.plan, self.servers)
        for server in servers:
            server.network = network
        Network.now = network

    @property
    def is_long_alone(self):
        """Whether a node that lost a sample may have been the only one for as long as the others are waited for."""
        return sum(trouble.seconds for trouble in self.plan.troubles) > RETRY_FOR_S / 2

    def tell(self, what):
        if self.tells:
            print(f"{self.scheduler.now - 1000:9.3f} s  {what}")

    def spoiling(self, chance):
        """What happens to the next answer, if anything."""
        if self._spoilt >= self.plan.spoilt or chance.random() >= self.plan.answers:
            return ""
        self._spoilt += 1
        kind = chance.choice(SPOILINGS)
        self.happened[kind] += 1
        self.tell(f"an answer is spoilt: {kind}")
        return kind

    def began(self, node):
        node.under_way += 1

    def run(self):
        """Live through it, and see that all is as promised."""
        self.scheduler.run(self._direct, Process("world"))
        self._check()

    def _direct(self):
        for trouble in self.plan.troubles:
            self.scheduler.at(1000 + trouble.at, partial(self._befall, trouble))
        for attempt in range(len(self.plan.kills) + 1):
            process = Process(f"trainer {attempt + 1}")
            if attempt < len(self.plan.kills):
                self.scheduler.at(self.scheduler.now + self.plan.kills[attempt], partial(self._kill, process))
            self.scheduler.start(self._train, process, "loop").join()
            if not process.is_dead:
                break
            self.happened["killed"] += 1
            self.scheduler.sleep(self.plan.restart_s)
        self.scheduler.sleep(3 * DEADLINE_S)
        left = self.scheduler.alive(process)
        assert not left, f"threads are left behind: {left}"

    def _befall(self, trouble):
        self.tell(trouble)
        self.happened[trouble.kind] += 1
        if trouble.part == "store":
            self.store_fails = True
            self.scheduler.at(self.scheduler.now + trouble.seconds, lambda: setattr(self, "store_fails", False))
        else:
            self.servers[trouble.part].befall(trouble)

    def _kill(self, process):
        self.tell(f"{process.name} is killed")
        self.scheduler.kill(process)

    def _train(self):
        state, batches = self.saved
        del self.handed[batches:]
        try:
            self._epochs(state)
        except FrostlineError as error:
            self.error = error
            self.tell(f"it ends: {error}")

    def _epochs(self, state):
        plan = self.plan
        job = offload(
            None,
            self.data,
            preprocess=imagenet(PIXELS),
            near=list(NODES),
            cut=1,
            settings=plan.settings,
            on_event=self.tell,
        )
        with job:
            epochs = Epochs(job.arrays(BATCH, shuffle=True, seed=plan.order_seed), range(plan.epochs))
            if state is not None:
                epochs.load_state_dict(json.loads(state))
            for loader in epochs:
                for batch in loader:
                    self._take(loader.epoch, batch)
                    if len(self.handed) % plan.checkpoint_every == 0:
                        self.saved = json.dumps(epochs.state_dict()), len(self.handed)
                    time.sleep(plan.step_s)

    def _take(self, epoch, batch):
        ids = batch.ids.tolist()
        self.tell(f"epoch {epoch}: {ids}")
        places = [self.places[id] for id in ids]
        expected = np.stack([_row(place) for place in places])
        assert np.array_equal(batch.features, expected), f"other values for {ids}"
        labels = self.data.samples.labels_at(np.array(places))
        assert np.array_equal(batch.labels, labels), f"other labels for {ids}"
        self.handed.append((epoch, ids))

    def _check(self):
        if self.plan.is_hopeless and self.error is not None:
            assert any(address in str(self.error) for address in NODES), f"no node is named: {self.error}"
        else:
            assert self.error is None, f"it should have ended well, and said: {self.error}"
            for epoch in range(self.plan.epochs):
                self._check_epoch(epoch)
        assert self.scheduler.now < 1000 + _ENDS_WITHIN_S, f"it took {self.scheduler.now - 1000:.0f} s"

    def _check_epoch(self, epoch):
        batches = [ids for number, ids in self.handed if number == epoch]
        order = Order(size=len(self.places), seed=self.plan.order_seed, epoch=epoch).indices(0, len(self.places))
        came = [id for ids in batches for id in ids]
        left_out = self.bad | (self.lost.keys() - set(came) if self.is_long_alone else set())
        agreed = [id for id in self.data.samples.ids[order].tolist() if id not in left_out]
        assert sorted(came) == sorted(agreed), f"epoch {epoch} has {came}, not each of {agreed} once"
        slack = self.plan.settings.max_reorder
        if slack == 0:
            assert came == agreed, f"epoch {epoch} has the order {came}, not {agreed}"
        elif slack is not None:
            _check_reach([agreed.index(id) for id in came], slack)
        assert all(len(ids) == BATCH for ids in batches[:-1]), f"epoch {epoch} has {[*map(len, batches)]} rows"


_ENDS_WITHIN_S = 400.0


def _check_reach(places, slack):
    seen, first = set(), 0
    for place in places:
        assert place <= first + slack, f"place {place} came while {first} was missing, with a slack of {slack}"
        seen.add(place)
        while first in seen:
            first += 1


def _blocks(real, *, data, samples):
    """Blocks are owned by the name of the data, which here is that of a folder with another name each time."""
    assert data
    return real(data="store", samples=samples)


@contextmanager
def prepared(folder):
    """Have worlds made: the data that their jobs read, which is listed once."""
    for number in range(max(SIZES)):
        path = Path(folder) / ("even", "odd")[number % 2] / f"{number:02}.jpg"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"%d" % number)
    data = Dataset(folder).refresh()
    data = {size: data.take(np.arange(size)) for size in SIZES}
    chance = random.Random(0)
    more = {
        Connection: VirtualConnection,
        Window: BoundedWindow,
        jitter: chance.random,
        Blocks: partial(_blocks, Blocks),
    }
    with on_one_core(), in_virtual_time("frostline", more, (HttpTransport, Connection)):

        def world(seed, *, tells=False):
            chance.seed(seed)
            return World(seed, data, tells=tells)

        yield world


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds to try")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, help="one seed, told as it goes")
    asked = parser.parse_args()
    findings, happened = 0, Counter()
    with tempfile.TemporaryDirectory() as folder, prepared(folder) as world:
        if asked.seed is not None:
            found = world(asked.seed, tells=True)
            print(found.plan)
            found.run()
            return 0
        began = time.process_time()
        for seed in range(asked.first, asked.first + asked.seeds):
            found = world(seed)
            try:
                found.run()
            except BaseException as error:  # noqa: BLE001 (whatever comes is a finding)
                findings += 1
                print(f"seed {seed}: {type(error).__name__}: {str(error)[:3000]}", flush=True)
                if isinstance(error, KeyboardInterrupt):
                    return 1
            happened += found.happened
        took_s = time.process_time() - began
    print(f"{asked.seeds} seeds, {findings} findings, {took_s:.1f} s of processor time")
    print(", ".join(f"{count} x {kind}" for kind, count in happened.most_common()))
    return 1 if findings else 0


if __name__ == "__main__":
    os.environ.setdefault("CI", "true")
    raise SystemExit(main())
