"""The training loop: epochs of optimiser steps on whatever hands out batches, and the state that goes on elsewhere.

The optimisers of recipes are PyTorch's own updates on the parameters of a head, and their state by name.
"""

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from frostline.core.errors import SettingError
from frostline.core.events import EpochsChosen, EpochTrained, Evaluated, HeadSelected, Observer, StepFinished
from frostline.engines.machine import settle_kernels
from frostline.loaders import Batch
from frostline.training.objective import Objective, objective_of
from frostline.training.recipe import Confusion
from frostline.wire.recipes import Recipe

__all__ = (
    "Batches",
    "Checkpoint",
    "Checkpointer",
    "Loop",
    "Optimizer",
    "Trainable",
    "UnfrozenHead",
)


_MOMENTUM: Final = 0.9
_BETAS: Final = (0.9, 0.999)
_EPSILON: Final = 1e-8
# Where a recipe says none, as in PyTorch.
_DECAYS: Final = {"adam": 0.0, "adamw": 0.01, "sgd": 0.0}
_STEP: Final = "step"


class Optimizer:
    """Takes the steps of a recipe. For one thread at a time.

    The first object of a class of ``torch.optim`` imports PyTorch's compiler (``torch._compile._disable_dynamo``): 1.2
    seconds of a processor, a quarter of what a job takes to its first step, to mark functions that nobody compiles. The
    updates are functions that need none of it, and are called as ``torch.optim.Adam``, ``AdamW`` and ``SGD`` call them.

    Args:
        recipe: recipe with the optimiser, its learning rate and its weight decay.
        parameters: parameters that it trains; their place here is their number in the state.
    """

    def __init__(self, recipe: Recipe, parameters: Iterable[torch.Tensor]) -> None:
        self._name = recipe.optimizer
        self._rate = recipe.learning_rate
        self._decay = _DECAYS[self._name] if recipe.weight_decay is None else recipe.weight_decay
        self._parameters = list(parameters)
        self._state: dict[int, dict[str, torch.Tensor]] = {}

    def add(self, parameters: Iterable[torch.Tensor]) -> None:
        """Train these too from the next step on."""
        self._parameters.extend(parameters)

    def clear_gradients(self) -> None:
        """Drop the gradients of all parameters."""
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def step(self, share: float) -> None:
        """Change each parameter that has a gradient.

        Args:
            share: part of the recipe's learning rate, from 0 to 1.
        """
        numbers = [number for number, parameter in enumerate(self._parameters) if parameter.grad is not None]
        if not numbers:
            return
        if self._name == "sgd":
            self._step_by_momentum(numbers, self._rate * share)
        else:
            self._step_by_moments(numbers, self._rate * share)

    def state(self) -> dict[str, torch.Tensor]:
        """What was learned of each parameter, under ``NUMBER.NAME``, with PyTorch's names; views, no copies."""
        return {f"{number}.{name}": value for number, own in self._state.items() for name, value in own.items()}

    def load_state(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Go on from there; the inverse of ``state``."""
        self._state = {}
        for place, tensor in tensors.items():
            number, _, name = place.partition(".")
            parameter = self._parameters[int(number)]
            # Counts of steps stay where they are, as PyTorch has them: reading one must not wait for an accelerator.
            own = tensor.clone() if name == _STEP else tensor.to(parameter.device, parameter.dtype, copy=True)
            self._state.setdefault(int(number), {})[name] = own

    def _step_by_moments(self, numbers: list[int], rate: float) -> None:
        for number in numbers:
            if number not in self._state:
                moments = {name: torch.zeros_like(self._parameters[number]) for name in ("exp_avg", "exp_avg_sq")}
                self._state[number] = {_STEP: torch.zeros(()), **moments}
        adam(
            [self._parameters[number] for number in numbers],
            self._gradients(numbers),
            [self._state[number]["exp_avg"] for number in numbers],
            [self._state[number]["exp_avg_sq"] for number in numbers],
            [],
            [self._state[number][_STEP] for number in numbers],
            has_complex=any(self._parameters[number].is_complex() for number in numbers),
            decoupled_weight_decay=self._name == "adamw",
            amsgrad=False,
            beta1=_BETAS[0],
            beta2=_BETAS[1],
            lr=rate,
            weight_decay=self._decay,
            eps=_EPSILON,
            maximize=False,
        )

    def _step_by_momentum(self, numbers: list[int], rate: float) -> None:
        momenta = [self._state.get(number, {}).get("momentum_buffer") for number in numbers]
        sgd(
            [self._parameters[number] for number in numbers],
            self._gradients(numbers),
            momenta,
            has_sparse_grad=any(gradient.is_sparse for gradient in self._gradients(numbers)),
            weight_decay=self._decay,
            momentum=_MOMENTUM,
            lr=rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        for number, momentum in zip(numbers, momenta, strict=True):
            if momentum is not None:
                self._state[number] = {"momentum_buffer": momentum}

    def _gradients(self, numbers: list[int]) -> list[torch.Tensor]:
        found = (self._parameters[number].grad for number in numbers)
        return [gradient for gradient in found if gradient is not None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """A training between two steps.

    Attributes:
        epoch: epoch under way, or the next one where all of one was trained and scored.
        epoch_steps: steps taken in that epoch.
        steps: steps of the whole run; 0 where nobody knows yet.
        order: state of the loader of that epoch; None where the epoch has not begun.
        losses: loss of every step so far.
        epoch_losses: mean loss of every epoch that was trained to its end.
        samples: samples handed to the head so far.
        scores: scores of the held-out samples after each epoch.
        is_over: True once no step is left.
        head: tensors of the head, by name.
        optimizer: tensors of the optimiser's state, by number of the parameter and name.
        best: tensors of the head that was best so far; empty where held-out loss decides nothing.
        best_epoch: epoch of that head; None where there is none.
        random: states of PyTorch's random generators.
    """

    epoch: int
    epoch_steps: int
    steps: int
    order: Mapping[str, Any] | None
    losses: tuple[float, ...]
    epoch_losses: tuple[float, ...]
    samples: int
    scores: tuple[Evaluated, ...] = ()
    is_over: bool = False
    head: Mapping[str, torch.Tensor] = field(default_factory=dict)
    optimizer: Mapping[str, torch.Tensor] = field(default_factory=dict)
    best: Mapping[str, torch.Tensor] = field(default_factory=dict)
    best_epoch: int | None = None
    random: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return len(self.losses)


class Checkpointer(Protocol):
    """Keeps checkpoints, and says when one is wanted."""

    def is_due(self, step: int, *, ends_epoch: bool) -> bool:
        """Whether to make one after so many steps; ``ends_epoch`` says that an epoch was just scored."""

    def keep(self, checkpoint: Checkpoint) -> None:
        """Keep one, before the tensors in it change again."""


def _random_state() -> dict[str, torch.Tensor]:
    """The states of PyTorch's random generators, by device; those of accelerators where they are in use."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        states |= {f"cuda:{number}": state for number, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _restore_random_state(states: Mapping[str, torch.Tensor]) -> None:
    """Let the generators go on from there; those of accelerators that are not here are left out."""
    torch.set_rng_state(states["cpu"])
    for device, state in states.items():
        if device != "cpu" and torch.cuda.is_available() and int(device.partition(":")[2]) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


class Trainable(Protocol):
    """A head, as the loop needs it: a torch module, or one that came from elsewhere."""

    def train(self) -> Any:
        """Behave as in training from now on."""

    def eval(self) -> Any:
        """Behave as in evaluation from now on."""

    def parameters(self) -> Iterator[torch.Tensor]:
        """The parameters, among them what is trained, which requires gradients."""

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

    def state_dict(self) -> dict[str, Any]:
        """How far the epoch is, as plain JSON; asked for where checkpoints are kept."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnfrozenHead:
    """A head that trains more than the one before it.

    Attributes:
        head: head to train from now on; the parameters of the one before are among its own.
        added: parameters that are trained too, those that belong together in one sequence.
    """

    head: Trainable
    added: Sequence[Sequence[torch.Tensor]]


def _nothing(*_: object) -> None:
    pass


def _one_by_one(passes: Sequence[Batches]) -> Generator[Batches]:
    yield from passes


class Loop:
    """Follows a recipe. What happens is told in events, from which whoever wants it gathers losses.

    Args:
        recipe: the way to train.
        head: head to train.
        train: the batches of an epoch, by its number.
        held_out: the batches to score after it; None where nothing is held out.
        keeps_features: True if a later epoch takes its features from memory or disk.
        on_event: function that is called with each event.
        objective: loss and score of the head; those of the classes of the labels by default.
        checkpointer: checkpointer that keeps checkpoints; None keeps none.
        unfreeze: the head of an epoch that has another one than the epoch before it, else None; None for a head that
            stays.
        in_turn: function that gives the passes of an epoch one after another, and may ask for one while the one before
            it ends.
        last_unfreeze: last epoch that has another head than the one before it, counted from 0; patience counts from
            there.
        on_batch: function that is called before each step with its number from 1, its epoch and the number of its batch
            there, both from 0, and the batch as it came.

    Attributes:
        head_s: seconds of the steps so far.
        confusion: answers of the kept head to the held-out samples, from the pass that scored it; None where no classes
            are learned, or where an earlier process scored it.

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
        on_event: Observer,
        objective: Objective | None = None,
        checkpointer: Checkpointer | None = None,
        unfreeze: Callable[[int], UnfrozenHead | None] | None = None,
        last_unfreeze: int = 0,
        in_turn: Callable[[Sequence[Any]], Generator[Batches]] = _one_by_one,
        on_batch: Callable[[int, int, int, Batch], None] = _nothing,
    ) -> None:
        self._objective = objective or objective_of(label_smoothing=recipe.label_smoothing)
        self._recipe = recipe
        self._passes = recipe.passes(keeps_features=keeps_features, has_held_out=held_out is not None)
        self._head = self._told(head)
        self._train = train
        self._held_out = held_out
        self._on_event = on_event
        settle_kernels()  # an optimiser's first step computes too
        self._parameters = _trained(head)
        self._optimizer = Optimizer(recipe, self._parameters)
        self._checkpointer = checkpointer
        self._unfreeze = unfreeze
        self._last_unfreeze = last_unfreeze
        self._in_turn = in_turn
        self._on_batch = on_batch
        self._steps = 0  # of the whole run, where it is known how many there are
        self._samples = 0
        self._step_losses: list[float] = []
        self._epoch_losses: list[float] = []
        self._scores: list[Evaluated] = []
        self._best: tuple[Evaluated, dict[str, torch.Tensor]] | None = None
        self.head_s = 0.0
        self.confusion: Confusion | None = None

    def run(self, resumed: Checkpoint | None = None) -> None:
        """All epochs, each with the scoring behind it. What ``on_event`` raises ends them.

        Where held-out loss decides how many there are, the head is the best one at the end, however it came.

        Args:
            resumed: the place to go on from; None begins. The losses from there on are those of a run that nothing
                broke off.
        """
        torch.manual_seed(self._recipe.seed)
        if self._passes.reason:
            self._on_event(EpochsChosen(epochs=self._passes.maximum, reason=self._passes.reason))
        if resumed is not None:
            self._take_head(resumed.epoch if resumed.order is not None else resumed.epoch - 1)
            self._go_on(resumed)
        self._epochs(resumed)

    def _told(self, head: Trainable) -> Trainable:
        """A head that does not warn of autocast, which ``bf16`` says is for what is trained alone."""
        if self._recipe.bf16 and hasattr(head, "expects_autocast_"):
            head.expects_autocast_ = True
        return head

    def _take_head(self, epoch: int) -> None:
        """Take the head of an epoch, and let the optimiser train what it has more."""
        unfrozen = None if self._unfreeze is None else self._unfreeze(epoch)
        if unfrozen is None:
            return
        self._head = self._told(unfrozen.head)
        if self._best is not None:  # what it trains more is still as it was when the best head was
            score, best = self._best
            self._best = score, {**_copied(self._head), **best}
        for parameters in filter(None, unfrozen.added):
            self._optimizer.add(parameters)

    @torch.no_grad()
    def _go_on(self, resumed: Checkpoint) -> None:
        self._steps, self._samples = resumed.steps, resumed.samples
        self._step_losses, self._epoch_losses = list(resumed.losses), list(resumed.epoch_losses)
        self._scores = list(resumed.scores)
        if resumed.best_epoch is not None:
            self._best = self._scores[resumed.best_epoch], dict(resumed.best)
        for name, tensor in self._head.state_dict().items():
            tensor.copy_(resumed.head[name])
        self._optimizer.load_state(resumed.optimizer)
        _restore_random_state(resumed.random)

    def _epochs(self, resumed: Checkpoint | None) -> None:
        try:
            for epoch in range(0 if resumed is None else resumed.epoch, self._passes.maximum):
                if self._are_over:
                    break
                self._take_head(epoch)
                both = [self._train(epoch), *([] if self._held_out is None else [self._held_out(epoch)])]
                with closing(self._in_turn(both)) as passes:
                    self._epoch(epoch, next(passes), resumed)
                    for batches in passes:
                        self._evaluate(epoch, batches)
                resumed = None
                is_over = epoch + 1 == self._passes.maximum or self._are_over
                self._keep(epoch + 1, is_over=is_over)
        finally:
            self._take_best()

    def _epoch(self, epoch: int, batches: Batches, resumed: Checkpoint | None) -> None:
        self._head.train()
        steps = self._passes.maximum * len(batches)
        if self._passes.patience is None and not self._steps:
            self._steps = steps
        begun = len(self._step_losses)
        if resumed is not None and resumed.order is not None:
            batches.load_state_dict(resumed.order)
            begun -= resumed.epoch_steps
        for batch in batches:
            taken = len(self._step_losses)
            self._on_batch(taken + 1, epoch, taken - begun, batch)  # before a head computes in its place
            self._step(epoch, batch, steps)
            self._keep(epoch, begun=begun, batches=batches)
        losses = self._step_losses[begun:]
        self._epoch_losses.append(sum(losses) / max(1, len(losses)))
        self._on_event(EpochTrained(epoch=epoch, loss=self._epoch_losses[-1]))

    def _step(self, epoch: int, batch: Batch, steps: int) -> None:
        started = time.perf_counter()
        # The rate is worked out of the step's number alone, so that a run goes on with the same one to the bit.
        share = self._recipe.rate_share(len(self._step_losses), steps) if self._recipe.changes_rate else 1.0
        loss = self._objective.loss(self._scored(batch), batch)
        self._optimizer.clear_gradients()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step(share)
        self._step_losses.append(float(loss.detach()))
        self._samples += len(batch)
        self.head_s += time.perf_counter() - started
        step, last = len(self._step_losses), self._step_losses[-1]
        self._on_event(StepFinished(epoch=epoch, step=step, steps=self._steps, samples=len(batch), loss=last))

    def _scored(self, batch: Batch) -> Any:
        if not self._recipe.bf16:
            return self._head(batch.features)
        with torch.autocast(self._parameters[0].device.type, torch.bfloat16):
            scores = self._head(batch.features)
        # The loss is a small sum of large exponentials, and costs nothing.
        return scores.float()

    def _keep(self, epoch: int, *, begun: int = 0, batches: Batches | None = None, is_over: bool = False) -> None:
        """Keep a checkpoint where one is due: within an epoch with the state of its batches, else between epochs."""
        step = len(self._step_losses)
        if self._checkpointer is None or not (is_over or self._checkpointer.is_due(step, ends_epoch=batches is None)):
            return
        self._checkpointer.keep(
            Checkpoint(
                epoch=epoch,
                epoch_steps=0 if batches is None else step - begun,
                steps=self._steps,
                order=None if batches is None else batches.state_dict(),
                losses=tuple(self._step_losses),
                epoch_losses=tuple(self._epoch_losses),
                samples=self._samples,
                scores=tuple(self._scores),
                is_over=is_over,
                head=self._head.state_dict(),
                optimizer=self._optimizer.state(),
                best={} if self._best is None else self._best[1],
                best_epoch=None if self._best is None else self._best[0].epoch,
                random=_random_state(),
            )
        )

    @torch.no_grad()
    def _evaluate(self, epoch: int, batches: Batches) -> None:
        self._head.eval()
        tally, losses, seen = self._objective.begin(), 0.0, 0
        for batch in batches:
            losses += tally.add(self._scored(batch), batch)
            seen += len(batch)
        score = Evaluated(epoch=epoch, samples=seen, loss=losses / max(1, seen), scores=tally.scores)
        self._scores.append(score)
        if self._passes.best_pass(self._losses) in (None, len(self._scores) - 1):
            self.confusion = tally.confusion
        self._put_aside(score)
        self._on_event(score)

    def _put_aside(self, score: Evaluated) -> None:
        """Copy the head where it is the best so far, and held-out loss decides."""
        if self._passes.best_pass(self._losses) == len(self._scores) - 1:
            self._best = None  # there is memory for one copy; until it is made the head itself is the best
            self._best = score, _copied(self._head)

    @torch.no_grad()
    def _take_best(self) -> None:
        if self._best is None:
            return
        score, tensors = self._best
        own = self._head.state_dict()
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        self._on_event(HeadSelected(epoch=score.epoch, epochs=len(self._scores)))

    @property
    def _are_over(self) -> bool:
        return self._passes.are_over(self._losses, since=self._last_unfreeze)

    @property
    def _losses(self) -> list[float]:
        return [score.loss for score in self._scores]


def _copied(head: Trainable) -> dict[str, torch.Tensor]:
    """Copies of what training may change, by name."""
    frozen = {tensor.data_ptr() for tensor in head.parameters() if not tensor.requires_grad}
    own = head.state_dict().items()
    return {name: tensor.detach().clone() for name, tensor in own if tensor.data_ptr() not in frozen}


def _trained(head: Trainable) -> list[torch.Tensor]:
    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    if not parameters:
        raise SettingError("the whole network is frozen, so there is nothing to train: freeze less of it (--until)")
    return parameters
