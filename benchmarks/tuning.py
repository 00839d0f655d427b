"""Links of several lengths: the window's bounds found from cold, by our rule and PRISMA's, against every fixed number.

    python benchmarks/tuning.py --data DIR [--mbit 100] [--round-trips 0,20,75,150] [--seconds 20]
        [--samples-per-request 1] [--fixed 1,2,4,8,16,32,64] [--rules ours]

A node serves photographs as they are stored at one end of a wide-area link (`parts/wide_link.py`), each side on a core
of its own; a plain job at the other end decodes them to 64 pixels, JPEGs at a reduced scale, for a loop that does
nothing, so that the link is the limit. Every run is a job of its own. Told for each link and length of requests: the
steady rate of every fixed number of requests (from the fourth second on; bytes count as they are received); for each
rule its steady rate (from the tenth second on) as a share of the best of those, and after how many seconds two seconds
of it first had 95 % of that. Needs root.
"""

import itertools
import os
import threading
import time
from dataclasses import replace

import numpy as np
from harness import Inside, answer_questions, markdown, pyplot, run, serve_node, wide_links
from parts.wide_link import WideLink

REACHED = 0.95
MAX = 64
# PRISMA's own bounds: as many producers as the processor has threads.
RULES = {"ours": ("auto", MAX), "PRISMA, 64 at most": ("prisma", MAX), "PRISMA, 2 at most": ("prisma", 2)}
BIN_S = 0.25
QUICK = {"round_trips": "20", "seconds": 0.75, "fixed": "4", "fixed_seconds": 0.5, "rules": "ours", "span": 0.25}


def options(parser):
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--round-trips", default="0,20,75,150", help="ms")
    parser.add_argument("--seconds", type=float, default=20, help="of a rule; its second half is the steady state")
    parser.add_argument("--fixed-seconds", type=float, default=9, help="of a fixed number; the last five ninths count")
    parser.add_argument("--span", type=float, default=2, help="seconds that a rate is reached for")
    parser.add_argument("--samples-per-request", type=int, default=1)
    parser.add_argument("--fixed", default="1,2,4,8,16,32,64")
    parser.add_argument("--rules", default=";".join(RULES), help="with ; between them")


def measure(wanted):
    links = []
    for round_trip_ms in map(float, wanted.round_trips.split(",")):
        links.append(over_one_link(wanted, round_trip_ms))
        yield {"links": links}


def over_one_link(wanted, round_trip_ms):
    """Every fixed number and every rule over one link."""
    link = {"round_trip_ms": round_trip_ms, "samples_per_request": wanted.samples_per_request, "mbit": wanted.mbit}
    link |= {"load_before": os.getloadavg()[0], "fixed": {}, "rules": {}}
    with (
        WideLink(round_trip_ms=round_trip_ms, mbit=wanted.mbit) as ends,
        Inside(ends.store, 0, "node", wanted, address=ends.address) as node,
        Inside(ends.trainer, 1, "trainer", wanted) as trainer,
    ):
        trainer.ask(do="start", url=node.answer()["url"])
        for requests in map(int, wanted.fixed.split(",")):
            seconds = wanted.fixed_seconds
            found = trainer.ask(do="run", seconds=seconds, settings={"requests_in_flight": requests})
            link["fixed"][requests] = rate(found["bins"], seconds * 4 / 9, seconds)
            print(f"{round_trip_ms:4.0f} ms {requests:3} fixed {link['fixed'][requests] / 1e6:7.2f} MB/s", flush=True)
        best = max(link["fixed"].values())
        for name in wanted.rules.split(";"):
            tuning, maximum = RULES[name]
            found = trainer.ask(do="run", seconds=wanted.seconds, settings={"tuning": tuning, "max_requests": maximum})
            link["rules"][name] = {**found, **judged(found["bins"], best, wanted)}
    return link


def rate(bins, start, stop):
    """Bytes a second between two times."""
    return sum(bins[round(start / BIN_S) : round(stop / BIN_S)]) / (stop - start)


