"""Draws the pictures of docs/measured.md: bars of whole jobs from raw figures, the others as benchmarks drew them.

python scripts/measured.py
"""

import json
import shutil
import statistics
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
DRAWN = {
    "2026-11-21-bandwidth-change.svg": "bandwidth_change.svg",
    "2026-11-21-what-if.svg": "what_if.svg",
    "2026-11-23-latency-third.svg": "latency.svg",
    "2026-11-23-compare-all.svg": "compare.svg",
    "2026-11-23-tuning.svg": "tuning.svg",
}
STORE, SCRIPT = "#1d6a8c", "#b4692a"


def whole_jobs():
    runs = json.loads((RESULTS / "2026-11-24-training.json").read_text(encoding="utf-8"))["runs"]
    medians = {name: statistics.median(run["seconds"] for run in several) for name, several in runs.items()}
    bars(medians, "seconds of the whole run, median of three", "whole_jobs.svg")


WAYS = {
    "second job": "frostline train --near, again",
    "first job": "frostline train --near, first time",
    "script here": "a script at the trainer, which fetches\nthe photographs and extracts once",
}


def wall_clock():
    """The same job with and without, across a link of 100 Mbit/s; ``benchmarks/near.py`` measured it."""
    found = {}
    for name, is_script in (("2026-11-28-near", False), ("2026-11-27-near-free-link-medians", True)):
        rows = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["figures"]["rows"]
        for row in rows:
            if row["mbit"] == 100 and row["way"] in WAYS and row["way"].startswith("script") == is_script:
                found.setdefault(WAYS[row["way"]], []).append(row["seconds"])
    assert all(len(seconds) == 3 for seconds in found.values())
    bars(
        {way: statistics.median(seconds) for way, seconds in found.items()},
        "seconds from the command to the trained network, median of three",
        "wall_clock.svg",
    )


def bars(medians, label, name):
    names = sorted(medians, key=medians.get, reverse=True)
    figure = Figure(figsize=(7.2, 0.6 + 0.42 * len(names)), layout="constrained")
    axes = figure.add_subplot()
    colours = [STORE if "frostline" in way else SCRIPT for way in names]
    drawn = axes.barh(names, [medians[way] for way in names], color=colours)
    axes.bar_label(drawn, fmt="%.1f s", padding=4)
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)
    with mpl.rc_context({"svg.hashsalt": "frostline"}):
        figure.savefig(PICTURES / name, metadata={"Date": None})


if __name__ == "__main__":
    whole_jobs()
    wall_clock()
    for source, name in DRAWN.items():
        shutil.copyfile(RESULTS / source, PICTURES / name)
