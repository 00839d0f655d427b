"""Cross-validation: a copy of the head for each fold, over features that are computed once for all of them.

python examples/k_fold.py photos --folds 5
"""

import argparse
import copy

import torch
import torchvision

import frostline as fl

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("photos", help="folder with a folder of images for each class, here or in a store")
parser.add_argument("--folds", type=int, default=5)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--weights", default="DEFAULT", help="weights of torchvision; 'none' for random ones")
parser.add_argument("--near", help="address of a node beside the data, such as http://store-1:7070")
asked = parser.parse_args()

data = fl.Dataset(asked.photos)
model = torchvision.models.resnet18(weights=None if asked.weights == "none" else asked.weights)
model.fc = torch.nn.Linear(model.fc.in_features, len(data.classes))
model = fl.freeze(model, until="layer4")
folds = list(data.split({str(fold): 1 / asked.folds for fold in range(asked.folds)}).values())

with fl.offload(model, data, preprocess=fl.preprocess.imagenet(224), near=asked.near) as job:
    scores = []
    for held_out in folds:
        first, *others = [fold for fold in folds if fold is not held_out]
        head = copy.deepcopy(job.head)  # its own weights: what a fold learns the next one does not know
        optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
        for epoch in range(asked.epochs):
            for batch in job.loader(16, data=first.concatenate(*others), shuffle=True, epoch=epoch):
                loss = torch.nn.functional.cross_entropy(head.train()(batch.features), batch.labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        head.eval()
        with torch.no_grad():
            right = sum(
                (head(batch.features).argmax(1) == batch.labels).sum() for batch in job.loader(16, data=held_out)
            )
        scores.append(int(right) / len(held_out))
        print(f"fold {len(scores)}: {scores[-1]:.1%} of {len(held_out)} photographs are right")
    counts = job.statistics()
    print(f"mean {sum(scores) / len(scores):.1%}; {counts.from_cache} of {counts.samples} samples came from memory")
