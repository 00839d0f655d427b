"""Reads of 100 KB objects from S3: Frostline's store beside obstore alone, s3torchconnector, boto3 and s3fs.

    scripts/object_readers.sh                # once: the other clients, into build/object-readers
    python benchmarks/object_reads.py [--concurrency 1 32 128] [--rounds 3] [--out FILE]

Runs a SeaweedFS on this machine, and each client in a process of its own, by turns. Prints reads a second, and
milliseconds of the client's processor time a read (user and system, all of its threads), the median of the rounds.
With --out FILE the rounds that FILE holds already count too, so that a long run can be done in pieces. With --layers it
prints instead what Frostline's layers take by themselves, on a store in memory.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
OTHERS = Path(os.environ.get("OBJECT_READERS", ROOT / "build" / "object-readers"))
BUCKET, OBJECTS, SIZE = "reads", 400, 100_000
WARM_UP = 0.1


def main():
    wanted = arguments()
    if wanted.layers:
        return layers()
    if wanted.reader:
        return print(json.dumps(measured(wanted)))
    found = json.loads(wanted.out.read_text()) if wanted.out and wanted.out.exists() else []
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
    from frostline.engines.machine import hardware_name
    from support.seaweed import seaweed

    print(f"{hardware_name('cpu')}, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as folder, seaweed(Path(folder)) as server:
        server.make_bucket(BUCKET)
        for number in range(OBJECTS):
            server.put(f"{BUCKET}/{name_of(number)}", os.urandom(SIZE))
        for number in range(wanted.rounds):
            readers = deque(wanted.readers)
            readers.rotate(-number)
            for concurrency in wanted.concurrency:
                found += filter(None, [run(reader, concurrency, wanted.reads, server) for reader in readers])
    if wanted.out:
        wanted.out.write_text(json.dumps(found, indent=1) + "\n")
        wanted.out.with_suffix(".md").write_text(page(found))
    print(table(found))
    return None


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reads", type=int, default=1500, help="of each client in each round; a third of it at 1")
    parser.add_argument("--readers", nargs="+", default=list(READERS), choices=READERS)
    parser.add_argument("--reader", choices=READERS, help=argparse.SUPPRESS)
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def layers():
    sys.path.insert(0, str(ROOT / "src"))
    import obstore
    from obstore.store import MemoryStore

    from frostline.stores.cloud import DriverStore
    from frostline.stores.retry import Retrying

    client, name = MemoryStore(), name_of(0)
    obstore.put(client, name, bytes(SIZE))
    store = Retrying(DriverStore("memory://layers", lambda _: client, ""))
    for what, call in (
        ("obstore", lambda: memoryview(obstore.get(client, name).bytes())),
        ("read", lambda: store.read(name, 0, SIZE)),
        ("read_version", lambda: store.read_version(name, 0, SIZE)),
    ):
        print(f"{what:13} {1e6 * min(timeit.repeat(call, number=5000, repeat=5)) / 5000:5.1f} microseconds")


def name_of(number):
    return f"photos/{number % OBJECTS:04}.jpg"


def run(reader, concurrency, reads, server):
    reads = reads if concurrency > 1 else reads // 3
    command = [sys.executable, __file__, "--reader", reader, "--concurrency", str(concurrency), "--reads", str(reads)]
    # The others' packages last: what the project itself uses stays as it is.
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    said = {**os.environ, **server.environment(), "PYTHONPATH": path, "OBJECT_READERS": str(OTHERS)}
    done = subprocess.run(command, env=said, capture_output=True, text=True)
    if done.returncode:
        print(f"{reader} failed:\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(done.stdout)


def measured(wanted):
    (concurrency,) = wanted.concurrency
    with READERS[wanted.reader](concurrency) as read_all:
        read_all(range(max(concurrency, int(wanted.reads * WARM_UP))))
        started, cpu = time.perf_counter(), time.process_time()
        nbytes = read_all(range(wanted.reads))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert nbytes == wanted.reads * SIZE, f"{nbytes} bytes of {wanted.reads} objects"
    return {
        "reader": wanted.reader,
        "concurrency": concurrency,
        "reads": wanted.reads,
        "seconds": seconds,
        "cpu_s": cpu,
    }


@contextmanager
def threads(concurrency, read):
    with ThreadPoolExecutor(concurrency) as pool:
        yield lambda numbers: sum(pool.map(read, numbers))


@contextmanager
def tasks(concurrency, read):
    async def worker(numbers):
        return sum([await read(number) for number in numbers])

    async def all_of(numbers):
        # Each worker takes the next number when it is done with one.
        rest = iter(numbers)
        return sum(await asyncio.gather(*(worker(rest) for _ in range(concurrency))))

    with asyncio.Runner() as runner:
        yield lambda numbers: runner.run(all_of(numbers))


def frostline(concurrency):
    from frostline.stores.open import open_store

    store = open_store(f"s3://{BUCKET}")
    return threads(concurrency, lambda number: len(store.read(name_of(number), 0, SIZE)))


def frostline_versions(concurrency):
    from frostline.stores.open import open_store

    store = open_store(f"s3://{BUCKET}")
    return threads(concurrency, lambda number: len(store.read_version(name_of(number), 0, SIZE)[0]))


def obstore_threads(concurrency):
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET)
    return threads(concurrency, lambda number: len(memoryview(obstore.get(store, name_of(number)).bytes())))


def obstore_tasks(concurrency):
    import obstore
    from obstore.store import S3Store

    store = S3Store(BUCKET)

    async def read(number):
        return len(memoryview(await (await obstore.get_async(store, name_of(number))).bytes_async()))

    return tasks(concurrency, read)


def s3torchconnector(concurrency):
    others()
    from s3torchconnector import S3ClientConfig
    from s3torchconnector._s3client import S3Client

    config = S3ClientConfig(force_path_style=True)
    client = S3Client(region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)
    return threads(concurrency, lambda number: len(client.get_object(BUCKET, name_of(number)).read()))


def boto3(concurrency):
    others()
    import boto3
    from botocore.config import Config

    client = boto3.client("s3", config=Config(max_pool_connections=concurrency))
    return threads(
        concurrency, lambda number: len(client.get_object(Bucket=BUCKET, Key=name_of(number))["Body"].read())
    )


@contextmanager
def s3fs(concurrency):
    others()
    import s3fs

    async def opened():
        system = s3fs.S3FileSystem(
            asynchronous=True, skip_instance_cache=True, config_kwargs={"max_pool_connections": concurrency}
        )
        return system, await system.set_session()

    async def read(number):
        # Its asynchronous face has no other name.
        return len(await system._cat_file(f"{BUCKET}/{name_of(number)}"))  # noqa: SLF001

    async def all_of(numbers):
        rest = iter(numbers)

        async def worker():
            return sum([await read(number) for number in rest])

        return sum(await asyncio.gather(*(worker() for _ in range(concurrency))))

    with asyncio.Runner() as runner:
        system, session = runner.run(opened())
        try:
            yield lambda numbers: runner.run(all_of(numbers))
        finally:
            runner.run(session.close())


def others():
    if not OTHERS.exists():
        raise SystemExit("the other clients are not here: run scripts/object_readers.sh")
    # First: boto3 and s3fs each need the botocore that they were made for.
    sys.path.insert(0, str(OTHERS))


READERS = {
    "frostline": frostline,
    "frostline, with versions": frostline_versions,
    "obstore": obstore_threads,
    "obstore, asyncio": obstore_tasks,
    "s3torchconnector": s3torchconnector,
    "boto3": boto3,
    "s3fs": s3fs,
}


def table(found):
    counts = sorted({item["concurrency"] for item in found})
    lines = [
        "| client | " + " | ".join(f"reads/s at {count} | CPU ms a read" for count in counts) + " |",
        "| --- |" + " ---: |" * 2 * len(counts),
    ]
    for reader in [reader for reader in READERS if any(row["reader"] == reader for row in found)]:
        cells = []
        for count in counts:
            rows = [item for item in found if (item["reader"], item["concurrency"]) == (reader, count)]
            if not rows:
                cells += ["-", "-"]
                continue
            rate = statistics.median(row["reads"] / row["seconds"] for row in rows)
            cpu = [1e3 * row["cpu_s"] / row["reads"] for row in rows]
            cells += [f"{rate:.0f}", f"{statistics.median(cpu):.2f} ({min(cpu):.2f} to {max(cpu):.2f})"]
        lines.append(f"| {reader} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(found):
    rounds = len([item for item in found if item["reader"] == "frostline"]) // len(
        {item["concurrency"] for item in found}
    )
    return (
        "# Reads of single objects\n\n"
        f"`benchmarks/object_reads.py`: whole objects of {SIZE:,} bytes from SeaweedFS on the same machine, each "
        f"client in a process of its own, by turns; the median of {rounds} rounds, and the "
        "span of the processor time.\n\n"
        f"{table(found)}\n"
    )


if __name__ == "__main__":
    main()
