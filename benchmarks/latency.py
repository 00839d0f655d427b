"""A long link with losses: does the window hide them, in order, with some slack, and without order?

    python benchmarks/latency.py --data DIR [--mbit 100] [--round-trips 0,20,75,150] [--losses 0,0.0001,0.001]

A node serves photographs at one end of a wide-area link (`parts/wide_link.py`), each side on a core of its own; a plain
loader (no model, nothing cached) reads and decodes them at the other end, at 64 pixels with JPEGs decoded at a reduced
scale, so that the link is the limit; one epoch after the other until it has had --samples. Beside it, over the same
link, as many bare connections that ask for as many bytes at a time: what the link carries. Told of each cell: samples a
second of the whole; megabits a second from the end of the third second on (the slope of a line through what had arrived
at each batch, since answers come in bursts), their share of those without delay and losses, and of what the bare
connections had. The picture has the bytes a second at the longest round trip with the window's ramp and without it.
Needs root.
"""

import itertools
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from harness import Inside, answer_questions, markdown, median, pyplot, run, wide_links
from parts.wide_link import WideLink, pull_bare, serve_bare

SLACKS = {"in order": 0, "slack of 128": 128, "no order": None}
SIDE = 64
BARE = "bare connections"
REQUESTS, SAMPLES_PER_REQUEST = 32, 8
WINDOW_BYTES = 32 << 20
QUICK = {"round_trips": "20", "losses": "0.001", "samples": 96, "steady_after": 0.0, "bare": 0.3}


def options(parser):
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--round-trips", default="0,20,75,150", help="ms")
    parser.add_argument("--losses", default="0,0.0001,0.001", help="share of the packets, each way")
    parser.add_argument("--samples", type=int, default=3000)
    parser.add_argument("--steady-after", type=float, default=3.0, help="seconds")
    parser.add_argument("--bare", type=float, default=15.0, help="seconds of the bare connections")


def numbers(text):
    return [float(word) for word in text.split(",")]


def measure(wanted):
    trips, losses = numbers(wanted.round_trips), numbers(wanted.losses)
    links, cells = [(trip, loss) for trip in trips for loss in (losses if trip else [0.0])], []
    for _ in range(wanted.rounds):
        for round_trip_ms, loss in links:
            cells += over_one_link(wanted, round_trip_ms, loss)
            cells.sort(key=lambda item: (item["round_trip_ms"], item["loss"]))
            yield {"window_bound_bytes": WINDOW_BYTES, "cells": cells}


def over_one_link(wanted, round_trip_ms, loss):
    """The cells of one link: every slack, and once without the ramp."""
    runs = [(name, slack, True) for name, slack in SLACKS.items()] + [("in order, no ramp", 0, False)]
    cells, link = [], {"round_trip_ms": round_trip_ms, "loss": loss}
    with (
        WideLink(round_trip_ms=round_trip_ms, mbit=wanted.mbit, loss=loss) as ends,
        Inside(ends.store, 0, "node", wanted, address=ends.address) as node,
        Inside(ends.trainer, 1, "trainer", wanted, address=ends.address) as trainer,
    ):
        trainer.ask(do="start", url=node.answer()["url"])
        for name, slack, ramp in runs:
            cells.append({**link, "order": name, **trainer.ask(do="epoch", max_reorder=slack, ramp=ramp)})
            print(f"{round_trip_ms:4.0f} ms {loss:7.2%} {name:18} {cells[-1]['samples_per_s']:6.1f}/s", flush=True)
        return [*cells, {**link, "order": BARE, **trainer.ask(do="bare")}]


def node_inside(wanted):
    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node

    roots = (str(Path(wanted.data).resolve()),)
    with start_node(roots, NodeSettings(allow_anonymous=True), host=wanted.address) as node:
        serve_bare(wanted.address)
        print(json.dumps({"url": node.url}), flush=True)
        sys.stdin.read()


def trainer_inside(wanted):
    side = Trainer(wanted)
    answer_questions({"start": side.start, "epoch": side.epoch, "bare": side.bare})


