"""Runs trials of engines in child processes, one after another, within limits of time and memory."""

import contextlib
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from pathlib import Path
from subprocess import TimeoutExpired
from typing import Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from frostline.core import Levels
from frostline.core.errors import Unavailable
from frostline.core.processes import Limits, Worker, without_keys
from frostline.core.system import STARTED
from frostline.core.units import in_bytes, in_seconds
from frostline.engines.catalog import offer_of
from frostline.engines.choice import is_prompt
from frostline.engines.protocols import Engine, Footprint, Pixels, evaluation_inputs, offer_name
from frostline.engines.trials import Subject, compare_engine, try_briefly
from frostline.models.artifact import Prefix, save_prefix
from frostline.node.memory import Cancelled
from frostline.node.trials.queue import NOBODY, Requester, TrialPolicy
from frostline.profiles import Trial

__all__ = ("Reference", "TrialJob", "TrialProcess", "TrialRunner")

T = TypeVar("T")

# Maximum seconds for one engine: its conversion with calibration, and some seconds of runs at eight cuts.
_LONGEST_S = 240.0
_MEMORY = ("MemoryError", "bad_alloc", "can't allocate memory", "Cannot allocate memory")


class Reference(Protocol):
    """The user's own network as the node runs it, with which other engines are compared."""

    def seconds(self, cut: int) -> float:
        """The measured seconds per sample from the network's input up to a cut."""

    def footprint(self, cut: int) -> Footprint:
        """The memory of one of its runs up to a cut, by which the graph was checked."""

    def features(self, samples: npt.NDArray[np.float32], cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Compute the tensors at a cut for some samples, given as the network's input."""

    def run_exclusive(self, call: Callable[[], T]) -> T:
        """Run a call that has the node's device to itself, and return its result."""


class TrialProcess:
    """The process of the current trial, which any thread can cancel.

    Args:
        environment: variables that it has beside the user's, which go first.
        niceness: niceness added to it, so that serving goes first.
    """

    def __init__(self, environment: Mapping[str, str], niceness: int) -> None:
        self._environment = environment
        self._limits = Limits(niceness=niceness)
        self._lock = threading.Lock()
        self._is_abandoned: Callable[[], bool] | None = None
        self._child: Worker | None = None
        self._spare: Worker | None = None
        self._is_closed = False

    def warm(self) -> None:
        """Start the process of the next trial now: it imports for seconds what every trial needs, and waits."""
        with self._lock:
            if not self._is_closed and self._spare is None:
                self._spare = self._new()

    def run(self, argument: str, longest_s: float, is_abandoned: Callable[[], bool]) -> tuple[int | None, str]:
        """Run a trial to its end. Returns its status, None if it took too long, and its last words.

        Raises:
            Cancelled: The request was cancelled.
            Unavailable: The node is stopping.
        """
        child = self._started(is_abandoned)
        status = None
        try:
            child.tell(argument)
            with contextlib.suppress(TimeoutExpired):
                status = child.wait(longest_s)
        finally:
            child.end()
            words = child.last_words()
            child.close()
        if self._is_closed:
            raise Unavailable("the node is stopping")
        if is_abandoned():
            raise Cancelled
        return status, words

    def wake(self) -> None:
        """Kill the process if its request was cancelled."""
        with self._lock:
            if self._child is not None and self._is_abandoned is not None and self._is_abandoned():
                self._child.end()

    def close(self) -> None:
        """Kill the process, and start no other."""
        with self._lock:
            self._is_closed = True
            if self._child is not None:
                self._child.end()
            if self._spare is not None:
                self._spare.end()
                self._spare.close()

    def _new(self) -> Worker:
        words = tempfile.TemporaryFile()  # noqa: SIM115 (it closes it)
        environment = {**self._environment, **without_keys(os.environ)}
        return Worker(STARTED["trial"], environment=environment, limits=self._limits, is_told=True, stderr=words)

    def _started(self, is_abandoned: Callable[[], bool]) -> Worker:
        with self._lock:
            if self._is_closed:
                raise Unavailable("the node is stopping")
            if is_abandoned():  # later cancellations are seen by ``wake``
                raise Cancelled
            self._is_abandoned = is_abandoned
            spare, self._spare = self._spare, None
            if spare is not None and spare.has_ended:
                spare.close()
                spare = None
            self._child = spare or self._new()
            return self._child


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrialJob:
    """What engines are tried on, and for whom.

    Attributes:
        digest: digest of the prefix.
        prefix: prefix to be run.
        pixels: the real samples.
        reference: reference, which runs the prefix as the user's own network does.
        requester: tenant and request for which engines are tried.
        levels: meaning of the pixels if they are unprocessed, so that engines take them unprocessed too; else None.
    """

    digest: str
    prefix: Prefix
    pixels: Pixels
    reference: Reference
    requester: Requester = NOBODY
    levels: Levels | None = None


class TrialRunner:
    """Tries engines on one prefix. A context manager, which removes its files.

    Args:
        job: prefix, samples and tenant.
        policy: the way that engines are tried.
        converted: folder for converted files of this prefix.
        process: process that runs the trials.
        longest_s: maximum seconds for all trials together, without waiting.
        is_brief: True if engines are tried at one setting only, for a job that waits.
        keep: function that takes each engine that was tried in this process, by its name; None where none is used.

    Attributes:
        job: prefix, samples and tenant.
        has_begun: True if a trial was run.
        spent_s: seconds spent on trials so far.
    """

    def __init__(
        self,
        job: TrialJob,
        policy: TrialPolicy,
        *,
        converted: Path,
        process: TrialProcess,
        longest_s: float,
        is_brief: bool = False,
        keep: Callable[[str, Engine], None] | None = None,
    ) -> None:
        self._keep = keep
        self.job = job
        self._policy = policy
        self._converted = converted
        self._process = process
        self._left_s = longest_s
        self._is_brief = is_brief
        self.has_begun = False
        self.spent_s = 0.0
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._referenced: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            self._folder.cleanup()

    @property
    def is_late(self) -> bool:
        """Whether the time for all trials is used up."""
        return self.has_begun and self._left_s <= 0

    def check(self) -> None:
        """Check the tenant's trial time; a request that has begun may finish, so that its trials are not lost.

        Raises:
            Overloaded: The tenant has to wait before more is tried for it.
        """
        if not self.has_begun:
            self.job.requester.check()

    def run_trials(self, trials: Sequence[Trial]) -> list[Trial]:
        """Try one engine at some cuts."""
        return self._found(trials, only_error=False)

    def compare(self, trials: Sequence[Trial]) -> list[Trial]:
        """Measure only the error of one engine at some cuts; its speed and memory are known."""
        return self._found(trials, only_error=True)

    def _found(self, trials: Sequence[Trial], *, only_error: bool) -> list[Trial]:
        engine, cuts = trials[0].engine, [trial.cut for trial in trials]
        found, why_not = self._run(engine, cuts, only_error=only_error)
        return [found.get(trial.cut) or _refused(trial, why_not or "gave no answer") for trial in trials]

    def _run(self, engine: str, cuts: Sequence[int], *, only_error: bool) -> tuple[dict[int, Trial], str | None]:
        """Run trials. Returns those that succeeded, by cut, and the reason why others failed."""
        self.has_begun = True
        left_s = min(_LONGEST_S, self._left_s)
        if left_s <= 0:
            return {}, "was not tried: the time for trials was used up"
        began_s = time.monotonic()
        try:
            if self._policy.here and is_prompt(offer_name(engine)):
                with self._survived(engine) as was_survived:
                    if was_survived:
                        return {cut: self._here(engine, cut, only_error=only_error) for cut in cuts}, None
            return self._apart(engine, cuts, left_s, only_error=only_error)
        finally:
            took_s = time.monotonic() - began_s
            self._left_s -= took_s
            self.spent_s += took_s
            self.job.requester.spent(took_s)

    @contextlib.contextmanager
    def _survived(self, engine: str) -> Iterator[bool]:
        """Yield whether no process has died while it tried this engine; a marker file records a death of this one."""
        marked = self._converted / f"{engine}.tried-here"
        try:
            marked.touch(exist_ok=False)
        except FileExistsError:
            yield False
            return
        try:
            yield True
        finally:
            marked.unlink(missing_ok=True)

    def _here(self, engine: str, cut: int, *, only_error: bool) -> Trial:
        """Try an engine in this process."""
        policy, reference = self._policy, self.job.reference
        subject = Subject(
            graph=self.job.prefix.graph,
            cuts=self.job.prefix.cuts,
            tensors=self.job.prefix.tensors,
            pixels=self.job.pixels,
            levels=self.job.levels,
            device=policy.device,
            rows=policy.rows,
            threads=policy.threads,
            folder=self._converted,
            footprints={cut: reference.footprint(cut)},
        )
        expected = reference.features(self._judging_samples(), cut)
        if only_error:
            return reference.run_exclusive(partial(compare_engine, subject, engine, cut, expected))
        return try_briefly(subject, engine, cut, expected, reference.run_exclusive, self._keep)

    def _apart(
        self, engine: str, cuts: Sequence[int], longest_s: float, *, only_error: bool
    ) -> tuple[dict[int, Trial], str | None]:
        """Try an engine in a process of its own."""
        folder = self._opened()
        self._refer(cuts)
        out = folder / "trials.jsonl"
        out.unlink(missing_ok=True)
        wanted = {**self._wanted(engine, cuts, folder), "only_error": only_error, "is_brief": self._is_brief}
        status, words = self._process.run(json.dumps(wanted), longest_s, self.job.requester.is_abandoned)
        lines = out.read_text(encoding="utf-8").splitlines() if out.exists() else []
        found = {trial.cut: trial for trial in (Trial(**json.loads(line)) for line in lines)}
        if status is None:
            return found, f"took longer than {in_seconds(longest_s)}"
        return found, None if status == 0 else self._failure(status, words)

    def _refer(self, cuts: Sequence[int]) -> None:
        """Write the reference's features at some cuts for the test samples."""
        samples = self._judging_samples()
        for cut in cuts:
            if cut not in self._referenced:
                for place, tensor in enumerate(self.job.reference.features(samples, cut)):
                    np.save(self._opened() / f"reference-{cut}-{place}.npy", tensor)
                self._referenced.add(cut)

    def _judging_samples(self) -> npt.NDArray[np.float32]:
        """The test samples, as the network's input."""
        return evaluation_inputs(self.job.pixels, self.job.levels)

    def _wanted(self, engine: str, cuts: Sequence[int], folder: Path) -> dict[str, object]:
        policy = self._policy
        return {
            "folder": str(folder),
            "levels": None if self.job.levels is None else asdict(self.job.levels),
            "engine": engine,
            "cuts": list(cuts),
            "device": policy.device,
            "rows": policy.rows,
            "threads": policy.threads if offer_of(engine).takes_threads else policy.threads[:1],
            "converted": str(self._converted),
            "footprints": [(cut, *astuple(self.job.reference.footprint(cut))) for cut in cuts],
            "max_bytes": policy.max_bytes,
        }

    def _opened(self) -> Path:
        if self._folder is None:
            made = tempfile.TemporaryDirectory(prefix="frostline-trial-")
            try:
                folder = Path(made.name)
                with (folder / "prefix.safetensors").open("wb") as file:
                    save_prefix(self.job.prefix, file)
                np.save(folder / "pixels.npy", self.job.pixels)
            except BaseException:  # a full disk: the next trial must not read half of them
                made.cleanup()
                raise
            self._folder = made
        return Path(self._folder.name)

    def _failure(self, status: int, last: str) -> str:
        if any(word in last for word in _MEMORY):
            return f"takes more than {in_bytes(self._policy.max_bytes)} to be made ready"
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
        return f"failed: {last.splitlines()[-1][:300]}" if last else f"failed with status {status}"


def _refused(trial: Trial, why_not: str) -> Trial:
    return Trial(engine=trial.engine, precision=trial.precision, cut=trial.cut, why_not=why_not)