def judged(bins, best, wanted):
    span, seconds = wanted.span, wanted.seconds
    starts = [number * BIN_S for number in range(round((seconds - span) / BIN_S))]
    reached = next((start for start in starts if rate(bins, start, start + span) >= REACHED * best), None)
    return {"share": rate(bins, seconds / 2, seconds) / best if best else None, "reached_s": reached}


def node_inside(wanted):
    from frostline.core.config import NodeSettings

    serve_node(wanted, NodeSettings(max_requests=2 * MAX, allow_anonymous=True))


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
        self.run(seconds=0.5, settings={"requests_in_flight": 8})  # warm the node and this side
        return {}

    def run(self, *, seconds, settings):
        """Take rows for so long; the bytes that came in each quarter of a second, and what was tuned."""
        import frostline as fl
        from frostline.core.events import Tuned
        from frostline.preprocess.steps import Decode

        chosen = fl.LoaderSettings(samples_per_request=self._rows, cache_bytes=0, ramp=False, **settings)
        whole = fl.preprocess.imagenet(64)
        preprocess = replace(whole, steps=(Decode(reduced=True), *whole.steps[1:]))
        tuned, given = [], {"near": self._url, "cut": 0, "settings": chosen, "preprocess": preprocess}

        def on_event(event):
            if isinstance(event, Tuned):
                tuned.append(event)

        with fl.offload(None, self._data, on_event=on_event, **given) as job:
            started = time.monotonic()
            passes = job.epochs(16, range(1 << 20), shuffle=True, seed=0)
            with Counted(lambda: job.statistics().payload_bytes) as received:
                for _ in itertools.chain.from_iterable(passes):
                    if time.monotonic() - started >= seconds:
                        break
        changes = [(item.at_s, item.requests, item.window_bytes, item.reason) for item in tuned]
        requests = tuned[-1].requests if tuned else chosen.first_requests
        return {"bins": received.bins(seconds), "changes": changes, "requests": requests}


class Counted:
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
        while True:
            self._counts.append((time.monotonic() - self._started, self._count()))
            if self._over.wait(BIN_S):
                return


def table(found):
    links = found["links"]
    fixed = sorted({int(number) for link in links for number in link["fixed"]})
    names = list(dict.fromkeys(name for link in links for name in link["rules"]))
    rows = []
    for link in links:
        rates = [link["fixed"].get(number) for number in fixed]
        judged_ = [cell for name in names for cell in judgement(link["rules"].get(name))]
        in_mb = [None if rate is None else rate / 1e6 for rate in rates]
        rows.append([link["samples_per_request"], f"{link['round_trip_ms']:.0f} ms", *in_mb, *judged_])
    head = ["samples a request", "round trip", *(f"{number} fixed" for number in fixed)]
    head += [word for name in names for word in (name, "reached after")]
    return markdown(head, rows) + "\n\nFixed numbers in MB/s; rules as shares of the best of them in the steady state."


def judgement(found):
    if found is None:
        return [None, None]
    share, reached = found["share"], found["reached_s"]
    return [None if share is None else f"{share:.1%}", "never" if reached is None else f"{reached:.1f} s"]


def draw(found, path):
    """Rates over time, a picture a link."""
    plt, links = pyplot(), found["links"]
    figure, panels = plt.subplots(1, len(links), figsize=(3.2 * len(links), 3.2), squeeze=False, sharey=True)
    for panel, link in zip(panels[0], links, strict=True):
        for name, rule in link["rules"].items():
            bins = rule["bins"]
            rates = [8e-6 * sum(bins[i : i + 4]) / (4 * BIN_S) for i in range(len(bins) - 3)]
            panel.plot([BIN_S * (i + 2) for i in range(len(rates))], rates, label=name)
        best = 8e-6 * max(link["fixed"].values())
        panel.axhline(best, color="grey", linestyle=":", label="best fixed number")
        panel.set(title=f"{link['round_trip_ms']:.0f} ms, {link['samples_per_request']} a request", xlabel="seconds")
    panels[0][0].set_ylabel("Mbit/s")
    panels[0][-1].legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path)


INSIDE = {"node": node_inside, "trainer": trainer_inside}

if __name__ == "__main__":
    shown = {"table": table, "draw": draw}
    run(__doc__, measure, quick=QUICK, options=options, inside=INSIDE, needs=(wide_links,), **shown)
