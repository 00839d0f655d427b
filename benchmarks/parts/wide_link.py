"""A wide-area link between two network namespaces: packets are delayed, lost and held to a rate. Needs root.

Kernels without tc-netem(8) cannot delay packets, so each namespace's end of the link is a TUN device, and a program
between them passes every packet on when it is due: the kernel's TCP at either end sees a real round trip and losses.
Where a rate is shared by many packets, each leaves when the line is free of those before it, and one that would wait
longer than the queue is dropped, as in a router.
"""

import ctypes
import fcntl
import json
import os
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness import Namespaces, command

DEVICE = "fl-wide"
# Linux: <linux/if_tun.h>, <sched.h>.
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI, _CLONE_NEWNET = 0x400454CA, 0x0001, 0x1000, 0x40000000
_MTU = 1500
# What a router of such a link holds back before it drops: as much as the line carries in this time.
_QUEUE_S = 0.1


class WideLink(Namespaces):
    """Namespaces of the store and the trainer with such a link between them. A context manager.

    Args:
        round_trip_ms: of an empty line.
        mbit: a second, each way.
        loss: share of the packets that are dropped, each way.
        congestion: TCP's congestion control at both ends, such as bbr or reno.
    """

    address = "10.78.0.1"
    trainer_address = "10.78.0.2"

    def __init__(self, *, round_trip_ms=0.0, mbit=100.0, loss=0.0, congestion="bbr"):
        super().__init__()
        self._line = {"delay_s": round_trip_ms / 2000, "bytes_per_s": mbit * 125_000, "loss": loss}
        self._congestion = congestion
        self._process = None

    def __enter__(self):
        super().__enter__()
        for name in (self.store, self.trainer):
            enter = ["ip", "netns", "exec", name]
            command(*enter, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={self._congestion}")
            # A long fast line needs large windows, which the kernel's limits would not allow.
            command(*enter, "sysctl", "-qw", "net.ipv4.tcp_rmem=4096 131072 33554432")
            command(*enter, "sysctl", "-qw", "net.ipv4.tcp_wmem=4096 131072 33554432")
        ends = [(self.store, self.address), (self.trainer, self.trainer_address)]
        words = [sys.executable, __file__, json.dumps([self._line, ends])]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._process.stdout.readline().strip() != "up":
            raise SystemExit("the link did not come up")
        return self

    def __exit__(self, *_):
        if self._process is not None:
            self._process.communicate()  # the end of its input ends it
            self._process = None
        super().__exit__()


@dataclass(slots=True)
class Direction:
    """Packets on their way from one end to the other."""

    source: int
    target: int
    delay_s: float
    bytes_per_s: float
    loss: float
    free_at: float = 0.0
    under_way: deque = field(default_factory=deque)

    def take(self, packet, now):
        """A packet enters, unless it is lost or the queue is full."""
        begins = max(now, self.free_at)
        if begins - now > _QUEUE_S or random.random() < self.loss:
            return
        self.free_at = begins + len(packet) / self.bytes_per_s
        self.under_way.append((self.free_at + self.delay_s, packet))

    def give(self, now):
        """Packets that are due leave; seconds until the next one is."""
        while self.under_way and self.under_way[0][0] <= now:
            with suppress(BlockingIOError):  # the other end's queue is full: lost
                os.write(self.target, self.under_way[0][1])
            self.under_way.popleft()
        return self.under_way[0][0] - now if self.under_way else None


def forward(line, ends):
    """Pass packets on until standard input ends."""
    store, trainer = (_tun(*end) for end in ends)
    directions = {store: Direction(store, trainer, **line), trainer: Direction(trainer, store, **line)}
    print("up", flush=True)
    poll = select.poll()
    for entry in (store, trainer, 0):
        poll.register(entry, select.POLLIN)
    waits = None
    while True:
        for ready, _ in poll.poll(None if waits is None else max(0.0, waits * 1000)):
            if ready == 0:
                return
            _take_all(directions[ready])
        now = time.monotonic()
        waits = min(
            (item for item in (each.give(now) for each in directions.values()) if item is not None), default=None
        )


def _take_all(direction):
    with suppress(BlockingIOError):
        while True:
            direction.take(os.read(direction.source, _MTU + 64), time.monotonic())


def _tun(namespace, address):
    """The file descriptor of a TUN device inside a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/proc/self/ns/net").open() as home, Path(f"/run/netns/{namespace}").open() as there:
        for item in (there, home):
            if item is home:
                descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
                fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
            if libc.setns(item.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"cannot enter the namespace {namespace}")
    command("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", DEVICE)
    command("ip", "-n", namespace, "link", "set", DEVICE, "mtu", str(_MTU), "txqueuelen", "2000", "up")
    return descriptor


# Bare connections, each of which asks for one message after the other: the ceiling of whatever asks over HTTP.

PORT = 29_000


def serve_bare(address):
    """Answer every byte with as many as the connection named first; in threads, until the end."""
    listener = socket.create_server((address, PORT), backlog=256)
    threading.Thread(target=_accept, args=(listener,), daemon=True).start()


def pull_bare(address, *, connections, message_bytes, seconds, steady_after_s):
    """Megabits a second that reached this end from the given second on."""
    started = time.perf_counter()
    received = [0] * connections
    counted = threading.Barrier(connections + 1)
    arguments = (address, message_bytes, started + steady_after_s, started + seconds, received, counted)
    for number in range(connections):
        threading.Thread(target=_pull, args=(number, *arguments), daemon=True).start()
    counted.wait()
    return 8e-6 * sum(received) / (seconds - steady_after_s)


def _accept(listener):
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection,), daemon=True).start()


def _answer(connection):
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, connection.makefile("rb") as asked:
        message = bytes(int(asked.readline()))
        try:
            while asked.read(1):
                connection.sendall(message)
        except ConnectionError:
            return  # the other end has had enough


def _pull(number, address, message_bytes, since, until, received, counted):
    space = bytearray(1 << 18)
    with socket.create_connection((address, PORT)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"%d\n" % message_bytes)
        while time.perf_counter() < until:
            connection.sendall(b"?")
            left = message_bytes
            while left and (now := time.perf_counter()) < until:
                connection.settimeout(max(0.001, until - now))
                try:
                    count = connection.recv_into(space, min(left, len(space)))
                except TimeoutError:
                    break
                left -= count
                if time.perf_counter() >= since:
                    received[number] += count
    counted.wait()


if __name__ == "__main__":
    forward(*json.loads(sys.argv[1]))
