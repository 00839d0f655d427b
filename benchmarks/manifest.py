"""Manifests of a hundred million rows: what opening, splitting and shuffling one takes; and what listing takes.

Each figure is taken in a process of its own. Names are generated; the big table is written a row group at a time.

    python benchmarks/manifest.py --parts open --rows 100000000 --folder DIR
    python benchmarks/manifest.py --parts start --rows 100000000 --folder DIR
    python benchmarks/manifest.py --parts job --rows 100000000 --folder DIR
    python benchmarks/manifest.py --parts list,local --objects 1000000 --files 1000000 --folder DIR
    python benchmarks/manifest.py --parts seaweed --files 200000 --folder DIR

``DIR`` needs some 25 GB for a hundred million rows. The tables stay there for the next run.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SHARD = 10_000
GROUP = 1 << 20


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
        self.steps[name] = {"s": round(seconds, 4), "peak_growth_bytes": resident_bytes("VmHWM") - self.before}
        return result


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
    from frostline.datasets.formats.base import COLUMNS

    kind = f"{rows} {classes} {shuffled}" + ("" if photographs is None else f" {photographs[1]}")
    digest = hashlib.sha256(kind.encode()).hexdigest()
    path = folder / ".frostline" / "manifests" / f"{digest}.parquet"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"digest": digest, "classes": [f"class {index}" for index in range(classes)], "reading": "objects"}
        schema = COLUMNS.append(pa.field("patient", pa.int64()))
        schema = schema.with_metadata({"frostline.manifest": json.dumps(about)})
        partial = path.with_suffix(".partial")
        with pq.ParquetWriter(partial, schema, compression="zstd", write_page_checksum=True) as writer:
            for start in range(0, rows, GROUP):
                count = min(GROUP, rows - start)
                some = group(schema, start, count, classes, rows, shuffled=shuffled, photographs=photographs)
                writer.write_table(some)
        partial.rename(path)
    last = {"digest": digest, "format": "folders", "nbytes": path.stat().st_size}
    (folder / ".frostline" / "last-manifest.json").write_text(json.dumps(last).ljust(256), encoding="ascii")
    return path


def child_open(folder, batches):
    """Open, split, shuffle: what a training takes before its first batch, and what batches take."""
    from frostline.datasets import Dataset
    from frostline.ordering import Order

    def first_batch():
        order = Order(size=len(train), seed=0, epoch=0)
        return train.samples.take(order.indices(0, 256))

    def some_batches():
        order = Order(size=len(train), seed=0, epoch=0)
        for number in range(1, batches + 1):
            some = train.samples.take(order.indices(256 * number, 256 * (number + 1)))
            assert len(some.objects) == len(some.versions) == 256

    watch = Watch()
    data = watch.step("open", lambda: _opened(Dataset(folder, cache=Path(folder) / "cache", relist=False)))
    train, _ = watch.step("split", lambda: data.split(0.2, seed=0))
    watch.step("shuffle, first batch", first_batch)
    watch.step(f"{batches} shuffled batches of 256", some_batches)
    total = sum(step["s"] for name, step in watch.steps.items() if not name[0].isdigit())
    peak = max(step["peak_growth_bytes"] for step in watch.steps.values())
    print(json.dumps({"rows": len(data), "steps": watch.steps, "opened_split_shuffled_s": total, "peak_bytes": peak}))


def child_start(folder):
    """A plain job from nothing to its first shuffled batch, with a node in its process: everything but the imports."""
    import torch  # noqa: F401 (a training has it already)

    import frostline as fl
    import frostline.jobs.offload
    import frostline.node
    from frostline.preprocess import imagenet

    watch = Watch()
    data = watch.step("open", lambda: _opened(fl.Dataset(folder, cache=Path(folder) / "cache", relist=False)))
    train, _ = watch.step("split", lambda: data.split(0.2, seed=0))
    with watch.step("job", lambda: fl.offload(None, train, preprocess=imagenet(224))) as job:
        watch.step("first shuffled batch of 32", lambda: _first(job))
    total = sum(step["s"] for step in watch.steps.values())
    peak = max(step["peak_growth_bytes"] for step in watch.steps.values())
    print(json.dumps({"rows": len(data), "steps": watch.steps, "started_s": total, "peak_bytes": peak}))


def child_job(folder):
    """What a training takes before its first batch is there: open, split, prepare the job, ask for a batch."""
    import frostline as fl
    from frostline.core.config import NodeSettings
    from frostline.models import freeze
    from frostline.node.process import start_node
    from frostline.training.networks import load_model

    network = load_model("demo:efficientnet_lite0", classes=1000)
    freeze(network.model, "features", input_shape=network.preprocess.shape)
    watch = Watch()
    data = watch.step("open", lambda: _opened(fl.Dataset(folder, cache=Path(folder) / "cache", relist=False)))
    train, _ = watch.step("split", lambda: data.split(0.2, seed=0))
    with start_node((data.url,), NodeSettings(memory_bytes=1 << 30)) as node:
        job = watch.step("plain job", lambda: fl.offload(None, train, preprocess=network.preprocess, near=node.url))
        with job:
            watch.step("its first batch of 32", lambda: _first(job))
            watch.step("its second epoch's", lambda: _first(job, 1))
        job = watch.step(
            "job with a network", lambda: fl.offload(network.model, train, preprocess=network.preprocess, near=node.url)
        )
        with job:
            watch.step("first batch of 32 with a network", lambda: _first(job))
    peak = max(step["peak_growth_bytes"] for step in watch.steps.values())
    print(json.dumps({"rows": len(data), "steps": watch.steps, "peak_bytes": peak}))


def _first(job, epoch=0):
    batch = next(iter(job.loader(32, shuffle=True, seed=0, epoch=epoch)))
    assert len(batch.ids) == 32


def _opened(data):
    assert len(data) > 0
    return data


def child_copy(folder):
    """The first time on a machine: the mapped copy is made of the Parquet file."""
    from frostline.datasets import Dataset

    watch = Watch()
    data = watch.step("copy", lambda: _opened(Dataset(folder, cache=Path(folder) / "cache", relist=False)))
    print(json.dumps({"rows": len(data), **watch.steps["copy"]}))


class Generated:
    """A store whose listing is made up, in class folders; what is written to it lies in a folder."""

    def __init__(self, folder, objects, changed=0):
        from frostline.stores.local import FolderStore

        folder.mkdir(parents=True, exist_ok=True)
        self._store = FolderStore(str(folder))
        self.url, self.read, self.write = self._store.url, self._store.read, self._store.write
        self._objects, self._changed = objects, changed

    def list(self):
        from frostline.stores.protocols import Entry

        yield from self._store.list()
        for number in range(self._objects):
            etag = f"{number + (number < self._changed):032x}"
            yield Entry(f"class{number % 1000:03}/photograph-{number:09}.jpg", 80_000 + number % 40_000, etag)


def child_list(folder, objects):
    """Build the manifest of generated names, find it again, and build it after one in a thousand changed."""
    from frostline.datasets.manifest import load_manifest

    watch = Watch()
    steps = (("built", 0), ("found again", 0), ("one in a thousand changed", max(1, objects // 1000)))
    for name, changed in steps:
        store = Generated(folder, objects, changed)
        found = watch.step(name, partial(load_manifest, store, cache=folder / "cache"))
        assert len(found.samples) == objects
        watch.steps[name]["objects_per_s"] = round(objects / watch.steps[name]["s"])
        del found
    print(json.dumps({"objects": objects, "steps": watch.steps}))


def child_folder(folder, objects, url):
    """The same over a real store: it is filled first, which is not measured."""
    from frostline.datasets import Dataset

    watch = Watch()
    for name in ("built", "found again"):
        data = watch.step(name, lambda: _opened(Dataset(url, cache=folder / "cache")))
        assert len(data) == objects
        watch.steps[name]["objects_per_s"] = round(objects / watch.steps[name]["s"])
    print(json.dumps({"objects": objects, "steps": watch.steps}))


def readable_rows(folder, count, classes):
    """So many rows that are a thousand photographs in turn, so that batches can be read, with their mapped copy."""
    root = folder / f"job-{count}"
    photographs = put_photographs(root)
    write_manifest(root, count, classes, shuffled=True, photographs=photographs)
    if not list((root / "cache").rglob("*.arrow")):
        run("--child", "copy", "--folder", root)
    return root


def measure_start(folder, rows, classes, rounds):
    root = readable_rows(folder, rows, classes)
    found = [run("--child", "start", "--folder", root) for _ in range(rounds)]
    print(f"from nothing to the first batch of {rows} rows", json.dumps(found, indent=1), flush=True)
    return {"started": found}


def measure_job(folder, rows, classes, sizes):
    """A job on a hundred million rows, and on few of them."""
    found = {}
    for count in sizes:
        root = readable_rows(folder, count, classes)
        found[f"{count} rows"] = [run("--child", "job", "--folder", root) for _ in range(2)]
        print(f"a job on {count} rows", json.dumps(found[f"{count} rows"], indent=1), flush=True)
    return found


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


def measure_list(folder, objects):
    found = run("--child", "list", "--folder", folder / f"list-{objects}", "--objects", objects)
    print("generated names", json.dumps(found, indent=1), flush=True)
    return {"generated names": found}


def fill_folder(folder, objects):
    for number in range(objects):
        place = folder / f"class{number % 1000:03}"
        if number < 1000:
            place.mkdir(parents=True, exist_ok=True)
        (place / f"photograph-{number:09}.jpg").touch()


def measure_local(folder, objects):
    """Empty files: a listing asks for their names, sizes and times alone."""
    root = folder / f"local-{objects}"
    if not root.exists():
        fill_folder(root, objects)
    found = run("--child", "folder", "--folder", folder, "--objects", objects, "--url", root)
    print("a folder", json.dumps(found, indent=1), flush=True)
    return {"a folder": found}


def measure_seaweed(folder, objects):
    """Objects of a byte in SeaweedFS, put there by its plain HTTP face."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
    from concurrent.futures import ThreadPoolExecutor

    from support.seaweed import seaweed

    root = folder / "seaweed"
    root.mkdir(parents=True, exist_ok=True)
    with seaweed(root) as server:
        server.make_bucket("many")
        names = [f"many/class{number % 1000:03}/photograph-{number:09}.jpg" for number in range(objects)]
        with ThreadPoolExecutor(16) as threads:
            list(threads.map(lambda name: server.put(name, b"x"), names))
        os.environ.update(server.environment())
        found = run("--child", "folder", "--folder", folder / "s3", "--objects", objects, "--url", "s3://many")
    print("SeaweedFS", json.dumps(found, indent=1), flush=True)
    return {"SeaweedFS": found}


