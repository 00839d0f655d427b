"""What a plain job takes before its first batch and at its peak, as arrays and as PyTorch's batches.

    python benchmarks/plain_start.py --data DIR [--rounds 5] [--batch 64]

A process each, by turns. Photographs of a folder are decoded to 224 pixels by a node in the process, and nothing is
kept. Seconds are those since the interpreter ran its first line; memory is what the process has resident, and at its
end the most that it had.
"""

import argparse
import json
import statistics
import subprocess
import sys

PASS = """
import json, sys, time
began = time.perf_counter()
def resident(name):
    lines = (line.split() for line in open("/proc/self/status"))
    return next(1024 * int(found[1]) for found in lines if found[0] == name + ":")
import frostline.loaders
imported_s, imported_bytes = time.perf_counter() - began, resident("VmRSS")
import frostline as fl
kind, folder, batch = sys.argv[1:]
settings = fl.LoaderSettings(cache_bytes=0)
data = fl.Dataset(folder)
with fl.offload(None, data, settings=settings) as job:
    batches = iter(getattr(job, kind)(int(batch), shuffle=True))
    next(batches)
    first_s, first_bytes = time.perf_counter() - began, resident("VmRSS")
    for _ in batches:
        pass
print(json.dumps({
    "imported_s": imported_s, "imported_bytes": imported_bytes, "first_s": first_s, "first_bytes": first_bytes,
    "max_bytes": resident("VmHWM"), "seconds": time.perf_counter() - began, "torch": "torch" in sys.modules,
}))
"""


def main():
    wanted = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    wanted.add_argument("--data", required=True, help="folders of photographs, one a class")
    wanted.add_argument("--rounds", type=int, default=5)
    wanted.add_argument("--batch", type=int, default=64)
    wanted = wanted.parse_args()
    found = {"arrays": [], "loader": []}
    for number in range(wanted.rounds + 1):  # the first to warm up: the system's files, and the manifest
        for kind, runs in found.items():
            one = run(kind, wanted)
            runs.extend([one] if number else [])
    for kind, runs in found.items():
        middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        print(
            f"{kind:7} imported after {middle['imported_s']:.2f} s with {middle['imported_bytes'] / 1e6:.0f} MB; "
            f"first batch after {middle['first_s']:.2f} s with {middle['first_bytes'] / 1e6:.0f} MB; "
            f"at most {middle['max_bytes'] / 1e6:.0f} MB; all after {middle['seconds']:.2f} s; "
            f"torch {'imported' if middle['torch'] else 'not imported'}"
        )


def run(kind, wanted):
    argv = [sys.executable, "-c", PASS, kind, wanted.data, str(wanted.batch)]
    return json.loads(subprocess.run(argv, check=True, stdout=subprocess.PIPE).stdout)


if __name__ == "__main__":
    main()
