"""Training loops over features in memory, without a node: real digits, blurred so that not all can be told apart."""

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn

from frostline.loaders import Batch
from frostline.ordering import Order
from frostline.ordering.splits import count_labels, split_by_class
from frostline.training.loop import Loop


class Kept:
    """Features and labels in memory, handed out as a loader does."""

    def __init__(self, features, labels, order, batch_size):
        self._rows = (features, labels)
        self._order = torch.from_numpy(order.indices(0, len(labels)))
        self._batch_size = batch_size

    def __len__(self):
        return len(self._order.split(self._batch_size))

    def __iter__(self):
        for rows in self._order.split(self._batch_size):
            features, labels = (some[rows] for some in self._rows)
            yield Batch(features=features, labels=labels, ids=rows)


def digits():
    """Real handwritten digits, blurred by noise so that not all of them can be told apart."""
    features, labels = load_digits(return_X_y=True)
    noise = np.random.default_rng(0).normal(0, 4, features.shape)
    return torch.from_numpy((features + noise).astype(np.float32) / 8), torch.from_numpy(labels)


def divided(labels, seed):
    counted = count_labels(lambda: iter([labels.numpy()]))
    return torch.from_numpy(split_by_class(counted, [0.8, 0.2], seed) == 1)


def a_loop(recipe, on_event, *, features=None, labels=None, keeps_features=True, seed=0, head=None, **how):
    if features is None:
        features, labels = digits()
    held_out = divided(labels, seed)
    torch.manual_seed(seed)
    head = nn.Sequential(nn.Dropout(0.2), nn.Linear(features.shape[1], int(labels.max()) + 1)) if head is None else head

    def batches(rows, epoch, *, shuffle):
        order = Order(size=int(rows.sum()), seed=seed, epoch=epoch, shuffle=shuffle)
        return Kept(features[rows], labels[rows], order, recipe.batch_size)

    loop = Loop(
        recipe,
        head,
        train=lambda epoch: batches(~held_out, epoch, shuffle=True),
        held_out=lambda epoch: batches(held_out, epoch, shuffle=False),
        keeps_features=keeps_features,
        on_event=on_event,
        **how,
    )
    return loop, head, (features[held_out], labels[held_out])