def run(*arguments):
    """This script again, in a process of its own; what it printed."""
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ)
    return json.loads(done.stdout)


def measure_open(folder, rows, classes, rounds, batches):
    found = {}
    for kind, shuffled in (("rows in the order of their classes", False), ("labels mixed", True)):
        root = folder / f"open-{rows}-{'mixed' if shuffled else 'sorted'}"
        started = time.perf_counter()
        path = write_manifest(root, rows, classes, shuffled=shuffled)
        written = time.perf_counter() - started
        copied = list((root / "cache").rglob("*.arrow"))
        first = None if copied else run("--child", "copy", "--folder", root)
        again = [run("--child", "open", "--folder", root, "--batches", batches) for _ in range(rounds)]
        (copy,) = (root / "cache").rglob("*.arrow")
        found[kind] = {
            "parquet_bytes": path.stat().st_size,
            "copy_bytes": copy.stat().st_size,
            "written_s": round(written, 1),
            "first_time": first,
            "opened": again,
        }
        print(kind, json.dumps(found[kind], indent=1), flush=True)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="open")
    parser.add_argument("--rows", type=int, default=100_000_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--objects", type=int, default=1_000_000)
    parser.add_argument("--files", type=int, default=200_000, help="of the parts local and seaweed")
    parser.add_argument("--url")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child")
    options = parser.parse_args()
    children = {
        "open": lambda: child_open(options.folder, options.batches),
        "job": lambda: child_job(options.folder),
        "start": lambda: child_start(options.folder),
        "copy": lambda: child_copy(options.folder),
        "list": lambda: child_list(options.folder, options.objects),
        "folder": lambda: child_folder(options.folder, options.objects, options.url),
    }
    if options.child:
        children[options.child]()
        return
    report = {}
    if "open" in options.parts:
        report["open"] = measure_open(options.folder, options.rows, options.classes, options.rounds, options.batches)
    if "start" in options.parts:
        report.update(measure_start(options.folder, options.rows, options.classes, options.rounds))
    if "job" in options.parts:
        report["job"] = measure_job(options.folder, options.rows, options.classes, (10_000, options.rows))
    if "list" in options.parts:
        report.update(measure_list(options.folder, options.objects))
    for name, measure in (("local", measure_local), ("seaweed", measure_seaweed)):
        if name in options.parts:
            report.update(measure(options.folder, options.files))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
