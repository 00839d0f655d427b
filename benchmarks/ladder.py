"""Every step from eager torch to a tuned node: images a second from stored bytes to features, error and gain.

    python benchmarks/ladder.py --data DIR [--networks resnet18,...] [--samples 128] [--rounds 3] [--out FILE]

All but the classifier of seven networks, on photographs of DIR (images in class folders). The first steps read, decode
and run one after another, as a plain loop does: eager torch, channels last, the fastest engine that folds layers
together, torch in bfloat16, the fastest engine of up to 16 bits, the ready format instead of JPEG, the fastest engine
of 8 bits. The last ones stream features from a node to a client in another process, where reading, computing and
sending overlap: with 16 bits and with 8 allowed, by the same engines, which the node's own trial measures anew. `alone`
is the engine by itself, with nothing to read or decode; in each round of the last steps it is measured next to them, on
floats that are ready and on pixels as they are kept, of which the faster counts, and their share of it is the median of
the rounds' ratios. The error is the relative RMS of the worst of 32 photographs, and that of the node's trial.
Steps take turns in each round; figures are medians. What is under way is told on stderr, for VGG-11's weights of 500 MB
take minutes to convert and to try.
"""

import itertools
import os
import statistics
import tempfile
import time
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import by_turns, doing, markdown, run
from parts.networks import NETWORKS, TINY, calibrated, frozen, load

import frostline as fl
from frostline.core import REFERENCE
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import EngineUnsupported
from frostline.core.events import PhaseStarted
from frostline.datasets import Dataset
from frostline.datasets.copy.ready import ingest
from frostline.engines.catalog import OFFERS, absence, build
from frostline.engines.machine import keep_freed_memory
from frostline.engines.protocols import identity, offer_name
from frostline.models import cut_network
from frostline.node.process import start_node
from frostline.preprocess import Applied
from frostline.preprocess.apply import decode_into, pixels_into, steps_left
from frostline.stores.open import open_store

SEVEN = [name for name in NETWORKS if name not in (TINY, "mobilenet_v3_large")]
ROWS = 32
CALIBRATED_ON, JUDGED_ON = 64, 32
MEMORY_BYTES = 8 << 30  # AlexNet's and VGG's weights do not fit into the default node
FUSED = ("torch-compiled", "onnxruntime", "openvino")
STREAMED = {"bf16": "+ prefetch, 16 bits", "int8": "+ prefetch, 8 bits"}


QUICK = {
    "networks": TINY,
    "engines": "torch-channels-last",
    "samples": 32,
    "alone_s": 0.1,
    "streamed_s": 0.2,
    "trial_s": 0.0,
}


def options(parser):
    parser.set_defaults(rounds=3)
    parser.add_argument("--networks", default=",".join(SEVEN))
    parser.add_argument("--engines", help="names with commas between them; all by default")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--alone-s", type=float, default=2.0, help="seconds of an engine by itself")
    parser.add_argument("--streamed-s", type=float, default=5.0, help="seconds of a stream")
    parser.add_argument("--trial-s", type=float, default=600.0, help="of the node")


def measure(wanted):
    torch.set_num_threads(wanted.threads)
    keep_freed_memory()  # as a node does; without it eager torch takes up to twice the time (docs/decisions/0007)
    found = {}
    for name in wanted.networks.split(","):
        found[name] = climbed(name, wanted)
        yield {"networks": found}


