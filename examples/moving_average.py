"""An exponential moving average of the weights, by PyTorch's own ``AveragedModel`` over the head.

python examples/moving_average.py photos
"""

import argparse

import torch
import torchvision
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("photos", help="folder with a folder of images for each class, here or in a store")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--weights", default="DEFAULT", help="weights of torchvision; 'none' for random ones")
parser.add_argument("--near", help="address of a node beside the data, such as http://store-1:7070")
asked = parser.parse_args()

data = fl.Dataset(asked.photos)
model = torchvision.models.resnet18(weights=None if asked.weights == "none" else asked.weights)
model.fc = torch.nn.Linear(model.fc.in_features, len(data.classes))
model = fl.freeze(model, until="layer3")  # layer4 is trained, its BatchNorm too
train, held_out = data.split(0.2)

with fl.offload(model, data, preprocess=fl.preprocess.imagenet(224), near=asked.near) as job:
    average = AveragedModel(job.head, multi_avg_fn=get_ema_multi_avg_fn(0.95), use_buffers=True)
    optimizer = torch.optim.AdamW([item for item in job.head.parameters() if item.requires_grad], lr=1e-4)
    for epoch in range(asked.epochs):
        job.head.train()
        for batch in job.loader(16, data=train, shuffle=True, epoch=epoch, last="drop"):
            loss = torch.nn.functional.cross_entropy(job.head(batch.features), batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(job.head)
        for name, head in (("the weights", job.head), ("their average", average)):
            head.eval()
            with torch.no_grad():
                batches = job.loader(16, data=held_out)
                right = sum((head(batch.features).argmax(1) == batch.labels).sum() for batch in batches)
            print(f"epoch {epoch + 1}: {int(right) / len(held_out):.1%} are right by {name}")
