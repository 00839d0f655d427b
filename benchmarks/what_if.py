"""What every rule would give for seven networks, whatever the link and the store's speed: nothing is run.

    python benchmarks/what_if.py [--profiles DIR] [--out DIR]

Reads the situations that `benchmarks/profile_networks.py` measured and plans each with links of 0.05 to 12 Gbit/s and
a store 0.1 to 10 times as fast as the trainer; once with the trainer as measured, on one thread, and once with one 50
times as fast, for which links are thin. Prints, for each rule, its predicted throughput relative to that of the
optimum (`frostline.planning.make_plan` with no allowance for noise): the worst cell, the geometric mean, and the share
of cells in which it is within 1 %. Writes them and all cells as JSON, markdown and a picture into DIR. Takes half a
minute.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.colors import LogNorm

from frostline.planning import POLICIES, Situation, make_plan, vary

HERE = Path(__file__).parent
DATE = "2026-11-21"
NETWORKS = ("alexnet", "resnet18", "resnet50", "vgg11", "vgg19", "densenet121", "vit_small")
GBITS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 12)
SPEEDS = (0.1, 0.25, 0.5, 1, 2, 4, 10)
TRAINERS = {1: "the trainer as measured, on one thread", 50: "a trainer 50 times as fast"}
BYTES_PER_GBIT = 125e6
WITHIN = 0.99

# Beside the published rules, the optimum with something taken from it or given to it.
OURS = (
    "as a job takes it",
    "one way for all",
    "exact codec alone",
    "one way, exact codec",
    "fp16 allowed",
    "int8 allowed",
)
MEANING = {
    "as a job takes it": "the fewest bytes of single ways within 5 % of the optimum, else of mixtures within 2 %",
    "one way for all": "the best pair of cut and codec, never a mixture",
    "exact codec alone": "the best mixture of cuts without any codec",
    "one way, exact codec": "the best single cut without any codec: what a perfect rule of the published kind gives",
    "fp16 allowed": 'the optimum with `accuracy="fp16"`',
    "int8 allowed": 'the optimum with `accuracy="int8"`',
    "baseline": "encoded samples, everything at the trainer",
    "all_in_store": "training too on the node, which no cut of ours can do: it gives up the trainer",
    "freeze": "all frozen layers at the store",
    "min_bytes": "the cut with the fewest bytes",
    "neurosurgeon": "the least latency of one sample",
    "hapi_v1": "HAPI's first rule: under a threshold of bytes, then the earliest that saves memory",
    "hapi_v3": "HAPI's later rule: the least time of its pipeline, or the baseline where that is faster",
}


def main():
    wanted = arguments()
    situations = {name: read(wanted.profiles / f"{name}.json") for name in NETWORKS}
    cells = [
        {
            "network": name,
            "gbit_per_s": gbit,
            "store_speed": speed,
            "trainer_speed": trainer,
            **predicted(situation, gbit, speed, trainer),
        }
        for trainer in TRAINERS
        for name, situation in situations.items()
        for gbit in GBITS
        for speed in SPEEDS
    ]
    page = written(cells, next(iter(situations.values())))
    print(page)
    wanted.out.mkdir(parents=True, exist_ok=True)
    rules = {str(trainer): summary(only(cells, trainer_speed=trainer)) for trainer in TRAINERS}
    found = {"hardware": situations[NETWORKS[0]].store.hardware, "rules_by_trainer": rules, "cells": cells}
    (wanted.out / f"{DATE}-what-if.json").write_text(on_lines(found))
    (wanted.out / f"{DATE}-what-if.md").write_text(page)
    draw(cells, wanted.out / f"{DATE}-what-if.svg")


def read(path):
    return Situation.from_json(json.loads(path.read_text()))


def predicted(situation, gbit, speed, trainer):
    """Samples a second of the optimum, what it consists of, and every rule's throughput relative to it."""
    here = vary(situation, bandwidth=gbit * BYTES_PER_GBIT, store_speed=speed * trainer, trainer_speed=trainer)
    best = make_plan(here, noise=0)
    bare = replace(here, store=replace(here.store, codecs=()))
    possible = [candidate.samples_per_s for candidate in best.candidates if candidate.is_possible]
    rates = {
        "as a job takes it": make_plan(here).samples_per_s,
        "one way for all": max(possible),
        "exact codec alone": make_plan(bare, noise=0).samples_per_s,
        "one way, exact codec": max(
            candidate.samples_per_s for candidate in best.candidates if candidate.codec == "exact"
        ),
        "fp16 allowed": make_plan(replace(here, accuracy="fp16"), noise=0).samples_per_s,
        "int8 allowed": make_plan(replace(here, accuracy="int8"), noise=0).samples_per_s,
    }
    rates |= {name: make_plan(bare, name).samples_per_s for name in POLICIES[1:]}
    return {
        "samples_per_s": float(f"{best.samples_per_s:.5g}"),
        "mixture": [[item.route.cut, item.route.codec, round(item.share, 4)] for item in best.mixture],
        "bottleneck": best.bottleneck,
        "relative": {name: round(rate / best.samples_per_s, 4) for name, rate in rates.items()},
    }


