"""A node in its own process against a plain loop on the same machine, and its loopback throughput.

    python benchmarks/node.py --data DIR [--model demo:efficientnet_lite0] [--samples 512]

Prints samples a second of a plain loop (Pillow, then the frozen network in eager torch, one batch of 32 after
another), of a node with several requests in flight, and their ratio; then MB/s at cuts 0 and 1. The rounds take
turns, so that both meet the same machine. Writes the same as JSON with --out FILE.
"""

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from networks import load

from frostline.client.http import HttpTransport
from frostline.core.config import NodeSettings
from frostline.datasets import Dataset
from frostline.engines.machine import hardware_name, keep_freed_memory
from frostline.models import cut_network, freeze
from frostline.models.artifact import digest_of, write_prefix
from frostline.node.process import start_node
from frostline.preprocess.apply import decode_into
from frostline.stores.open import open_store
from frostline.wire.messages import FeatureRequest


def main():
    wanted = arguments()
    if wanted.keep_freed:
        keep_freed_memory()
    data = Dataset(wanted.data)
    pretrained = load(wanted.model)
    preprocess = pretrained.preprocess
    model = freeze(pretrained.model.eval(), "features")
    network = cut_network(model, preprocess.shape)
    artifact = write_prefix(network.prefix)
    digest = digest_of(artifact)
    samples = data.samples.take(np.arange(wanted.samples) % len(data))
    samples.ids[:] = np.arange(wanted.samples)
    print(f"{wanted.model}, {wanted.samples} samples, {hardware_name('cpu')}, load {os.getloadavg()[0]:.1f}")
    settings = NodeSettings(
        memory_bytes=wanted.memory << 20, decode_threads=wanted.decode_threads, compute_threads=wanted.compute_threads
    )
    with start_node((data.url,), settings) as node:
        transport = HttpTransport(node.url)
        transport.put_prefix(digest, artifact)

        def requests(cut, size):
            for start in range(0, len(samples), size):
                rows = np.arange(start, min(start + size, len(samples)))
                yield FeatureRequest(
                    data=data.url,
                    samples=samples.take(rows),
                    prefix=digest if cut > 1 else None,
                    cut=cut,
                    preprocess=preprocess.to_json(),
                )

        def at_node(cut):
            def one(request):
                return sum(batch.nbytes for batch in transport.features(request))

            started = time.perf_counter()
            with ThreadPoolExecutor(wanted.in_flight) as threads:
                nbytes = sum(threads.map(one, requests(cut, wanted.per_request)))
            return time.perf_counter() - started, nbytes

        last = network.cuts[-1].number
        at_node(last)  # warm
        ratios, plain_rates, node_rates = [], [], []
        for _ in range(wanted.rounds):
            plain_s = plain(model, preprocess, data, samples)
            node_s, _ = at_node(last)
            ratios.append(plain_s / node_s)
            plain_rates.append(len(samples) / plain_s)
            node_rates.append(len(samples) / node_s)
            print(f"plain {len(samples) / plain_s:.1f}/s, node {len(samples) / node_s:.1f}/s, ratio {ratios[-1]:.3f}")
        print(f"ratio: median {statistics.median(ratios):.3f} of {len(ratios)}, {min(ratios):.3f} to {max(ratios):.3f}")
        result = {
            "hardware": hardware_name("cpu"),
            "settings": {name: value for name, value in vars(wanted).items() if name not in ("data", "out")},
            "plain_samples_per_s": statistics.median(plain_rates),
            "node_samples_per_s": statistics.median(node_rates),
            "ratios": ratios,
            "ratio": statistics.median(ratios),
        }
        for cut in (0, 1):
            at_node(cut)
            seconds, nbytes = min(at_node(cut) for _ in range(wanted.rounds))
            print(f"cut {cut}: {len(samples) / seconds:.0f} samples/s, {nbytes / seconds / 1e6:.0f} MB/s")
            result[f"cut_{cut}"] = {"samples_per_s": len(samples) / seconds, "bytes_per_s": nbytes / seconds}
    if wanted.out is not None:
        wanted.out.write_text(json.dumps(result, indent=2) + "\n")


def plain(model, preprocess, data, samples):
    """Seconds of one batch of 32 after another: read, decode, run the whole network."""
    store = open_store(data.url)
    model.eval()
    started = time.perf_counter()
    for start in range(0, len(samples), 32):
        rows = range(start, min(start + 32, len(samples)))
        pixels = np.empty((len(rows), *preprocess.shape), np.float32)
        for place, row in enumerate(rows):
            encoded = store.read(samples.objects[row], int(samples.offsets[row]), int(samples.lengths[row]))
            decode_into(preprocess, encoded, pixels[place], id=int(samples.ids[row]), view=None)
        with torch.inference_mode():
            model(torch.from_numpy(pixels))
    return time.perf_counter() - started


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="demo:efficientnet_lite0")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--per-request", type=int, default=64)
    parser.add_argument("--memory", type=int, default=2048, help="MiB")
    parser.add_argument("--decode-threads", type=int, default=os.cpu_count())
    parser.add_argument("--compute-threads", type=int, default=os.cpu_count())
    parser.add_argument("--keep-freed", action="store_true", help="the plain loop keeps freed memory, as nodes do")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
