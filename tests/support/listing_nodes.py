"""Nodes that list: one that is served from this process, and an untrusted client that answers whatever it likes."""

import contextlib
import hashlib
import http.server
import json
import os
import threading
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from frostline.core.config import NodeSettings
from frostline.core.files import checked_text
from frostline.datasets.mapped import ABOUT
from frostline.node import Node
from support.nodes import served

__all__ = ("DIGEST", "answer_of", "listers", "listing_node", "manifest_bytes", "stranger", "table_of")

DIGEST = "d" * 64


@contextmanager
def listing_node(*roots, **settings):
    """A node for these roots, with its address."""
    with (
        Node(NodeSettings(memory_bytes=1 << 28, **settings), tuple(map(str, roots))) as node,
        served(node) as url,
    ):
        node.url = url
        yield node


def listers(parent=None):
    """The processes that list for nodes of this process, or for one that is a process of its own."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (folder / "cmdline").read_bytes().split(b"\0")
            its_parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            if b"frostline.datasets.listing_process" in words and its_parent == str(parent or os.getpid()):
                found.append(int(folder.name))
    return found


def table_of(count=3, **columns):
    """A manifest's table, with columns of an untrusted client's choice."""
    names = [f"a/{number}.jpg" for number in range(count)]
    said = {
        "id": pa.array(range(1, count + 1), pa.int64()),
        "name": names,
        "object": names,
        "offset": pa.array([0] * count, pa.int64()),
        "length": pa.array([9] * count, pa.int64()),
        "label": pa.array([0] * count, pa.int64()),
        "etag": [""] * count,
    }
    return pa.table({**said, **columns})


def manifest_bytes(table, **about):
    said = {
        "digest": DIGEST,
        "classes": ["a"],
        "reading": "objects",
        "splits": [],
        "left_out": [],
        "is_turned": False,
        "named": {},
        **about,
    }
    sink = pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({ABOUT: checked_text(said)}), sink, compression="zstd")
    return sink.getvalue().to_pybytes()


def answer_of(body, bits=b"", **head):
    """What a node answers: lines, the manifest and the splits."""
    said = {
        "event": "listed",
        "digest": DIGEST,
        "samples": 3,
        "nbytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
        "is_known": False,
        "splits": [],
        "splits_sha256": hashlib.sha256(bits).hexdigest(),
        "applied": None,
        "found": False,
    }
    line = json.dumps({**said, **head}).encode() + b"\n"
    return b'{"event":"phase","name":"listing the data"}\n\n' + line + body + bits


@contextmanager
def stranger(answer, status=200):
    """Something at an address that answers every request so."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            with contextlib.suppress(OSError):  # whom it answers has heard enough
                self.send_response(status)
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
