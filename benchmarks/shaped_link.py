"""Every rule's plan run for real over a shaped link: predicted against measured, ours against the published ones.

    python benchmarks/shaped_link.py --data DIR [--networks a,b] [--mbit 5,20,100,1000] [--samples 480] [--rounds 1]

Node and trainer run in network namespaces of their own, each on one core, joined by a link that tc shapes; the
encoded images are read from DIR by the node. For each network and bandwidth one job measures and plans; then each
rule's plan fetches one epoch and trains the head on it. The samples a second of the epoch's middle part are compared
with the prediction, which is for the steady state; those of the whole epoch are kept too. An epoch
needs three times the samples of the requests under way (160), or there is no steady state. Rules that choose the same
share one run. Bytes are counted at the interface. Needs root. Writes JSON and a table with --out FILE (without suffix).
"""

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from links import STORE, STORE_ADDRESS, TRAINER, Inside, ShapedLink, answer_questions, received_bytes

NETWORKS = ("efficientnet_lite0", "resnet18", "alexnet", "mobilenet_v3_large")
RULES = ("best", "baseline", "freeze", "min_bytes", "neurosurgeon", "hapi_v1", "hapi_v3", "all_in_store")
BATCH = 16
# Runs of one plan differ by this much here; a smaller lead is none.
NOISE = 0.10


def main():
    wanted = arguments()
    if wanted.inside:
        {"node": node_inside, "trainer": trainer_inside}[wanted.inside](wanted)
        return
    rows = []
    with ShapedLink() as link:
        link.rate(1000)
        with Inside(STORE, 0, __file__, "--inside", "node", "--data", wanted.data) as node:
            url = node.answer()["url"]
            for network in wanted.networks.split(","):
                rows += over_one_network(wanted, link, url, network)
                keep(wanted, rows)
    print(summary(rows))


def keep(wanted, rows):
    """What there is by now, so that a run that is cut short is not lost."""
    if wanted.out:
        Path(f"{wanted.out}.json").write_text(json.dumps({"command": sys.argv[1:], "rows": rows}, indent=1) + "\n")
        Path(f"{wanted.out}.md").write_text(summary(rows))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--mbit", default="5,20,100,1000")
    parser.add_argument("--samples", type=int, default=480)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--accuracy", default="exact")
    parser.add_argument("--out")
    parser.add_argument("--inside", choices=("node", "trainer"), help=argparse.SUPPRESS)
    return parser.parse_args()


def over_one_network(wanted, link, url, network):
    """Rows of all bandwidths and rules."""
    rows = []
    options = ["--inside", "trainer", "--data", wanted.data, "--samples", str(wanted.samples)]
    options += ["--accuracy", wanted.accuracy, "--networks", network]
    with Inside(STORE, 0, __file__, *options) as beside:
        in_store = beside.ask(do="train in the store", url=url)
    with Inside(TRAINER, 1, __file__, *options) as trainer:
        for mbit in (int(word) for word in wanted.mbit.split(",")):
            link.rate(mbit)
            plans = trainer.ask(do="plan", url=url)
            runs = {}
            for _ in range(wanted.rounds):
                for mixture in {json.dumps(plan["mixture"]) for plan in plans.values() if plan["mixture"]}:
                    runs.setdefault(mixture, []).append(trainer.ask(do="run", mixture=json.loads(mixture)))
            for rule, plan in plans.items():
                measured = [in_store] if rule == "all_in_store" else runs[json.dumps(plan["mixture"])]
                row = {"network": network, "mbit": mbit, "rule": rule, **plan, "runs": measured}
                row["measured"] = statistics.median(map(rate, measured))
                rows.append(row)
                print(said(row), flush=True)
    return rows


def rate(run):
    """The steady rate, where the requests' times tell one: the loop notes them, which may have been busy for long."""
    whole = run["whole_epoch_samples_per_s"]
    return run["samples_per_s"] if 0.9 * whole <= run["samples_per_s"] <= 1.6 * whole else whole


def said(row):
    ways = ", ".join(f"{share:.0%} cut {cut} {codec}" for cut, codec, share in row["mixture"]) or "trains on the node"
    return (
        f"{row['network']:20} {row['mbit']:5} Mbit/s {row['rule']:13} predicted {row['predicted']:7.1f} "
        f"measured {row['measured']:7.1f} samples/s  {ways}"
    )


def node_inside(wanted):
    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node

    settings = NodeSettings(device_batch=BATCH, allow_anonymous=True)
    with start_node((str(Path(wanted.data).resolve()),), settings, host=STORE_ADDRESS) as node:
        print(json.dumps({"url": node.url}), flush=True)
        sys.stdin.read()


def trainer_inside(wanted):
    side = Trainer(wanted)
    answer_questions({"plan": side.plan, "run": side.run, "train in the store": side.in_store})


