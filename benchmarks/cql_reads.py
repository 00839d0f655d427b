"""Single reads of 100 KB rows from a real Cassandra: what does a read cost here, and what does it cost the bare driver?

    python benchmarks/cql_reads.py [--concurrency 1,32,128] [--rounds 5] [--reads 1500] [--out FILE]

One server on loopback, on the same cores. Four ways, one after another in every round, in an order that turns, so
that other programs on the machine hit all alike:

* ours, many: ``CqlStore.read_many``, with so many reads under way;
* ours, threads: ``CqlStore.read_version`` in so many threads, as a node reads;
* bare, many: the driver's own ``execute_concurrent_with_args`` of ``SELECT data``, with so many under way;
* bare, threads: the driver's ``Session.execute`` of ``SELECT data`` in so many threads.

Printed and written: medians over the rounds, with the least and the greatest, of reads a second and of milliseconds of
this process's processor time a read; and ours relative to the bare driver, as the median of the rounds' ratios.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile
from cassandra.concurrent import execute_concurrent_with_args
from cassandra.policies import DCAwareRoundRobinPolicy, TokenAwarePolicy

from frostline.engines.machine import hardware_name
from frostline.stores.open import open_store
from frostline.stores.protocols import Place

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.cassandra import KEYSPACE, cassandra

ROWS, NBYTES = 400, 100_000


def main():
    wanted = arguments()
    with tempfile.TemporaryDirectory() as folder, cassandra(Path(folder), heap_mb=1024) as server:
        keys = fill(server)
        ways = Ways(server, keys)
        cells = [measure(ways, int(word), wanted) for word in wanted.concurrency.split(",")]
        ways.close()
    result = {
        "what": f"reads of {NBYTES} bytes from one Cassandra 2.1.0 on loopback, on the same cores",
        "hardware": hardware_name("cpu"),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "rounds": wanted.rounds,
        "reads_a_round": wanted.reads,
        "cells": cells,
    }
    if wanted.out:
        wanted.out.write_text(json.dumps(result, indent=1) + "\n")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--concurrency", default="1,32,128")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--reads", type=int, default=1500, help="of a way in a round; a quarter of it at concurrency 1")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def fill(server):
    """Rows that no compression makes smaller, in a table without any."""
    keys = [uuid.uuid4() for _ in range(ROWS)]
    with server.session() as session:
        plain = "WITH compression = {'sstable_compression': ''}"
        session.execute(f"CREATE TABLE {KEYSPACE}.photos (id uuid PRIMARY KEY, label int, data blob) {plain}")
        insert = session.prepare(f"INSERT INTO {KEYSPACE}.photos (id, label, data) VALUES (?, 0, ?)")
        for key in keys:
            session.execute(insert, (key, os.urandom(NBYTES)))
    return keys


class Ways:
    """The four ways to read keys, each connected and warm."""

    def __init__(self, server, keys):
        self.keys = keys
        self.store = open_store(f"cql://{server.place}/{KEYSPACE}/photos?protocol=3")
        profile = ExecutionProfile(TokenAwarePolicy(DCAwareRoundRobinPolicy()))
        self.cluster = Cluster(
            server.hosts, port=server.port, protocol_version=3, execution_profiles={EXEC_PROFILE_DEFAULT: profile}
        )
        self.session = self.cluster.connect(KEYSPACE)
        self.select = self.session.prepare("SELECT data FROM photos WHERE id = ?")
        self.all = {
            "ours, many": self.ours_many,
            "bare, many": self.bare_many,
            "ours, threads": self.ours_threads,
            "bare, threads": self.bare_threads,
        }
        for way in self.all.values():
            way(200, 8)

    def close(self):
        self.cluster.shutdown()

    def some(self, count):
        return [self.keys[number % ROWS] for number in range(count)]

    def ours_many(self, count, concurrency):
        places = [Place(str(key), 0, NBYTES) for key in self.some(count)]
        return sum(len(found[0]) for _, found in self.store.read_many(places, maximum=concurrency))

    def ours_threads(self, count, concurrency):
        names = [str(key) for key in self.some(count)]
        return self.threaded(lambda name: len(self.store.read_version(name, 0, NBYTES)[0]), names, concurrency)

    def bare_many(self, count, concurrency):
        rows = [(key,) for key in self.some(count)]
        found = execute_concurrent_with_args(
            self.session, self.select, rows, concurrency=concurrency, results_generator=True
        )
        return sum(len(answer.one().data) for _, answer in found)

    def bare_threads(self, count, concurrency):
        rows = [(key,) for key in self.some(count)]
        return self.threaded(lambda row: len(self.session.execute(self.select, row).one().data), rows, concurrency)

    @staticmethod
    def threaded(read, wanted, concurrency):
        with ThreadPoolExecutor(concurrency) as threads:
            return sum(threads.map(read, wanted))


def measure(ways, concurrency, wanted):
    count = wanted.reads if concurrency > 1 else wanted.reads // 4
    names = list(ways.all)
    got = {name: {"reads_per_s": [], "cpu_ms_per_read": []} for name in names}
    for number in range(wanted.rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            started, cpu = time.perf_counter(), time.process_time()
            nbytes = ways.all[name](count, concurrency)
            assert nbytes == count * NBYTES
            got[name]["cpu_ms_per_read"].append(1000 * (time.process_time() - cpu) / count)
            got[name]["reads_per_s"].append(count / (time.perf_counter() - started))
    cell = {"concurrency": concurrency, "reads": count, "ways": got, "ours_relative_to_bare": {}}
    print(f"\n{concurrency} at once, {count} reads a round, load {os.getloadavg()[0]:.1f}")
    for name in names:
        said = [said_of(got[name][what], digits) for what, digits in (("reads_per_s", 0), ("cpu_ms_per_read", 3))]
        print(f"  {name:14} {said[0]} reads/s   {said[1]} ms of processor time a read")
    for how in ("many", "threads"):
        pairs = zip(got[f"ours, {how}"]["cpu_ms_per_read"], got[f"bare, {how}"]["cpu_ms_per_read"], strict=True)
        cell["ours_relative_to_bare"][how] = statistics.median(ours / bare for ours, bare in pairs)
        print(f"  processor time of ours relative to the bare driver, {how}: {cell['ours_relative_to_bare'][how]:.2f}")
    return cell


def said_of(values, digits):
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


if __name__ == "__main__":
    main()
