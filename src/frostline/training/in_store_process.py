"""The process that trains a head beside a node: checks its assignment, asks the node for features, and trains.

It reads one line of JSON from stdin, then the file of its assignment, and says what happens in lines of JSON on
stdout. ``stop`` on stdin ends it after the step that it is in; the end of stdin ends it at once, since then its node
is gone. What it was given is untrusted: it is read as data, checked, and held to a bound on memory that the
node has set for this process.
"""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from safetensors.torch import save as save_tensors

from frostline.batching import readable_bytes
from frostline.client.http import HttpTransport
from frostline.core.config import LoaderSettings
from frostline.core.errors import BadRequest, FrostlineError, OverBudget, UnsafeArtifact, UserError
from frostline.core.events import Event, StepFinished, WaitingForRows
from frostline.engines.machine import end_at_once
from frostline.engines.measure import BROKEN, dry_step
from frostline.jobs.in_store import Assignment, read_assignment
from frostline.jobs.in_store_batches import InStoreLoaders
from frostline.models.portable import Mode, PortedHead
from frostline.training.loop import Loop
from frostline.wire.messages import error_to_json
from frostline.wire.recipes import event_to_json, line_of

__all__ = ("check_assignment", "main")

# Python and torch, before they do anything.
_BASE_BYTES = 320 << 20
# Gradients, and the two moments of Adam; SGD keeps one and AdamW two.
_COPIES = {"adam": 3, "adamw": 3, "sgd": 2}


def check_assignment(assignment: Assignment, memory_bytes: int) -> None:
    """Do nothing if the head gives scores for what crosses the frost line, and a step of it fits the memory.

    It is run on shapes alone: nothing that it says of itself is believed, and nothing is made for it.

    Args:
        assignment: the assignment as it came.
        memory_bytes: bytes that the trainer's process may have.

    Raises:
        UnsafeArtifact: The head does not do what it should.
        OverBudget: A step cannot fit.
    """
    head, recipe = assignment.head, assignment.recipe
    rows = min(recipe.batch_size, len(assignment.train))
    made = max(_made(assignment, mode, rows) for mode in (head.training, head.evaluation))
    weights = sum(tensor.nbytes for tensor in head.tensors.values())
    trained = sum(head.tensors[name].nbytes for name in head.trained)
    may_choose = recipe.epochs is None or recipe.patience is not None
    aside = sum(head.tensors[name].nbytes for name in head.returning) if may_choose else 0
    needed = _BASE_BYTES + made + weights + aside + _COPIES[recipe.optimizer] * trained
    _check_memory(needed, memory_bytes, f"a step of {rows} samples", ", or train with smaller batches")


def _check_memory(needed: int, memory_bytes: int, what: str, otherwise: str = "") -> None:
    if needed > memory_bytes:
        raise OverBudget(
            f"{what} takes {readable_bytes(needed)}, and this node gives a training {readable_bytes(memory_bytes)}: "
            f"start it with more --training-memory{otherwise}"
        )


def _made(assignment: Assignment, mode: Mode, rows: int) -> int:
    if max(mode.places) >= len(assignment.inputs):
        raise UnsafeArtifact("the head takes more than what crosses the frost line")
    inputs = [assignment.inputs[place] for place in mode.places]
    step = dry_step(mode.graph, assignment.head.tensors, inputs, rows)
    wanted = (rows, assignment.classes)
    if step.shape != wanted or step.dtype != "float32":
        raise UnsafeArtifact(f"the head must give float32 {list(wanted)}, and it gives {step.dtype} {list(step.shape)}")
    return step.nbytes


