"""Plans run for real over a shaped link: every rule's, predicted against measured; and one that follows its link.

    python benchmarks/shaped_link.py --data DIR [--networks a,b] [--mbit 5,20,100,1000] [--samples 480] [--out FILE]
    python benchmarks/shaped_link.py --data DIR --parts cuts --networks alexnet,resnet18,resnet50 --rules best,hapi_v3
    python benchmarks/shaped_link.py --data DIR --parts change [--change 100,10,100] [--seconds 20] [--samples 512]

Node and trainer run in network namespaces of their own, each on one core, joined by a link that tc shapes; the
encoded images are read from DIR by the node. Bytes are counted at the interface. Needs root.

- rules: for each network and bandwidth one job measures first and plans; then each rule's plan fetches one epoch and
  trains the head on it. The samples a second of the epoch's middle part are compared with the prediction, which is for
  the steady state; those of the whole epoch are kept too. An epoch needs three times the samples of the requests under
  way (16 x --window), or there is no steady state. Rules that choose the same share one run. `default` is no rule: a
  job that measures nothing first deals each request when it is sent; its second and third epoch count.
- cuts: the rules, and each cut by itself, as HAPI's authors ran all of theirs. A cut is not run that cannot be the best
  one: even a third of its bytes take longer over the link than the fastest plan takes for all, or it is predicted to
  reach less than 0.7 of that plan's speed. What is within 10 % of the fastest is run twice. Told is how many cuts were
  not run, and in how many cells a rule's choice is as fast as the fastest cut, or within 5 %.
- change: one job fetches epoch after epoch while the link's rate is changed under it every so many seconds; then the
  same epochs are run undisturbed. Told is when the plan changed after each change of the link, to what, and the samples
  a second in each stretch; and whether samples, order and losses were the same.
"""

import collections
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

from harness import (
    Inside,
    ShapedLink,
    answer_questions,
    doing,
    markdown,
    namespaces,
    pyplot,
    received_bytes,
    run,
    serve_node,
)

RULES = ("best", "baseline", "freeze", "min_bytes", "neurosurgeon", "hapi_v1", "hapi_v3", "all_in_store")
BATCH = 16
# Runs of one plan differ by this much here; a smaller lead is none.
NOISE = 0.10
# How near our choice must be to the fastest cut to count as it.
NEAR = 0.05
CUT = "cut "
# No rule, but what a job does by default.
DEFAULT = "default"
# Times that no codec of ours makes activations smaller without loss.
SQUEEZED = 3
# A cut that is predicted to reach less of the fastest plan's speed is not run: predictions were off by 31 % at most.
HOPELESS = 0.7
QUICK = {
    "parts": "cuts,change",
    "networks": "tiny",
    "mbit": "100",
    "change": "100,10",
    "samples": 96,
    "rules": "best,baseline,freeze",
    "seconds": 0.5,
}


def options(parser):
    parser.add_argument("--parts", default="rules")
    parser.add_argument("--networks", default="efficientnet_lite0,resnet18,alexnet,mobilenet_v3_large")
    parser.add_argument("--mbit", default="5,20,100,1000")
    parser.add_argument("--samples", type=int, default=480)
    parser.add_argument("--accuracy", default="exact")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--enlarge", action="store_true", help="photographs at twice their width and height")
    parser.add_argument("--window", type=int, default=10, help="requests under way, of 16 samples each")
    parser.add_argument("--change", default="100,10,100", help="Mbit/s, one after another")
    parser.add_argument("--seconds", type=float, default=20, help="of each rate")


def measure(wanted):
    found = {"rows": []}
    with tempfile.TemporaryDirectory() as folder, ShapedLink(1000) as link:
        if wanted.enlarge:
            wanted.data = enlarged(Path(wanted.data), Path(folder))
        yield from over_networks(wanted, link, found)


