"""A long link with losses: does the window hide them, in order, with some slack, and without order?

    python benchmarks/latency.py --data DIR [--mbit 100] [--round-trips 0,20,75,150] [--losses 0,0.0001,0.001]

A node serves photographs at one end of a wide-area link (`wide_link.py`), each side on a core of its own; a plain
loader (no model, nothing cached) reads and decodes them at the other end, at 64 pixels with JPEGs decoded at a reduced
scale, so that the link is the limit; one epoch after the other until it has had --samples. Beside it, over the same
link, as many bare connections that ask for as many bytes at a time: what the link carries. Told of each cell: samples a
second of the whole; megabits a second from the end of the third second on (the slope of a line through what had arrived
at each batch, since answers come in bursts), their share of those without delay and losses, and of what the bare
connections had; the most bytes that the window held. Needs root. With --out FILE (without suffix) also JSON, a table,
and a picture of the bytes a second at the longest round trip with the window's ramp and without it; links that the JSON
has from an earlier run are kept beside the new ones.
"""

import argparse
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from itertools import chain
from pathlib import Path

import bare_link
from links import STORE, TRAINER, Inside, answer_questions
from wide_link import STORE_ADDRESS, WideLink

SLACKS = {"in order": 0, "slack of 128": 128, "no order": None}
SIDE = 64
BARE = "bare connections"
REQUESTS, SAMPLES_PER_REQUEST = 32, 8
STEADY_AFTER_S, BARE_S = 3.0, 15.0
WINDOW_BYTES = 32 << 20


def main():
    wanted = arguments()
    if wanted.inside:
        {"node": node_inside, "trainer": trainer_inside}[wanted.inside](wanted)
        return
    links = [(trip, loss) for trip in wanted.round_trips for loss in (wanted.losses if trip else [0.0])]
    cells = [item for item in earlier(wanted) if (item["round_trip_ms"], item["loss"]) not in links]
    for _ in range(wanted.rounds):
        for round_trip_ms, loss in links:
            cells += over_one_link(wanted, round_trip_ms, loss)
            cells.sort(key=lambda item: (item["round_trip_ms"], item["loss"]))
            keep(wanted, cells)
    print(table(wanted, cells))
    if wanted.out:
        draw(cells, f"{wanted.out}.svg")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--round-trips", type=numbers, default=[0, 20, 75, 150], help="ms")
    parser.add_argument("--losses", type=numbers, default=[0, 0.0001, 0.001], help="share of the packets, each way")
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out")
    parser.add_argument("--inside", choices=("node", "trainer"), help=argparse.SUPPRESS)
    return parser.parse_args()


def earlier(wanted):
    path = Path(f"{wanted.out}.json")
    return json.loads(path.read_text())["cells"] if wanted.out and path.exists() else []


def numbers(text):
    return [float(word) for word in text.split(",")]


def over_one_link(wanted, round_trip_ms, loss):
    """The cells of one link: every slack, and once without the ramp."""
    options = ["--data", wanted.data, "--samples", str(wanted.samples)]
    runs = [(name, slack, True) for name, slack in SLACKS.items()] + [("in order, no ramp", 0, False)]
    cells = []
    with (
        WideLink(round_trip_ms=round_trip_ms, mbit=wanted.mbit, loss=loss),
        Inside(STORE, 0, __file__, "--inside", "node", *options) as node,
        Inside(TRAINER, 1, __file__, "--inside", "trainer", *options) as trainer,
    ):
        trainer.ask(do="start", url=node.answer()["url"])
        for name, slack, ramp in runs:
            found = trainer.ask(do="epoch", slack=slack, ramp=ramp)
            cells.append({"round_trip_ms": round_trip_ms, "loss": loss, "order": name, **found})
            print(f"{round_trip_ms:4.0f} ms {loss:7.2%} {name:18} {found['samples_per_s']:6.1f}/s", flush=True)
        bare = {"round_trip_ms": round_trip_ms, "loss": loss, "order": BARE, **trainer.ask(do="bare")}
        print(f"{round_trip_ms:4.0f} ms {loss:7.2%} {BARE:18} {bare['steady_mbit']:6.1f} Mbit/s", flush=True)
    return [*cells, bare]


def node_inside(wanted):
    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node

    settings = NodeSettings(allow_anonymous=True)
    with start_node((str(Path(wanted.data).resolve()),), settings, host=STORE_ADDRESS) as node:
        bare_link.serve(STORE_ADDRESS)
        print(json.dumps({"url": node.url}), flush=True)
        sys.stdin.read()


def trainer_inside(wanted):
    side = Trainer(wanted)
    answer_questions({"start": side.start, "epoch": side.epoch, "bare": side.bare})