def climbed(name, wanted):
    """All steps of one network, in their order."""
    doing(f"{name}: decoding, and cutting the network")
    pretrained, data = load(name), Dataset(wanted.data)
    preprocess = pretrained.preprocess
    pixels = decoded(data, preprocess)
    calibration = pixels[:CALIBRATED_ON]
    model = pretrained.model if name == "efficientnet_lite0" else calibrated(pretrained.model, calibration)
    prefix = cut_network(frozen(model, preprocess.shape), preprocess.shape).prefix
    with tempfile.TemporaryDirectory() as folder:
        ready = str(Path(folder, "ready"))
        weights = sum(tensor.nbytes for tensor in prefix.tensors.values())
        doing(f"{name}: engines up to {prefix.cuts[-1].name}, {weights / 1e6:.0f} MB of weights")
        engines = built(prefix, calibration, wanted, Path(folder))
        doing(f"{name}: the ready format")
        ingest(data, ready, Applied.to(preprocess, "uint8"), on_event=lambda _: None)
        sources = {"jpeg": Source(data, preprocess), "ready": Source(Dataset(ready), preprocess)}
        rows = one_after_another(name, sources, engines, prefix.cuts[-1].number, pixels, wanted)
        kept_pixels = decoded(data, preprocess, as_kept=True)
        for accuracy, step in (("bf16", "+ ready format"), ("int8", "+ 8 bits")):
            if step in rows:
                engine = rows[step]["engine"]
                batches = [(engines[engine], pixels)]
                if offer_of(engine).takes_pixels:
                    batches.append(
                        (of_kept(prefix, engine, kept_pixels, preprocess, wanted, Path(folder)), kept_pixels)
                    )
                alone = partial(fastest_by_itself, batches, prefix.cuts[-1].number, wanted.alone_s)
                row = streamed(name, model, Dataset(ready), preprocess, wanted, accuracy, engine, alone)
                rows[STREAMED[accuracy]] = {**row, "after": step}
    return compared(name, rows)


def built(prefix, calibration, wanted, folder):
    """Engines by their names, as far as they can be had here."""
    engines = {}
    for offer in OFFERS:
        if wanted.engines and offer.name not in (*wanted.engines.split(","), REFERENCE):
            continue
        why_not, started = absence(offer.name, "cpu"), time.perf_counter()
        if why_not is None:
            try:
                engines[offer.name] = engine_of(offer.name, prefix, calibration, wanted, folder)
            except EngineUnsupported as error:
                why_not = str(error)
        doing(f"  {offer.name}: {why_not or 'made'}, {time.perf_counter() - started:.0f} s")
    return engines


def engine_of(name, prefix, calibration, wanted, folder, **options):
    options = {"max_rows": ROWS, "threads": wanted.threads, "calibration": calibration, "folder": folder, **options}
    return build(name, prefix.graph, prefix.cuts, prefix.tensors, cut=prefix.cuts[-1].number, **options)


def of_kept(prefix, offer, pixels, preprocess, wanted, folder):
    """An engine that takes pixels as they are kept."""
    name = identity(offer, offer_of(offer).precision, pixels, preprocess.levels)
    return engine_of(name, prefix, pixels[:CALIBRATED_ON], wanted, folder, levels=preprocess.levels)


def one_after_another(name, sources, engines, cut, pixels, wanted):
    """Steps by name that read, decode and run in turn."""
    doing(f"{name}: errors, and engines alone")
    judged = pixels[CALIBRATED_ON:]
    expected = engines[REFERENCE].run(judged, cut)[0]
    errors = {offer: relative_error(engine.run(judged, cut)[0], expected) for offer, engine in engines.items()}
    batch = np.resize(pixels, (ROWS, *pixels.shape[1:]))
    rates = by_turns(wanted.rounds, {offer: partial(once, engine, batch, cut) for offer, engine in engines.items()}, 1)
    alone = {offer: statistics.median(found) for offer, found in rates.items()}
    steps = {step: (offer, source) for step, offer, source in planned(alone) if offer is not None}
    runs = {
        step: partial(in_turn, sources[source], engines[offer], cut, wanted.samples)
        for step, (offer, source) in steps.items()
    }
    doing(f"{name}: one after another")
    times = by_turns(wanted.rounds, runs, warm=1)
    return {step: row(offer, times[step], alone[offer], errors[offer]) for step, (offer, _) in steps.items()}


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


def compared(name, rows):
    """Each step relative to the one before it; a stream to the same precision one after another."""
    before, found = None, []
    for step, item in rows.items():
        earlier = rows[item.pop("after")] if "after" in item else before or item
        item["gain"] = item["images_per_s"] / earlier["images_per_s"]
        item["over_eager"] = item["images_per_s"] / rows["eager fp32"]["images_per_s"]
        found.append({"step": step, **item})
        print(f"{name:20} {said(found[-1])}", flush=True)
        before = item
    return found


def relative_error(values, reference):
    """Relative RMS of the worst sample."""
    values, reference = (item.reshape(len(item), -1).astype(np.float64) for item in (values, reference))
    return float(np.sqrt(((values - reference) ** 2).sum(1) / (reference**2).sum(1)).max())


