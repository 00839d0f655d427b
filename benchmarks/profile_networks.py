"""What every cut of seven networks costs on this machine: one file a network, from which plans can be made anywhere.

    OMP_NUM_THREADS=1 python benchmarks/profile_networks.py --data DIR [--networks resnet18 vit_small] [--out DIR]

Measures, on eight photographs of DIR (images in class folders) and with one thread: reading and decoding, the seconds
up to every cut (one instrumented run of batch 8, the median of three), the memory on both sides of it, the codecs
where they may matter, and one step of training the classifier. All but the classifier is frozen. Both sides of the
situation have the same profile, and its link is a round 1 Gbit/s: `benchmarks/what_if.py` asks what other speeds and
links would give. Weights are random, with BatchNorm statistics calibrated on the photographs; how many zeros a ReLU
leaves, and so what the sparse codecs save, is therefore not that of trained networks.

Where torchvision was built for CUDA and torch was not, `PYTHONPATH=tests/support/torchvision_cpu` lets it be imported.
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from networks import NETWORKS, calibrated, frozen, load

from frostline.datasets import Dataset
from frostline.engines.codec_costs import codec_costs, worth_packing
from frostline.engines.machine import hardware_name, keep_freed_memory
from frostline.engines.measure import cut_seconds, cut_values
from frostline.engines.torch import TorchEngine
from frostline.models import cut_network
from frostline.planning import Link, Situation
from frostline.preprocess.apply import decode_into
from frostline.profiles import CutCost, Profile
from frostline.stores.open import open_store
from frostline.wire.codecs import CODECS

SEVEN = [name for name in NETWORKS if name != "efficientnet_lite0"]
# Of this one thread alone: on a machine that is busy with other things the time on the wall would be theirs too.
CLOCK = time.thread_time
# A photograph of about 500 x 375 as a JPEG: the mean that the cuts' bytes are compared with.
ENCODED_BYTES = 110_000
ROWS, REPEATS = 8, 3
# The node's default, of which the memory counts the largest batch.
DEVICE_BATCH = 32
CODEC_ROWS = 4
# Enough for any of them: the question is speed.
MEMORY_BYTES = 64 << 30


def main():
    wanted = arguments()
    torch.set_num_threads(1)
    keep_freed_memory()
    wanted.out.mkdir(parents=True, exist_ok=True)
    for name in wanted.networks:
        started = CLOCK()
        situation = measured(NETWORKS[name], Dataset(wanted.data))
        path = wanted.out / f"{name}.json"
        path.write_text(json.dumps(rounded(situation.to_json()), separators=(",", ":"), allow_nan=False) + "\n")
        last = situation.store.cuts[-1]
        print(
            f"{name}: {len(situation.cuts)} cuts, {len(situation.store.codecs)} pairs of cut and codec, "
            f"{last.seconds * 1e3:.1f} ms to the frost line ({situation.frost_line.bytes_per_sample} B), "
            f"head {situation.head_s * 1e3:.3f} ms, measured in {CLOCK() - started:.0f} s of CPU"
        )


def measured(name, data):
    pretrained = load(name)
    read_s, decode_s, pixels = decoded(data, pretrained.preprocess)
    model = calibrated(pretrained.model, pixels)
    network = cut_network(frozen(model, pretrained.preprocess.shape), pretrained.preprocess.shape)
    prefix = network.prefix
    engine = TorchEngine(prefix.graph, prefix.cuts, prefix.tensors, max_rows=DEVICE_BATCH)
    leaves = [prefix.tensors[path] for _, path in prefix.graph.leaves]
    seconds = cut_seconds(prefix.graph, leaves, prefix.cuts, pixels, repeats=REPEATS, clock=CLOCK)
    packable = worth_packing(prefix.cuts, ENCODED_BYTES)
    values = cut_values(prefix.graph, leaves, packable, pixels[:CODEC_ROWS])
    features = engine.run(pixels, network.frost_line.number)[0]
    profile = Profile(
        hardware=f"{hardware_name('cpu').rpartition(',')[0]}, 1 thread",
        host="",
        engine=engine.name,
        device_batch=DEVICE_BATCH,
        read_s=read_s,
        cuts=cut_costs(prefix.cuts, seconds, decode_s, engine),
        codecs=codec_costs(values, packable, CODECS, clock=CLOCK),
    )
    return Situation(
        cuts=network.cuts,
        encoded_bytes=ENCODED_BYTES,
        store=profile,
        trainer=profile,
        link=Link(bytes_per_s=125e6, round_trip_s=0.001),
        same_host=False,
        memory_bytes=MEMORY_BYTES,
        head_s=head_seconds(network.head, torch.from_numpy(features.copy())),
    )


def decoded(data, preprocess):
    """Seconds of reading and of decoding a sample, and the pixels of eight."""
    store = open_store(data.url)
    some = data.samples.take(np.linspace(0, len(data) - 1, ROWS).astype(np.int64))
    pixels = np.empty((ROWS, *preprocess.shape), np.float32)
    marks = []
    for _ in range(REPEATS + 1):
        read_s = decode_s = 0.0
        for row, path in enumerate(some.objects):
            started = CLOCK()
            encoded = store.read(path, int(some.offsets[row]), int(some.lengths[row]))
            between = CLOCK()
            decode_into(preprocess, encoded, pixels[row], id=row, view=None)
            read_s, decode_s = read_s + between - started, decode_s + CLOCK() - between
        marks.append((read_s / ROWS, decode_s / ROWS))
    return (*np.median(marks[1:], axis=0).tolist(), pixels)


def cut_costs(cuts, seconds, decode_s, engine):
    middle = np.median(seconds, axis=0)
    spread = np.subtract(*np.percentile(seconds, (75, 25), axis=0))
    costs = [
        CutCost(
            number=cut.number,
            seconds=decode_s + float(middle[place]),
            spread_s=float(spread[place]),
            fixed_bytes=engine.weight_bytes + engine.footprint(cut.number).fixed_bytes,
            bytes_per_sample=engine.footprint(cut.number).bytes_per_sample + cut.bytes_per_sample,
            remaining_fixed_bytes=engine.weight_bytes + engine.remaining_footprint(cut.number).fixed_bytes,
            remaining_bytes_per_sample=engine.remaining_footprint(cut.number).bytes_per_sample,
        )
        for place, cut in enumerate(cuts)
    ]
    encoded = CutCost(
        number=0,
        seconds=0.0,
        spread_s=0.0,
        fixed_bytes=0,
        bytes_per_sample=0,
        remaining_fixed_bytes=costs[0].remaining_fixed_bytes,
        remaining_bytes_per_sample=costs[0].remaining_bytes_per_sample,
    )
    return (encoded, *costs)


def head_seconds(head, features):
    """Of one step of Adam on a batch of eight, a sample."""
    optimizer = torch.optim.Adam([parameter for parameter in head.parameters() if parameter.requires_grad])
    labels = torch.zeros(len(features), dtype=torch.int64)
    marks = []
    for _ in range(REPEATS + 1):
        started = CLOCK()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(head(features), labels).backward()
        optimizer.step()
        marks.append(CLOCK() - started)
    return float(np.median(marks[1:])) / len(features)


def rounded(value):
    """Floats in six digits: more would be noise, and would double the file."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--networks", nargs="+", choices=SEVEN, default=SEVEN)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "profiles")
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("run it with OMP_NUM_THREADS=1, so that nothing beside torch takes more than one thread either")
    return parser.parse_args()


if __name__ == "__main__":
    main()