def enlarged(data, folder):
    """The folder of the photographs at twice their width and height, as JPEG of the quality that cameras use."""
    from PIL import Image

    for path in sorted(data.glob("*/*.jpg")):
        place = folder / path.relative_to(data)
        place.parent.mkdir(exist_ok=True)
        with Image.open(path) as picture:
            picture.resize((2 * picture.width, 2 * picture.height), Image.Resampling.BICUBIC).save(place, quality=92)
    return str(folder)


def over_networks(wanted, link, found):
    """The figures so far, each time that there are more."""
    with node_of(link, wanted) as node:
        url = node.answer()["url"]
        for network in wanted.networks.split(","):
            with Inside(link.trainer, 1, "trainer", wanted, network=network) as trainer:
                if {"rules", "cuts"} & set(wanted.parts.split(",")):
                    for rows in over_one_network(wanted, link, url, network, trainer):
                        found["rows"] += rows
                        yield found
                if "change" in wanted.parts:
                    found["change"] = changed(wanted, link, url, trainer)
                    yield found
                    return  # one network is enough


def node_of(link, wanted):
    return Inside(link.store, 0, "node", wanted, address=link.address)


def over_one_network(wanted, link, url, network, trainer):
    """The rows of each bandwidth, with all rules."""
    in_store, rules = None, wanted.rules.split(",")
    if "all_in_store" in rules:
        with Inside(link.store, 0, "trainer", wanted, network=network) as beside:
            in_store = beside.ask(do="train in the store", url=url)
    for mbit in (int(word) for word in wanted.mbit.split(",")):
        link.rate(mbit)
        doing(f"{network} at {mbit} Mbit/s")
        plans = trainer.ask(do="plan", url=url, rules=rules)
        runs, rows = Runs(trainer), []
        for plan in plans.values():
            runs.run(plan["mixture"], wanted.rounds)
        if "cuts" in wanted.parts:
            cuts = each_cut(plans["best"]["bytes"], mbit, runs, trainer)
            plans["best"]["not_run"] = len(plans["best"]["bytes"]) - len(cuts)
            plans |= cuts
            runs.run_the_fastest_again()
        plans[DEFAULT] = trainer.ask(do="run by default", url=url)
        for rule, plan in plans.items():
            row = {"network": network, "mbit": mbit, "rule": rule, **plan}
            if "runs" not in row:
                row["runs"] = [in_store] if rule == "all_in_store" else runs.of(plan["mixture"])
            rows.append({**row, "measured": statistics.median(map(rate, row["runs"]))})
            print(said(rows[-1]), flush=True)
        yield rows


class Runs:
    """Epochs that were run over one link, by mixture."""

    def __init__(self, trainer):
        self._trainer = trainer
        self._runs = {}

    def of(self, mixture):
        return self._runs[json.dumps(mixture)]

    def run(self, mixture, times=1):
        """Run a mixture until it was run so many times; one that trains beside the store has no mixture."""
        found = self._runs.setdefault(json.dumps(mixture), []) if mixture else ()
        while mixture and len(found) < times:
            found.append(self._trainer.ask(do="run", mixture=mixture))
            doing(f"{rate(found[-1]):.1f} samples/s by {mixture}")

    def rates(self):
        return {mixture: statistics.median(map(rate, found)) for mixture, found in self._runs.items()}

    def run_the_fastest_again(self):
        """Run those once more that may be the fastest by chance alone."""
        fastest = max(self.rates().values())
        for mixture, found in self.rates().items():
            if found >= (1 - NOISE) * fastest:
                self.run(json.loads(mixture), 1 + len(self._runs[mixture]))


def each_cut(sizes, mbit, runs, trainer):
    """The cuts that may be the fastest, as plans, each run once."""
    fastest, plans = max(runs.rates().values()), {}
    for cut, nbytes in sizes.items():
        if nbytes * fastest > SQUEEZED * mbit * 125_000:
            continue
        plan = trainer.ask(do="plan one cut", cut=int(cut))
        if plan["predicted"] < HOPELESS * fastest:
            continue
        runs.run(plan["mixture"])
        plans[f"{CUT}{cut}"] = plan
    return plans


