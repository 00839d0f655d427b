"""What a head of the user's own code costs a training step, beside the same layers called by hand.

    python benchmarks/head_cost.py [--rows 64] [--rounds 6] [--out FILE]

A ResNet-18 is frozen up to layer3 and a ViT-B/16 up to its tenth block. By turns a step of SGD is timed on activations
at the frost line: through ``job.head``, which runs the network's own ``forward`` with its frozen modules skipped, and
through the trained layers as one would call them by hand. One thread, memory that is freed is kept. What is beside by
hand is by seconds of a processor, which others on the machine change less. It does not grow with the batch, so
`--rows 2 --rounds 40` shows it best.
"""

import importlib
import time

import torch
from harness import doing, markdown, median, run, spread

NETWORKS = {"resnet18": "layer3", "vit_b_16": "encoder.layers.encoder_layer_9"}
WAYS = ("own code", "by hand")
QUICK = {"networks": "resnet18", "rows": 2, "rounds": 1}
WARM_UP = 2


def options(parser):
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--rows", type=int, default=64)


def measure(wanted):
    from frostline.engines.machine import keep_freed_memory
    from frostline.models import cut_network, freeze

    keep_freed_memory()
    torch.set_num_threads(1)
    importlib.import_module("support.torchvision_cpu.sitecustomize")  # a wheel for CUDA imports beside torch without it
    models, rows = importlib.import_module("torchvision.models"), []
    for name in wanted.networks.split(","):
        model = getattr(models, name)(num_classes=6).train()
        freeze(model, NETWORKS[name], input_shape=(3, 224, 224))
        network = cut_network(model, (3, 224, 224))
        batch = [torch.randn(wanted.rows, *shape) for shape in network.frost_line.shapes]
        labels = torch.randint(0, 6, (wanted.rows,))
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.01)
        heads = dict(zip(WAYS, (network.head, by_hand(name, model)), strict=True))
        for number in range(WARM_UP + wanted.rounds):
            doing(f"{name}, round {number + 1}")
            for way, head in heads.items():
                began, processor = time.perf_counter(), time.process_time()
                loss = torch.nn.functional.cross_entropy(head(*batch), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if number >= WARM_UP:
                    seconds, processor_s = time.perf_counter() - began, time.process_time() - processor
                    rows.append({"network": name, "way": way, "seconds": seconds, "processor_s": processor_s})
        yield {"rows": rows}


def by_hand(name, model):
    """The trained layers, called as a script would."""
    if name == "resnet18":
        return lambda values: model.fc(torch.flatten(model.avgpool(model.layer4(values)), 1))

    def head(values):
        for layer in list(model.encoder.layers)[10:]:
            values = layer(values)
        return model.heads(model.encoder.ln(values)[:, 0])

    return head


def table(found):
    lines = []
    for name in dict.fromkeys(row["network"] for row in found["rows"]):
        of = {way: [row for row in found["rows"] if (row["network"], row["way"]) == (name, way)] for way in WAYS}
        hand = median(of["by hand"], "processor_s")
        for way, rows in of.items():
            more = median(rows, "processor_s") - hand
            times = (spread([row[kind] for row in rows]) for kind in ("seconds", "processor_s"))
            lines.append([name, way, *times, f"{more * 1e3:+.1f} ms", f"{more / hand:+.1%}"])
    return markdown(["network", "head", "seconds a step", "of a processor", "beside by hand", "of that"], lines)


if __name__ == "__main__":
    run(__doc__, measure, quick=QUICK, options=options, table=table, data=False)
