"""Every step from eager torch to a tuned node: images a second from stored bytes to features, error and gain.

    python benchmarks/ladder.py --data DIR [--networks resnet18 ...] [--samples 128] [--rounds 3] [--out FILE]

All but the classifier of seven networks, on photographs of DIR (images in class folders). The first steps read, decode
and run one after another, as a plain loop does: eager torch, channels last, the fastest engine that folds layers
together, torch in bfloat16, the fastest engine of up to 16 bits, the ready format instead of JPEG, the fastest engine
of 8 bits. The last ones stream features from a node to a client in another process, where reading, computing and
sending overlap: with 16 bits and with 8 allowed, by the same engines, which the node's own trial measures anew. `alone`
is the engine by itself, with nothing to read or decode; in each round of the last steps it is measured next to them, on
floats that are ready and on pixels as they are kept, of which the faster counts, and their share of it is the median of
the rounds' ratios. The error is that of `benchmarks/engines.py`, and of the node's trial.
Steps take turns in each round; figures are medians. Writes JSON and a table with --out (without suffix). What is under
way is told on stderr, for VGG-11's weights of 500 MB take minutes to convert and to try.

Where torchvision was built for CUDA and torch was not, `PYTHONPATH=tests/support/torchvision_cpu` lets it be imported.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from networks import NETWORKS, calibrated, frozen, load

import frostline as fl
from engines import built, decoded, features, relative_error, timed
from frostline.core import REFERENCE
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.events import PhaseStarted
from frostline.datasets import Dataset
from frostline.datasets.copy.ready import ingest
from frostline.engines.catalog import OFFERS, build
from frostline.engines.machine import hardware_name, keep_freed_memory
from frostline.engines.protocols import identity, offer_name
from frostline.models import cut_network
from frostline.node.process import start_node
from frostline.preprocess import Applied
from frostline.preprocess.apply import decode_into, steps_left
from frostline.stores.open import open_store

SEVEN = [name for name in NETWORKS if name not in ("vgg19", "vit_base")]
ROWS = 32
ALONE_S = 2.0
STREAMED_S = 5.0
MEMORY_BYTES = 8 << 30  # AlexNet's and VGG's weights do not fit into the default node
FUSED = ("torch-compiled", "onnxruntime", "openvino")
STREAMED = {"bf16": "+ prefetch, 16 bits", "int8": "+ prefetch, 8 bits"}


def main():
    wanted = arguments()
    torch.set_num_threads(wanted.threads)
    keep_freed_memory()
    result = {"hardware": hardware_name("cpu"), "torch": torch.__version__, "load_before": os.getloadavg()[0]}
    result["networks"] = {}
    for name in wanted.networks:
        result["networks"][name] = climbed(name, wanted)
        if wanted.out:
            Path(f"{wanted.out}.json").write_text(json.dumps(result, indent=1) + "\n")
            Path(f"{wanted.out}.md").write_text(table(result))
    print(table(result))


def climbed(name, wanted):
    """All steps of one network, in their order."""
    doing(name, "decoding, and cutting the network")
    pretrained = load(NETWORKS[name])
    preprocess, data = pretrained.preprocess, Dataset(wanted.data)
    pixels = decoded(data, preprocess, 96)
    calibration, judged = pixels[:64], pixels[64:]
    model = pretrained.model if name == "efficientnet_lite0" else calibrated(pretrained.model, calibration)
    prefix = cut_network(frozen(model, preprocess.shape), preprocess.shape).prefix
    cut = prefix.cuts[-1].number
    chosen = argparse.Namespace(engines=wanted.engines, rows=[ROWS], threads=wanted.threads, device="cpu")
    with tempfile.TemporaryDirectory() as kept, tempfile.TemporaryDirectory() as ready:
        doing(name, f"making engines up to {prefix.cuts[-1].name}, {prefix_bytes(prefix) / 1e6:.0f} MB of weights")
        engines, found = built(prefix, cut, calibration, chosen, Path(kept))
        engines = {key: engine for key, engine in engines.items() if "why_not" not in found[key[0]]}
        doing(name, "errors, and engines alone")
        expected = features(engines[REFERENCE, ROWS], judged, ROWS, cut)
        errors = {
            offer: relative_error(features(engine, judged, ROWS, cut), expected)
            for (offer, _), engine in engines.items()
        }
        rates = timed(engines, pixels, cut, wanted.rounds)
        alone = {offer: statistics.median(rates[offer, ROWS]) for offer, _ in engines}
        doing(name, "the ready format")
        ingest(data, ready, Applied.to(preprocess, "uint8"), observe=lambda _: None)
        steps = [(step, offer, source) for step, offer, source in planned(alone) if offer is not None]
        sources = {"jpeg": Source(data, preprocess), "ready": Source(Dataset(ready), preprocess)}
        times = {step: [] for step, _, _ in steps}
        for turn in range(wanted.rounds + 1):
            doing(name, f"one after another, round {turn} of {wanted.rounds}")
            for step, offer, source in steps:
                rate = one_after_another(sources[source], engines[offer, ROWS], cut, wanted.samples)
                if turn:
                    times[step].append(rate)
        rows = [row(step, offer, times[step], alone[offer], errors[offer]) for step, offer, _ in steps]
        by_accuracy = {"bf16": rows[-2]["engine"], "int8": rows[-1]["engine"]}
        kept_pixels = decoded(data, preprocess, 96, as_kept=True)
        alone = {}
        for offer in by_accuracy.values():
            pairs = [(engines[offer, ROWS], pixels)]
            if offer_of(offer).takes_pixels:
                taking = of_kept(prefix, cut, offer, kept_pixels, preprocess.levels, wanted.threads, Path(kept))
                pairs.append((taking, kept_pixels))
            batches = [(engine, np.resize(some, (ROWS, *some.shape[1:]))) for engine, some in pairs]
            alone[offer] = partial(fastest_by_itself, batches, cut)
        engines.clear()
        rows += [
            streamed(name, model, Dataset(ready), preprocess, wanted, accuracy, engine, alone[engine])
            for accuracy, engine in by_accuracy.items()
        ]
    # Streaming is compared with the same precision one after another.
    before = [rows[0], *rows[:-3], rows[-4], rows[-3]]
    for earlier, item in zip(before, rows, strict=True):
        item["gain"] = item["images_per_s"] / earlier["images_per_s"]
        item["over_eager"] = item["images_per_s"] / rows[0]["images_per_s"]
        print(f"{name:20} {said(item)}", flush=True)
    return rows


def doing(name, what):
    """Say what is under way."""
    print(f"{time.strftime('%H:%M:%S')} {name}: {what}", file=sys.stderr, flush=True)


def prefix_bytes(prefix):
    return sum(tensor.nbytes for tensor in prefix.tensors.values())


def of_kept(prefix, cut, offer, pixels, levels, threads, folder):
    """An engine that takes pixels as they are kept."""
    return build(
        identity(offer, offer_of(offer).precision, pixels, levels),
        prefix.graph,
        prefix.cuts,
        prefix.tensors,
        cut=cut,
        max_rows=ROWS,
        threads=threads,
        levels=levels,
        calibration=pixels[:64],
        folder=folder,
    )


def planned(alone):
    """The steps before the last ones: name, engine, and what is read."""

    def fastest(names):
        return max((name for name in names if name in alone), key=alone.get, default=None)

    of_16 = fastest([name for name in alone if offer_of(name).precision in ("fp32", "bf16")])
    of_8 = fastest([name for name in alone if offer_of(name).precision == "int8"])
    return [
        ("eager fp32", REFERENCE, "jpeg"),
        ("+ channels last", fastest(["torch-channels-last"]), "jpeg"),
        ("+ fusion", fastest(FUSED), "jpeg"),
        ("+ 16 bits", fastest(["torch-bf16"]), "jpeg"),
        ("+ tuned engine", of_16, "jpeg"),
        ("+ ready format", of_16, "ready"),
        ("+ 8 bits", of_8, "ready"),
    ]


class Source:
    """Reads and decodes one sample after another."""

    def __init__(self, data, preprocess):
        self._store = open_store(data.url)
        self._samples = data.samples
        self._preprocess = steps_left(preprocess, data.manifest.applied)
        self.shape = preprocess.shape

    def into(self, row, out):
        samples = self._samples
        row %= len(samples)
        encoded = self._store.read(samples.objects[row], int(samples.offsets[row]), int(samples.lengths[row]))
        decode_into(self._preprocess, encoded, out, id=row, view=None)


def one_after_another(source, engine, cut, count):
    """Images a second of a loop that reads, decodes and runs in turn."""
    batch = np.empty((ROWS, *source.shape), np.float32)
    started = time.perf_counter()
    for start in range(0, count, ROWS):
        for row in range(ROWS):
            source.into(start + row, batch[row])
        engine.run(batch, cut)
    return count / (time.perf_counter() - started)


def offer_of(name):
    return next(offer for offer in OFFERS if offer.name == name)


def fastest_by_itself(pairs, cut):
    """Images a second of the faster of some engines, each with a batch as it takes them."""
    return max(by_itself(engine, batch, cut) for engine, batch in pairs)


def by_itself(engine, batch, cut):
    """Images a second of an engine with nothing else to do."""
    engine.run(batch, cut)
    runs, started = 0, time.perf_counter()
    while time.perf_counter() - started < ALONE_S:
        engine.run(batch, cut)
        runs += 1
    return runs * len(batch) / (time.perf_counter() - started)


def streamed(name, model, data, preprocess, wanted, accuracy, engine, alone):
    """A last step: features stream from a node in another process."""
    settings = NodeSettings(
        compute_threads=wanted.threads,
        decode_threads=wanted.threads,
        engines=tuple({REFERENCE, engine}),
        memory_bytes=MEMORY_BYTES,
    )
    options = {"accuracy": accuracy, "cut": len(cut_network(model, preprocess.shape).cuts) - 1}
    options["settings"] = LoaderSettings(cache_bytes=0, follow=False)
    options["observe"] = lambda event: isinstance(event, PhaseStarted) and doing(name, f"{accuracy}, {event.name}")
    with (
        start_node((data.url,), settings) as node,
        fl.offload(model, data, preprocess=preprocess, near=node.url, **options) as job,
    ):
        doing(name, f"{accuracy}, streaming")
        pairs = [(alone(), streaming(job, seed)) for seed in range(wanted.rounds + 1)][1:]
        profile, last = job.situation.store, options["cut"]
    rates, shares = [rate for _, rate in pairs], [rate / by_itself for by_itself, rate in pairs]
    step = row(
        STREAMED[accuracy], offer_name(profile.engine), rates, statistics.median(pair for pair, _ in pairs), None
    )
    tried = {(trial.engine, trial.cut): trial.error for trial in profile.trials}
    error = tried.get((profile.engine, last), 0.0)  # of the reference, from which errors are measured, there is none
    return step | {"error": error, "share": statistics.median(shares), "shares": shares}


def streaming(job, seed):
    """Images a second of some epochs, after the first batch; each is asked for while the one before it ends."""
    done, started = 0, None
    with closing(iter(job.epochs(ROWS, range(1000), shuffle=True, seed=seed))) as epochs:
        for batch in itertools.chain.from_iterable(epochs):
            if started is None:
                started = time.perf_counter()
                continue
            done += len(batch.labels)
            if time.perf_counter() - started > STREAMED_S:
                return done / (time.perf_counter() - started)
    raise AssertionError("no network is that fast")


def row(step, engine, rates, alone, error):
    return {
        "step": step,
        "engine": engine,
        "images_per_s": statistics.median(rates),
        "range": [min(rates), max(rates)],
        "alone": alone,
        "error": error,
    }


def said(one):
    return (
        f"{one['step']:20} {one['engine']:22} {one['images_per_s']:7.1f}/s  x{one['gain']:.2f}  "
        f"{one['over_eager']:5.2f} of eager  alone {one['alone']:7.1f}/s  error {one['error']:.1e}"
    )


def table(result):
    lines = [
        f"On {result['hardware']}, torch {result['torch']}.",
        "",
        "| network | step | engine | images/s | gain | over eager | engine alone | share of it | error |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, rows in result["networks"].items():
        for item in rows:
            share = item.get("share", item["images_per_s"] / item["alone"])
            lines.append(
                f"| {name} | {item['step']} | {item['engine']} | {item['images_per_s']:.1f} | {item['gain']:.2f} | "
                f"{item['over_eager']:.2f} | {item['alone']:.1f} | {share:.0%} | {item['error']:.1e} |"
            )
    return "\n".join(lines) + "\n"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=SEVEN)
    parser.add_argument("--engines", nargs="+", choices=[offer.name for offer in OFFERS], help="all by default")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--out")
    return parser.parse_args()


if __name__ == "__main__":
    main()
