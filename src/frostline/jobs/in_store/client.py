"""Has a head trained on a node: sends it there, passes on what happens, and takes the trained tensors back."""

from dataclasses import dataclass
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from frostline.errors import FrostlineError, NodeUnreachable, Refused
from frostline.events import Observer, PhaseStarted
from frostline.jobs.in_store.assignment import Assignment, write_assignment
from frostline.transport.protocol import BesideTraining, TrainsBeside
from frostline.wire.event_lines import event_from_json
from frostline.wire.refusals import error_from_json

__all__ = ("Trained", "train_beside")

# Names, shapes and places of the tensors in the answer.
_MAX_HEADER = 32 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training on a node was.

    Attributes:
        is_whole: all epochs were trained; False where somebody asked for an end.
        head_s: seconds in which the head was trained, reading and the frozen layers not counted.
    """

    is_whole: bool
    head_s: float


def train_beside(transport: TrainsBeside, assignment: Assignment, observe: Observer) -> Trained:
    """Train the head of an assignment on a node; its tensors, the user's own, hold what was learned afterwards.

    Raises:
        Refused: The node does not take it, or the training failed.
        Unavailable: The node is busy, or went away.
        KeyboardInterrupt: Ctrl-C; what was learned by then has come back.
    """
    observe(PhaseStarted(name="sending the head"))
    with transport.train(assignment.prefix, write_assignment(assignment)) as training:
        last, is_interrupted = _followed(training, observe)
        failure = _failure(last)
        if failure is not None:
            raise failure
        sizes = sum(assignment.head.tensors[name].nbytes for name in assignment.head.returning)
        _take_over(assignment, training.tensors(_bounded(last.get("bytes"), sizes), str(last.get("digest"))))
    if is_interrupted:
        raise KeyboardInterrupt
    return Trained(is_whole=last.get("is_whole") is True, head_s=_seconds(last.get("head_s")))


def _followed(training: BesideTraining, observe: Observer) -> tuple[dict[str, Any], bool]:
    """Pass on what happens to its end; the first Ctrl-C asks for one, the second does not wait for it."""
    is_interrupted = False
    last: dict[str, Any] | None = None
    while True:
        try:
            for value in training:
                if value.get("event") in ("trained", "failed"):
                    last = value
                event = event_from_json(value)
                if event is not None:
                    observe(event)
            break
        except KeyboardInterrupt:
            if is_interrupted:
                raise
            is_interrupted = True
            training.stop()
    if last is None:
        raise NodeUnreachable("the training broke off: the node, or the way to it, is gone")
    return last, is_interrupted


def _failure(last: dict[str, Any]) -> FrostlineError | None:
    if last.get("event") == "trained":
        return None
    return error_from_json(last) or Refused(f"the training failed: {str(last.get('message'))[:500]}")


def _bounded(nbytes: object, tensors: int) -> int:
    """The length of the answer, which holds the tensors and their names."""
    if isinstance(nbytes, bool) or not isinstance(nbytes, int) or not 0 < nbytes <= tensors + _MAX_HEADER:
        raise Refused(f"the node announces {str(nbytes)[:50]} bytes of trained tensors, which these cannot have")
    return nbytes


def _seconds(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _take_over(assignment: Assignment, body: bytes) -> None:
    """Put what came back into the user's own tensors: all of it, or nothing."""
    own = {name: assignment.head.tensors[name] for name in assignment.head.returning}
    try:
        came = load_tensors(body)
    except (SafetensorError, ValueError) as error:
        raise Refused(f"the node's answer holds no tensors: {error}") from error
    if {name: (tensor.shape, tensor.dtype) for name, tensor in came.items()} != {
        name: (tensor.shape, tensor.dtype) for name, tensor in own.items()
    }:
        raise Refused("the node's answer holds other tensors than the head has")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(came[name])
