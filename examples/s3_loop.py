"""A plain PyTorch loop over a bucket: goes on in the middle of an epoch, in the order that it would have had.

AWS_REGION=eu-central-1 python examples/s3_loop.py s3://bucket/photos --stop-after 2
"""

import argparse
from pathlib import Path

import torch
import torchvision

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("photos", help="such as s3://bucket/photos, with a folder for each class")
parser.add_argument("--weights", default="DEFAULT", help="weights of torchvision; 'none' for random ones")
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
parser.add_argument("--stop-after", type=int, help="steps, as if the machine were taken away then")
parser.add_argument("--near", help="address of a node beside the bucket, such as http://store-1:7070")
asked = parser.parse_args()

data = fl.Dataset(asked.photos)
model = torchvision.models.mobilenet_v3_small(weights=None if asked.weights == "none" else asked.weights)
model.classifier[3] = torch.nn.Linear(model.classifier[3].in_features, len(data.classes))
model = fl.freeze(model, until="features")
optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-2)

with fl.offload(model, data, near=asked.near) as job:
    loader = job.loader(8, shuffle=True, seed=1)
    if asked.checkpoint.exists():
        kept = torch.load(asked.checkpoint)
        model.load_state_dict(kept["model"])
        loader.load_state_dict(kept["loader"])
        print(f"going on behind {kept['steps']} steps")
    steps = kept["steps"] if asked.checkpoint.exists() else 0
    for x, y in loader:
        loss = torch.nn.functional.cross_entropy(job.head(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        steps += 1
        print(f"step {steps}: loss {loss.item():.3f}")
        torch.save({"model": model.state_dict(), "loader": loader.state_dict(), "steps": steps}, asked.checkpoint)
        if steps == asked.stop_after:
            break
