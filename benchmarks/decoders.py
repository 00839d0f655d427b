"""What decoding in processes apart costs: the same photographs here and apart by turns, and what a new process costs.

    python benchmarks/decoders.py --data DIR [--samples 200] [--rounds 15] --out FILE
    python benchmarks/decoders.py --data DIR --parts node --samples 960 [--rounds 15] --out FILE

Photographs are decoded to 224 pixels from memory, one and two at a time, here as a node without tenants does, and
apart as one with tenants does; as many threads bring them as a node has for reading. A round has each way once, and
each way apart is compared with the one here in its round. The seconds of the processor, of both sides, are what a busy
machine changes least. Starts are those of a process for a tenant that has none, from the request to its first sample.

The part ``node`` asks whole nodes over HTTP, for which one tenant's photographs are decoded here (it may see all) or
apart (it may not). They lie in files, or in a Parquet file whose columns are read apart then too; row groups have more
bytes than the memory that keeps them, so that each round reads all of them again. The node answers with the outputs of
a ResNet-18 (of 32 photographs), or with pixels, where nothing but decoding takes much time. The processor's seconds
are those of the node and of its decoding processes.
"""

import hashlib
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from itertools import count, product
from pathlib import Path
from threading import Semaphore

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import by_turns, markdown, run, spread

from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings, NodeSettings, TenantSettings
from frostline.datasets import Dataset
from frostline.engines.machine import keep_freed_memory
from frostline.models import cut_network, freeze
from frostline.models.artifact import digest_of, write_prefix
from frostline.node.process import start_node
from frostline.preprocess import imagenet
from frostline.preprocess.apply import MAX_PIXELS, decode_into, pixels_needed
from frostline.preprocess.decoders import Decoders
from frostline.wire.messages import FeatureRequest

SIDE, READERS = 224, 16
MEMORY_BYTES = 256 << 20
# Of a node: its memory, of which a 16th keeps columns; samples of a request, requests at once, and rows of a group.
NODE_BYTES, REQUEST, AT_ONCE, GROUP = 768 << 20, 32, 4, 128
QUICK = {"samples": 8, "rounds": 2, "starts": 2, "parts": "decoders,node"}


def options(parser):
    parser.add_argument("--samples", type=int, default=200, help="photographs in a run")
    parser.add_argument("--starts", type=int, default=20, help="processes that are started for new tenants")
    parser.add_argument("--parts", default="decoders", help="decoders, node, or both with a comma between them")
    parser.set_defaults(rounds=15)


def measure(wanted):
    found = {}
    if "decoders" in wanted.parts.split(","):
        found["decoders"] = of_decoders(wanted)
        yield found
    if "node" in wanted.parts.split(","):
        for rows in of_nodes(wanted):
            yield {**found, "node": rows}


def of_decoders(wanted):
    encoded = [path.read_bytes() for path in sorted(Path(wanted.data).rglob("*.jpg"))[: wanted.samples]]
    assert encoded, f"{wanted.data} has photographs"
    encoded = [encoded[number % len(encoded)] for number in range(wanted.samples)]
    keep_freed_memory()  # as a node's process does
    found = {"bytes": float(np.mean([len(each) for each in encoded])), "runs": {}}
    with closing(Decoders(MEMORY_BYTES, 1)) as one, closing(Decoders(MEMORY_BYTES, 2)) as two:
        runs = {
            f"{name} {at_once}": partial(decode, encoded, decoders)
            for at_once, decoders in ((1, one), (2, two))
            for name, decode in (("here", partial(here, at_once=at_once)), ("apart", apart))
        }
        for way, rows in by_turns(wanted.rounds, runs, warm=1).items():
            found["runs"][way] = rows
        found["start_s"] = starts(one, encoded[0], wanted.starts)
    return found


def here(encoded, decoders, *, at_once):
    slots = Semaphore(at_once)

    def decode(preprocess, sample, out):
        with slots:
            assert pixels_needed(preprocess, sample) <= MAX_PIXELS
            decode_into(preprocess, sample, out, id=0, view=None)

    return spent(decode, encoded, decoders)


def apart(encoded, decoders):
    return spent(partial(decoders.decode_into, id=0, view=None, tenant="one"), encoded, decoders)


def spent(decode, encoded, decoders):
    """Samples a second, and processor seconds of a sample."""
    preprocess = imagenet(SIDE)

    def work(number):
        out = np.empty(preprocess.shape, preprocess.dtype)
        for sample in encoded[number::READERS]:
            decode(preprocess, sample, out)

    with ThreadPoolExecutor(READERS) as pool:
        before, began = spent_s(decoders), time.perf_counter()
        list(pool.map(work, range(READERS)))
        took_s, spent = time.perf_counter() - began, spent_s(decoders) - before
    return {"samples_per_s": len(encoded) / took_s, "processor_s": spent / len(encoded)}


def spent_s(decoders):
    """Of this process and of those that wait; nanoseconds of /proc/PID/schedstat, where ticks are too coarse."""
    files = [Path(f"/proc/{pid}/schedstat") for pid in decoders.pids()]
    return time.process_time() + sum(int(file.read_text().split()[0]) / 1e9 for file in files)


def starts(decoders, sample, number):
    """Seconds of the first sample of tenants that have no process yet, less those of the second."""
    preprocess, took_s, names = imagenet(SIDE), [], count()
    out = np.empty(preprocess.shape, preprocess.dtype)
    for _ in range(number):
        tenant, each = f"new {next(names)}", []
        for _ in range(2):
            began = time.perf_counter()
            decoders.decode_into(preprocess, sample, out, id=0, view=None, tenant=tenant)
            each.append(time.perf_counter() - began)
        took_s.append(each[0] - each[1])
    return took_s


