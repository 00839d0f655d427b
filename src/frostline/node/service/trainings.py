"""Runs trainings beside a node: a few at a time, each in a process that ends when its client stops following it."""

import os
import secrets
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import IO

from frostline.batching import readable_bytes
from frostline.config import NodeSettings
from frostline.errors import BadRequest, Forbidden, OverBudget, Overloaded, Unavailable, UnknownTraining
from frostline.node.process.bounded import BoundedProcess
from frostline.node.scheduling.tenants import Account

__all__ = ("Training", "Trainings")

# Started by name, because the node is a lower layer than training: it passes data and reads lines.
_MODULE = "frostline.training.in_store.process"
_RETRY_AFTER_S = 10.0
# Results are kept on disk until their client fetches them; the oldest is dropped first.
_MAX_KEPT = 4


class Training:
    """One training: its files, its process and its slot. Made by ``Trainings``; closing it again does nothing.

    Attributes:
        id: name that cannot be guessed.
    """

    def __init__(self, settings: NodeSettings, length: int, held: ExitStack, charge: Callable[[float], None]) -> None:
        self.id = secrets.token_hex(16)
        self._settings = settings
        self._charge = charge
        self._charged_s = 0.0
        self._length = length
        self._held = held
        # Temporary files without names: nothing stays behind, however the node ends.
        self._assignment = held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (a context closes it)
        self._trained = tempfile.TemporaryFile()  # noqa: SIM115 (it outlives the process that fills it)
        self._process: BoundedProcess | None = None
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._is_closed = False

    def write(self, chunk: bytes) -> None:
        """Write the next piece of the assignment.

        Raises:
            BadRequest: if there is more than announced.
            Unavailable: if the disk is full.
        """
        if self._assignment.tell() + len(chunk) > self._length:
            raise BadRequest(f"the training has more than the {self._length} bytes that were announced")
        try:
            self._assignment.write(chunk)
        except OSError as error:
            raise Unavailable(f"the node cannot store the training's assignment: {error.strerror}") from error

    def start(self, url: str, token: str | None) -> bytes:
        """Start the process, and return its first line.

        Args:
            url: URL of this node.
            token: token of the tenant that asks.

        Raises:
            BadRequest: if the assignment is shorter than announced.
            Refused: if the process ended before its first line.
        """
        if self._assignment.tell() != self._length:
            raise BadRequest(f"the training ended after {self._assignment.tell()} of {self._length} bytes")
        self._assignment.flush()
        self._assignment.seek(0)
        with self._lock:
            if self._is_closed:
                raise Unavailable("the node is stopping")
            self._process = BoundedProcess(
                _MODULE,
                {"near": url, "threads": self._settings.compute_threads},
                {"assignment": self._assignment, "trained": self._trained},
                memory_bytes=self._settings.training_memory_bytes,
                file_bytes=self._settings.training_memory_bytes,
                what="the trainer",
                option="--training-memory",
                token=token,
            )
        return self.line()

    def line(self) -> bytes:
        """The next line of its output; empty at the end.

        Raises:
            Refused: if it ended without a final line.
        """
        with self._turn:
            if self._is_closed:
                return b""
            assert self._process, "it was started"
            line = self._process.line()
            self._pay(self._process)
            return line

    def stop(self) -> None:
        """Ask the process to end after its current step."""
        with self._lock:
            if self._process is not None and not self._is_closed:
                self._process.stop()

    def result(self) -> IO[bytes] | None:
        """The trained tensors, as a file that the caller closes; None if there are none."""
        with self._lock:
            if self._process is None or not self._process.has_finished or self._trained.closed:
                return None
            return os.fdopen(os.dup(self._trained.fileno()), "rb")

    def forget(self) -> None:
        """Delete the result."""
        with self._lock:
            self._trained.close()

    def close(self) -> None:
        """Kill its process if it runs, and free its slot."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            process = self._process
        if process is not None:
            process.processor_s()  # read before the kill, because a dead process has no clock
            process.kill()
            with self._turn:  # no thread reads from it any more
                self._pay(process)
                process.close()
        self._held.close()

    def _pay(self, process: BoundedProcess) -> None:
        """Charge the core seconds since the last call."""
        took_s = process.processor_s()
        took_s, self._charged_s = took_s - self._charged_s, took_s
        self._charge(took_s)


class Trainings:
    """The trainings of a node. Safe for threads.

    Args:
        settings: settings of the node, with the number of trainings and their memory.
        hold: returns a context that keeps a prefix resident.
        charge: called with an account and the core seconds of its training.
    """

    def __init__(
        self,
        settings: NodeSettings,
        hold: Callable[[str], AbstractContextManager[object]],
        charge: Callable[[Account, float], None],
    ) -> None:
        self._settings = settings
        self._hold = hold
        self._charge = charge
        self._lock = threading.Lock()
        self._running: dict[str, Training] = {}
        self._kept: OrderedDict[str, Training] = OrderedDict()
        self._places = settings.trainings
        self._is_shut = False

    def check(self) -> None:
        """Check that this node trains.

        Raises:
            Forbidden: if it does not.
        """
        if not self._settings.allow_training:
            raise Forbidden("this node trains no heads: start it with --allow-training (allow_training)")

    def begin(self, prefix: str, length: int, account: Account) -> Training:
        """Take a slot for a training, before its body is read.

        Args:
            prefix: digest of the frozen part.
            length: announced size of the assignment in bytes.
            account: account that is charged.

        Raises:
            Forbidden: if this node does not train.
            OverBudget: if the assignment can never fit.
            Overloaded: if all slots are taken, or a quota of the tenant is used up.
            UnknownPrefix: if the prefix is not held.
        """
        self.check()
        account.check()
        memory_bytes = self._settings.training_memory_bytes
        if length > memory_bytes // 2:
            raise OverBudget(
                f"the head and its samples have {readable_bytes(length)}, but may have half of the "
                f"{readable_bytes(memory_bytes)} of a training: start the node with more --training-memory"
            )
        with ExitStack() as held:
            self._take_place(held)
            held.enter_context(self._hold(prefix))
            training = Training(self._settings, length, held.pop_all(), partial(self._charge, account))
        with self._lock:
            self._running[training.id] = training
        return training

    def end(self, training: Training) -> None:
        """End a training, and keep its result if it has one."""
        training.close()
        with self._lock:
            self._running.pop(training.id, None)
            self._kept[training.id] = training
            late = [self._kept.popitem(last=False)[1]] if len(self._kept) > _MAX_KEPT else []
        for training in late:
            training.forget()

    def stop(self, name: str) -> bool:
        """Ask a running training to end, and return True; or delete the result of one that has ended.

        Raises:
            UnknownTraining: if there is none of that name.
        """
        with self._lock:
            running, kept = self._running.get(name), self._kept.pop(name, None)
        if running is None and kept is None:
            raise UnknownTraining(_UNKNOWN)
        if running is not None:
            running.stop()
        if kept is not None:
            kept.forget()
        return running is not None

    def result(self, name: str) -> IO[bytes]:
        """The trained tensors of a training that has ended, as an open file.

        Raises:
            UnknownTraining: if there is none of that name, or it ended without a result.
        """
        with self._lock:
            kept = self._kept.get(name)
        found = None if kept is None else kept.result()
        if found is None:
            raise UnknownTraining(_UNKNOWN)
        return found

    def close(self) -> None:
        """End all trainings. Calling it again does nothing."""
        with self._lock:
            self._is_shut = True
            running, kept = list(self._running.values()), list(self._kept.values())
            self._kept.clear()
        for training in running:
            training.close()
        for training in (*running, *kept):
            training.forget()

    def _take_place(self, held: ExitStack) -> None:
        with self._lock:
            if self._is_shut or self._places == 0:
                raise Overloaded(
                    f"the node already trains as many heads as it may ({self._settings.trainings}): ask again later",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._places -= 1
        held.callback(self._give_place)

    def _give_place(self) -> None:
        with self._lock:
            self._places += 1


_UNKNOWN = "there is no such training, or it has no result: results are kept for a while only"
