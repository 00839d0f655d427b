"""Requests under way found from cold, in simulated time over a line that connections share: nothing is sent.

    python benchmarks/tuning_simulated.py [--seeds 6] [--seconds 40]

For requests of 1, 8, 16 and 32 photographs and round trips of 0, 20, 75 and 150 ms, what the line carried from the
tenth second on as a share of what the best fixed number of requests did in the same weather (`tests/support`'s
`SharedLine`: 100 Mbit/s less what frames take, its rate wandering by 12 %): mean and least over the seeds.
"""

import argparse
import statistics
import sys
from multiprocessing import Pool
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from frostline.tuning import AutoTuning, Setting, Steady
from support.shared_line import hundred_mbit

MAX = Setting(requests=64, window_bytes=256 << 20)
FIXED = (4, 8, 16, 32, 64)
PHOTOGRAPHS, ROUND_TRIPS_MS = (1, 8, 16, 32), (0, 20, 75, 150)
FROM_S = 10


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--seconds", type=int, default=40)
    wanted = parser.parse_args()
    cells = [(photographs, ms) for photographs in PHOTOGRAPHS for ms in ROUND_TRIPS_MS]
    runs = [
        (cell, fixed, seed, wanted.seconds)
        for cell in cells
        for fixed in (*FIXED, None)
        for seed in range(wanted.seeds)
    ]
    with Pool() as pool:
        rates = dict(zip(runs, pool.map(rate, runs), strict=True))
    every = []
    print("| photographs a request | round trip | mean | least |\n| ---: | ---: | ---: | ---: |")
    for cell in cells:

        def of(fixed, cell=cell):
            return [rates[cell, fixed, seed, wanted.seconds] for seed in range(wanted.seeds)]

        best = max(map(of, FIXED), key=statistics.mean)
        shares = [ours / theirs for ours, theirs in zip(of(None), best, strict=True)]
        every += shares
        print(f"| {cell[0]} | {cell[1]} ms | {statistics.mean(shares):.3f} | {min(shares):.3f} |")
    print(f"| all {len(every)} runs | | {statistics.mean(every):.3f} | {min(every):.3f} |")
    print(f"{sum(item < 0.95 for item in every)} runs below 95 %")


def rate(run):
    """Bytes a second on the line; by the rule where no number is fixed."""
    (photographs, round_trip_ms), fixed, seed, seconds = run
    rule = (
        AutoTuning(MAX, requests=8) if fixed is None else Steady(Setting(requests=fixed, window_bytes=MAX.window_bytes))
    )
    line = hundred_mbit(rule, photographs, round_trip_ms, seed)
    line.run(seconds)
    return line.carried_rate(FROM_S, seconds)


if __name__ == "__main__":
    main()