class Trainer:
    """The program at the trainer's end."""

    def __init__(self, wanted):
        import frostline as fl

        self._fl = fl
        self._data = fl.Dataset(wanted.data)
        self._samples = wanted.samples
        self._url = None

    def start(self, url):
        self._url = url
        self.epoch(slack=0, ramp=True, maximum=64)  # warm both sides
        return {}

    def bare(self):
        steady_mbit = bare_link.pull(
            STORE_ADDRESS,
            connections=REQUESTS,
            message_bytes=SAMPLES_PER_REQUEST * int(self._data.samples.lengths.mean()),
            seconds=BARE_S,
            steady_after_s=STEADY_AFTER_S,
        )
        return {"steady_mbit": steady_mbit}

    def epoch(self, *, slack, ramp, maximum=None):
        from frostline.core.config import LoaderSettings
        from frostline.prefetch import Window
        from frostline.preprocess.steps import Decode

        settings = LoaderSettings(
            requests_in_flight=REQUESTS,
            samples_per_request=SAMPLES_PER_REQUEST,
            window_bytes=WINDOW_BYTES,
            cache_bytes=0,
            slack=slack,
            ramp=ramp,
            follow=False,
        )
        held, ask = [0], Window.asks

        def watched(window, now):
            found = ask(window, now)
            seen = window.statistics()
            held[0] = max(held[0], seen.expected_bytes + seen.ready_bytes)
            return found

        Window.asks = watched
        whole = self._fl.preprocess.imagenet(SIDE)
        preprocess = replace(whole, steps=(Decode(reduced=True), *whole.steps[1:]))
        with self._fl.offload(None, self._data, preprocess=preprocess, near=self._url, cut=0, settings=settings) as job:
            started, arrived, done = time.perf_counter(), [], 0
            for batch in chain.from_iterable(job.epochs(16, range(1 << 20), shuffle=True, seed=0)):
                done += len(batch)
                arrived.append((time.perf_counter() - started, job.statistics().wire_bytes))
                if done >= (maximum or self._samples):
                    break
        Window.asks = ask
        seconds = arrived[-1][0]
        steady = [item for item in arrived if item[0] >= min(STEADY_AFTER_S, seconds / 2)]
        return {
            "samples_per_s": done / seconds,
            "steady_mbit": 8e-6 * statistics.linear_regression(*zip(*steady, strict=True)).slope,
            "first_batch_s": arrived[0][0],
            "window_bytes": held[0],
            "wire_bytes_at": arrived,
        }


def keep(wanted, cells):
    if wanted.out:
        about = {"command": sys.argv[1:], "load_before": os.getloadavg()[0], "window_bound_bytes": WINDOW_BYTES}
        Path(f"{wanted.out}.json").write_text(json.dumps({**about, "cells": cells}) + "\n")
        Path(f"{wanted.out}.md").write_text(table(wanted, cells))


def table(wanted, cells):
    lines = [
        "| round trip | loss | order | samples/s | steady Mbit/s | of no delay | of bare | first batch | most held |",
        "| ---: | ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    groups = {}
    for cell in cells:
        groups.setdefault((cell["round_trip_ms"], cell["loss"], cell["order"]), []).append(cell)
    steady = {key: statistics.median(cell["steady_mbit"] for cell in found) for key, found in groups.items()}
    for (round_trip_ms, loss, order), found in groups.items():
        rate = steady[round_trip_ms, loss, order]
        near, bare = steady.get((0.0, 0.0, order)), steady.get((round_trip_ms, loss, BARE))
        shares = " | ".join(f"{rate / item:.0%}" if item else "" for item in (near, bare))
        whole, first, maximum = "", "", ""
        if order != BARE:
            whole, first = (
                f"{middle(found, item):.{digits}f}" for item, digits in (("samples_per_s", 1), ("first_batch_s", 2))
            )
            maximum = f"{max(item['window_bytes'] for item in found) / 1e6:.1f} MB"
            first += " s"
        link = f"| {round_trip_ms:.0f} ms | {loss:.2%} | {order} "
        lines.append(f"{link}| {whole} | {rate:.1f} | {shares} | {first} | {maximum} |")
    return "\n".join(lines) + "\n"


def middle(cells, name):
    return statistics.median(cell[name] for cell in cells)


def draw(cells, path):
    """Bytes a second over time at the longest round trip, with the ramp and without."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    farthest = max(cell["round_trip_ms"] for cell in cells)
    figure, axes = pyplot.subplots(figsize=(7, 3.5))
    for cell in cells:
        if cell["round_trip_ms"] == farthest and not cell["loss"] and cell["order"].startswith("in order"):
            times, counts = zip(*cell["wire_bytes_at"], strict=True)
            rates = [8e-6 * (b - a) / (t - s) for a, b, s, t in zip(counts, counts[3:], times, times[3:], strict=False)]
            axes.plot(times[3:], rates, label=cell["order"])
    axes.set(xlabel="seconds", ylabel="Mbit/s", xlim=(0, 6), title=f"{farthest:.0f} ms round trip")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
