"""LoRA on the last two blocks of a vision transformer over a thin link: bytes and seconds of each epoch.

    python benchmarks/lora_link.py --data DIR [--mbit 100] [--samples 240] [--epochs 3] [--dtype float32] [--out FILE]

Node and trainer run in network namespaces of their own, each on one core, joined by a link that tc shapes. The node
reads photographs from DIR. The same loop trains LoRA and a fresh head, over the same samples in the same order:

- defaults: ``fl.offload`` with the node's address and nothing else;
- photographs: every epoch ships the encoded photographs, and the trainer runs the frozen blocks (``cut=0``, no cache),
  which is what a loop with a remote reader does;
- photographs, features kept: the same, but features stay in the trainer's memory.

Bytes are counted at the interface. Weights are random, which changes no byte and no second. Needs root, peft and timm.
Writes JSON with --out FILE.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from links import STORE, STORE_ADDRESS, TRAINER, Inside, ShapedLink, answer_questions, received_bytes

BATCH = 16
WAYS = {
    "defaults": {},
    "photographs": {"cut": 0, "cache_bytes": 0},
    "photographs, features kept": {"cut": 0},
}


def main():
    wanted = arguments()
    if wanted.inside:
        {"node": node_inside, "trainer": trainer_inside}[wanted.inside](wanted)
        return
    shared = ["--data", wanted.data, "--samples", str(wanted.samples), "--dtype", wanted.dtype]
    rows = []
    with ShapedLink() as link:
        link.rate(wanted.mbit)
        with Inside(STORE, 0, __file__, "--inside", "node", *shared) as node:
            url = node.answer()["url"]
            for way, options in WAYS.items():
                with Inside(TRAINER, 1, __file__, "--inside", "trainer", *shared) as trainer:
                    row = trainer.ask(do="train", url=url, epochs=wanted.epochs, options=options)
                rows.append({"way": way, **row})
                print(said(rows[-1]), flush=True)
    first = rows[0]["losses"]
    for row in rows[1:]:
        apart = max(abs(ours - theirs) for ours, theirs in zip(first, row["losses"], strict=True))
        print(f"losses of {row['way']!r} differ by at most {apart:.2g} from those of the defaults")
    if wanted.out:
        about = {"command": sys.argv[1:], "mbit": wanted.mbit, "rows": rows}
        Path(wanted.out).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", required=True)
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--out")
    parser.add_argument("--inside", choices=("node", "trainer"), help=argparse.SUPPRESS)
    return parser.parse_args()


def said(row):
    epochs = "; ".join(f"{epoch['seconds']:.1f} s, {epoch['bytes'] / 1e6:.2f} MB" for epoch in row["epochs"])
    return f"{row['way']}: begins after {row['setup_s']:.1f} s, {row['setup_bytes'] / 1e6:.2f} MB; epochs {epochs}"


def node_inside(wanted):
    from frostline.core.config import NodeSettings
    from frostline.node.process import start_node

    roots = (str(Path(wanted.data).resolve()),)
    with start_node(roots, NodeSettings(allow_anonymous=True), host=STORE_ADDRESS) as node:
        print(json.dumps({"url": node.url}), flush=True)
        sys.stdin.read()


def trainer_inside(wanted):
    answer_questions({"train": lambda **question: train(wanted, **question)})


def network(classes, dtype):
    """A ViT of twelve blocks with LoRA on the last two, and a head that is trained."""
    import timm
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=classes).to(getattr(torch, dtype))
    tuned = r"blocks\.1[01]\.attn\.(qkv|proj)"
    return get_peft_model(model, LoraConfig(target_modules=tuned, r=8, modules_to_save=["head"])).train()


def train(wanted, *, url, epochs, options):
    """One job: what it takes to begin, and each epoch."""
    import torch

    import frostline as fl
    from frostline.core.config import LoaderSettings

    started, before = time.perf_counter(), received_bytes()
    data = fl.Dataset(wanted.data)
    part = data.split(wanted.samples / len(data), 0)[1]
    model = network(len(data.classes), wanted.dtype)
    settings = {"settings": LoaderSettings(cache_bytes=options.pop("cache_bytes"))} if "cache_bytes" in options else {}
    with fl.offload(
        model, part, preprocess=fl.preprocess.imagenet(224), near=url, epochs=epochs, **settings, **options
    ) as job:
        tuned = [parameter for parameter in job.head.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(tuned, lr=0.01)
        setup = {"setup_s": time.perf_counter() - started, "setup_bytes": received_bytes() - before}
        passes, losses = [], []
        for epoch in range(epochs):
            started, before = time.perf_counter(), received_bytes()
            for batch in job.loader(BATCH, shuffle=True, seed=0, epoch=epoch):
                loss = torch.nn.functional.cross_entropy(job.head(batch.features).float(), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            passes.append({"seconds": time.perf_counter() - started, "bytes": received_bytes() - before})
        explained = str(job.explain())
    return {**setup, "epochs": passes, "losses": losses, "explained": explained}


if __name__ == "__main__":
    main()