def rate(run):
    """The steady rate, where the requests' times tell one: the loop notes them, which may have been busy for long."""
    whole = run["whole_epoch_samples_per_s"]
    steady = run["samples_per_s"]
    return steady if steady is not None and 0.9 * whole <= steady <= 1.6 * whole else whole


def said(row):
    ways = ", ".join(f"{share:.0%} cut {cut} {codec}" for cut, codec, share in row["mixture"]) or "trains on the node"
    predicted = f"predicted {row['predicted']:7.1f}" if row["predicted"] else "predicts nothing "
    return (
        f"{row['network']:20} {row['mbit']:5} Mbit/s {row['rule']:13} {predicted} "
        f"measured {row['measured']:7.1f} samples/s  {ways}"
    )


def changed(wanted, link, url, trainer):
    """A job whose link changes, and the same undisturbed."""
    rates = [int(word) for word in wanted.change.split(",")]
    link.rate(rates[0])
    trainer.ask(do="follow", url=url)
    trainer.send(do="train", seconds=wanted.seconds * len(rates))
    changes, pause = [(time.monotonic(), rates[0])], threading.Event()
    for mbit in rates[1:]:
        pause.wait(wanted.seconds)
        link.rate(mbit)
        changes.append((time.monotonic(), mbit))
    disturbed = trainer.answer()
    link.rate(rates[0])
    trainer.ask(do="follow", url=url)
    return report(changes, disturbed, trainer.ask(do="train", batches=len(disturbed["losses"])))


def report(changes, disturbed, undisturbed):
    started = disturbed["started"]
    ends = [at for at, _ in changes[1:]] + [disturbed["taken"][-1][0]]
    stretches = []
    for (begin, mbit), end in zip(changes, ends, strict=True):
        replans = [(round(at - begin, 2), after, why) for at, after, why in disturbed["replans"] if begin <= at < end]
        settled = begin + min(2, (end - begin) / 2)
        rows = sum(count for at, count in disturbed["taken"] if settled <= at < end)
        stretches.append({"mbit": mbit, "replans": replans, "samples_per_s_after": rows / max(1e-9, end - settled)})
    return {
        "stretches": stretches,
        "same_samples_in_the_same_order": disturbed["ids"] == undisturbed["ids"],
        "same_losses": disturbed["losses"] == undisturbed["losses"],
        "batches": len(disturbed["losses"]),
        "changes": [(round(at - started, 2), mbit) for at, mbit in changes],
        "taken": [(round(at - started, 3), count) for at, count in disturbed["taken"]],
    }


def node_inside(wanted):
    from frostline.core.config import NodeSettings

    serve_node(wanted, NodeSettings(device_batch=BATCH, allow_anonymous=True, engines=engines_of(wanted)))


def engines_of(wanted):
    """All that there are; to bring some up takes seconds, which a quick form does without."""
    return () if wanted.quick else None


def trainer_inside(wanted):
    side = Trainer(wanted)
    does = {"plan": side.plan, "run": side.run, "follow": side.follow, "train": side.train}
    does |= {"plan one cut": side.plan_one_cut, "run by default": side.by_default}
    answer_questions({**does, "train in the store": side.in_store})


