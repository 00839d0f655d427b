"""LoRA on the last two blocks of a vision transformer over a thin link: bytes and seconds of each epoch.

    python benchmarks/lora_link.py --data DIR [--mbit 100] [--samples 240] [--epochs 3] [--dtype float32] [--out FILE]

Node and trainer run in network namespaces of their own, each on one core, joined by a link that tc shapes. The node
reads photographs from DIR. The same loop trains LoRA and a fresh head, over the same samples in the same order:

- defaults: ``fl.offload`` with the node's address and nothing else;
- photographs: every epoch ships the encoded photographs, and the trainer runs the frozen blocks (``cut=0``, no cache),
  which is what a loop with a remote reader does;
- photographs, features kept: the same, but features stay in the trainer's memory.

Bytes are counted at the interface. Weights are random, which changes no byte and no second. Needs root, peft and timm.
"""

import time

from harness import (
    Inside,
    ShapedLink,
    answer_questions,
    markdown,
    modules,
    namespaces,
    received_bytes,
    run,
    serve_node,
)

BATCH = 16
WAYS = {
    "defaults": {},
    "photographs": {"cut": 0, "cache_bytes": 0},
    "photographs, features kept": {"cut": 0},
}


QUICK = {"ways": "defaults", "samples": 16, "epochs": 2, "depth": 3}


def options(parser):
    parser.add_argument("--mbit", type=int, default=100)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--depth", type=int, default=12, help="blocks of the network")
    parser.add_argument("--ways", default=";".join(WAYS), help="with ; between them")


def measure(wanted):
    rows = []
    with ShapedLink(wanted.mbit) as link, Inside(link.store, 0, "node", wanted, address=link.address) as node:
        url = node.answer()["url"]
        for way in wanted.ways.split(";"):
            with Inside(link.trainer, 1, "trainer", wanted) as trainer:
                rows.append({"way": way, **trainer.ask(do="train", url=url, options=WAYS[way])})
            yield {"rows": rows}


def table(found):
    rows = found["rows"]
    of_epochs = [
        [f"{epoch['seconds']:.1f} s, {epoch['bytes'] / 1e6:.2f} MB" for epoch in row["epochs"]] for row in rows
    ]
    lines = [
        [row["way"], f"{row['setup_s']:.1f} s, {row['setup_bytes'] / 1e6:.2f} MB", *epochs]
        for row, epochs in zip(rows, of_epochs, strict=True)
    ]
    head = ["", "until it begins", *(f"epoch {number + 1}" for number in range(len(of_epochs[0])))]
    apart = [
        f"Losses of {row['way']!r} differ by at most {distance(rows[0], row):.2g} from those of the first."
        for row in rows[1:]
    ]
    return "\n\n".join([markdown(head, lines), *apart])


def distance(first, row):
    return max(abs(ours - theirs) for ours, theirs in zip(first["losses"], row["losses"], strict=True))


def node_inside(wanted):
    from frostline.core.config import NodeSettings

    serve_node(wanted, NodeSettings(allow_anonymous=True))


def trainer_inside(wanted):
    answer_questions({"train": lambda **question: train(wanted, **question)})


def network(classes, dtype, depth):
    """A ViT with LoRA on the last two, and a head that is trained."""
    import timm
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=classes, depth=depth).to(getattr(torch, dtype))
    tuned = rf"blocks\.({depth - 2}|{depth - 1})\.attn\.(qkv|proj)"
    return get_peft_model(model, LoraConfig(target_modules=tuned, r=8, modules_to_save=["head"])).train()


def train(wanted, *, url, options):
    """One job: what it takes to begin, and each epoch."""
    import torch

    import frostline as fl

    started, before = time.perf_counter(), received_bytes()
    data = fl.Dataset(wanted.data)
    part = data.split(min(0.999, wanted.samples / len(data)), 0)[1]
    model = network(len(data.classes), wanted.dtype, wanted.depth)
    # Each way is a first job: nothing of an earlier one is on disk.
    kept = {name: options.pop(name) for name in ("cache_bytes",) if name in options}
    settings = fl.LoaderSettings(cache_disk_bytes=0, **kept)
    with fl.offload(
        model,
        part,
        preprocess=fl.preprocess.imagenet(224),
        near=url,
        epochs=wanted.epochs,
        settings=settings,
        **options,
    ) as job:
        tuned = [parameter for parameter in job.head.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(tuned, lr=0.01)
        setup = {"setup_s": time.perf_counter() - started, "setup_bytes": received_bytes() - before}
        passes, losses = [], []
        for epoch in range(wanted.epochs):
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


INSIDE = {"node": node_inside, "trainer": trainer_inside}

if __name__ == "__main__":
    needs = (namespaces, modules("timm", "peft"))
    run(__doc__, measure, quick=QUICK, options=options, table=table, inside=INSIDE, needs=needs)