def summary(cells):
    """By rule: the worst cell, the geometric mean, the best cell, and the share of cells within 1 %."""
    return {
        name: {
            "worst": min(values),
            "geometric_mean": round(geometric_mean(values), 4),
            "best": max(values),
            "within_1_percent": round(sum(value >= WITHIN for value in values) / len(values), 4),
        }
        for name in (*OURS, *POLICIES[1:])
        if (values := [cell["relative"][name] for cell in cells])
    }


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def only(cells, **where):
    return [cell for cell in cells if all(cell[key] == value for key, value in where.items())]


def written(cells, first):
    setting = (
        "`python benchmarks/what_if.py`, from the profiles that `benchmarks/profile_networks.py` measured: "
        f"{len(NETWORKS)} networks with all but the classifier frozen, {first.store.hardware}, one node, encoded "
        f"samples of {first.encoded_bytes / 1e3:.0f} kB, random weights, lossless codecs. Links of {GBITS[0]} to "
        f"{GBITS[-1]} Gbit/s, a store side {SPEEDS[0]} to {SPEEDS[-1]} times as fast as the trainer. Predicted, not "
        "run: every rule's cut is reckoned by the same steady state, in which reading, computing and the link overlap, "
        "so a rule whose authors ran its stages one after another is shown better than it was."
    )
    lines = ["# What every rule would give, 21 November 2026", "", setting, ""]
    for trainer, words in TRAINERS.items():
        here = only(cells, trainer_speed=trainer)
        lines += [f"## With {words}", "", *by_rule(here), "", gains(here), "", *by_place(here), ""]
    lines += [
        "## By network",
        "",
        "Geometric means over all cells.",
        "",
        *by_network(cells),
        "",
        f"![Each rule's throughput relative to the optimum, by link and store]({DATE}-what-if.svg)",
        "",
    ]
    return "\n".join(lines)


def by_rule(cells):
    rows = [
        f"| throughput relative to the optimum, {len(cells)} cells | worst | geometric mean | best | within 1 % | |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    rows += [
        f"| {name} | {item['worst']:.3f} | {item['geometric_mean']:.3f} | {item['best']:.3f} "
        f"| {item['within_1_percent'] * 100:.0f} % | {MEANING[name]} |"
        for name, item in summary(cells).items()
    ]
    return rows


