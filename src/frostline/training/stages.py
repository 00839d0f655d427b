"""A run's job, made anew where further layers are trained, and what all its jobs did."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from frostline.core import Cut
from frostline.errors import SettingError, Unavailable
from frostline.events import LayersUnfrozen, Observer
from frostline.jobs import Job
from frostline.jobs.statistics import JobStatistics
from frostline.models.freezing import layer_of, unfreeze, used_parameters
from frostline.training.loop import Thawed
from frostline.training.recipe.lora import check_thawed
from frostline.training.recipe.unfreezing import Unfreezing
from frostline.training.report.report import RouteUsage
from frostline.training.setup import Setup

__all__ = ("Stages",)

_SUMS = (
    "wire_bytes",
    "requests",
    "samples",
    "from_cache",
    "stall_s",
    "loading_s",
    "fetching_s",
    "fetched",
)
_LISTS = ("skipped", "replans", "tunings")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Done:
    """What a job did."""

    statistics: JobStatistics
    ways: tuple[RouteUsage, ...]
    stages: Mapping[str, float]


class Stages:
    """The stages of a run: one job after another, each with a frost line that lies before that of the last.

    Args:
        setup: data, network and first job of the run.
        unfreezing: layers that are trained later.
        epochs: number of all epochs.
        observe: told when the frost line moves.

    Raises:
        SettingError: nothing would be frozen in the end, or a layer has an adapter.
        UnknownLayer: the network has no such layer.
    """

    def __init__(self, setup: Setup, unfreezing: Unfreezing, epochs: int, observe: Observer) -> None:
        self.job = setup.job
        self._setup = setup
        self._unfreezing = unfreezing
        self._epochs = epochs
        self._left = list(unfreezing.steps)
        self._observe = observe
        self._past: list[_Done] = []
        self._is_open = True
        _check(setup, unfreezing)

    def thaw(self, epoch: int) -> Thawed | None:
        """Make the job of an epoch, counted from 0, where it is another one than that of the epoch before.

        Raises:
            UserError: the network cannot be cut there.
            Unavailable: the node went away.
        """
        due = [step for step in self._left if step.epoch <= epoch + 1]
        if not due:
            return None
        del self._left[: len(due)]
        self._past.append(_done(self.job))
        self._is_open = False
        self.job.close()
        network = self._setup.network
        added = [unfreeze(network.model, step.layers, input_shape=network.preprocess.inputs) for step in due]
        with torch.random.fork_rng():  # which dropout goes on with
            self.job = self._setup.again(self._unfreezing.until_next(epoch, self._epochs))
        self._is_open = True
        layers = ", ".join(layer for step in due for layer in step.layers)
        self._observe(LayersUnfrozen(epoch=epoch, layers=layers, frost_line=self.job.frost_line.name))
        return Thawed(head=self.job.head, added=added)

    @property
    def begun(self) -> int:
        """The number of stages that were begun."""
        return len(self._past) + self._is_open

    def done(self) -> tuple[JobStatistics, tuple[RouteUsage, ...], Mapping[str, float]]:
        """What all jobs did: their statistics, the ways of their samples, and the seconds of each part."""
        # Where a stage could not begin, the job before it is closed, and was counted.
        done = [*self._past, _done(self.job)] if self._is_open else self._past
        return (
            _summed([item.statistics for item in done]),
            tuple(way for item in done for way in item.ways),
            {name: _seconds(name, done) for name in done[-1].stages},
        )


def _check(setup: Setup, unfreezing: Unfreezing) -> None:
    if not unfreezing.steps:
        return
    model = setup.network.model
    check_thawed(model, unfreezing.layers)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    trained += [parameter for layer in unfreezing.layers for parameter in layer_of(model, layer).parameters()]
    first = next(
        (
            parameter
            for _, parameter in used_parameters(model, setup.network.preprocess.inputs)
            if parameter is not None
        ),
        None,
    )
    if any(first is parameter for parameter in trained):
        raise SettingError(
            f"with {unfreezing.layers[-1]} the whole network is trained, and nothing is left that could run beside the "
            "data: leave it frozen (--unfreeze)"
        )


def _done(job: Job) -> _Done:
    statistics = job.statistics()
    return _Done(statistics=statistics, ways=_ways(job.cuts, statistics), stages=_parts(job))


def _parts(job: Job) -> Mapping[str, float]:
    try:
        return job.stages()
    except Unavailable:  # a run that was cut short may have lost its node
        return {}


def _ways(cuts: Sequence[Cut], statistics: JobStatistics) -> tuple[RouteUsage, ...]:
    taken = (
        RouteUsage(cut=route.cut, codec=route.codec, name=cuts[route.cut].name, samples=samples)
        for route, samples in statistics.routed
    )
    return tuple(sorted(taken, key=lambda item: -item.samples))


def _summed(parts: Sequence[JobStatistics]) -> JobStatistics:
    changes: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    changes |= {name: tuple(item for part in parts for item in getattr(part, name)) for name in _LISTS}
    return replace(parts[-1], codec_error=max(part.codec_error for part in parts), **changes)


def _seconds(name: str, parts: Sequence[_Done]) -> float:
    """A node's seconds are those of all its jobs already."""
    seconds = [part.stages.get(name, 0.0) for part in parts]
    return seconds[-1] if name.startswith("store") else sum(seconds)
