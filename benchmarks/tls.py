"""What TLS costs a node and its client: answers of 1 MB over loopback, plain, and encrypted with certificates of both.

    python benchmarks/tls.py [--answers 300] [--rounds 7] --out FILE

The node runs no network: it sends samples of 1 MB as they lie in the page cache, so that nothing else takes much time.
Node and client share one core, so that an answer's rate is one over the processor seconds of both sides; plain and
encrypted runs take turns. The seconds of the processor are what a busy machine changes least.
"""

import os
import tempfile
import time
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import numpy as np
from harness import by_turns, markdown, median, processor_s, processor_s_of, run, spread

from frostline.client.http import HttpTransport
from frostline.core import Samples
from frostline.core.config import LoaderSettings, NodeSettings, ServerTls, TlsFiles
from frostline.node.process import start_node
from frostline.preprocess import CenterCrop, Decode, Normalize, Preprocess, Resize
from frostline.wire.messages import FeatureRequest
from frostline.wire.tls import Authority

BYTES = 1_000_000
SAMPLES = 16
QUICK = {"answers": 4}


def options(parser):
    parser.add_argument("--answers", type=int, default=300, help="answers in a run")


def measure(wanted):
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        folder, authority = Path(place) / "data", Authority(Path(place) / "authority")
        folder.mkdir()
        for number in range(SAMPLES):
            (folder / f"{number}.jpg").write_bytes(np.random.default_rng(number).bytes(BYTES))
        cert, key = map(str, authority.issue(["127.0.0.1"]))
        own_cert, own_key = map(str, authority.issue(["trainer"], is_client=True))
        trusts = LoaderSettings(tls=TlsFiles(ca=str(authority.ca), cert=own_cert, key=own_key))
        serves = {"plain": None, "encrypted": ServerTls(cert=cert, key=key, client_ca=str(authority.ca))}
        runs = {}
        for way, tls in serves.items():
            settings = NodeSettings(memory_bytes=256 << 20, trial_s=0, tls=tls)
            node = stack.enter_context(start_node((str(folder),), settings))
            transport = stack.enter_context(closing(HttpTransport(node.url, trusts)))
            runs[way] = partial(one, way, node, transport, folder, wanted.answers)
        yield {"bytes": BYTES, "rows": [row for rows in by_turns(wanted.rounds, runs, warm=1).values() for row in rows]}


def one(way, node, transport, folder, answers):
    """Processor seconds of both sides, and seconds, of an answer."""
    requests = [request(folder, number) for number in range(SAMPLES)]
    here, there, began = processor_s(), processor_s_of(node.pid), time.perf_counter()
    for number in range(answers):
        (batch,) = transport.features(requests[number % SAMPLES])
        assert len(batch.encoded[0]) == BYTES
    spent = {"client_s": processor_s() - here, "node_s": processor_s_of(node.pid) - there}
    return {
        "way": way,
        "seconds": (time.perf_counter() - began) / answers,
        **{side: seconds / answers for side, seconds in spent.items()},
        "processor_s": sum(spent.values()) / answers,
    }


def request(folder, number):
    """A sample as it is in its file."""
    normalise = Normalize(mean=(127.0,) * 3, std=(128.0,) * 3)
    return FeatureRequest(
        data=folder.as_uri(),
        samples=Samples(
            ids=np.array([number], np.int64),
            objects=[f"{number}.jpg"],
            offsets=np.zeros(1, np.int64),
            lengths=np.full(1, BYTES, np.int64),
            labels=np.full(1, -1, np.int64),
        ),
        prefix=None,
        cut=0,
        preprocess=Preprocess(steps=(Decode(), Resize(8), CenterCrop(8), normalise)).to_json(),
    )


def table(found):
    ways = {way: [row for row in found["rows"] if row["way"] == way] for way in ("plain", "encrypted")}
    plain = median(ways["plain"], "processor_s")
    lines = [
        [
            way,
            *(spread([1000 * row[side] for row in rows], 2) for side in ("node_s", "client_s", "processor_s")),
            f"{found['bytes'] / 1e6 / median(rows, 'processor_s'):.0f}",
            f"{plain / median(rows, 'processor_s'):.0%}",
        ]
        for way, rows in ways.items()
    ]
    return markdown(["answers of 1 MB", "node, ms", "client, ms", "both, ms", "MB/s on one core", "of plain"], lines)


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, data=False)
