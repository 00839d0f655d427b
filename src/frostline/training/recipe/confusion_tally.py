"""Counts which classes are taken for which, and keeps the held-out samples that were got wrong with most confidence."""

import heapq

import numpy as np
import numpy.typing as npt
import torch

from frostline.training.recipe.confusion import ConfusedPair, Confusion, Mistake

__all__ = ("ConfusionTally",)

# The counts of more classes than this would take more than 4 MB, and those of a matrix fill a report's file.
_MAX_COUNTED = 1000
_MAX_MATRIX = 100
_MAX_PAIRS = 20
_MAX_MISTAKES = 24


class ConfusionTally:
    """Gathers it over the batches of a pass, in memory that does not grow with the samples."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int32] | None = None
        self._mistakes: list[tuple[float, int, int, int]] = []
        self._samples = self._wrong = 0

    def add(self, scores: torch.Tensor, labels: torch.Tensor, ids: torch.Tensor) -> None:
        """Count a batch.

        Args:
            scores: scores ``[batch, classes]``.
            labels: true classes ``int64[batch]``.
            ids: ids of the samples ``int64[batch]``.
        """
        said = scores.argmax(1)
        shares = scores.detach().float().softmax(1)
        confidence = shares.gather(1, said[:, None])[:, 0].nan_to_num(0.0)
        self._count(scores.shape[1], labels.cpu().numpy(), said.cpu().numpy())
        wrong = said != labels
        self._samples += len(labels)
        self._wrong += int(wrong.sum())
        places = torch.where(wrong, confidence, -1.0).topk(min(_MAX_MISTAKES, int(wrong.sum()))).indices.tolist()
        found = [(float(confidence[place]), int(ids[place]), int(labels[place]), int(said[place])) for place in places]
        self._mistakes = heapq.nlargest(_MAX_MISTAKES, [*self._mistakes, *found])

    def _count(self, classes: int, true: npt.NDArray[np.int64], said: npt.NDArray[np.int64]) -> None:
        if classes > _MAX_COUNTED:
            return
        if self._counts is None:
            self._counts = np.zeros((classes, classes), np.int32)
        np.add.at(self._counts, (true, said), 1)

    @property
    def value(self) -> Confusion:
        """What was gathered so far."""
        return Confusion(
            samples=self._samples,
            wrong=self._wrong,
            matrix=self._matrix(),
            pairs=self._pairs(),
            mistakes=tuple(
                Mistake(id=id, true=true, said=said, confidence=confidence)
                for confidence, id, true, said in self._mistakes
            ),
        )

    def _matrix(self) -> tuple[tuple[int, ...], ...]:
        if self._counts is None or len(self._counts) > _MAX_MATRIX:
            return ()
        return tuple(map(tuple, self._counts.tolist()))

    def _pairs(self) -> tuple[ConfusedPair, ...]:
        if self._counts is None:
            return ()
        confused = self._counts.copy()
        np.fill_diagonal(confused, 0)
        order = np.argsort(-confused, axis=None, kind="stable")[:_MAX_PAIRS]
        true, said = np.unravel_index(order, confused.shape)
        pairs = zip(true.tolist(), said.tolist(), confused[true, said].tolist(), strict=True)
        return tuple(ConfusedPair(true=row, said=column, samples=count) for row, column, count in pairs if count)