class Trainer:
    """The trainer's program: one network, one job at a time."""

    def __init__(self, wanted):
        import torch
        from parts.networks import load

        import frostline as fl
        from frostline.engines.machine import keep_freed_memory

        keep_freed_memory()  # as the node does, so that both sides compute alike
        torch.manual_seed(0)
        self._data = fl.Dataset(wanted.data)
        self._part = self._data.split(min(0.999, wanted.samples / len(self._data)), 0)[1]
        self._network = load(wanted.network, len(self._data.classes))
        # All but the last layer: the three that AlexNet has behind its module "features" would take all the time.
        until = "classifier.5" if wanted.network == "alexnet" else "features"
        fl.freeze(self._network.model, until, input_shape=self._network.preprocess.shape)
        self._window = wanted.window
        self._accuracy = float(wanted.accuracy) if wanted.accuracy[0].isdigit() else wanted.accuracy
        self._fresh = {name: value.clone() for name, value in self._network.model.state_dict().items()}
        self._job = None
        self._finished = []
        self._replans = []

    def begin(self, url, **settings):
        """A job of the fresh network that has measured, without a cache, so that each run fetches all."""
        import torch

        import frostline as fl

        if self._job is not None:
            self._job.close()
        self._network.model.load_state_dict(self._fresh)
        torch.manual_seed(0)
        self._replans.clear()
        # One run's rows a request, on either side, so that no run has rows to spare.
        chosen = {"cache_bytes": 0, "samples_per_request": BATCH, "device_batch": BATCH, "measure_first": True}
        options = {"preprocess": self._network.preprocess, "near": url, "accuracy": self._accuracy}
        settings = fl.LoaderSettings(**{**chosen, **settings})
        self._job = fl.offload(self._network.model, self._data, settings=settings, on_event=self._observe, **options)
        return self._job

    def plan(self, url, rules=RULES):
        """Measure over the link as it is now, and what each rule says."""
        from frostline.planning import make_plan

        # No following, so that each plan is run as it was made.
        job = self.begin(url, requests_in_flight=self._window, replan=False)
        plans = {rule: described(make_plan(job.situation, rule)) for rule in rules}
        if "all_in_store" in plans:
            plans["all_in_store"]["mixture"] = []
        encoded = self._data.samples.encoded_bytes / len(self._data)
        plans["best"]["bytes"] = {cut.number: cut.bytes_per_sample or encoded for cut in job.situation.cuts}
        return plans

    def plan_one_cut(self, cut):
        """The plan that stops there for every sample."""
        from frostline.planning import plan_at_cut

        return described(plan_at_cut(self._job.situation, cut))

    def _observe(self, event):
        from frostline.core.events import Replanned, RequestFinished

        if isinstance(event, RequestFinished):
            self._finished.append((time.perf_counter(), event.samples, event.route))
        elif isinstance(event, Replanned):
            self._replans.append((time.monotonic(), event.after, event.reason))

    def run(self, mixture):
        """One epoch by a mixture."""
        from frostline.core import Route

        self._job.use({Route(cut, codec): share for cut, codec, share in mixture})
        return self.epoch()

    def by_default(self, url):
        """Three epochs of a job that measures nothing first, the first of which shows it what each way takes."""
        self.begin(url, requests_in_flight=self._window, measure_first=False)
        _, *runs = [self.epoch() for _ in range(3)]
        rows = collections.Counter()
        for _, samples, route in self._finished:
            rows[route.cut, route.codec] += samples
        mixture = [(*way, samples / rows.total()) for way, samples in rows.most_common()]
        return {"predicted": None, "mixture": mixture, "runs": runs}

    def epoch(self):
        """One epoch as the job deals it now, and how fast it was."""
        before, started = received_bytes(), time.perf_counter()
        self._finished.clear()
        optimizer = self.optimizer()
        for batch in self._job.loader(batch_size=BATCH, shuffle=True, seed=0, epoch=0, data=self._part):
            self.step(optimizer, batch)
        return {
            "samples_per_s": steady_rate(self._finished),
            "whole_epoch_samples_per_s": len(self._part) / (time.perf_counter() - started),
            "samples": len(self._part),
            "bytes_at_interface": received_bytes() - before,
            "load": os.getloadavg()[0],
        }

    def in_store(self, url):
        """The same program beside the store, on the node's own core: nothing crosses the link."""
        self.plan(url)
        return self.run([(len(self._job.situation.cuts) - 1, "exact", 1.0)])

    def follow(self, url):
        """A job whose plan follows the link."""
        # What was asked for before a change still comes the old way: few requests, so that this is little.
        return {"plan": self.begin(url, requests_in_flight=4).plan.reason}

    def train(self, *, seconds=None, batches=None):
        """Epochs until the time is over, or so many batches."""
        optimizer, started, losses, ids, taken, epoch = self.optimizer(), time.monotonic(), [], [], [], 0
        while True:
            for batch in self._job.loader(BATCH, shuffle=True, seed=0, epoch=epoch, data=self._part):
                losses.append(self.step(optimizer, batch))
                ids += batch.ids.tolist()
                taken.append((time.monotonic(), len(batch)))
                if (seconds and time.monotonic() - started >= seconds) or len(losses) == batches:
                    return {"started": started, "losses": losses, "ids": ids, "taken": taken, "replans": self._replans}
            epoch += 1

    def optimizer(self):
        import torch

        head = self._job.head.train()
        return torch.optim.Adam([parameter for parameter in head.parameters() if parameter.requires_grad], lr=1e-3)

    def step(self, optimizer, batch):
        """One step of the head; its loss."""
        import torch

        loss = torch.nn.functional.cross_entropy(self._job.head(batch.features), batch.labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return float(loss.detach())


def described(plan):
    return {
        "predicted": plan.samples_per_s,
        "bottleneck": plan.bottleneck,
        "mixture": [(item.route.cut, item.route.codec, item.share) for item in plan.mixture],
        "link_bytes_per_s": plan.link.bytes_per_s,
    }


def steady_rate(finished):
    """Samples a second between the requests that end the first quarter of the epoch and its last tenth; else None.

    Before that the window still opens, request by request; after it ever fewer are under way. Requests that are
    finished are counted rather than batches handed over, which come in order and therefore in bursts.
    """
    total, done, inside = sum(rows for _, rows, _ in finished), 0, []
    for at, rows, _ in finished:
        done += rows
        if 0.25 * total <= done <= 0.92 * total:
            inside.append((at, done))
    if len(inside) < 2 or inside[-1][0] <= inside[0][0]:
        return None
    (first, before), (last, after) = inside[0], inside[-1]
    return (after - before) / (last - first)


def table(found):
    parts = [rules_table(found["rows"])] if found["rows"] else []
    return "\n\n".join([*parts, *([change_table(found["change"])] if "change" in found else [])])


def rules_table(rows):
    """For every cell each rule's rate next to ours, and how good the predictions were."""
    by = {(row["network"], row["mbit"], row["rule"]): row for row in rows}
    cells = list(dict.fromkeys((row["network"], row["mbit"]) for row in rows))
    rules = dict.fromkeys(row["rule"] for row in rows)
    others = [rule for rule in rules if rule != "best" and not rule.startswith(CUT)]
    lines = []
    for cell in cells:
        ours = by[*cell, "best"]
        ratios = [by[*cell, rule]["measured"] / ours["measured"] for rule in others]
        lines.append([*cell, ours["predicted"], ours["measured"], *ratios])
    head = ["network", "Mbit/s", "ours: predicted", "measured", *others]
    after = "Columns after `measured` are that rule's samples/s as a multiple of ours."
    return "\n".join([markdown(head, lines), "", after, "", *judged(rows, by, cells)])


def judged(rows, by, cells):
    """How near predictions were, how far ours is ahead, and where it is not."""
    said_of_cuts, rows = judged_cuts(rows), [row for row in rows if not row["rule"].startswith(CUT)]
    here = [row for row in rows if row["rule"] not in ("all_in_store", DEFAULT)]
    plans_of = {
        "Our plans'": [row for row in here if row["rule"] == "best"],
        "The rules'": [row for row in here if row["rule"] != "best"],
    }
    ours = {cell: by[*cell, "best"]["measured"] for cell in cells}
    rates = {cell: [row["measured"] for row in here if (row["network"], row["mbit"]) == cell] for cell in cells}
    shares = [ours[cell] / max(rates[cell][1:]) for cell in cells]
    lost = [row for row in here if row["measured"] > (1 + NOISE) * ours[row["network"], row["mbit"]]]
    return [
        *(error_of(whose, plans) for whose, plans in plans_of.items() if plans),
        f"Ours to each cell's next: median {statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f}).",
        f"Cells in which another rule was faster than ours by more than {NOISE:.0%}: {len(lost)}.",
        *(f"* {row['network']} at {row['mbit']} Mbit/s: {row['rule']} {row['measured']:.1f}" for row in lost),
        *said_of_cuts,
    ]


def error_of(whose, plans):
    off = [abs(row["measured"] / row["predicted"] - 1) for row in plans]
    return f"{whose} prediction: median error {statistics.median(off):.1%}, worst {max(off):.1%} over {len(off)} plans."


def judged_cuts(rows):
    """In how many cells our choice is the fastest of all cuts that were run, or near it; nothing where none were.

    Whole epochs count: an encoded request is finished when it is here, and its frozen layers run after that.
    """
    cells, lines = {}, []
    for row in rows:
        if row["rule"] != "all_in_store":
            whole = statistics.median(run["whole_epoch_samples_per_s"] for run in row["runs"])
            cells.setdefault((row["network"], row["mbit"]), {})[row["rule"]] = whole
    if not any(rule.startswith(CUT) for rates in cells.values() for rule in rates):
        return []
    near, of_cuts = dict.fromkeys((*RULES, DEFAULT), 0), []
    for (network, mbit), rates in cells.items():
        fastest = max(rates, key=rates.get)
        cut = max(measured for rule, measured in rates.items() if rule not in ("best", DEFAULT))
        of_cuts.append(rates[DEFAULT] / cut)
        for rule in near.keys() & rates.keys():
            near[rule] += rates[rule] >= (1 - NEAR) * cut
        if rates["best"] < (1 - NEAR) * rates[fastest]:
            share = rates["best"] / rates[fastest]
            lines.append(f"* {network} at {mbit} Mbit/s: {fastest} is faster; ours gives {share:.0%} of it")
    counts = ", ".join(
        f"{rule} {count}" for rule, count in near.items() if any(rule in rates for rates in cells.values())
    )
    ran, without = sum(row["rule"].startswith(CUT) for row in rows), sum(row.get("not_run", 0) for row in rows)
    return [
        f"Cells of {len(cells)} in which a rule is as fast as the fastest cut, or within {NEAR:.0%}: {counts}.",
        f"Default to the fastest cut: {statistics.median(of_cuts):.2f} ({min(of_cuts):.2f} to {max(of_cuts):.2f}).",
        f"Cuts that were run: {ran}. Not run, since they cannot be the fastest: {without}.",
        *lines,
    ]


def change_table(found):
    rows = [
        [item["mbit"], item["replans"][0][0] if item["replans"] else None, item["samples_per_s_after"]]
        for item in found["stretches"]
    ]
    same = ("the same" if found[name] else "OTHER" for name in ("same_samples_in_the_same_order", "same_losses"))
    words = "In {} batches samples and order are {}, losses {}.".format(found["batches"], *same)
    return markdown(["Mbit/s", "another plan after, s", "samples/s from 2 s on"], rows) + "\n\n" + words


def draw(found, path):
    """Samples a second over time, with the link's and the plan's changes."""
    if "change" not in found:
        return
    import numpy as np

    plt, found = pyplot(), found["change"]
    at, count = (np.array(item, float) for item in zip(*found["taken"], strict=True))
    edges = np.arange(0, at[-1] + 1, 1.0)
    rate, _ = np.histogram(at, bins=edges, weights=count)
    _, axes = plt.subplots(figsize=(8, 3), layout="constrained")
    axes.step(edges[:-1], rate, where="post", color="#1764ab")
    for begin, mbit in found["changes"]:
        axes.axvline(max(0, begin), color="#888")
        axes.text(max(0, begin), axes.get_ylim()[1], f" {mbit} Mbit/s", va="top")
    for (begin, _), stretch in zip(found["changes"], found["stretches"], strict=True):
        for after, *_ in stretch["replans"]:
            axes.axvline(begin + after, color="#c44e00", linestyle=":")
    axes.set(xlabel="seconds (dotted: another plan)", ylabel="samples/s", ylim=(0, None))
    plt.savefig(path)


INSIDE = {"node": node_inside, "trainer": trainer_inside}

if __name__ == "__main__":
    shown = {"table": table, "draw": draw}
    run(__doc__, measure, quick=QUICK, options=options, inside=INSIDE, needs=(namespaces,), pictures=40, **shown)
