"""Manifests of a hundred million rows: what opening, splitting and shuffling one takes, and a job's first batch of it.

    python benchmarks/manifest.py --folder DIR [--rows 100000000] [--rounds 3] [--parts open,start] [--out FILE]

Each figure is taken in a process of its own. Names are generated; the table is written a row group at a time. ``DIR``
needs some 25 GB for a hundred million rows, which stay there for the next run.

- open: the first time the mapped copy is made of the Parquet file; then the manifest is opened, split by class and
  shuffled up to a batch, with rows in the order of their classes and with mixed labels.
- start: a plain job from nothing to its first shuffled batch of 32, with a node in its process: everything but imports.
  Rows are a thousand photographs in turn, so that they can be read.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from harness import markdown, run, spread

SHARD = 10_000
GROUP = 1 << 20
SCHEMA = 3  # of manifests, as frostline.datasets.manifest_store has it
QUICK = {"rows": 20_000, "classes": 10, "batches": 2}


def options(parser):
    parser.set_defaults(rounds=3)
    parser.add_argument("--parts", default="open,start")
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--folder", help="keeps the tables; without it one that is removed at the end")


def measure(wanted):
    parts, found = {"open": opened, "start": started}, {}
    with nullcontext(wanted.folder) if wanted.folder else tempfile.TemporaryDirectory() as folder:
        for part in wanted.parts.split(","):
            for name, figures in parts[part](Path(folder), wanted):
                found[name] = figures
                yield found


def opened(folder, wanted):
    for kind, shuffled in (("mixed", True),) if wanted.quick else (("sorted", False), ("mixed", True)):
        root = folder / f"open-{wanted.rows}-{kind}"
        path = write_manifest(root, wanted.rows, wanted.classes, shuffled=shuffled)
        first = copied(root, wanted)
        runs = [child("open", root, batches=wanted.batches) for _ in range(wanted.rounds)]
        copies = sum(copy.stat().st_size for copy in (root / "cache").rglob("*.arrow"))  # none where rows are few
        sizes = {"parquet_bytes": path.stat().st_size, "copy_bytes": copies}
        yield f"opened, split and shuffled, labels {kind}", {**sizes, "first_time": first, "runs": runs}


def started(folder, wanted):
    root = folder / f"job-{wanted.rows}"
    write_manifest(root, wanted.rows, wanted.classes, shuffled=True, photographs=put_photographs(root))
    copied(root, wanted)
    yield "a plain job's first batch", {"runs": [child("start", root) for _ in range(wanted.rounds)]}


def copied(root, wanted):
    """What the first time takes, where it is; so few rows as in the quick form are not copied."""
    is_copied = wanted.quick or list((root / "cache").rglob("*.arrow"))
    return None if is_copied else child("copy", root)


def child(role, folder, **given):
    """A part of this script, in a process of its own; what it printed."""
    argv = [sys.executable, __file__, "--inside", role, json.dumps({"folder": str(folder), **given})]
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE, text=True, env=os.environ).stdout)


def table(found):
    rows = []
    for name, part in found.items():
        seconds = spread([run_["seconds"] for run_ in part["runs"]], digits=2)
        peak = max(run_["peak_bytes"] for run_ in part["runs"])
        rows.append([name, part["runs"][0]["rows"], seconds, f"{peak / 1e6:.0f}"])
    return markdown(["", "rows", "seconds", "MB at most"], rows)


def resident_bytes(field="VmRSS"):
    """What this process has in memory, mapped files too, or the most it had (VmHWM)."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


class Watch:
    """Seconds of each step, and how much memory it added at most."""

    def __init__(self):
        self.before = resident_bytes()
        self.steps = {}

    def step(self, name, call):
        forget_peak()
        started = time.perf_counter()
        result = call()
        seconds = time.perf_counter() - started
        self.steps[name] = {"s": seconds, "peak_growth_bytes": resident_bytes("VmHWM") - self.before}
        return result

    def seconds(self):
        return sum(step["s"] for step in self.steps.values())

    def tell(self, rows, seconds):
        peak = max(step["peak_growth_bytes"] for step in self.steps.values())
        print(json.dumps({"rows": rows, "steps": self.steps, "seconds": seconds, "peak_bytes": peak}))


