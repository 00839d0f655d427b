"""Links of several lengths: the window's bounds found from cold, by our rule and PRISMA's, against every fixed number.

    python benchmarks/tuning.py --data DIR [--mbit 100] [--round-trips 0,20,75,150] [--seconds 20]
        [--samples-per-request 1] [--fixed 1,2,4,8,16,32,64] [--rules ours]

A node serves photographs as they are stored at one end of a wide-area link (`wide_link.py`), each side on a core of its
own; the prefetcher at the other end hands them to a loop that does nothing, so that the link is the limit. Every run
begins cold, with no connection open. Told for each link and length of requests: the steady rate of every fixed number
of requests (from the fourth second on; bytes count as they are received); for each rule its steady rate (from
the tenth second on) as a share of the best of those, and after how many seconds two seconds of it first had 95 % of
that. Needs root. With --out FILE
(without suffix) also JSON with all rates and changes, a table, and a picture of the rates over time; links that the
JSON has from an earlier run are kept beside the new ones.
"""

import argparse
import json
import os
import sys
import threading
import time
from pathlib import Path

import numpy as np
from links import STORE, TRAINER, Inside, answer_questions
from wide_link import STORE_ADDRESS, WideLink

FIXED = (1, 2, 4, 8, 16, 32, 64)
FIXED_S, FIXED_STEADY_S = 9.0, 4.0
STEADY_S, REACHED = 10.0, 0.95
MAX = 64
# PRISMA's own bounds: as many producers as the processor has threads.
RULES = {"ours": ("auto", MAX), "PRISMA, 64 at most": ("prisma", MAX), "PRISMA, 2 at most": ("prisma", 2)}
BIN_S = 0.25


def main():
    wanted = arguments()
    if wanted.inside:
        {"node": node_inside, "trainer": trainer_inside}[wanted.inside](wanted)
        return
    links = earlier(wanted)
    for round_trip_ms in wanted.round_trips:
        found = over_one_link(wanted, round_trip_ms)
        links = sorted([*(link for link in links if cell(link) != cell(found)), found], key=cell)
        keep(wanted, links)
    print(table(links))


def cell(link):
    return link.get("samples_per_request", 1), link["round_trip_ms"]


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--round-trips", type=numbers, default=[0, 20, 75, 150], help="ms")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--samples-per-request", type=int, default=1)
    parser.add_argument("--fixed", type=lambda text: [int(word) for word in text.split(",")], default=list(FIXED))
    parser.add_argument("--rules", type=lambda text: text.split(";"), default=list(RULES), help="with ; between them")
    parser.add_argument("--out")
    parser.add_argument("--inside", choices=("node", "trainer"), help=argparse.SUPPRESS)
    return parser.parse_args()


def numbers(text):
    return [float(word) for word in text.split(",")]


def earlier(wanted):
    path = Path(f"{wanted.out}.json")
    return json.loads(path.read_text())["links"] if wanted.out and path.exists() else []


def over_one_link(wanted, round_trip_ms):
    """Every fixed number and every rule over one link."""
    options = ["--data", wanted.data, "--samples-per-request", str(wanted.samples_per_request)]
    link = {"round_trip_ms": round_trip_ms, "samples_per_request": wanted.samples_per_request, "mbit": wanted.mbit}
    link |= {"load_before": os.getloadavg()[0], "fixed": {}}
    with (
        WideLink(round_trip_ms=round_trip_ms, mbit=wanted.mbit),
        Inside(STORE, 0, __file__, "--inside", "node", *options) as node,
        Inside(TRAINER, 1, __file__, "--inside", "trainer", *options) as trainer,
    ):
        trainer.ask(do="start", url=node.answer()["url"])
        for requests in wanted.fixed:
            found = trainer.ask(do="run", seconds=FIXED_S, settings={"requests_in_flight": requests})
            link["fixed"][requests] = rate(found["bins"], FIXED_STEADY_S, FIXED_S)
            print(f"{round_trip_ms:4.0f} ms {requests:3} fixed {link['fixed'][requests] / 1e6:7.2f} MB/s", flush=True)
        best = max(link["fixed"].values())
        for name in wanted.rules:
            tuning, maximum = RULES[name]
            settings = {"tuning": tuning, "max_requests": maximum}
            found = trainer.ask(do="run", seconds=wanted.seconds, settings=settings)
            link[name] = {**found, **judged(found["bins"], best, wanted.seconds)}
            print(
                f"{round_trip_ms:4.0f} ms {name}: {link[name]['share']:.1%} of the best fixed one, reached after "
                f"{link[name]['reached_s']} s, at the end {found['requests']} requests",
                flush=True,
            )
    return link


def rate(bins, start, stop):
    """Bytes a second between two times."""
    return sum(bins[round(start / BIN_S) : round(stop / BIN_S)]) / (stop - start)


def judged(bins, best, seconds):
    span = 2.0
    starts = [number * BIN_S for number in range(round((seconds - span) / BIN_S))]
    reached = next((start for start in starts if rate(bins, start, start + span) >= REACHED * best), None)
    return {"share": rate(bins, STEADY_S, seconds) / best, "reached_s": reached}


def node_inside(wanted):
    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node

    settings = NodeSettings(max_requests=2 * MAX, allow_anonymous=True)
    with start_node((str(Path(wanted.data).resolve()),), settings, host=STORE_ADDRESS) as node:
        print(json.dumps({"url": node.url}), flush=True)
        sys.stdin.read()