def decoded(data, preprocess, *, as_kept=False):
    """Some samples as a network takes them, ``float32[n, C, H, W]``, or as they are kept, ``uint8[n, H, W, C]``."""
    store, count = open_store(data.url), CALIBRATED_ON + JUDGED_ON
    some = data.samples.take(np.linspace(0, len(data) - 1, count).astype(np.int64))
    channels, *sides = preprocess.shape
    into, shape, dtype = (
        (pixels_into, (*sides, channels), np.uint8) if as_kept else (decode_into, preprocess.shape, np.float32)
    )
    pixels = np.empty((count, *shape), dtype)
    # Spread, so that what is calibrated on and what is judged on hold all classes.
    for row, place in enumerate(np.random.default_rng(0).permutation(count)):
        encoded = store.read(some.objects[place], int(some.offsets[place]), int(some.lengths[place]))
        into(preprocess, encoded, pixels[row], id=row, view=None)
    return pixels


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


def in_turn(source, engine, cut, count):
    """Images a second of a loop that reads, decodes and runs in turn."""
    batch = np.empty((ROWS, *source.shape), np.float32)
    started = time.perf_counter()
    for start in range(0, count, ROWS):
        for row in range(ROWS):
            source.into(start + row, batch[row])
        engine.run(batch, cut)
    return count / (time.perf_counter() - started)


def once(engine, batch, cut):
    """Images a second of one run."""
    engine.run(batch, cut)  # whatever ran before has left its memory and threads in another state
    started = time.perf_counter()
    engine.run(batch, cut)
    return len(batch) / (time.perf_counter() - started)


def offer_of(name):
    return next(offer for offer in OFFERS if offer.name == name)


def fastest_by_itself(pairs, cut, seconds):
    """Images a second of the faster of some engines with nothing else to do, each with a batch as it takes them."""
    return max(by_itself(engine, np.resize(some, (ROWS, *some.shape[1:])), cut, seconds) for engine, some in pairs)


def by_itself(engine, batch, cut, seconds):
    engine.run(batch, cut)
    runs, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
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
        trial_s=wanted.trial_s,
    )
    options = {"accuracy": accuracy, "cut": len(cut_network(model, preprocess.shape).cuts) - 1}
    options["settings"] = LoaderSettings(cache_bytes=0, replan=False)
    options["on_event"] = lambda event: isinstance(event, PhaseStarted) and doing(f"{name}: {accuracy}, {event.name}")
    with (
        start_node((data.url,), settings) as node,
        fl.offload(model, data, preprocess=preprocess, near=node.url, **options) as job,
    ):
        doing(f"{name}: {accuracy}, streaming")
        pairs = [(alone(), streaming(job, seed, wanted.streamed_s)) for seed in range(wanted.rounds + 1)][1:]
        profile, last = job.situation.store, options["cut"]
    rates, shares = [rate for _, rate in pairs], [rate / by_itself for by_itself, rate in pairs]
    step = row(offer_name(profile.engine), rates, statistics.median(pair for pair, _ in pairs), None)
    tried = {(trial.engine, trial.cut): trial.error for trial in profile.trials}
    error = tried.get((profile.engine, last), 0.0)  # of the reference, from which errors are measured, there is none
    return step | {"error": error, "share": statistics.median(shares), "shares": shares}


def streaming(job, seed, seconds):
    """Images a second of some epochs, after the first batch; each is asked for while the one before it ends."""
    done, started = 0, None
    with closing(iter(job.epochs(ROWS, range(1000), shuffle=True, seed=seed))) as epochs:
        for batch in itertools.chain.from_iterable(epochs):
            if started is None:
                started = time.perf_counter()
                continue
            done += len(batch.labels)
            if time.perf_counter() - started > seconds:
                return done / (time.perf_counter() - started)
    raise AssertionError("no network is that fast")


def row(engine, rates, alone, error):
    return {
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


def table(found):
    head = ["network", "step", "engine", "images/s", "gain", "over eager", "engine alone", "share of it", "error"]
    rows = []
    for name, steps in found["networks"].items():
        for item in steps:
            share = item.get("share", item["images_per_s"] / item["alone"])
            figures = [item[column] for column in ("images_per_s", "gain", "over_eager", "alone")]
            rows.append([name, item["step"], item["engine"], *figures, f"{share:.0%}", f"{item['error']:.1e}"])
    return markdown(head, rows)


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table)
