"""What takes a loader into another process: how it was made, where it stands, and which rank it is."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from frostline.errors import OrderMismatch
from frostline.loaders.epoch.ranks import Ranks
from frostline.ordering import OrderState

if TYPE_CHECKING:
    from frostline.loaders.epoch.epoch_loader import ArrayLoader

__all__ = (
    "LoaderSpec",
    "PassStart",
    "WorkerState",
    "begin_of",
    "merge_worker_states",
    "open_in_worker",
    "worker_state",
)

_KEY = "frostline_worker"
# Batches that torchdata's loader handed out since its workers told it how far they were.
_SINCE = "_steps_since_snapshot"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassStart:
    """Where the next pass of a loader begins.

    Attributes:
        state: from which all workers take their turns; None is the beginning of the epoch.
        given: number of its own turns from there that a worker had before.
    """

    state: OrderState | None = None
    given: int = 0


class LoaderSpec(Protocol):
    """Makes the same loader again, in the process that calls it."""

    def make(self, epoch: int, ranks: Ranks, workers: int) -> "ArrayLoader":
        """That of an epoch, as one of so many workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A loader as values.

    Attributes:
        maker: makes it again.
        epoch: epoch of the loader.
        ranks: ranks that share it. Those of another process cannot speak to each other: who sends it there compares
            (``ArrayLoader.agree``).
        begin: point where the next pass begins.
    """

    maker: LoaderSpec
    epoch: int
    ranks: Ranks
    begin: PassStart

    def open(self, worker: int = 0, workers: int = 1) -> "ArrayLoader":
        """The loader, in this process, as one of its rank's workers, who take its steps in turn."""
        ranks = replace(self.ranks, gather=None, worker=worker, workers=workers)
        found = self.maker.make(self.epoch, ranks, workers)
        found.begin_at(self.begin)
        return found


def open_in_worker(state: WorkerState) -> "ArrayLoader":
    """A loader that travelled alone."""
    return state.open()


def worker_state(state: OrderState, begin: PassStart, given: int, workers: int) -> dict[str, Any]:
    """The state of a worker: how far it is, and which of its turns it has had since the workers began.

    Args:
        state: state of the worker.
        begin: point where its pass began.
        given: turns that it had in the pass.
        workers: how many there are.
    """
    began = None if begin.state is None else begin.state.to_json()
    return {**state.to_json(), _KEY: {"began": began, "given": begin.given + given, "workers": workers}}


def begin_of(state: Mapping[str, Any], workers: int, at_once: int) -> PassStart:
    """Where one of so many workers goes on: after its own turns, where the state is one of as many workers.

    Args:
        state: state of a worker, or of a whole run.
        workers: how many there are now.
        at_once: samples of a step of all ranks now.

    Raises:
        OrderMismatch: it is none, or damaged, or of a worker among more or fewer, or of one whose turns were others.
    """
    own = state.get(_KEY)
    if own is None or workers == 1:
        return PassStart(state=OrderState.from_json(state))
    given = own.get("given") if isinstance(own, Mapping) else None
    if not isinstance(given, int) or given < 0:
        raise OrderMismatch(f"this state of a loader's worker is damaged: {_KEY!r} makes no sense")
    if own.get("workers") != workers:
        raise OrderMismatch(
            f"this is the state of one of {own.get('workers')} workers, and there are {workers}: go on from the state "
            "of the whole run, which frostline.loaders.merge_worker_states finds"
        )
    if state.get("batch_size") != at_once:
        raise OrderMismatch(
            f"this is the state of a worker whose turns were steps of {state.get('batch_size')} samples, and they are "
            f"of {at_once} now: go on from the state of the whole run, which frostline.loaders.merge_worker_states "
            "finds"
        )
    began = own.get("began")
    return PassStart(state=None if began is None else OrderState.from_json(began), given=given)


def merge_worker_states(state: Any) -> dict[str, Any]:
    """The state of a whole run, from that of anything that holds the states of its workers.

    It is plain JSON, and any number of workers and ranks, and any framework, goes on from it.

    Args:
        state: such as that of torchdata's ``StatefulDataLoader``.

    Raises:
        OrderMismatch: there is no state of a loader in it, or one that says how far workers were batches before.
    """
    found = list(_states(state))
    if not found:
        raise OrderMismatch("there is no state of a loader in this")
    last = max(found, key=lambda item: int(item["position"]))
    return {name: value for name, value in last.items() if name != _KEY}


def _states(value: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, Mapping):
        if value.get(_SINCE):
            raise OrderMismatch(
                f"this state says how far workers were {value[_SINCE]} batches before it: make the StatefulDataLoader "
                "with snapshot_every_n_steps=1, its default"
            )
        if "frostline_order" in value and isinstance(value.get("position"), int):
            yield value
            return
        for item in value.values():
            yield from _states(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _states(item)