def gains(cells):
    over_one_way = [1 / cell["relative"]["one way for all"] for cell in cells]
    over_no_codec = [1 / cell["relative"]["exact codec alone"] for cell in cells]
    mixed = sum(len(cell["mixture"]) > 1 for cell in cells) / len(cells)
    return (
        f"The optimum mixes several ways in {mixed * 100:.0f} % of the cells. Mixing gains "
        f"{(max(over_one_way) - 1) * 100:.0f} % at most and {(geometric_mean(over_one_way) - 1) * 100:.0f} % in the "
        f"geometric mean; lossless codecs gain {(max(over_no_codec) - 1) * 100:.0f} % at most and "
        f"{(geometric_mean(over_no_codec) - 1) * 100:.1f} %. The best of the published rules but all_in_store, chosen "
        "anew in each cell, which no rule does, relative to the optimum (geometric mean over the networks), by Gbit/s "
        "and the store's speed:"
    )


def by_network(cells):
    names = [*OURS[:4], *POLICIES[1:]]
    rows = [f"| {' | '.join(('network', *names))} |", f"| --- {'| ---: ' * len(names)}|"]
    for network in NETWORKS:
        means = [geometric_mean([cell["relative"][name] for cell in only(cells, network=network)]) for name in names]
        rows.append(f"| {' | '.join((network, *(f'{mean:.3f}' for mean in means)))} |")
    return rows


def by_place(cells):
    rules = [name for name in POLICIES[1:] if name != "all_in_store"]
    rows = [f"| Gbit/s | {' | '.join(f'{speed} x' for speed in SPEEDS)} |", f"| ---: {'| ---: ' * len(SPEEDS)}|"]
    for gbit in GBITS:
        best = []
        for speed in SPEEDS:
            here = only(cells, gbit_per_s=gbit, store_speed=speed)
            best.append(geometric_mean([max(cell["relative"][name] for name in rules) for cell in here]))
        rows.append(f"| {gbit} | {' | '.join(f'{item:.3f}' for item in best)} |")
    return rows


def draw(cells, path):
    """A field a rule, a row a trainer: the geometric mean over the networks, by link and store."""
    plt.rcParams.update({"svg.hashsalt": "frostline", "font.size": 8})
    names = ["as a job takes it", *POLICIES[1:]]
    figure, places = plt.subplots(
        len(TRAINERS), len(names), figsize=(15, 4.5), sharex=True, sharey=True, layout="constrained"
    )
    for row, trainer in zip(places, TRAINERS, strict=True):
        for place, name in zip(row, names, strict=True):
            here = only(cells, trainer_speed=trainer)
            table = [
                [
                    geometric_mean([cell["relative"][name] for cell in only(here, gbit_per_s=gbit, store_speed=speed)])
                    for gbit in GBITS
                ]
                for speed in SPEEDS
            ]
            image = place.imshow(table, norm=LogNorm(0.1, 1), cmap="viridis", origin="lower", aspect="auto")
            place.set_title("Frostline" if name in OURS else name)
            place.set_xticks(range(len(GBITS)), [f"{gbit:g}" for gbit in GBITS], rotation=90)
            place.set_yticks(range(len(SPEEDS)), [f"{speed:g}" for speed in SPEEDS])
        row[0].set_ylabel(f"store, times the trainer\n(trainer: {trainer} x)")
    figure.supxlabel("link, Gbit/s")
    bar = figure.colorbar(image, ax=places, label="throughput relative to the optimum", ticks=[0.1, 0.2, 0.5, 1])
    bar.ax.set_yticklabels(["0.1 or less", "0.2", "0.5", "1"])
    bar.ax.minorticks_off()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def on_lines(found):
    """JSON with one cell a line, as values in the order of ``columns``."""
    columns = [name for name in found["cells"][0] if name != "relative"]
    rows = [[*(cell[name] for name in columns), *cell["relative"].values()] for cell in found["cells"]]
    head = {key: value for key, value in found.items() if key != "cells"}
    head = json.dumps({**head, "columns": [*columns, *found["cells"][0]["relative"]]}, indent=2)
    lines = ",\n".join(f"    {json.dumps(row, separators=(',', ':'))}" for row in rows)
    return f'{head[:-2]},\n  "cells": [\n{lines}\n  ]\n}}\n'


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--profiles", type=Path, default=HERE / "profiles")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    return parser.parse_args()


if __name__ == "__main__":
    main()
