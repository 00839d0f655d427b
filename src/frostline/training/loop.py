"""The training loop: epochs of optimiser steps on whatever hands out batches, here or beside the store."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from frostline.engines.machine.first_calls import settle_kernels
from frostline.errors import SettingError
from frostline.events import EpochsChosen, EpochTrained, Evaluated, HeadKept, Observer, StepFinished
from frostline.loaders import Batch
from frostline.processors import collector_rests
from frostline.training.objective import Classes, Objective
from frostline.wire.recipes import Recipe

__all__ = ("Batches", "Loop", "Trainable")


class Trainable(Protocol):
    """A head, as the loop needs it: a torch module, or one that came from elsewhere."""

    def train(self) -> Any:
        """Behave as in training from now on."""

    def eval(self) -> Any:
        """Behave as in evaluation from now on."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """Among them what is trained, which requires gradients."""

    def state_dict(self) -> Mapping[str, torch.Tensor]:
        """What training may change, by name: the tensors themselves, not copies."""

    def __call__(self, features: Any) -> Any:
        """The scores for the activations of a batch."""


class Batches(Protocol):
    """The batches of one epoch."""

    def __iter__(self) -> Iterator[Batch]:
        """In the seeded order."""

    def __len__(self) -> int:
        """How many there are."""


class Loop:
    """Follows a recipe. What happens is told in events, from which whoever wants it gathers losses.

    Args:
        recipe: how to train.
        head: head to train.
        train: the batches of an epoch, by its number.
        held_out: the batches to score after it; None where nothing is held out.
        keeps_features: whether a later epoch takes its features from memory or disk.
        observe: told what happens.
        objective: loss and score of the head; those of the classes of the labels by default.

    Raises:
        SettingError: The head has nothing to train.
    """

    def __init__(
        self,
        recipe: Recipe,
        head: Trainable,
        *,
        train: Callable[[int], Batches],
        held_out: Callable[[int], Batches] | None,
        keeps_features: bool = False,
        observe: Observer,
        objective: Objective | None = None,
    ) -> None:
        self._objective = objective or Classes()
        self._recipe = recipe
        self._passes = recipe.passes(keeps_features=keeps_features, has_held_out=held_out is not None)
        self._head = head
        self._train = train
        self._held_out = held_out
        self._observe = observe
        settle_kernels()  # an optimiser's first step computes too
        self._parameters = _trained(head)
        self._steps = 0
        self._scores: list[Evaluated] = []
        self._best: tuple[Evaluated, dict[str, torch.Tensor]] | None = None
        self.head_s = 0.0

    def run(self) -> None:
        """All epochs, each with the scoring behind it. What ``observe`` raises ends them.

        Where held-out loss decides how many there are, the head is the best one at the end, however it came.
        """
        torch.manual_seed(self._recipe.seed)
        if self._passes.reason:
            self._observe(EpochsChosen(epochs=self._passes.maximum, reason=self._passes.reason))
        # To make it imports torch's compiler, for a second in which the first batch is on its way.
        with ThreadPoolExecutor(1, "frostline-optimizer") as aside:
            self._epochs(aside.submit(_optimizer, self._recipe, self._parameters))

    def _epochs(self, made: Future[torch.optim.Optimizer]) -> None:
        try:
            for epoch in range(self._passes.maximum):
                self._epoch(epoch, made)
                if self._held_out is not None:
                    self._evaluate(epoch, self._held_out(epoch))
                if self._passes.are_over(self._losses):
                    break
        finally:
            self._take_best()

    def _epoch(self, epoch: int, made: Future[torch.optim.Optimizer]) -> None:
        self._head.train()
        batches = self._train(epoch)
        steps = 0 if self._passes.patience is not None else self._passes.maximum * len(batches)
        losses = []
        for batch in batches:
            started = time.perf_counter()
            optimizer = made.result()
            loss = self._objective.loss(self._head(batch.features), batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
            self.head_s += time.perf_counter() - started
            self._steps += 1
            self._observe(StepFinished(epoch=epoch, step=self._steps, steps=steps, samples=len(batch), loss=losses[-1]))
        self._observe(EpochTrained(epoch=epoch, loss=sum(losses) / max(1, len(losses))))

    @torch.no_grad()
    def _evaluate(self, epoch: int, batches: Batches) -> None:
        self._head.eval()
        tally, losses, seen = self._objective.begin(), 0.0, 0
        for batch in batches:
            losses += tally.add(self._head(batch.features), batch)
            seen += len(batch)
        loss, metric = losses / max(1, seen), self._objective.metric
        score = Evaluated(epoch=epoch, samples=seen, loss=loss, score=tally.score, metric=metric)
        self._scores.append(score)
        self._put_aside(score)
        self._observe(score)

    def _put_aside(self, score: Evaluated) -> None:
        """Copy the head where it is the best so far, and held-out loss decides."""
        if self._passes.best(self._losses) == len(self._scores) - 1:
            self._best = None  # there is room for one copy; until it is made the head itself is the best
            tensors = {name: tensor.detach().clone() for name, tensor in self._head.state_dict().items()}
            self._best = score, tensors

    @torch.no_grad()
    def _take_best(self) -> None:
        if self._best is None:
            return
        score, tensors = self._best
        for name, tensor in self._head.state_dict().items():
            tensor.copy_(tensors[name])
        self._observe(HeadKept(epoch=score.epoch, epochs=len(self._scores)))

    @property
    def _losses(self) -> list[float]:
        return [score.loss for score in self._scores]


def _trained(head: Trainable) -> list[torch.Tensor]:
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if not parameters:
        raise SettingError("the whole network is frozen, so there is nothing to train: freeze less of it (--until)")
    return parameters


def _optimizer(recipe: Recipe, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    with collector_rests():
        match recipe.optimizer:
            case "sgd":
                return torch.optim.SGD(parameters, recipe.learning_rate, momentum=0.9)
            case "adamw":
                return torch.optim.AdamW(parameters, recipe.learning_rate)
            case _:
                return torch.optim.Adam(parameters, recipe.learning_rate)
