"""A link that becomes ten times thinner in the middle of a run, and comes back: does the plan follow?

    python benchmarks/bandwidth_change.py --data DIR [--network efficientnet_lite0] [--mbit 100,10,100] [--seconds 20]

Node and trainer as in shaped_link.py. One job fetches epoch after epoch while the link's rate is changed under it
every so many seconds; then the same epochs are run undisturbed. Prints when the plan changed after each change of the
link, to what, and the samples a second in each stretch; and whether samples, order and losses were the same. Needs
root. Writes JSON and a picture with --out FILE (without suffix).
"""

import argparse
import json
import threading
import time
from pathlib import Path

from links import STORE, TRAINER, Inside, ShapedLink, answer_questions
from shaped_link import BATCH, Trainer, node_inside


def main():
    wanted = arguments()
    if wanted.inside:
        {"node": node_inside, "trainer": trainer_inside}[wanted.inside](wanted)
        return
    rates = [int(word) for word in wanted.mbit.split(",")]
    options = ["--data", wanted.data, "--networks", wanted.network]
    with ShapedLink() as link:
        link.rate(rates[0])
        with Inside(STORE, 0, __file__, "--inside", "node", *options) as node:
            url = node.answer()["url"]
            with Inside(TRAINER, 1, __file__, "--inside", "trainer", *options) as trainer:
                trainer.ask(do="start", url=url)
                changes = change_the_link(link, rates, wanted.seconds, trainer)
                disturbed = trainer.answer()
            link.rate(rates[0])
            with Inside(TRAINER, 1, __file__, "--inside", "trainer", *options) as trainer:
                trainer.ask(do="start", url=url)
                trainer.send(do="train", batches=len(disturbed["losses"]))
                undisturbed = trainer.answer()
    found = report(rates, changes, disturbed, undisturbed)
    print(json.dumps({name: value for name, value in found.items() if name != "taken"}, indent=1))
    if wanted.out:
        Path(f"{wanted.out}.json").write_text(json.dumps(found) + "\n")
        draw(found, f"{wanted.out}.svg")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--network", "--networks", dest="network", default="efficientnet_lite0")
    parser.add_argument("--mbit", default="100,10,100")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--out")
    parser.add_argument("--inside", choices=("node", "trainer"), help=argparse.SUPPRESS)
    return parser.parse_args()


def change_the_link(link, rates, seconds, trainer):
    """Let the job run, and change the link under it; seconds on this machine's clock at which it was changed."""
    trainer.send(do="train", seconds=seconds * len(rates))
    changes = [(time.monotonic(), rates[0])]
    pause = threading.Event()
    for mbit in rates[1:]:
        pause.wait(seconds)
        link.rate(mbit)
        changes.append((time.monotonic(), mbit))
    return changes


def trainer_inside(wanted):
    wanted.samples, wanted.accuracy, wanted.networks = 512, "exact", wanted.network
    side = Feedback(wanted)
    answer_questions({"start": side.start, "train": side.train})


class Feedback(Trainer):
    """The trainer of shaped_link.py, with a plan that follows."""

    def start(self, url):
        from dataclasses import replace

        from frostline.core.events import Replanned

        # What was asked for before a change still comes the old way: few requests, so that this is little.
        self._settings = replace(self._settings, follow=True, requests_in_flight=4)
        self._replans = []

        def observe(event):
            if isinstance(event, Replanned):
                self._replans.append((time.monotonic(), event.after, event.reason))

        self._job = self._offload(
            self._network.model,
            self._data,
            preprocess=self._network.preprocess,
            near=url,
            settings=self._settings,
            observe=observe,
        )
        return {"plan": self._job.plan.reason}

    def train(self, *, seconds=None, batches=None):
        """Epochs until the time is over, or so many batches."""
        import torch

        torch.manual_seed(0)
        head = self._job.head.train()
        optimizer = torch.optim.Adam((parameter for parameter in head.parameters() if parameter.requires_grad), lr=1e-3)
        started, losses, ids, taken, epoch = time.monotonic(), [], [], [], 0
        while True:
            for batch in self._job.loader(BATCH, shuffle=True, seed=0, epoch=epoch, data=self._part):
                loss = torch.nn.functional.cross_entropy(head(batch.features), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(float(loss.detach()))
                ids += batch.ids.tolist()
                taken.append((time.monotonic(), len(batch)))
                if (seconds and time.monotonic() - started >= seconds) or len(losses) == batches:
                    return {"started": started, "losses": losses, "ids": ids, "taken": taken, "replans": self._replans}
            epoch += 1


def report(rates, changes, disturbed, undisturbed):
    started = disturbed["started"]
    ends = [at for at, _ in changes[1:]] + [disturbed["taken"][-1][0]]
    stretches = []
    for (begin, mbit), end in zip(changes, ends, strict=True):
        replans = [(round(at - begin, 2), after, why) for at, after, why in disturbed["replans"] if begin <= at < end]
        settled = begin + (replans[-1][0] if replans else 0) + 2
        rows = sum(count for at, count in disturbed["taken"] if settled <= at < end)
        stretches.append(
            {"mbit": mbit, "replans": replans, "samples_per_s_after": round(rows / max(1e-9, end - settled), 1)}
        )
    return {
        "stretches": stretches,
        "same_samples_in_the_same_order": disturbed["ids"] == undisturbed["ids"],
        "same_losses": disturbed["losses"] == undisturbed["losses"],
        "batches": len(disturbed["losses"]),
        "changes": [(round(at - started, 2), mbit) for at, mbit in changes],
        "taken": [(round(at - started, 3), count) for at, count in disturbed["taken"]],
    }


def draw(found, path):
    """Samples a second over time, with the link's and the plan's changes."""
    import matplotlib as mpl

    mpl.use("svg")
    import matplotlib.pyplot as plt
    import numpy as np

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


if __name__ == "__main__":
    main()