class Trainer:
    """The trainer's program: one network, one job at a time."""

    def __init__(self, wanted):
        import torch
        from networks import load

        import frostline as fl
        from frostline.core.config import LoaderSettings
        from frostline.engines.machine import keep_freed_memory
        from frostline.models import freeze

        keep_freed_memory()  # as the node does, so that both sides compute alike
        torch.manual_seed(0)
        named = (
            "demo:efficientnet_lite0" if wanted.networks == "efficientnet_lite0" else f"torchvision:{wanted.networks}"
        )
        self._offload = fl.offload
        self._data = fl.Dataset(wanted.data)
        self._part = self._data.split(wanted.samples / len(self._data), 0)[1]
        self._network = load(named, len(self._data.classes))
        # All but the last layer: the three that AlexNet has behind its module "features" would take all the time.
        until = "classifier.5" if wanted.networks == "alexnet" else "features"
        freeze(self._network.model, until, input_shape=self._network.preprocess.shape)
        # No cache, so that each run fetches all; no following, so that each plan is run as it was made.
        # One run's rows a request, on either side, so that no run has rows to spare.
        self._settings = LoaderSettings(
            cache_bytes=0, samples_per_request=BATCH, requests_in_flight=10, device_batch=BATCH, follow=False
        )
        from frostline.planning.situation import ACCURACIES

        accuracy = wanted.accuracy
        self._accuracy = accuracy if accuracy in ACCURACIES else float(accuracy)
        self._job = None
        self._finished = []

    def plan(self, url):
        """Measure over the link as it is now, and what every rule says."""
        from frostline.planning import make_plan

        if self._job is not None:
            self._job.close()
        self._job = self._offload(
            self._network.model,
            self._data,
            preprocess=self._network.preprocess,
            near=url,
            settings=self._settings,
            accuracy=self._accuracy,
            observe=self._observe,
        )
        plans = {rule: make_plan(self._job.situation, rule) for rule in RULES}
        return {
            rule: {
                "predicted": plan.samples_per_s,
                "bottleneck": plan.bottleneck,
                "mixture": []
                if rule == "all_in_store"
                else [(item.route.cut, item.route.codec, item.share) for item in plan.mixture],
                "link_bytes_per_s": plan.link.bytes_per_s,
            }
            for rule, plan in plans.items()
        }

    def _observe(self, event):
        if type(event).__name__ == "RequestFinished":
            self._finished.append((time.perf_counter(), event.samples))

    def run(self, mixture):
        """One epoch by a mixture."""
        from frostline.core import Route

        self._job.use({Route(cut, codec): share for cut, codec, share in mixture})
        return self._epoch(self._job)

    def in_store(self, url):
        """The same program beside the store, on the node's own core: nothing crosses the link."""
        self.plan(url)
        return self.run([(len(self._job.situation.cuts) - 1, "exact", 1.0)])

    def _epoch(self, job):
        import torch

        optimizer = torch.optim.Adam(
            (parameter for parameter in job.head.parameters() if parameter.requires_grad), lr=1e-3
        )
        job.head.train()
        before, started = received_bytes_here(), time.perf_counter()
        self._finished.clear()
        for batch in job.loader(batch_size=BATCH, shuffle=True, seed=0, epoch=0, data=self._part):
            loss = torch.nn.functional.cross_entropy(job.head(batch.features), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return {
            "samples_per_s": steady_rate(self._finished),
            "whole_epoch_samples_per_s": len(self._part) / (time.perf_counter() - started),
            "samples": len(self._part),
            "bytes_at_interface": received_bytes_here() - before,
            "load": os.getloadavg()[0],
        }


def steady_rate(finished):
    """Samples a second between the requests that end the first quarter of the epoch and its last tenth.

    Before that the window still opens, request by request; after it ever fewer are under way. Requests that are
    finished are counted rather than batches handed over, which come in order and therefore in bursts.
    """
    total, done, inside = sum(rows for _, rows in finished), 0, []
    for at, rows in finished:
        done += rows
        if 0.25 * total <= done <= 0.92 * total:
            inside.append((at, done))
    (first, before), (last, after) = inside[0], inside[-1]
    return (after - before) / (last - first)


def received_bytes_here():
    return received_bytes("fl-t" if Path("/sys/class/net/fl-t").exists() else "fl-s")


def summary(rows):
    """The table in markdown: for every cell each rule's rate next to ours, and how good the predictions were."""
    cells = sorted({(row["network"], row["mbit"]) for row in rows}, key=lambda item: (NETWORKS.index(item[0]), item[1]))
    by = {(row["network"], row["mbit"], row["rule"]): row for row in rows}
    head = ["network", "Mbit/s", "ours: predicted", "measured", *(f"{rule}" for rule in RULES if rule != "best")]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for network, mbit in cells:
        ours = by[network, mbit, "best"]
        others = [f"{by[network, mbit, rule]['measured'] / ours['measured']:.2f}" for rule in RULES if rule != "best"]
        figures = [network, str(mbit), f"{ours['predicted']:.1f}", f"{ours['measured']:.1f}", *others]
        lines.append("| " + " | ".join(figures) + " |")
    here = [row for row in rows if row["rule"] != "all_in_store"]
    errors = [abs(row["measured"] / row["predicted"] - 1) for row in here]
    lost = [
        f"{row['network']} at {row['mbit']} Mbit/s: {row['rule']} {row['measured']:.1f}, ours {ours:.1f}"
        for row in here
        if row["measured"] > (1 + NOISE) * (ours := by[row["network"], row["mbit"], "best"]["measured"])
    ]
    others = [row for row in here if row["rule"] != "best"]
    best_other = {
        cell: max(row["measured"] for row in others if (row["network"], row["mbit"]) == cell) for cell in cells
    }
    shares = [by[*cell, "best"]["measured"] / best_other[cell] for cell in cells]
    lines += [
        "",
        "Columns after `measured` are that rule's measured samples/s as a multiple of ours.",
        "",
        f"Prediction: median error {statistics.median(errors):.1%}, worst {max(errors):.1%} over {len(errors)} plans.",
        f"Ours to each cell's next: median {statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f}).",
        f"Cells in which another rule was faster than ours by more than {NOISE:.0%}: {len(lost)}.",
        *(f"* {item}" for item in lost),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