def trainer_inside(wanted):
    side = Trainer(wanted)
    answer_questions({"start": side.start, "run": side.run})


class Trainer:
    """The program at the trainer's end."""

    def __init__(self, wanted):
        import frostline as fl

        self._data = fl.Dataset(wanted.data)
        self._rows = wanted.samples_per_request
        self._url = None

    def start(self, url):
        self._url = url
        self.run(seconds=1.0, settings={"requests_in_flight": 8})  # warm the node and this side
        return {}

    def run(self, *, seconds, settings):
        """Take rows for so long; the bytes that came in each quarter of a second, and what was tuned."""
        from frostline.client.http import HttpTransport
        from frostline.core.config import LoaderSettings
        from frostline.core.events import Tuned
        from frostline.prefetch import Prefetcher, Tuner, Window, stretches
        from frostline.tuning import rule_of

        chosen = LoaderSettings(samples_per_request=self._rows, **settings)
        transport = HttpTransport(self._url, chosen)
        rows = np.tile(np.random.default_rng(0).permutation(len(self._data)), 20)
        asked = stretches(self._data.samples, rows, np.arange(len(rows)), _Straight(self._rows))
        tuned = []
        started = time.monotonic()
        tuner = Tuner(rule_of(chosen), started)
        with (
            ProgressMade(lambda: transport.statistics().bytes_received) as received,
            Prefetcher(
                Window(asked, chosen),
                lambda ask: transport.features(self._request(ask.samples)),
                threads=chosen.last_requests,
                clock=time.monotonic,
                observe=lambda event: tuned.append(event) if isinstance(event, Tuned) else None,
                tuner=tuner,
            ) as deliveries,
        ):
            for _ in deliveries:
                if time.monotonic() - started >= seconds:
                    break
        transport.close()
        changes = [
            {"at_s": item.at_s, "requests": item.requests, "bytes": item.window_bytes, "reason": item.reason}
            for item in tuned
        ]
        last = tuned[-1] if tuned else None
        return {
            "bins": received.bins(seconds),
            "changes": changes,
            "requests": last.requests if last else chosen.first_requests,
            "window_bytes": last.window_bytes if last else chosen.window_bytes,
        }

    def _request(self, samples):
        from frostline.preprocess import imagenet
        from frostline.wire.messages import FeatureRequest

        return FeatureRequest(
            data=self._data.url, samples=samples, prefix=None, cut=0, preprocess=imagenet(64).to_json()
        )


class ProgressMade:
    """A counter read every quarter of a second, in a thread. A context manager."""

    def __init__(self, count):
        self._count = count
        self._counts = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self):
        self._started = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._over.set()
        self._thread.join()

    def bins(self, seconds):
        """What was added in each quarter of a second."""
        times, counts = zip(*self._counts, strict=True)
        edges = np.arange(round(seconds / BIN_S) + 1) * BIN_S
        return np.diff(np.interp(edges, times, counts)).tolist()

    def _watch(self):
        while not self._over.wait(BIN_S):
            self._counts.append((time.monotonic() - self._started, self._count()))


class _Straight:
    """Encoded photographs, so many a request."""

    def __init__(self, rows):
        self._rows = rows

    def deal(self, left):
        from frostline.core import Route
        from frostline.prefetch import Deal

        return Deal(route=Route(0), rows=min(left, self._rows), bytes_per_sample=0)


def keep(wanted, links):
    if wanted.out:
        Path(f"{wanted.out}.json").write_text(json.dumps({"command": sys.argv[1:], "links": links}) + "\n")
        Path(f"{wanted.out}.md").write_text(table(links))
        draw(links, f"{wanted.out}.svg")


def table(links):
    numbers = sorted({int(item) for link in links for item in link["fixed"]})
    fixed = " | ".join(f"{number} fixed" for number in numbers)
    names = " | ".join(f"{name} | reached after" for name in RULES)
    lines = [
        f"| samples a request | round trip | {fixed} | {names} |",
        "| ---: " * (2 + len(numbers) + 2 * len(RULES)) + "|",
    ]
    for link in links:
        rates = {int(number): item for number, item in link["fixed"].items()}
        cells = [str(cell(link)[0]), f"{link['round_trip_ms']:.0f} ms"]
        cells += [f"{rates[number] / 1e6:.2f}" if number in rates else "" for number in numbers]
        for name in RULES:
            cells += judgement(link[name]) if name in link else ["", ""]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Fixed numbers in MB/s; rules as shares of the best of them in the steady state."]
    return "\n".join(lines) + "\n"


def judgement(found):
    reached = found["reached_s"]
    return [f"{found['share']:.1%}", "never" if reached is None else f"{reached:.1f} s"]


def draw(links, path):
    """Rates over time, a picture a link."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(links), figsize=(3.2 * len(links), 3.2), squeeze=False, sharey=True)
    for panel, link in zip(panels[0], links, strict=True):
        best = max(link["fixed"].values())
        for name in filter(link.__contains__, RULES):
            bins = link[name]["bins"]
            rates = [8e-6 * sum(bins[i : i + 4]) / (4 * BIN_S) for i in range(len(bins) - 3)]
            panel.plot([BIN_S * (i + 2) for i in range(len(rates))], rates, label=name)
        panel.axhline(8e-6 * best, color="grey", linestyle=":", label="best fixed number")
        panel.set(title=f"{link['round_trip_ms']:.0f} ms, {cell(link)[0]} a request", xlabel="seconds")
    panels[0][0].set_ylabel("Mbit/s")
    panels[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