def group(schema, start, rows, classes, total, *, shuffled, photographs=None):
    """Rows of a data set of tar shards: names, places and labels that follow from the row's number.

    With ``photographs``, what lies in one object that is there (its name, its version, and the place and the length of
    each photograph), rows are these in turn, so that they can be read.
    """
    number = np.arange(start, start + rows, dtype=np.int64)
    ids = (number.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(1)).astype(np.int64)
    shards = [f"shards/{index:06}.tar" for index in range(start // SHARD, (start + rows - 1) // SHARD + 1)]
    etags = [hashlib.blake2b(shard.encode(), digest_size=8).hexdigest() for shard in shards]
    of = pa.array((number // SHARD - start // SHARD).astype(np.int32))
    label = (number * 2654435761 % 4294967296 % classes) if shuffled else number * classes // total
    objects = pa.DictionaryArray.from_arrays(of, shards).cast(pa.string())
    offsets, lengths = number % SHARD * 102_400, 80_000 + number % 40_000
    versions = pa.DictionaryArray.from_arrays(of, etags).cast(pa.string())
    if photographs is not None:
        name, etag, places, sizes = photographs
        objects, versions = (pa.array(np.full(rows, item, object), pa.string()) for item in (name, etag))
        offsets, lengths = places[number % len(places)], sizes[number % len(places)]
    return pa.table(
        [
            ids,
            _names(start, rows),
            objects,
            offsets,
            lengths,
            label,
            versions,
            number // 100,
        ],
        schema=schema,
    )


def _names(start, rows):
    digits = np.arange(start, start + rows, dtype=np.int64)[:, None] // 10 ** np.arange(11, -1, -1) % 10 + ord("0")
    text = np.empty((rows, 16), np.uint8)
    text[:, :12] = digits
    text[:, 12:] = np.frombuffer(b".jpg", np.uint8)
    ends = np.arange(0, 16 * (rows + 1), 16, dtype=np.int32)
    return pa.Array.from_buffers(pa.string(), rows, [None, pa.py_buffer(ends), pa.py_buffer(text)])


def write_manifest(folder, rows, classes, *, shuffled, photographs=None):
    """A manifest beside data that is not there, as it is kept; and the note of what was built last."""
    from frostline.core.files import checked_text, with_schema
    from frostline.datasets.formats.base import COLUMNS

    kind = f"{rows} {classes} {shuffled}" + ("" if photographs is None else f" {photographs[1]}")
    digest = hashlib.sha256(kind.encode()).hexdigest()
    path = folder / ".frostline" / "manifests" / f"{digest}.parquet"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"digest": digest, "classes": [f"class {index}" for index in range(classes)], "reading": "objects"}
        about |= {"splits": [], "divided_by_names": False, "left_out": [], "is_turned": False, "named": {}}
        schema = COLUMNS.append(pa.field("patient", pa.int64()))
        schema = schema.with_metadata({"frostline.manifest": checked_text(with_schema(about, SCHEMA))})
        partial = path.with_suffix(".partial")
        with pq.ParquetWriter(partial, schema, compression="zstd", write_page_checksum=True) as writer:
            for start in range(0, rows, GROUP):
                count = min(GROUP, rows - start)
                some = group(schema, start, count, classes, rows, shuffled=shuffled, photographs=photographs)
                writer.write_table(some)
        partial.rename(path)
    last = {"digest": digest, "format": "folders", "nbytes": path.stat().st_size, "listing": digest, "rule": ""}
    (folder / ".frostline" / "last-manifest.json").write_text(
        json.dumps(with_schema(last, SCHEMA)).ljust(512), encoding="ascii"
    )
    return path


def inside_open(wanted):
    """Open, split, shuffle: what a training takes before its first batch, and what batches take."""
    from frostline.ordering import Order

    def first_batch():
        order = Order(size=len(train), seed=0, epoch=0)
        return train.samples.take(order.indices(0, 256))

    def some_batches():
        order = Order(size=len(train), seed=0, epoch=0)
        for number in range(1, wanted.batches + 1):
            some = train.samples.take(order.indices(256 * number, 256 * (number + 1)))
            assert len(some.objects) == len(some.versions) == 256

    watch = Watch()
    data = watch.step("open", lambda: dataset(wanted.folder))
    train, _ = watch.step("split", lambda: data.split(0.2, seed=0))
    watch.step("shuffle, first batch", first_batch)
    seconds = watch.seconds()
    watch.step(f"{wanted.batches} shuffled batches of 256", some_batches)
    watch.tell(len(data), seconds)


def inside_start(wanted):
    """A plain job from nothing to its first shuffled batch."""
    import torch  # noqa: F401 (a training has it already)

    import frostline as fl

    fl.offload  # noqa: B018 (what it needs is imported when it is named)
    watch = Watch()
    data = watch.step("open", lambda: dataset(wanted.folder))
    train, _ = watch.step("split", lambda: data.split(0.2, seed=0))
    with watch.step("job", lambda: fl.offload(None, train, preprocess=fl.preprocess.imagenet(224))) as job:
        batch = watch.step("first shuffled batch", lambda: next(iter(job.loader(32, shuffle=True, seed=0))))
        assert len(batch.ids) == 32
    watch.tell(len(data), watch.seconds())


def inside_copy(wanted):
    """The first time on a machine: the mapped copy is made of the Parquet file."""
    watch = Watch()
    data = watch.step("copy", lambda: dataset(wanted.folder))
    watch.tell(len(data), watch.seconds())


def dataset(folder):
    import frostline as fl

    data = fl.Dataset(folder, cache=Path(folder) / "cache", relist=False)
    assert len(data) > 0
    return data


def put_photographs(root):
    """A thousand small photographs, one behind the other in one object."""
    from io import BytesIO

    from PIL import Image

    from frostline.stores.open import open_store

    rng, encoded = np.random.default_rng(0), []
    for _ in range(1000):
        file = BytesIO()
        pixels = np.kron(rng.integers(0, 255, (8, 8, 3), np.uint8), np.ones((32, 32, 1), np.uint8))
        Image.fromarray(pixels).save(file, "JPEG")
        encoded.append(file.getvalue())
    root.mkdir(parents=True, exist_ok=True)
    store = open_store(str(root))
    if not (root / "photographs.bin").exists():
        store.write("photographs.bin", b"".join(encoded))
    lengths = np.array([len(item) for item in encoded], np.int64)
    return "photographs.bin", store.describe("photographs.bin").etag, np.cumsum(lengths) - lengths, lengths


INSIDE = {"open": inside_open, "start": inside_start, "copy": inside_copy}

if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, inside=INSIDE, data=False)
