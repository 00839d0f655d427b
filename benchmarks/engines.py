"""Every engine on the same prefix: images a second, and how far its features are from the reference's.

    python benchmarks/engines.py --data DIR [--networks resnet18 efficientnet_lite0] [--rows 8 32] [--out FILE.json]
    python benchmarks/engines.py --data DIR --device cuda --networks resnet50 vit_base --rows 32 128 256

All but the classifier of each network runs on photographs of DIR (images in class folders). Nothing is read or decoded
while an engine is timed. The engines take turns in each round, so that all meet the same machine; the figures are the
median of the rounds, the ratio to the reference within each round, at the best of the batch sizes. `--clock cpu` with
`--threads 1` counts seconds of the processor, which tells engines apart on a machine that is busy with other work too.
The error is the relative RMS of the worst of 32 photographs that no engine was calibrated on. Weights of
EfficientNet-lite0 are those of ImageNet; the others are random, with BatchNorm statistics calibrated on photographs.
The ceiling is the rate of a large product of matrices in bfloat16 on the same device, and an engine's share of it the
operations of its images over that rate, whatever precision it computes in.

Where torchvision was built for CUDA and torch was not, `PYTHONPATH=tests/support/torchvision_cpu` lets it be imported.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from networks import NETWORKS, calibrated, frozen, load
from torch.utils.flop_counter import FlopCounterMode

from frostline.core import REFERENCE
from frostline.core.errors import EngineUnsupported
from frostline.datasets import Dataset
from frostline.engines.catalog import OFFERS, absence, build
from frostline.engines.machine import hardware_name, keep_freed_memory
from frostline.models import cut_network
from frostline.preprocess.apply import decode_into, pixels_into
from frostline.stores.open import open_store

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CALIBRATED_ON, JUDGED_ON = 64, 32


def main():
    wanted = arguments()
    torch.set_num_threads(wanted.threads)
    # As a node does; without it eager torch takes up to twice the time (docs/decisions/0007).
    keep_freed_memory()
    results = {
        "hardware": hardware_name(wanted.device),
        "ceiling_flops": ceiling_flops(wanted.device),
        "torch": torch.__version__,
        "settings": {name: value for name, value in vars(wanted).items() if name not in ("data", "out")},
        "load_before": os.getloadavg()[0],
        "networks": {},
    }
    for name in wanted.networks:
        results["networks"][name] = measured(name, Dataset(wanted.data), wanted, results["ceiling_flops"])
        if wanted.out is not None:
            wanted.out.write_text(json.dumps(results, indent=1) + "\n")


def ceiling_flops(device):
    """Floating-point operations a second of a product of large bfloat16 matrices, the best of some."""
    side = 8192 if device.startswith("cuda") else 2048
    one, other = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    rates = []
    for _ in range(5):
        started = time.perf_counter()
        float((one @ other)[0, 0])  # which waits for the device
        rates.append(2 * side**3 / (time.perf_counter() - started))
    return max(rates)


def measured(name, data, wanted, ceiling):
    pretrained = load(NETWORKS[name])
    pixels = decoded(data, pretrained.preprocess, CALIBRATED_ON + JUDGED_ON)
    calibration, judged = pixels[:CALIBRATED_ON], pixels[CALIBRATED_ON:]
    model = pretrained.model if name == "efficientnet_lite0" else calibrated(pretrained.model, calibration)
    prefix = cut_network(frozen(model, pretrained.preprocess.shape), pretrained.preprocess.shape).prefix
    cut = prefix.cuts[-1].number
    print(f"\n{name}, {prefix.cuts[-1].name}, {wanted.threads} threads, load {os.getloadavg()[0]:.1f}")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.from_numpy(judged[:1]))
    with tempfile.TemporaryDirectory() as folder:
        engines, found = built(prefix, cut, calibration, wanted, Path(folder))
        expected = features(engines[REFERENCE, wanted.rows[0]], judged, wanted.rows[0], cut)
        for (offer, rows), engine in engines.items():
            if rows == wanted.rows[0]:
                found[offer]["error"] = relative_error(features(engine, judged, rows, cut), expected)
        rates = timed(engines, pixels, cut, wanted.rounds, CLOCKS[wanted.clock])
    for offer, entry in found.items():
        if "error" in entry:
            entry.update(best(offer, rates, wanted.rows))
            entry["share_of_ceiling"] = entry["images_per_s"] * counter.get_total_flops() / ceiling
        print(line(offer, entry))
    return found


def built(prefix, cut, calibration, wanted, folder):
    """Engines by their name and batch, and for each name how long its first build took, or why there is none."""
    engines, found = {}, {}
    for offer in OFFERS:
        if wanted.engines and offer.name not in (*wanted.engines, REFERENCE):
            continue
        why_not = absence(offer.name, wanted.device)
        started = time.perf_counter()
        try:
            for rows in wanted.rows if why_not is None else ():
                engines[offer.name, rows] = build(
                    offer.name,
                    prefix.graph,
                    prefix.cuts,
                    prefix.tensors,
                    cut=cut,
                    device=wanted.device,
                    max_rows=rows,
                    threads=wanted.threads,
                    calibration=calibration,
                    folder=folder,
                )
        except EngineUnsupported as error:
            why_not = str(error)
        took_s = time.perf_counter() - started
        print(f"  {offer.name}: {why_not or 'made'}, {took_s:.0f} s", file=sys.stderr, flush=True)
        found[offer.name] = {"precision": offer.precision, "build_s": took_s}
        if why_not is not None:
            found[offer.name] = {"precision": offer.precision, "why_not": why_not}
    return engines, found


def timed(engines, pixels, cut, rounds, clock=time.perf_counter):
    """Images a second of each engine in each round."""
    rates = {key: [] for key in engines}
    for turn in range(rounds + 1):
        for (name, rows), engine in engines.items():
            batch = np.resize(pixels, (rows, *pixels.shape[1:]))
            engine.run(batch, cut)  # whatever ran before has left its memory and threads in another state
            runs = max(1, 32 // rows)
            started = clock()
            for _ in range(runs):
                engine.run(batch, cut)
            if turn:  # the first round only warms up
                rates[name, rows].append(rows * runs / (clock() - started))
    return rates


def best(name, rates, sizes):
    rows = max(sizes, key=lambda size: statistics.median(rates[name, size]))
    reference = max(sizes, key=lambda size: statistics.median(rates[REFERENCE, size]))
    ratios = [rate / other for rate, other in zip(rates[name, rows], rates[REFERENCE, reference], strict=True)]
    return {
        "rows": rows,
        "images_per_s": statistics.median(rates[name, rows]),
        "by_rows": {size: statistics.median(rates[name, size]) for size in sizes},
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def line(name, entry):
    if "why_not" in entry:
        return f"{name:22} {entry['why_not']}"
    low, high = entry["ratio_range"]
    return (
        f"{name:22} {entry['images_per_s']:7.1f}/s at {entry['rows']:2}  "
        f"{entry['ratio']:5.2f}x ({low:.2f} to {high:.2f})  {entry['share_of_ceiling']:4.0%} of the ceiling  "
        f"error {entry['error']:.1e}  built in {entry['build_s']:.1f} s"
    )


def features(engine, pixels, rows, cut):
    return np.concatenate([engine.run(pixels[at : at + rows], cut)[0] for at in range(0, len(pixels), rows)])


def relative_error(values, reference):
    """Relative RMS of the worst sample."""
    values, reference = (item.reshape(len(item), -1).astype(np.float64) for item in (values, reference))
    return float(np.sqrt(((values - reference) ** 2).sum(1) / (reference**2).sum(1)).max())


def decoded(data, preprocess, rows, *, as_kept=False):
    """Some samples as a network takes them, ``float32[n, C, H, W]``, or as they are kept, ``uint8[n, H, W, C]``."""
    store = open_store(data.url)
    some = data.samples.take(np.linspace(0, len(data) - 1, rows).astype(np.int64))
    channels, *sides = preprocess.shape
    into = pixels_into if as_kept else decode_into
    pixels = (
        np.empty((rows, *sides, channels), np.uint8) if as_kept else np.empty((rows, *preprocess.shape), np.float32)
    )
    # Spread, so that what is calibrated on and what is judged on hold all classes.
    for row, place in enumerate(np.random.default_rng(0).permutation(rows)):
        encoded = store.read(some.objects[place], int(some.offsets[place]), int(some.lengths[place]))
        into(preprocess, encoded, pixels[row], id=row, view=None)
    return pixels


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=["resnet18", "efficientnet_lite0"])
    parser.add_argument("--engines", nargs="+", choices=[offer.name for offer in OFFERS], help="beside the reference")
    parser.add_argument("--device", default="cpu", help="in torch's words")
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--out", type=Path)
    wanted = parser.parse_args()
    if wanted.clock == "cpu" and wanted.threads > 1:
        parser.error("--clock cpu goes with --threads 1: threads that wait for each other take processor time too")
    return wanted


if __name__ == "__main__":
    main()
