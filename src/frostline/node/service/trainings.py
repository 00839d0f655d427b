"""The trainings beside a node: few at a time, each a process of its own that ends when nobody follows it any more."""

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
from frostline.errors import BadRequest, NotAllowed, OverBudget, Overloaded, Unavailable, UnknownTraining
from frostline.node.process.bounded import BoundedProcess
from frostline.node.scheduling.tenants import Account

__all__ = ("Training", "Trainings")

# Started by name, since the node stands below whatever trains: it hands over data and reads lines.
_MODULE = "frostline.training.in_store.process"
_RETRY_AFTER_S = 10.0
# Results wait for whoever asked for them, on the disk; the oldest makes room.
_MAX_KEPT = 4


class Training:
    """One training: its files, its process and its place. Made by ``Trainings``; closing it again does nothing.

    Attributes:
        id: names it, and cannot be guessed.
    """

    def __init__(self, settings: NodeSettings, length: int, held: ExitStack, charge: Callable[[float], None]) -> None:
        self.id = secrets.token_hex(16)
        self._settings = settings
        self._charge = charge
        self._charged_s = 0.0
        self._length = length
        self._held = held
        # Without names: nothing is left behind, however the node ends.
        self._assignment = held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (a context closes it)
        self._trained = tempfile.TemporaryFile()  # noqa: SIM115 (it outlives the process that fills it)
        self._process: BoundedProcess | None = None
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._is_closed = False

    def write(self, chunk: bytes) -> None:
        """Take the next piece of its assignment.

        Raises:
            BadRequest: There is more than was announced.
            Unavailable: The disk is full.
        """
        if self._assignment.tell() + len(chunk) > self._length:
            raise BadRequest(f"the training has more than the {self._length} bytes that were announced")
        try:
            self._assignment.write(chunk)
        except OSError as error:
            raise Unavailable(f"the node cannot keep what is to be trained: {error.strerror}") from error

    def start(self, url: str, token: str | None) -> bytes:
        """Start its process, and return the first line that it says.

        Args:
            url: of this node.
            token: of whoever asked for it.

        Raises:
            BadRequest: Its assignment ended early.
            Refused: The process did not get as far as a line.
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
        """What it says next; nothing at its end.

        Raises:
            Refused: It ended without a last word.
        """
        with self._turn:
            if self._is_closed:
                return b""
            assert self._process, "it was started"
            line = self._process.line()
            self._pay(self._process)
            return line

    def stop(self) -> None:
        """Ask it to end after the step that it is in."""
        with self._lock:
            if self._process is not None and not self._is_closed:
                self._process.stop()

    def result(self) -> IO[bytes] | None:
        """The trained tensors, as a file for the caller to close; None where there are none."""
        with self._lock:
            if self._process is None or not self._process.has_finished or self._trained.closed:
                return None
            return os.fdopen(os.dup(self._trained.fileno()), "rb")

    def forget(self) -> None:
        """Drop the result."""
        with self._lock:
            self._trained.close()

    def close(self) -> None:
        """End its process, whatever it is at, and give its place to the next one."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            process = self._process
        if process is not None:
            process.processor_s()  # of one that is killed nothing can be seen
            process.kill()
            with self._turn:  # nobody reads from it any more
                self._pay(process)
                process.close()
        self._held.close()

    def _pay(self, process: BoundedProcess) -> None:
        """Charge what it took since the last time."""
        took_s = process.processor_s()
        took_s, self._charged_s = took_s - self._charged_s, took_s
        self._charge(took_s)


class Trainings:
    """The trainings of a node. Safe for threads.

    Args:
        settings: whether there may be any, how many, and with how much memory.
        hold: keeps a prefix for as long as a context lasts.
        charge: told whose training took how many seconds of a core.
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
        """Do nothing if this node trains.

        Raises:
            NotAllowed: It does not.
        """
        if not self._settings.allow_training:
            raise NotAllowed("this node trains no heads: start it with --allow-training (allow_training)")

    def begin(self, prefix: str, length: int, account: Account) -> Training:
        """Take a place for a training, before anything of it is read.

        Args:
            prefix: digest of the frozen part that it needs.
            length: of its assignment in bytes, as announced.
            account: who pays for it.

        Raises:
            NotAllowed: This node does not train.
            OverBudget: It can never fit.
            Overloaded: Another one runs, or one of the tenant's quotas is used up.
            UnknownPrefix: The prefix is not held.
        """
        self.check()
        account.check()
        memory_bytes = self._settings.training_memory_bytes
        if length > memory_bytes // 2:
            raise OverBudget(
                f"the head and its samples have {readable_bytes(length)}, and this node gives a training "
                f"{readable_bytes(memory_bytes)}, half of it for them: start it with more --training-memory"
            )
        with ExitStack() as held:
            self._take_place(held)
            held.enter_context(self._hold(prefix))
            training = Training(self._settings, length, held.pop_all(), partial(self._charge, account))
        with self._lock:
            self._running[training.id] = training
        return training

    def end(self, training: Training) -> None:
        """End a training, and keep its result where it has one."""
        training.close()
        with self._lock:
            self._running.pop(training.id, None)
            self._kept[training.id] = training
            late = [self._kept.popitem(last=False)[1]] if len(self._kept) > _MAX_KEPT else []
        for one in late:
            one.forget()

    def stop(self, name: str) -> bool:
        """Ask a running training to end, which is True, or forget the result of one that has ended.

        Raises:
            UnknownTraining: There is none of that name.
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
            UnknownTraining: There is none of that name, or it ended without any.
        """
        with self._lock:
            kept = self._kept.get(name)
        found = None if kept is None else kept.result()
        if found is None:
            raise UnknownTraining(_UNKNOWN)
        return found

    def close(self) -> None:
        """End all of them. Calling it again does nothing."""
        with self._lock:
            self._is_shut = True
            running, kept = list(self._running.values()), list(self._kept.values())
            self._kept.clear()
        for one in running:
            one.close()
        for one in (*running, *kept):
            one.forget()

    def _take_place(self, held: ExitStack) -> None:
        with self._lock:
            if self._is_shut or self._places == 0:
                raise Overloaded(
                    f"the node trains as many heads as it may ({self._settings.trainings}): ask again later",
                    retry_after_s=_RETRY_AFTER_S,
                )
            self._places -= 1
        held.callback(self._give_place)

    def _give_place(self) -> None:
        with self._lock:
            self._places += 1


_UNKNOWN = "there is no such training, or it left nothing: results are kept for a while only"
