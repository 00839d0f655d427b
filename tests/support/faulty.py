"""Nodes that misbehave: a way to a real one that hangs, lies, refuses or dies, and a store that cannot read."""

import json
import random
import re
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

from frostline.core.config import NodeSettings
from frostline.core.errors import ObjectNotFound, SampleError
from frostline.node import Node
from frostline.node.resources import RequestOpener
from frostline.stores.local import FolderStore
from frostline.stores.urls import parse_url
from frostline.wire.messages import STATUS_OF_ERROR
from support.nodes import served

REFUSALS = {
    "another service": (404, "text/html", b"<h1>Not Found</h1>"),
    "a service that says yes": (200, "text/html", b"<h1>It works!</h1>"),
    "other roots": (400, "application/json", {"error": "BadRequest", "message": "data lies under no root"}),
    "other credentials": (403, "application/json", {"error": "AccessDenied", "message": "the store says no"}),
    "other tenants": (401, "application/json", {"error": "Unauthenticated", "message": "who is that?"}),
    "less memory": (413, "application/json", {"error": "OverBudget", "message": "it does not fit"}),
    "a broken store": (502, "application/json", {"error": "StoreError", "message": "the store is broken"}),
    "nothing there": (404, "application/json", {"error": "ObjectNotFound", "message": "no such object"}),
    "an error of its own": (500, "text/plain", b"Internal Server Error"),
}
"""What answers in the place of a node, by what it is."""

ERRORS = {
    kind.__name__: (status, "application/json", {"error": kind.__name__, "message": "no", "retry_after_s": 1.0})
    for kind, status in STATUS_OF_ERROR.items()
}
"""Every error that a node may answer with, by its name, to whatever it is asked."""

HALF_HANGS = ("drips", "says heads only", "keeps features back", "keeps posts back")
"""A node that is there, and from which nothing comes that is of use.

It sends a byte a second; the heads of its answers alone; no answer that takes more than one packet, as where the path
lets none of full size through; or none to a POST.
"""

ONE_WAY = ("loses answers", "loses requests")
"""A path on which one direction is silent, while the other one and the connections stay."""

BREAKS = ("cuts answers off", "resets connections")
"""A path on which each answer ends in its middle: with the end of the connection, or with a reset."""

_ANSWERED = REFUSALS | ERRORS
_PACKET = 1500

_PIECE = 64 << 10
_SLOW_BYTES_PER_S = 512 << 10
# Heads of requests and answers, and the lines that say how long a piece of an answer is.
_FRAMING = re.compile(rb"\A(?:[A-Z]{3,7} /|HTTP/1).*?\r\n\r\n|(?:\A|\r\n)[0-9a-fA-F]{1,8}\r\n|\r\n\Z", re.DOTALL)