class Trainer:
    """The program at the trainer's end."""

    def __init__(self, wanted):
        import frostline as fl

        self._wanted = wanted
        self._data = fl.Dataset(wanted.data)
        self._url = None

    def start(self, url):
        self._url = url
        self.epoch(max_reorder=0, ramp=True, maximum=64)  # warm both sides
        return {}

    def bare(self):
        steady_mbit = pull_bare(
            self._wanted.address,
            connections=REQUESTS,
            message_bytes=SAMPLES_PER_REQUEST * int(self._data.samples.lengths.mean()),
            seconds=self._wanted.bare,
            steady_after_s=min(self._wanted.steady_after, self._wanted.bare / 2),
        )
        return {"steady_mbit": steady_mbit}

    def epoch(self, *, max_reorder, ramp, maximum=None):
        """Samples and bytes as they come; one pass after the other until there were enough."""
        import frostline as fl
        from frostline.preprocess.steps import Decode

        settings = fl.LoaderSettings(
            requests_in_flight=REQUESTS,
            samples_per_request=SAMPLES_PER_REQUEST,
            window_bytes=WINDOW_BYTES,
            cache_bytes=0,
            max_reorder=max_reorder,
            ramp=ramp,
            replan=False,
        )
        whole = fl.preprocess.imagenet(SIDE)
        preprocess = replace(whole, steps=(Decode(reduced=True), *whole.steps[1:]))
        with fl.offload(None, self._data, preprocess=preprocess, near=self._url, cut=0, settings=settings) as job:
            started, arrived, done = time.perf_counter(), [], 0
            for batch in itertools.chain.from_iterable(job.epochs(16, range(1 << 20), shuffle=True, seed=0)):
                done += len(batch)
                arrived.append((time.perf_counter() - started, job.statistics().wire_bytes))
                if done >= (maximum or self._wanted.samples):
                    break
        seconds = arrived[-1][0]
        steady = [item for item in arrived if item[0] >= min(self._wanted.steady_after, seconds / 2)]
        return {
            "samples_per_s": done / seconds,
            "steady_mbit": 8e-6 * slope(steady),
            "first_batch_s": arrived[0][0],
            "wire_bytes_at": arrived,
        }


def slope(points):
    """Of the line through what had arrived at each batch, since answers come in bursts."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope if len(points) > 1 else 0.0


def table(found):
    groups, rows = {}, []
    for cell in found["cells"]:
        groups.setdefault((cell["round_trip_ms"], cell["loss"], cell["order"]), []).append(cell)
    steady = {key: median(cells, "steady_mbit") for key, cells in groups.items()}
    for (trip, loss, order), cells in groups.items():
        rate = steady[trip, loss, order]
        near, bare = steady.get((0.0, 0.0, order)), steady.get((trip, loss, BARE))
        shares = [f"{rate / item:.0%}" if item else None for item in (near, bare)]
        figures = [median(cells, "samples_per_s"), rate, *shares, median(cells, "first_batch_s")]
        rows.append([f"{trip:.0f} ms", f"{loss:.2%}", order, *figures])
    head = ["round trip", "loss", "order", "samples/s", "steady Mbit/s", "of no delay", "of bare", "first batch, s"]
    return markdown(head, rows)


def draw(found, path):
    """Bytes a second over time at the longest round trip, with the ramp and without."""
    plt, cells = pyplot(), found["cells"]
    farthest = max(cell["round_trip_ms"] for cell in cells)
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for cell in cells:
        if cell["round_trip_ms"] == farthest and not cell["loss"] and cell["order"].startswith("in order"):
            times, counts = zip(*cell["wire_bytes_at"], strict=True)
            rates = [8e-6 * (b - a) / (t - s) for a, b, s, t in zip(counts, counts[3:], times, times[3:], strict=False)]
            axes.plot(times[3:], rates, label=cell["order"])
    axes.set(xlabel="seconds", ylabel="Mbit/s", xlim=(0, 6), title=f"{farthest:.0f} ms round trip")
    if axes.lines:
        axes.legend()
    figure.tight_layout()
    figure.savefig(path)


INSIDE = {"node": node_inside, "trainer": trainer_inside}

if __name__ == "__main__":
    shown = {"table": table, "draw": draw}
    run(__doc__, measure, quick=QUICK, options=options, inside=INSIDE, needs=(wide_links,), **shown)