# Whole nodes.


def of_nodes(wanted):
    """Samples a second, and processor seconds of a sample, of nodes that decode here and apart, as rounds end."""
    network = cut_network(freeze(plain_network(), "fc"), imagenet(SIDE).shape)
    prefix, cuts = write_prefix(network.prefix), {"ResNet-18": network.cuts[-1].number, "pixels": 0}
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        folders = laid_out(wanted, Path(place))
        runs = {}
        for where in ("here", "apart"):
            token = hashlib.sha256(where.encode()).hexdigest()
            tenant = TenantSettings(name="one", token_sha256=token, sees_all=where == "here")
            settings = NodeSettings(memory_bytes=NODE_BYTES, trial_s=0, tenants=(tenant,))
            node = stack.enter_context(start_node(tuple(map(str, folders.values())), settings))
            transport = stack.enter_context(closing(HttpTransport(node.url, LoaderSettings(token=where))))
            transport.put_prefix(digest_of(prefix), prefix)
            for form, work in product(folders, cuts):
                asked = [*requests(Dataset(folders[form]), digest_of(prefix), cuts[work])]
                asked = asked[: 1 if cuts[work] else None]
                runs[f"{form}, {work}, {where}"] = partial(answered, node.pid, transport, asked)
        by_turns(1, runs)
        found = {name: [] for name in runs}
        for _ in range(wanted.rounds):
            for name, rows in by_turns(1, runs).items():
                found[name] += rows
            yield found


def plain_network():
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet18()


def laid_out(wanted, place):
    """The photographs as files, and in a Parquet file."""
    paths = sorted(Path(wanted.data).rglob("*.jpg"))
    encoded = [paths[number % len(paths)].read_bytes() for number in range(wanted.samples)]
    folders = {form: place / form for form in ("files", "Parquet")}
    for folder in folders.values():
        (folder / "all").mkdir(parents=True)
    for number, sample in enumerate(encoded):
        (folders["files"] / "all" / f"{number:06}.jpg").write_bytes(sample)
    table = pa.table({"image": encoded, "label": [number % 2 for number in range(len(encoded))]})
    pq.write_table(table, folders["Parquet"] / "all" / "train.parquet", row_group_size=GROUP)
    return folders


def requests(dataset, prefix, cut):
    for start in range(0, len(dataset.samples), REQUEST):
        yield FeatureRequest(
            data=dataset.url,
            samples=dataset.samples.take(np.arange(start, min(start + REQUEST, len(dataset.samples)))),
            prefix=prefix if cut else None,
            cut=cut or 1,
            preprocess=imagenet(SIDE).to_json(),
            reading=dataset.manifest.reading,
        )


def answered(pid, transport, asked):
    def ask(request):
        batches = list(transport.features(request))
        assert not sum(len(batch.skipped) for batch in batches)
        return sum(len(batch.ids) for batch in batches)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        before, began = node_s(pid), time.perf_counter()
        samples = sum(pool.map(ask, asked))
        took_s, spent = time.perf_counter() - began, node_s(pid) - before
    return {"samples_per_s": samples / took_s, "processor_s": spent / samples}


def node_s(pid):
    """Processor seconds of a process, its threads and those that it started, and these started."""
    total = 0.0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0]) / 1e9
        total += sum(map(node_s, map(int, (task / "children").read_text().split())))
    return total


# A quick form may take less processor time than the system counts.
_LEAST = 1e-3


def table(found):
    said = {"decoders": table_of_decoders, "node": table_of_nodes}
    return "\n\n".join(said[name](part) for name, part in found.items())


def table_of_nodes(runs):
    lines = []
    for name in [name.removesuffix(", here") for name in runs if name.endswith(", here")]:
        sides = [runs[f"{name}, {where}"] for where in ("here", "apart")]
        lines.append([name])
        for field, factor, digits in (("samples_per_s", 1, 0), ("processor_s", 1000, 2)):
            here, apart = ([factor * max(row[field], _LEAST / 1000) for row in rows] for rows in sides)
            ratios = [other / one for one, other in zip(here, apart, strict=True)]
            lines[-1] += [spread(here, digits), spread(apart, digits), spread(ratios, 3)]
    head = ["a node that reads", "samples/s here", "apart", "ratio", "processor ms here", "apart", "ratio"]
    return markdown(head, lines)


def table_of_decoders(found):
    ratios = defaultdict(list)
    lines = []
    for threads in (1, 2):
        pairs = list(zip(found["runs"][f"here {threads}"], found["runs"][f"apart {threads}"], strict=True))
        for field in ("samples_per_s", "processor_s"):
            ratios[field] = [apart[field] / max(here[field], _LEAST) for here, apart in pairs]
        lines.append(
            [
                threads,
                *(spread([pair[side]["samples_per_s"] for pair in pairs], 0) for side in (0, 1)),
                spread(ratios["samples_per_s"], 3),
                *(spread([1000 * pair[side]["processor_s"] for pair in pairs], 2) for side in (0, 1)),
                spread(ratios["processor_s"], 3),
            ]
        )
    head = ["at once", "samples/s here", "apart", "ratio", "processor ms here", "apart", "ratio"]
    began = spread([1000 * seconds for seconds in found["start_s"]], 1)
    return markdown(head, lines) + f"\n\nA process for a new tenant: {began} ms more for its first sample."


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table)
