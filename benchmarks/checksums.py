"""What the checksums of answers cost: the same answers over loopback with them and without, by turns in one process.

    python benchmarks/checksums.py [--answers 16] [--rounds 25] --out FILE

A node of this process sends encoded samples as they lie in the page cache, and features that it keeps, so that nothing
else takes much time; on one core, an answer's rate is one over the processor seconds of both sides, which are what a
busy machine changes least. Without checksums, the node sends no message of them and the client reads none. A pair is
two runs in turn, and its cost how much longer the run with checksums took.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
from harness import by_turns, markdown, median, run

from frostline.client.http import HttpTransport
from frostline.core.config import NodeSettings
from frostline.node.service import Node
from frostline.wire import connection, framing
from support.nodes import artifact_of, make_images, request, samples_of, served, small_network

KINDS = {"encoded samples of 5 kB": 5_000, "encoded samples of 110 kB": 110_000, "encoded samples of 1 MB": 1_000_000}
FEATURES = "features of 7.7 kB"
ROWS, BYTES = 64, 4 << 20
QUICK = {"answers": 2}


def options(parser):
    parser.add_argument("--answers", type=int, default=16, help="answers in a run")


def measure(wanted):
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rows = []
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        settings = NodeSettings(memory_bytes=512 << 20, trial_s=0, cache_folder=f"{place}/cache")
        node = stack.enter_context(Node(settings, (Path(place).as_uri(),)))
        transport = stack.enter_context(closing(HttpTransport(stack.enter_context(served(node)))))
        for kind, make in requests(Path(place), transport).items():
            runs = {way: partial(one, way, kind, transport, make, wanted.answers) for way in ("with", "without")}
            rows += [row for rows in by_turns(wanted.rounds, runs, warm=1).values() for row in rows]
            yield {"rows": rows}


def requests(place, transport):
    """A request of each kind."""
    found = {}
    for kind, nbytes in KINDS.items():
        folder = place / str(nbytes)
        folder.mkdir()
        for number in range(max(2, min(ROWS, BYTES // nbytes))):
            (folder / f"{number:04}.jpg").write_bytes(np.random.default_rng(number).bytes(nbytes))
        found[kind] = request(folder, 0)
    images, network = make_images(place / "images", ROWS), small_network()
    digest, body = artifact_of(network)
    transport.put_prefix(digest, body)
    samples = samples_of(images, with_versions=True)
    return {**found, FEATURES: request(images, network.cuts[-1].number, prefix=digest, samples=samples)}


def one(way, kind, transport, asked, answers):
    """Processor seconds of a sample, and seconds."""
    with without_checksums() if way == "without" else ExitStack():
        here, began, got = time.process_time(), time.perf_counter(), 0
        for _ in range(answers):
            got += sum(len(batch) for batch in transport.features(asked))
        assert got == answers * len(asked.samples)
        spent = {"processor_s": (time.process_time() - here) / got, "seconds": (time.perf_counter() - began) / got}
    return {"way": way, "kind": kind, "rows_per_answer": len(asked.samples), **spent}


@contextmanager
def without_checksums():
    """Answers neither have checksums nor are looked at for them."""
    with (
        patch.object(framing.Encoder, "_pieces", _pieces_alone),
        patch.object(framing, "_verify", lambda *_: None),
        patch.object(connection, "crc32", lambda *_: 0),
    ):
        yield


def _pieces_alone(_, parts) -> Iterator[memoryview]:
    for part in parts:
        for start in range(0, len(part), framing.PIECE_BYTES):
            yield memoryview(part)[start : start + framing.PIECE_BYTES]


def costs(rows, field):
    """How much longer runs with checksums took than those beside them, sorted."""
    ways = [[row[field] for row in rows if row["way"] == way] for way in ("with", "without")]
    return sorted(a / b - 1 for a, b in zip(*ways, strict=True))


def table(found):
    lines = []
    for kind in dict.fromkeys(row["kind"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["kind"] == kind]
        plain = median([row for row in rows if row["way"] == "without"], "processor_s")
        cost = costs(rows, "processor_s")
        quartiles = f"{cost[len(cost) // 4]:.1%} to {cost[3 * len(cost) // 4]:.1%}"
        lines.append([kind, f"{1e6 * plain:.0f}", f"{cost[len(cost) // 2]:.1%}", quartiles, str(len(cost))])
    return markdown(["answers", "us a sample without", "checksums cost", "half of the pairs", "pairs"], lines)


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, data=False)