_MIB = 1 << 20
_SAID_WHY = 3
# Without a buffer, whose lock a thread that waits for a line would still hold when the interpreter ends.
_STDIN = os.fdopen(0, "rb", buffering=0, closefd=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Orders:
    """What the node tells its trainer.

    Attributes:
        near: URL of the node.
        assignment: number of the open file with what is to be trained.
        trained: number of the open file for what comes out.
        memory_bytes: bytes that this process may have.
        threads: number of threads of torch.
    """

    near: str
    assignment: int
    trained: int
    memory_bytes: int
    threads: int


class _Stopped(Exception):
    """The node asked for an end."""


def main() -> int:
    """Do what stdin says; what goes wrong is the last line on stdout."""
    orders = _Orders(**json.loads(_STDIN.readline()))
    stop = threading.Event()
    threading.Thread(target=_listen, args=(stop,), daemon=True).start()
    torch.set_num_threads(orders.threads)
    try:
        _train(orders, stop)
    except FrostlineError as error:
        return _fail(error)
    except BROKEN as error:
        return _fail(_meant(error, orders.memory_bytes))
    return 0


def _train(orders: _Orders, stop: threading.Event) -> None:
    with os.fdopen(orders.assignment, "rb") as file:
        # As it came, and its tensors: what finds no memory for these in the midst of reading says so in many ways.
        _check_memory(_BASE_BYTES + 2 * os.fstat(file.fileno()).st_size, orders.memory_bytes, "reading the training")
        assignment = read_assignment(file.read())
    check_assignment(assignment, orders.memory_bytes)
    head = PortedHead(assignment.head)
    settings = _settings(orders.memory_bytes, assignment.views)
    transport = HttpTransport(orders.near, settings)
    remote = InStoreLoaders(assignment, transport, settings, _telling(stop))
    loop = Loop(
        assignment.recipe,
        head,
        train=remote.train,
        held_out=remote.validation_batches if len(assignment.held_out) else None,
        keeps_features=remote.keeps_features,
        on_event=remote.on_event,
    )
    _say({"event": "ready"})
    is_whole = True
    try:
        loop.run()
    except _Stopped:
        is_whole = False
    finally:
        transport.close()
    with os.fdopen(orders.trained, "wb") as out:
        written = _write(out, {name: head.tensors[name] for name in assignment.head.returning})
    _say({"event": "trained", "is_whole": is_whole, "head_s": loop.head_s, **written})


def _settings(memory_bytes: int, views: int) -> LoaderSettings:
    """Features and requests may take a part of the memory; the head takes the rest."""
    return LoaderSettings(
        window_bytes=max(_MIB, memory_bytes // 16), cache_bytes=memory_bytes // 4, cached_augmentations=views
    )


def _telling(stop: threading.Event) -> Callable[[Event], None]:
    def tell(event: Event) -> None:
        line = event_to_json(event)
        if line is not None:
            _say(line)
        if isinstance(event, StepFinished | WaitingForRows) and stop.is_set():
            raise _Stopped

    return tell


def _write(out: BinaryIO, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    body = save_tensors({name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()})
    out.write(body)
    return {"bytes": len(body), "digest": hashlib.sha256(body).hexdigest()}


def _meant(error: BaseException, memory_bytes: int) -> FrostlineError:
    """What an error of torch or Python means: no memory, or a head that does not work on what it gets."""
    why = str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, MemoryError) or any(word in str(error) for word in ("allocate memory", "bad_alloc")):
        return OverBudget(
            f"the training takes more than the {readable_bytes(memory_bytes)} that this node gives one ({why}): start "
            "it with more --training-memory, or train with smaller batches"
        )
    return UnsafeArtifact(f"the head cannot be trained: {why}")


def _fail(error: FrostlineError) -> int:
    # What the client's own mistake is to a verb is a bad request to a node.
    told = BadRequest(str(error)) if isinstance(error, UserError) else error
    _say({"event": "failed", **error_to_json(told)})
    return _SAID_WHY


def _say(value: dict[str, Any]) -> None:
    sys.stdout.buffer.write(line_of(value))
    sys.stdout.buffer.flush()


def _listen(stop: threading.Event) -> None:
    while line := _STDIN.readline():
        if line == b"stop\n":
            stop.set()
    os._exit(1)


if __name__ == "__main__":
    end_at_once()
    raise SystemExit(main())
