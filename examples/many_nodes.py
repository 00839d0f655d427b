"""Several nodes that share the work: each keeps a part of the data, and one that dies is left out.

python examples/many_nodes.py photos --near http://store-1:7070 --near http://store-2:7070
"""

import argparse

import torch
import torchvision

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("photos", help="folder or bucket that all nodes read, with a folder of images for each class")
parser.add_argument("--near", action="append", required=True, help="address of a node; once for each")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--weights", default="DEFAULT", help="weights of torchvision; 'none' for random ones")
asked = parser.parse_args()

data = fl.Dataset(asked.photos, near=asked.near)  # a node lists the data, too
model = torchvision.models.mobilenet_v3_small(weights=None if asked.weights == "none" else asked.weights)
model.classifier[3] = torch.nn.Linear(model.classifier[3].in_features, len(data.classes))
model = fl.freeze(model, until="features")
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)

with fl.offload(model, data, near=asked.near) as job:
    for epoch in range(asked.epochs):
        for x, y in job.loader(16, shuffle=True, epoch=epoch):
            loss = torch.nn.functional.cross_entropy(job.head(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}")
    for node in job.statistics().nodes:
        print(f"{node.url}: {node.requests} requests")