class FaultyWay:
    """A way to a node that passes on what it is sent until it is told otherwise. A context manager.

    ``mode`` is ``well``, ``hang``, ``slow``, ``killed`` or ``flip``, one of ``HALF_HANGS``, ``ONE_WAY`` or ``BREAKS``,
    or a key of ``REFUSALS`` or ``ERRORS``.
    """

    def __init__(self, url, draw):
        host, _, port = url.removeprefix("http://").partition(":")
        self._node = (host, int(port))
        self._draw = draw
        self._sockets = set()
        self._changed = threading.Condition()
        self.mode = "well"
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def __enter__(self):
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.switch_scope("killed")

    def switch_scope(self, mode):
        """Behave so from now on."""
        with self._changed:
            self.mode = mode
            self._changed.notify_all()
        if mode == "killed":
            with suppress(OSError):  # which wakes who accepts
                self._listening.shutdown(socket.SHUT_RDWR)
            self._listening.close()
            for one in tuple(self._sockets):
                _end(one)

    def _accept(self):
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            self._sockets.add(client)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with suppress(OSError), client:
            if self.mode in _ANSWERED:
                self._refuse(client)
                return
            with socket.create_connection(self._node) as node:
                self._sockets.add(node)
                if self.mode == "killed":  # meanwhile, with no look at these two
                    return
                back = threading.Thread(target=self._pump, args=(node, client), kwargs={"is_answer": True}, daemon=True)
                back.start()
                self._pump(client, node, is_answer=False)
                back.join()

    def _pump(self, one, other, *, is_answer):
        with suppress(OSError):
            while data := one.recv(_PIECE):
                if self.mode in _ANSWERED and not is_answer:
                    self._refuse(other if is_answer else one)
                    break
                self._wait_while_silent("hang", ONE_WAY[0 if is_answer else 1])
                if self.mode in HALF_HANGS:
                    data = self._passed(data, other, is_answer=is_answer)
                if self.mode in BREAKS and is_answer:
                    other.sendall(data[: len(data) // 2])
                    if self.mode == BREAKS[1]:
                        other.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        other.close()
                    break
                if self.mode == "slow":
                    time.sleep(len(data) / _SLOW_BYTES_PER_S)
                other.sendall(self._flipped(data))
        _end(one)
        _end(other)

    def _wait_while_silent(self, *silent):
        with self._changed:
            self._changed.wait_for(lambda: self.mode not in silent)

    def _passed(self, data, other, *, is_answer):
        """What is left of some bytes once the node behaves again, of which some may have been sent."""
        mode = self.mode
        held = {
            "drips": len(data) if is_answer else 0,
            "says heads only": len(data[data.find(b"\r\n\r\n") + 4 :]) if is_answer else 0,
            "keeps features back": len(data) if is_answer and len(data) > _PACKET else 0,
            "keeps posts back": len(data) if data.startswith(b"POST") else 0,
        }[mode]
        other.sendall(data[: len(data) - held])
        data = data[len(data) - held :]
        with self._changed:
            while data and not self._changed.wait_for(lambda: self.mode != mode, 1.0 if mode == "drips" else None):
                other.sendall(data[:1])
                data = data[1:]
        return data

    def _flipped(self, data):
        if self.mode != "flip" or len(data) < 200:
            return data
        # A bit of HTTP's own framing may have either side wait for what never comes, until the deadline.
        framing = {place for line in _FRAMING.finditer(data) for place in range(*line.span())}
        places = [place for place in range(len(data)) if place not in framing]
        if not places:
            return data
        changed = bytearray(data)
        changed[self._draw.choice(places)] ^= 1 << self._draw.randrange(8)
        return bytes(changed)

    def _refuse(self, client):
        status, kind, body = _ANSWERED[self.mode]
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Content-Type": kind, "Content-Length": len(body), "Connection": "close"}
        head = "\r\n".join([f"HTTP/1.1 {status} No", *(f"{name}: {value}" for name, value in fields.items()), "", ""])
        client.settimeout(0.2)
        with suppress(OSError):  # what is left of the request, so that the answer is not lost with it
            while client.recv(_PIECE):
                pass
        client.sendall(head.encode() + body)


def _end(one):
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        one.close()


class SickStore(FolderStore):
    """A folder whose reads hang, or fail in part, as ``sickness`` says."""

    sickness = "none"
    well = threading.Event()
    draw = random.Random(0)

    def read_version(self, object, offset, length):
        """See ``FolderStore``."""
        if self.sickness == "hangs":
            self.well.wait(60)
        if self.sickness == "cannot read" or (self.sickness == "cannot read some" and self.draw.random() < 0.3):
            raise self.draw.choice([SampleError("input/output error"), ObjectNotFound("stale file handle")])
        return super().read_version(object, offset, length)


_SICK = "file:///sick"


@contextmanager
def faulty_nodes(url, count, draw, monkeypatch):
    """So many nodes of this process with the same data; the first may misbehave. Yields its way, and all addresses."""
    opened = RequestOpener.store

    def store(self, request, preprocess, account):
        if not any(root.startswith(_SICK) for root in self.stores.roots):
            return opened(self, request, preprocess, account)
        return SickStore(parse_url(request.data).path)

    monkeypatch.setattr(RequestOpener, "store", store)
    SickStore.sickness, SickStore.draw = "none", draw
    SickStore.well.clear()
    settings = NodeSettings(memory_bytes=256 << 20, device_batch=8, trial_s=0)
    with ExitStack() as stack:
        ways = []
        for number in range(count):
            node = stack.enter_context(Node(settings, (url, _SICK) if not number else (url,)))
            ways.append(stack.enter_context(served(node)))
        way = stack.enter_context(FaultyWay(ways[0], draw))
        try:
            yield way, [way.url, *ways[1:]]
        finally:
            SickStore.sickness = "none"
            SickStore.well.set()
