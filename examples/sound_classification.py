"""Sounds in class folders: a ResNet over log-mel spectrograms, which a node beside the data computes.

python examples/sound_classification.py sounds --seconds 2.5
"""

import argparse

import torch
import torchvision

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("sounds", help="folder with a folder of WAV, FLAC or OGG files for each class")
parser.add_argument("--seconds", type=float, default=2.5, help="length to which each sound is cut or filled")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--weights", default="DEFAULT", help="weights of torchvision; 'none' for random ones")
parser.add_argument("--near", help="address of a node beside the data, such as http://store-1:7070")
asked = parser.parse_args()

data = fl.Dataset(asked.sounds)
mels = fl.preprocess.audio(asked.seconds)
model = torchvision.models.resnet18(weights=None if asked.weights == "none" else asked.weights)
colours = model.conv1.weight.detach()
model.conv1 = torch.nn.Conv2d(1, 64, 7, stride=2, padding=3, bias=False)
model.conv1.weight.data = colours.sum(1, keepdim=True)  # a spectrogram has one channel
model.fc = torch.nn.Linear(model.fc.in_features, len(data.classes))
model = fl.freeze(model, until="layer3", input_shape=mels.inputs)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)

with fl.offload(model, data, preprocess=mels, near=asked.near) as job:
    for epoch in range(asked.epochs):
        right = 0
        for x, y in job.loader(16, shuffle=True, epoch=epoch):
            scores = job.head(x)
            loss = torch.nn.functional.cross_entropy(scores, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            right += int((scores.argmax(1) == y).sum())
        print(f"epoch {epoch + 1}: loss {loss.item():.3f}, {right} of {len(data)} sounds were right")
