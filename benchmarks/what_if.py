"""What every rule would give for seven networks, whatever the link and the store's speed: nothing is run.

    python benchmarks/what_if.py [--out FILE]

Reads the situations that were measured once of seven networks (`profiles`, one thread of an Intel Xeon) and plans each
with links of 0.05 to 12 Gbit/s and a store 0.1 to 10 times as fast as the trainer; once with the trainer as measured,
and once with one 50 times as fast, for which links are thin. Told is, for each rule, its predicted throughput relative
to that of the optimum, a plan with no allowance for noise: the worst cell, the geometric mean, and the share of cells
in which it is within 1 %. Takes half a minute.
"""

import json
import math
from dataclasses import replace
from pathlib import Path

from harness import markdown, pyplot, run

from frostline.planning import POLICIES, Situation, make_plan, vary

PROFILES = Path(__file__).parent / "profiles"
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


QUICK = {"networks": "resnet18,vit_small", "gbits": "0.1,5", "speeds": "0.25,4"}


def options(parser):
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--gbits", default=",".join(map(str, GBITS)))
    parser.add_argument("--speeds", default=",".join(map(str, SPEEDS)))


def measure(wanted):
    situations = {name: read(PROFILES / f"{name}.json") for name in wanted.networks.split(",")}
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
        for gbit in map(float, wanted.gbits.split(","))
        for speed in map(float, wanted.speeds.split(","))
    ]
    first = next(iter(situations.values()))
    rules = {str(trainer): summary(only(cells, trainer_speed=trainer)) for trainer in TRAINERS}
    about = {"hardware": first.store.hardware, "encoded_bytes": first.encoded_bytes}
    return {**about, "rules_by_trainer": rules, "cells": cells}


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


def axis(cells, name):
    return list(dict.fromkeys(cell[name] for cell in cells))


def table(found):
    cells, parts = found["cells"], []
    for trainer, words in TRAINERS.items():
        here = only(cells, trainer_speed=trainer)
        parts += [f"With {words}:", by_rule(here), gains(here), by_place(here)]
    return "\n\n".join([*parts, "By network, geometric means over all cells:", by_network(cells)])


def by_rule(cells):
    head = [f"throughput relative to the optimum, {len(cells)} cells", "worst", "geometric mean", "best", "within 1 %"]
    rows = [
        [name, item["worst"], item["geometric_mean"], item["best"], f"{item['within_1_percent']:.0%}", MEANING[name]]
        for name, item in summary(cells).items()
    ]
    return markdown([*head, ""], rows)


def gains(cells):
    over_one_way = [1 / cell["relative"]["one way for all"] for cell in cells]
    over_no_codec = [1 / cell["relative"]["exact codec alone"] for cell in cells]
    mixed = sum(len(cell["mixture"]) > 1 for cell in cells) / len(cells)
    return (
        f"The optimum mixes several ways in {mixed:.0%} of the cells. Mixing gains {max(over_one_way) - 1:.0%} at most "
        f"and {geometric_mean(over_one_way) - 1:.0%} in the geometric mean; lossless codecs gain "
        f"{max(over_no_codec) - 1:.0%} at most and {geometric_mean(over_no_codec) - 1:.1%}. The best of the published "
        "rules but all_in_store, chosen anew in each cell, relative to the optimum (geometric mean over the networks), "
        "by Gbit/s and the store's speed:"
    )


def by_network(cells):
    names, rows = [*OURS[:4], *POLICIES[1:]], []
    for network in axis(cells, "network"):
        here = only(cells, network=network)
        rows.append([network, *(geometric_mean([cell["relative"][name] for cell in here]) for name in names)])
    return markdown(["network", *names], rows)


def by_place(cells):
    rules, speeds = [name for name in POLICIES[1:] if name != "all_in_store"], axis(cells, "store_speed")
    rows = []
    for gbit in axis(cells, "gbit_per_s"):
        places = [only(cells, gbit_per_s=gbit, store_speed=speed) for speed in speeds]
        best = [[max(cell["relative"][name] for name in rules) for cell in here] for here in places]
        rows.append([gbit, *map(geometric_mean, best)])
    return markdown(["Gbit/s", *(f"{speed:g} x" for speed in speeds)], rows)


def draw(found, path):
    """A field a rule, a row a trainer: the geometric mean over the networks, by link and store."""
    plt, cells = pyplot(), found["cells"]
    plt.rcParams["font.size"] = 8
    names, shape = ["as a job takes it", *POLICIES[1:]], {"sharex": True, "sharey": True, "layout": "constrained"}
    figure, places = plt.subplots(len(TRAINERS), len(names), figsize=(15, 4.5), **shape)
    for row, trainer in zip(places, TRAINERS, strict=True):
        for place, name in zip(row, names, strict=True):
            image = one_field(place, only(cells, trainer_speed=trainer), name)
        row[0].set_ylabel(f"store, times the trainer\n(trainer: {trainer} x)")
    figure.supxlabel("link, Gbit/s")
    bar = figure.colorbar(image, ax=places, label="throughput relative to the optimum", ticks=[0.1, 0.2, 0.5, 1])
    bar.ax.set_yticklabels(["0.1 or less", "0.2", "0.5", "1"])
    bar.ax.minorticks_off()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def one_field(place, cells, name):
    from matplotlib.colors import LogNorm

    gbits, speeds = axis(cells, "gbit_per_s"), axis(cells, "store_speed")
    means = [
        [
            geometric_mean([cell["relative"][name] for cell in only(cells, gbit_per_s=gbit, store_speed=speed)])
            for gbit in gbits
        ]
        for speed in speeds
    ]
    place.set_title("Frostline" if name in OURS else name)
    place.set_xticks(range(len(gbits)), [f"{gbit:g}" for gbit in gbits], rotation=90)
    place.set_yticks(range(len(speeds)), [f"{speed:g}" for speed in speeds])
    return place.imshow(means, norm=LogNorm(0.1, 1), cmap="viridis", origin="lower", aspect="auto")


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, draw=draw, data=False)
