"""The ready format against the images it was made from: images a second read alone, and through a node.

    python benchmarks/ready_format.py --data DIR [--model NAME] [--engine openvino-bf16] [--samples 512]

Makes ready formats of some images (pixels, and 16-bit floats), and asks a node in its own process for pixels (cut 1)
and for features (the last cut) of each, with several requests in flight: JPEGs, pixels from memory maps, pixels by
ordinary reads, 16-bit floats. The formats take turns, so that all meet the same machine. Checks that pixels are those
of the JPEGs to the bit. Beside it, decoding at reduced scale against decoding in full, of the same images enlarged to
2048 pixels as cameras make them. Processor time is given too, which neighbours on the machine change less than rates.
Writes the same as JSON with --out FILE.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import numpy as np
from networks import load
from PIL import Image

from frostline.client.http import HttpTransport
from frostline.core import REFERENCE
from frostline.core.config import NodeSettings
from frostline.datasets import Dataset
from frostline.datasets.copy.ready import ingest
from frostline.engines.machine import hardware_name
from frostline.models import cut_network, freeze
from frostline.models.artifact import digest_of, write_prefix
from frostline.node.process import start_node
from frostline.preprocess import Applied, Preprocess
from frostline.preprocess.apply import decode_into, steps_left
from frostline.stores.local import FolderStore, MmapFolder
from frostline.stores.open import open_store
from frostline.wire.messages import FeatureRequest, ProfileRequest


@dataclass(frozen=True)
class Format:
    data: Dataset
    preprocess: Preprocess


def main():
    wanted = arguments()
    images = Dataset(wanted.data)
    images = images.take(np.arange(min(wanted.samples, len(images))))
    pretrained = load(wanted.model)
    declared = pretrained.preprocess
    network = cut_network(freeze(pretrained.model.eval(), "features"), declared.shape)
    artifact = write_prefix(network.prefix)
    digest, last = digest_of(artifact), network.cuts[-1].number
    result = {
        "hardware": hardware_name("cpu"),
        "model": wanted.model,
        "engine": wanted.engine,
        "samples": len(images),
        "load": os.getloadavg()[0],
    }
    print(f"{wanted.model}, {len(images)} images, {hardware_name('cpu')}, load {result['load']:.1f}")
    with tempfile.TemporaryDirectory(dir=wanted.scratch) as scratch:
        formats, result["ingest"] = made(images, declared, Path(scratch))
        roots = tuple(dict.fromkeys(format.data.url for format in formats.values()))
        settings = NodeSettings(memory_bytes=wanted.memory << 20)
        with start_node(roots, settings) as node:
            transport = HttpTransport(node.url)
            transport.put_prefix(digest, artifact)
            if wanted.engine != REFERENCE:  # have the node make it ready
                features = next(requests(formats["jpeg"], last, digest, 32, wanted.engine))
                transport.profile(ProfileRequest(features=features))
            result["same_pixels"] = same_pixels(transport, formats, wanted)
            keys = ("alone", "cut_1", f"cut_{last}", "alone_cpu_ms", "cut_1_cpu_ms", f"cut_{last}_cpu_ms")
            measured = {name: {key: [] for key in keys} for name in formats}
            for cut in (1, last):
                asked(transport, formats["jpeg"], cut, digest, wanted)  # warm
            for _ in range(wanted.rounds):
                for name, format in formats.items():
                    rates = measured[name]
                    seconds, cpu_s = alone(format)
                    rates["alone"].append(len(images) / seconds)
                    rates["alone_cpu_ms"].append(cpu_s / len(images) * 1e3)
                    for cut in (1, last):
                        before = cpu_of(node.pid)
                        rates[f"cut_{cut}"].append(len(images) / asked(transport, format, cut, digest, wanted))
                        rates[f"cut_{cut}_cpu_ms"].append((cpu_of(node.pid) - before) / len(images) * 1e3)
    result["formats"] = {name: {key: spread(values) for key, values in item.items()} for name, item in measured.items()}
    print("median (best) images/s, and processor ms an image in the node; alone is one thread without a node")
    for name, item in result["formats"].items():
        ways = [
            f"{way.replace('_', ' ')} {item[way]['median']:.0f} ({item[way]['most']:.0f}), "
            f"{item[f'{way}_cpu_ms']['median']:.2f} ms"
            for way in ("alone", "cut_1", f"cut_{last}")
        ]
        print(f"{name:<14}" + "; ".join(ways))
    result["reduced"] = reduced(images, declared, wanted.rounds)
    if wanted.out is not None:
        wanted.out.write_text(json.dumps(result, indent=2) + "\n")


def made(images, declared, scratch):
    """The formats to compare, and what making the ready one took."""
    figures = {}
    for dtype in ("uint8", "fp16"):
        done = ingest(images, scratch / dtype, Applied.to(declared, dtype), observe=lambda _: None)
        figures[dtype] = {"images_per_s": done.samples / done.seconds, "bytes": done.nbytes}
        rate, each = done.samples / done.seconds, done.nbytes / done.samples / 1e3
        print(f"ingest {dtype}: {rate:.0f} images/s, {each:.0f} kB each")
    figures["jpeg"] = {"bytes": images.samples.encoded_bytes}
    pixels, half = Dataset(scratch / "uint8"), Dataset(scratch / "fp16")
    # The same objects under another root, where everybody may write to them, so that they are not mapped.
    (scratch / "read").mkdir()
    for path in (scratch / "uint8").rglob("*"):
        if path.is_file():
            copy = scratch / "read" / path.relative_to(scratch / "uint8")
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    read = Dataset(scratch / "read")
    formats = {
        "jpeg": Format(images, declared),
        "ready mapped": Format(pixels, steps_left(declared, pixels.manifest.applied)),
        "ready read": Format(read, steps_left(declared, read.manifest.applied)),
        "ready fp16": Format(half, steps_left(declared, half.manifest.applied)),
    }
    return formats, figures


def alone(format):
    """Seconds to read and decode every sample in one thread, without a node; and of its processor."""
    store = open_store(format.data.url)
    if format.preprocess.stored is not None and isinstance(store, FolderStore):
        store = MmapFolder(store)
    samples, out = format.data.samples, np.empty(format.preprocess.shape, np.float32)
    started, cpu = time.perf_counter(), time.thread_time()
    for row in range(len(samples)):
        encoded = store.read(samples.objects[row], int(samples.offsets[row]), int(samples.lengths[row]))
        decode_into(format.preprocess, encoded, out, id=int(samples.ids[row]), view=None)
    return time.perf_counter() - started, time.thread_time() - cpu


def reduced(images, declared, rounds):
    """Images a second of one thread, of large photographs decoded in full and at reduced scale."""
    first, *rest = declared.steps
    ways = {"full": declared, "reduced": Preprocess(steps=(replace(first, reduced=True), *rest))}
    store, large = open_store(images.url), []
    for row in range(min(32, len(images))):
        encoded = store.read(images.samples.objects[row], 0, int(images.samples.lengths[row]))
        photograph, sink = Image.open(BytesIO(encoded)).convert("RGB"), BytesIO()
        scale = 2048 / max(photograph.size)
        photograph.resize([round(scale * side) for side in photograph.size]).save(sink, "JPEG", quality=90)
        large.append(sink.getvalue())
    out, rates = np.empty(declared.shape, np.float32), {name: [] for name in ways}
    for _ in range(rounds):
        for name, preprocess in ways.items():
            started = time.perf_counter()
            for encoded in large:
                decode_into(preprocess, encoded, out, id=0, view=None)
            rates[name].append(len(large) / (time.perf_counter() - started))
    found = {name: spread(values) for name, values in rates.items()}
    print(f"2048 pixels: full {found['full']['median']:.0f}/s, reduced {found['reduced']['median']:.0f}/s, one thread")
    return found


def asked(transport, format, cut, digest, wanted):
    """Seconds until the node has answered for every sample."""

    def one(request):
        return sum(len(batch) for batch in transport.features(request))

    started = time.perf_counter()
    with ThreadPoolExecutor(wanted.in_flight) as threads:
        rows = sum(threads.map(one, requests(format, cut, digest, wanted.per_request, wanted.engine)))
    assert rows == len(format.data)
    return time.perf_counter() - started


def requests(format, cut, digest, size, engine=REFERENCE):
    samples = format.data.samples
    for start in range(0, len(samples), size):
        yield FeatureRequest(
            data=format.data.url,
            samples=samples.take(np.arange(start, min(start + size, len(samples)))),
            prefix=digest if cut > 1 else None,
            cut=cut,
            preprocess=format.preprocess.to_json(),
            engine=engine if cut > 1 else REFERENCE,
        )


def same_pixels(transport, formats, wanted):
    """Whether pixels of the ready format are those of the JPEGs to the bit."""

    def pixels(format):
        return [
            tensor.copy()
            for request in requests(format, 1, None, wanted.per_request)
            for batch in transport.features(request)
            for tensor in batch.tensors
        ]

    expected = np.concatenate(pixels(formats["jpeg"]))
    same = all(
        np.array_equal(expected, np.concatenate(pixels(formats[name]))) for name in ("ready mapped", "ready read")
    )
    print(f"pixels of the ready format are those of the JPEGs to the bit: {same}")
    return same


def cpu_of(pid):
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spread(values):
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--model", default="demo:efficientnet_lite0")
    parser.add_argument("--engine", default=REFERENCE, help="that runs the network at the node")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=4)
    parser.add_argument("--per-request", type=int, default=64)
    parser.add_argument("--memory", type=int, default=2048, help="MiB")
    parser.add_argument("--scratch", type=Path, help="folder on the disk to measure")
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
