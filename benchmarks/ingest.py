"""Many small objects into a real store by tasks of Ray, two of which are killed: are all there once, with their bytes?

    python benchmarks/ingest.py [--store cassandra|seaweedfs] [--objects 100000] [--writers 8] [--kills 2] [--out FILE]

A folder of random objects of 500 to 1,500 bytes in ten classes is put into a table of Cassandra, or copied as it is
into a bucket of SeaweedFS, by as many tasks of Ray at once as there are writers. At equal distances one of the
processes that write is killed by SIGKILL, and Ray runs its task again. `--writers 0` writes without Ray, here.
Server, Ray and all writers share the machine. Afterwards everything is read from the store, by other ways than those
that wrote it, and compared with the source: names, classes, SHA-256, and how many there are.
"""

import hashlib
import os
import random
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

from harness import Skipped, doing, markdown, modules, run

import frostline as fl
from frostline.core.events import ProgressMade
from frostline.datasets.copy.cql import put_into_table
from frostline.datasets.copy.parts import make_in_process
from frostline.datasets.copy.repack import repack
from frostline.stores.open import open_store
from support.cassandra import KEYSPACE, PASSWORD, USER, cassandra, why_no_cassandra
from support.ray_here import workers_of_ray
from support.seaweed import find_weed, seaweed

CLASSES = 10
SCRATCH = Path(tempfile.mkdtemp(prefix="fl-", dir="/tmp"))
"""Short, for sockets; and by it the processes of this Ray are told from any other's."""

ENVIRONMENT = {
    "TMPDIR": str(SCRATCH),
    "XDG_CACHE_HOME": str(SCRATCH / "cache"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # it listens on loopback alone
    "RAY_AUTH_MODE": "disabled",  # it would write a token into the user's home
    "RAY_worker_niceness": "0",
}


def options(parser):
    parser.add_argument("--store", choices=STORES, default="cassandra")
    parser.add_argument("--objects", type=int, default=100_000)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--kills", type=int, default=2)


def server_is_here(wanted):
    why_not = why_no_cassandra() if wanted.store == "cassandra" else None
    if wanted.store == "seaweedfs" and find_weed() is None:
        why_not = "SeaweedFS is not installed"
    if why_not:
        raise Skipped(why_not)


def measure(wanted):
    os.environ.update(ENVIRONMENT)
    tempfile.tempdir = None
    try:
        (SCRATCH / "server").mkdir()
        source, expected = make_source(wanted.objects)
        with STORES[wanted.store]() as (copy, read_all), runner(wanted.writers) as makes:
            killer = Killer(wanted.kills, wanted.objects)
            began = time.perf_counter()
            done = copy(source, killer, makes)
            seconds = time.perf_counter() - began
            found = check(expected, list(read_all()))
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    return {
        "store": wanted.store,
        "objects": wanted.objects,
        "bytes": done.nbytes,
        "writers": wanted.writers,
        "killed_at": killer.killed_at,
        "seconds": seconds,
        "objects_per_s": wanted.objects / seconds,
        "counted_in_the_copy": done.samples,
        "counted_as_made": done.made,
        "skipped": len(done.skipped),
        **found,
    }


def table(found):
    wrong = ("missing", "doubled", "strange", "other_bytes_or_class")
    head = ["into", "seconds", "objects a second", "killed", *(name.replace("_", " ") for name in wrong)]
    figures = [found["seconds"], found["objects_per_s"], len(found["killed_at"]), *(found[name] for name in wrong)]
    return markdown(head, [[found["store"], *figures]])


def make_source(objects):
    """A folder of objects, and the class and SHA-256 of each by its name."""
    draw, folder, expected = random.Random(1), SCRATCH / "source", {}
    for number in range(CLASSES):
        (folder / f"class-{number}").mkdir(parents=True)
    for number in range(objects):
        name, data = f"class-{number % CLASSES}/{number:06}.jpg", draw.randbytes(draw.randint(500, 1500))
        (folder / name).write_bytes(data)
        expected[name] = (f"class-{number % CLASSES}", hashlib.sha256(data).hexdigest())
    return fl.Dataset(folder), expected


class Killer:
    """An observer that kills one writer after each of so many equal shares of the objects."""

    def __init__(self, kills, objects):
        self.waiting = [objects * (number + 1) // (kills + 1) for number in range(kills)]
        self.killed_at = []

    def __call__(self, event):
        if isinstance(event, ProgressMade):
            doing(f"{event.done} objects")
        if isinstance(event, ProgressMade) and self.waiting and event.done >= self.waiting[0]:
            for process in workers_of_ray("ray::_make")[:1]:
                os.kill(process, signal.SIGKILL)
                self.waiting.pop(0)
                self.killed_at.append(event.done)


@contextmanager
def runner(writers):
    """Who makes the parts of the copy."""
    if not writers:
        yield make_in_process
        return
    import ray

    from frostline.ray.tasks import ray_runner

    ray.init(
        num_cpus=writers,
        object_store_memory=256 << 20,
        include_dashboard=False,
        log_to_driver=False,
        _temp_dir=str(SCRATCH / "ray"),
    )
    try:
        yield ray_runner(ray)
    finally:
        ray.shutdown()


@contextmanager
def cql_table():
    os.environ["FROSTLINE_CQL_PASSWORD"] = PASSWORD
    with cassandra(SCRATCH / "server", heap_mb=1024, secured=True) as server:
        url = f"cql://{USER}@{server.place}/{KEYSPACE}/put?protocol=3"

        def read_all():
            with server.session() as session:
                for row in session.execute(f"SELECT name, label, data FROM {KEYSPACE}.put"):
                    yield row.name, row.label, bytes(row.data)

        yield lambda source, on_event, makes: put_into_table(source, url, on_event=on_event, runner=makes), read_all


@contextmanager
def bucket():
    with seaweed(SCRATCH / "server") as server:
        os.environ |= server.environment()
        server.make_bucket("copies")

        def read_all():
            store = open_store("s3://copies/all")
            for entry in store.list():
                if not entry.object.startswith("."):
                    yield entry.object, entry.object.partition("/")[0], bytes(store.read(entry.object, 0, entry.size))

        def copy(source, on_event, makes):
            return repack(source, "s3://copies/all", "original", part_bytes=1 << 20, on_event=on_event, runner=makes)

        yield copy, read_all


STORES = {"cassandra": cql_table, "seaweedfs": bucket}


def check(expected, found):
    """Counts of what is there; everything must be 0 but ``read_back``, which is the number of objects."""
    names = Counter(name for name, _, _ in found)
    there = {name: (label, hashlib.sha256(data).hexdigest()) for name, label, data in found}
    return {
        "read_back": len(found),
        "doubled": len(found) - len(names),
        "missing": len(expected.keys() - there.keys()),
        "strange": len(there.keys() - expected.keys()),
        "other_bytes_or_class": sum(there[name] != expected[name] for name in there.keys() & expected.keys()),
    }


if __name__ == "__main__":
    quick = {"store": "seaweedfs", "objects": 60, "writers": 0, "kills": 0}
    run(__doc__, measure, quick=quick, options=options, table=table, needs=(modules("ray"), server_is_here), data=False)
