"""Reads from a server that refuses what comes faster than its limit: how much of that limit is used, what is refused.

    python benchmarks/throttled.py [--limits 50 200 800] [--threads 4 32] [--seconds 20] [--out FILE]

The server is a bucket over HTTP in a process of its own, whose bucket of tokens holds a tenth of a second's. It answers
``503 SlowDown`` beyond its limit, with a ``Retry-After`` of a second that the driver tells nobody. The second half of
each run counts, as the server saw it.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZE = 1000


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--limits", type=float, nargs="+", default=[50, 200, 800])
    parser.add_argument("--threads", type=int, nargs="+", default=[4, 32])
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", type=float, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]
    if wanted.serve:
        return serve(wanted.serve)
    found = [measured(limit, threads, wanted.seconds) for limit in wanted.limits for threads in wanted.threads]
    print(table(found))
    if wanted.out:
        wanted.out.write_text(json.dumps({"command": " ".join(sys.argv), "found": found}, indent=1) + "\n")
    return None


def serve(limit):
    """Serve until stdin ends; a line asks for the counts."""
    from support.bucket_peer import bucket_peer
    from support.throttle import Throttle

    with bucket_peer() as peer:
        peer.objects["x"] = bytes(SIZE)
        throttle = Throttle(limit, time.monotonic)
        peer.answers = throttle
        print(peer.url, flush=True)
        for _ in sys.stdin:
            print(json.dumps([throttle.taken, throttle.refused, time.monotonic()]), flush=True)


def measured(limit, threads, seconds):
    from frostline.stores.open import open_store

    os.environ["GOOGLE_BEARER_TOKEN"] = "token"
    command = [sys.executable, __file__, "--serve", str(limit)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        store = open_store(f"gs://photos?endpoint={server.stdout.readline().strip()}")
        done, failed = threading.Event(), []
        with ThreadPoolExecutor(threads) as pool:
            readers = [pool.submit(read_until, store, done, failed) for _ in range(threads)]
            done.wait(seconds / 2)
            first = counts(server)
            done.wait(seconds / 2)
            last = counts(server)
            done.set()
            reads = sum(reader.result() for reader in readers)
        taken, refused, passed = (after - before for after, before in zip(last, first, strict=True))
        one = {
            "limit_per_s": limit,
            "threads": threads,
            "used": taken / passed / limit,
            "refused": refused / (taken + refused),
            "reads": reads,
            "lost": len(failed),
        }
        print(one, flush=True)
        server.stdin.close()
    return one


def read_until(store, done, failed):
    from frostline.core.errors import StoreError

    reads = 0
    while not done.is_set():
        try:
            assert len(store.read("x", 0, SIZE)) == SIZE
        except StoreError as error:
            failed.append(error)
        reads += 1
    return reads


def counts(server):
    server.stdin.write("\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


def table(found):
    lines = ["| limit, reads/s | threads | of the limit | refused | lost |", "| ---: | ---: | ---: | ---: | ---: |"]
    lines += [
        f"| {row['limit_per_s']:.0f} | {row['threads']} | {row['used']:.0%} | {row['refused']:.1%} | {row['lost']} |"
        for row in found
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
