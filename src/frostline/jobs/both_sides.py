"""Has both sides of a job compute from the first request on, each sample where it is expected to be done first.

The trainer runs the frozen layers of its share by the fastest engine that the job's accuracy allows. It is tried while
the job is made, on a few of its samples, in a thread of this process: a node tries its own meanwhile, and the link and
this processor would idle else. What was found is kept in the user's cache. An accelerator's engines that are compiled
for minutes are tried in a process of their own, while the job runs.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from frostline.batching import ROWS, pad_rows
from frostline.core import REFERENCE, Route
from frostline.core.config import cache_folder
from frostline.core.errors import FrostlineError
from frostline.core.system import usable_cores, usable_memory_bytes
from frostline.engines.catalog import OFFERS, absence
from frostline.engines.choice import Choice, is_prompt
from frostline.engines.graph_runner import leaf_values
from frostline.engines.machine import (
    estimated_operations_per_s,
    free_device_bytes,
    hardware_name,
    host_digest,
    is_accelerator,
    keeps_freed_memory,
    operations_per_s,
)
from frostline.engines.measure import LONG_RUN_S, observed_memory
from frostline.engines.protocols import Engine, Footprint, Pixels, evaluation_pixels
from frostline.engines.torch import TorchEngine
from frostline.engines.trials import features
from frostline.jobs.context import JobContext, has_engines, judges_of, total_samples
from frostline.jobs.measuring import FoundHere
from frostline.jobs.partition import TorchLocalPrefix
from frostline.jobs.router import BothSides
from frostline.loaders.local_stage import decode
from frostline.models.artifact import Prefix
from frostline.node.trials.processes import TrialJob
from frostline.node.trials.queue import EngineMemory, TrialPolicy
from frostline.node.trials.selection import Trials
from frostline.prefetch import ShortestWait
from frostline.prefetch.requests import Slabs
from frostline.preprocess import DecodeAudio, Preprocess
from frostline.preprocess.sounds import has_sound_packages
from frostline.preprocess.tokens import has_tokenizers
from frostline.wire.messages import Health

__all__ = ("Judges", "SharedRuns", "TrainerEngine", "both_sides_of", "can_be_tried")

T = TypeVar("T")
_Arrays = Sequence[npt.NDArray[np.generic]]

# Of this machine's memory: the trainer's own network and batches have the rest.
_PART = 4
_TRIAL_S = 30.0
# Rows of other requests come so soon after those of a run have left.
_TOGETHER_S = 0.005
# Until a loop has its first rows, or until it may be that it has not begun.
_FIRST_S = 1.0
# Samples on which the reference's memory is seen: one alone may take other ways through a network than several.
_SEEN_ROWS = 2
# Numbers of a sample that are compared before all of it is.
_COMPARED = 64
# Beside a job that runs nobody waits for engines that are compiled.
_SLOW_TRIAL_S = 600.0
# Of a link: what features and encoded samples may take of it together, what is left to the latter in any case, and from
# how many bytes on its rate is known.
_LINK_SHARE, _MIN_SHARE, _TELLING_BYTES = 0.95, 0.05, 256 << 10


def both_sides_of(
    context: JobContext, health: Health, nodes: int, run_rows: int, row_s: float | None
) -> BothSides | None:
    """What deals a job's samples to both sides; None where the trainer cannot do what the node does, or need not.

    Args:
        context: context of the job.
        health: health of its node, or of one of its nodes.
        nodes: number of nodes.
        run_rows: rows of each run on either side, which is filled up where a request has fewer.
        row_s: seconds that the trainer takes for a row in eager PyTorch; None where nobody knows.
    """
    if _shares_a_core(health, context) or not _can_decode(context.preprocess):
        return None
    line, node_per_s = context.cuts[-1], health.operations_per_s
    if node_per_s > 0:
        trainer_per_s = operations_per_s(context.device)
    else:  # it has just started: what was measured is not to be compared with an estimate
        node_per_s = estimated_operations_per_s(health.hardware, max(1, len(health.cores)))
        trainer_per_s = estimated_operations_per_s(hardware_name(context.device), len(usable_cores()))
    encoded_bytes = context.data.samples.encoded_bytes / max(1, len(context.data))

    def bound(route: Route) -> float:
        """Encoded samples may take what the features leave of a link that the node computes meanwhile."""
        seen = context.transport.statistics()
        if route.cut or seen.transfer_bytes < _TELLING_BYTES or not encoded_bytes:
            return math.inf
        link = _LINK_SHARE * seen.transfer_bytes / seen.transfer_s
        features = ways.observed_speed(Route(line.number)) * line.bytes_per_sample
        return max(link - features, _MIN_SHARE * link) / encoded_bytes

    ways = ShortestWait(
        {
            Route(line.number): max(1, nodes) * node_per_s,
            Route(0): trainer_per_s,
        },
        samples_per_request=context.settings.samples_per_request,
        bytes_per_sample=lambda route: max(context.cuts[route.cut].bytes_per_sample, line.bytes_per_sample),
        clock=time.monotonic,
        bound=bound,
        rows_per_run={Route(0): run_rows, Route(line.number): run_rows},
        row_s={} if row_s is None else {Route(0): row_s},
    )
    return BothSides(ways)


def _can_decode(preprocess: Preprocess) -> bool:
    """Whether this side has the packages that samples of this kind need; a node may have them where it has not."""
    has_sounds = any(isinstance(part.steps[0], DecodeAudio) for part in preprocess.parts)
    return (not has_sounds or has_sound_packages()) and (preprocess.tokens is None or has_tokenizers())


def _shares_a_core(health: Health, context: JobContext) -> bool:
    """Whether a node and a trainer without an accelerator would take each other's cores."""
    return health.host == host_digest() and context.device == "cpu" and bool(set(health.cores) & set(usable_cores()))


def can_be_tried(context: JobContext) -> bool:
    """Whether any engine but eager torch may run the frozen layers of a job at its trainer."""
    return (
        context.ahead is not None
        and context.prefix is not None
        and context.prefix.lengths is None
        and bool(_prompt_engines(context.device))
        and has_engines(context.data, context.preprocess, context.accuracy)
    )


def _prompt_engines(device: str) -> list[str]:
    """Engines that are ready in a moment on a device, where this machine has them."""
    others = (offer.name for offer in OFFERS if offer.name != REFERENCE)
    return [name for name in others if is_prompt(name) and absence(name, device) is None]


class _Few:
    """Rows of one request that wait for a run, and what it made of them."""

    def __init__(self, pixels: npt.NDArray[np.generic]) -> None:
        self.pixels = pixels
        self.made: tuple[npt.NDArray[np.generic], ...] | None = None


class SharedRuns:
    """Runs a few rows with those of other requests that wait: a run of one row takes as long as one of eight.

    Safe for threads: whoever has the turn takes along what waits. A run that fails does so for it alone, and the others
    run again. Who has its rows leaves at once, whoever runs next: its place is for another that waits.

    Args:
        run: function that runs at most eight rows, ``[n, ...]``.
    """

    def __init__(self, run: Callable[[npt.NDArray[np.generic]], _Arrays]) -> None:
        self._run = run
        self._waiting: deque[_Few] = deque()
        self._changed = threading.Condition()
        self._is_running = False

    @property
    def waiting(self) -> int:
        """Requests whose rows no run has taken yet."""
        return len(self._waiting)

    def __call__(self, pixels: npt.NDArray[np.generic]) -> tuple[npt.NDArray[np.generic], ...]:
        """What the function makes of these rows, ``[n, ...]`` with n below eight."""
        own = _Few(pixels)
        with self._changed:
            self._waiting.append(own)
            self._changed.notify_all()
            self._changed.wait_for(lambda: own.made is not None or not self._is_running)
            if own.made is not None:
                return own.made
            self._is_running = True
            self._changed.wait_for(lambda: sum(len(few.pixels) for few in self._waiting) >= ROWS, _TOGETHER_S)
            others = self._taken_along(own)
        try:
            made = self._run(np.concatenate([few.pixels for few in (own, *others)]))
            ends = np.cumsum([len(few.pixels) for few in (own, *others)])[:-1]
            mine, *theirs = zip(*(np.split(column, ends) for column in made), strict=True)
            for few, columns in zip(others, theirs, strict=True):
                few.made = columns
        finally:
            with self._changed:
                self._waiting.extendleft(few for few in reversed(others) if few.made is None)
                self._is_running = False
                self._changed.notify_all()
        return mine

    def _taken_along(self, own: _Few) -> list[_Few]:
        """What else waits and fits; none of it waits any more, nor do these rows."""
        self._waiting.remove(own)
        others: list[_Few] = []
        rows = len(own.pixels)
        while self._waiting and rows + len(self._waiting[0].pixels) <= ROWS:
            others.append(self._waiting.popleft())
            rows += len(others[-1].pixels)
        return others


class Judges:
    """What the reference made of the samples that judge engines, which are the job's: nothing runs on them again.

    Args:
        pixels: the samples as the network takes them, ``[n, ...]``.
        made: features of these samples, ``[n, ...]`` for each tensor.
    """

    def __init__(self, pixels: npt.NDArray[np.generic], made: _Arrays) -> None:
        self._pixels, self._made = np.ascontiguousarray(pixels), made
        self._places = {key: place for place, key in enumerate(_some_bytes(pixels))}

    def find(self, pixels: npt.NDArray[np.generic]) -> dict[int, int]:
        """Rows that are one of the samples, each with the sample's place."""
        found = {row: self._places[key] for row, key in enumerate(_some_bytes(pixels)) if key in self._places}
        return {row: place for row, place in found.items() if np.array_equal(pixels[row], self._pixels[place])}

    def merge(self, known: dict[int, int], rest: _Arrays, rows: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Features of all rows, those that are not known given in their order."""
        others = [row for row in range(rows) if row not in known]
        columns = []
        for column, made in zip(self._made, rest or self._made, strict=True):
            merged = np.empty((rows, *column.shape[1:]), column.dtype)
            merged[list(known)] = column[list(known.values())]
            if others:
                merged[others] = made
            columns.append(merged)
        return tuple(columns)


def _some_bytes(pixels: npt.NDArray[np.generic]) -> list[bytes]:
    """A few numbers of each row, by which it is looked up."""
    rows = pixels.reshape(len(pixels), math.prod(pixels.shape[1:]))
    return [row.tobytes() for row in rows[:, :: max(1, rows.shape[1] // _COMPARED)]]


class TrainerEngine:
    """The whole frozen part, run at the trainer; a ``LocalPrefix`` from cut 1. Safe for threads.

    Args:
        context: context of the job, for which ``can_be_tried`` holds.
        tell: function that is called once it is known what runs, on the thread that tries engines, with that, and with
            the reason why no engine could be tried, or None.
        eager_rows: number of rows that eager torch runs before any engine is tried, since a loop waits for the first
            ones; 0 where an engine is known from an earlier job, or these rows take longer than a trial.
        row_s: seconds that a row took in eager torch when the network was checked; None where nobody knows.
    """

    def __init__(
        self,
        context: JobContext,
        tell: Callable[[FoundHere, str | None], None],
        *,
        eager_rows: int = 0,
        row_s: float | None = None,
    ) -> None:
        assert context.prefix is not None, "there is something to run"
        self._context = context
        self._prefix = context.prefix
        self._cut = context.cuts[-1].number
        self._engine: Engine | None = None
        self._tell = tell
        self._eager = TorchLocalPrefix(self._prefix.graph, self._prefix.tensors, context.device)
        self.choice = Choice(engine=REFERENCE, trials=())
        self._eager_rows, self._running, self._has_run = eager_rows, threading.Lock(), False
        self._checked_s = math.inf if row_s is None else row_s
        self._row_s: list[float] = []  # of each run in eager torch until engines are tried
        self._may_try, self._is_late, self._is_closed = threading.Event(), False, False
        self._is_known = threading.Event()
        self._judges: Judges | None = None
        self._trying: Trials | None = None
        self._left = total_samples(context) // 2  # the node has the others
        self._shared_runs = SharedRuns(self._run_few)
        if not eager_rows:
            self._may_try.set()
        self._thread = threading.Thread(target=self._find, name="frostline-engine", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for a trial that is under way in this process: an engine that is being made cannot be interrupted."""
        with self._running:
            self._is_closed = True
            if self._trying is not None:
                self._trying.close()
        self._may_try.set()
        self._thread.join()

    @property
    def name(self) -> str:
        """The name of the engine that runs, once it was found."""
        return REFERENCE if self._engine is None else self.choice.engine

    def run(self, arrays: _Arrays, size: int) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``loaders.local_stage.LocalPrefix``; waits until an engine was found, but for the first rows."""
        with self._running:
            self._left -= len(arrays[0])
            if self._eager_rows > 0:
                self._eager_rows -= len(arrays[0])
                if self._eager_rows <= 0:
                    self._may_try.set()
                began_s = time.perf_counter()
                made = self._run_eagerly(arrays, size)
                self._row_s.append((time.perf_counter() - began_s) / len(arrays[0]))
                if self._is_late and len(self._row_s) > 1:
                    self._may_try.set()
                return made
        self._is_known.wait()
        known = self._judges.find(arrays[0]) if self._judges is not None and len(arrays) == 1 else {}
        if not known:
            return self._run_unknown(arrays, size)
        rest = np.delete(arrays[0], list(known), axis=0)
        assert self._judges is not None, "it knows some"
        return self._judges.merge(known, self._run_unknown([rest], size) if len(rest) else (), len(arrays[0]))

    def _run_unknown(self, arrays: _Arrays, size: int) -> tuple[npt.NDArray[np.generic], ...]:
        if len(arrays) == 1 and len(arrays[0]) < ROWS:
            return self._shared_runs(arrays[0])
        if self._engine is None:
            return self._run_eagerly(arrays, size)
        [pixels] = arrays
        parts = [self._run(pixels[start : start + size]) for start in range(0, len(pixels), size)]
        return tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def _run_eagerly(self, arrays: _Arrays, size: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Another batch may round otherwise, which an accuracy with engines to try allows: no run is filled up.

        One row alone may take other ways through a network than several.
        """
        made = self._eager.run(arrays, min(size, max(_SEEN_ROWS, len(arrays[0]))))
        self._has_run = True
        return made

    def _run_few(self, pixels: npt.NDArray[np.generic]) -> tuple[npt.NDArray[np.generic], ...]:
        return self._run_eagerly([pixels], len(pixels)) if self._engine is None else self._run(pixels)

    def _run(self, pixels: npt.NDArray[np.generic]) -> tuple[npt.NDArray[np.generic], ...]:
        assert self._engine is not None, "it was found"
        rows = pad_rows(len(pixels))
        batch = np.zeros((rows, *pixels.shape[1:]), pixels.dtype) if rows != len(pixels) else pixels
        batch[: len(pixels)] = pixels
        return tuple(tensor[: len(pixels)] for tensor in self._engine.run(batch, self._cut))

    def _find(self) -> None:
        found, why_not, reference = FoundHere(), None, None
        if not self._may_try.wait(_FIRST_S) and len(self._row_s) < 2 and (self._row_s or self._running.locked()):
            self._is_late = True  # a slow processor: its second run says how long a row takes
            self._may_try.wait(_FIRST_S)
        with self._running:
            self._eager_rows = 0  # what comes now waits: beside other runs an engine would seem slow
        try:
            if self._is_closed:
                return
            try:
                reference = self._reference()
                self._try_engines(reference, _prompt_engines(self._context.device), _TRIAL_S)
            except FrostlineError as error:
                why_not = str(error)
            found = self._found()
        finally:  # a node may wait for it too
            self._tell(found, why_not)
            self._is_known.set()
        # On a processor they would take from the loop, for minutes, what they gain it.
        if why_not is None and reference is not None and is_accelerator(self._context.device):
            with suppress(FrostlineError):  # what was found stays
                self._try_engines(reference, [offer.name for offer in OFFERS], _SLOW_TRIAL_S)

    def _found(self) -> FoundHere:
        speeds = {trial.engine: trial.samples_per_s for trial in self.choice.trials if trial.samples_per_s}
        mine, eager = speeds.get(self.choice.engine, 0.0), speeds.get(REFERENCE)
        return FoundHere(samples_per_s=mine, speed_up=mine / eager if mine and eager and len(speeds) > 1 else None)

    def _reference(self) -> "_Eager":
        pixels = _pixels(self._context)
        seen_s = min(self._row_s) if len(self._row_s) > 1 else None  # the first of them made kernels ready
        return _Eager(
            self._prefix,
            pixels,
            self._context.device,
            has_run=self._has_run,
            seen_s=seen_s,
            checked_s=self._checked_s,
        )

    def _try_engines(self, reference: "_Eager", engines: Sequence[str], longest_s: float) -> None:
        """Have the fastest of these run from now on."""
        context, digest = self._context, self._context.shipment.digest if self._context.shipment else ""
        tried: dict[str, Engine] = {}
        with closing(_trials(context, engines, longest_s, tried.__setitem__)) as trials:
            with self._running:
                if self._is_closed:
                    return
                self._trying = trials
            choice = trials.choose(
                TrialJob(digest=digest, prefix=self._prefix, pixels=reference.pixels, reference=reference),
                context.accuracy,
                max_s=context.settings.trial_s,
                samples=max(0, self._left),
            )
            if (made := reference.judge_features(self._cut)) is not None:
                self._judges = Judges(reference.judging, made)
            if choice.engine == REFERENCE and self._engine is not None:
                return  # what was found without other work beside it stays
            if choice.engine not in (REFERENCE, self.choice.engine):
                trial = next(trial for trial in choice.trials if trial.engine == choice.engine)
                checked = reference.footprint(self._cut)
                self._engine = tried.get(choice.engine) or trials.make_engine(
                    digest, self._prefix, trial, None, checked, context.device
                )
            self.choice = choice


def _trials(
    context: JobContext, engines: Sequence[str], longest_s: float, keep: Callable[[str, Engine], None]
) -> Trials:
    free_bytes = free_device_bytes(context.device)
    memory_bytes = (usable_memory_bytes() if free_bytes is None else free_bytes) // _PART
    policy = TrialPolicy(
        device=context.device,
        rows=(context.settings.device_batch,),
        threads=(len(usable_cores()),),
        keeps_freed=keeps_freed_memory(),
        max_bytes=memory_bytes,
        here=True,
    )
    memory = EngineMemory(weights_bytes=memory_bytes, run_bytes=memory_bytes)
    return Trials(cache_folder() / "engines", policy, memory, longest_s=longest_s, engines=engines, keep=keep)


def _pixels(context: JobContext) -> npt.NDArray[np.float32]:
    """The samples that judge, as the network takes them."""
    assert context.ahead is not None, "can_be_tried holds"
    batch = decode(context.preprocess, context.ahead.first.result(), judges_of(context.data), context.view, Slabs())
    # Of three samples one judges; the others calibrate, which no engine needs here.
    return np.repeat(np.asarray(batch.tensors[0], np.float32), 3, axis=0)


class _Eager:
    """The frozen part in eager torch, with which engines are compared; see ``node.trials.processes.Reference``.

    Args:
        prefix: the frozen part.
        pixels: the samples for a trial; what those give on which engines are judged is kept, since it is timed too.
        device: the place where it runs, in torch's words.
        has_run: True if these layers have run in this process before, so that their kernels are ready.
        seen_s: seconds that a row took up to the frost line in the job's own runs, so that a job which is too short for
            any trial computes nothing to know it; None where that was not seen.
        checked_s: seconds that a row took when the network was checked; infinity where nobody knows. Other work of this
            process, as an upload, makes a run longer and never shorter.
    """

    def __init__(
        self, prefix: Prefix, pixels: Pixels, device: str, *, has_run: bool, seen_s: float | None, checked_s: float
    ) -> None:
        self._prefix, self._device, self._checked_s = prefix, device, checked_s
        self.pixels, self.judging = pixels, evaluation_pixels(pixels)
        self._is_ready, self._seen_s = has_run, seen_s
        self._known: dict[int, tuple[npt.NDArray[np.generic], ...]] = {}

    @cached_property
    def _engine(self) -> TorchEngine:
        prefix = self._prefix
        few = torch.from_numpy(self.judging[:_SEEN_ROWS]).to(self._device, getattr(torch, prefix.cuts[0].dtypes[0]))
        leaves = [leaf.to(self._device) for leaf in leaf_values(prefix.graph, prefix.tensors)]
        memory = observed_memory(prefix.graph, leaves, prefix.cuts, [few])
        return TorchEngine(prefix.graph, prefix.cuts, prefix.tensors, device=self._device, memory=memory)

    def seconds(self, cut: int) -> float:
        """See ``Reference``."""
        if self._seen_s is not None:
            return self._seen_s
        took_s = self._timed(cut)
        # The first run makes kernels ready, which is a small part of a long one.
        is_told = self._is_ready or took_s > LONG_RUN_S
        return min((took_s if is_told else self._timed(cut)) / len(self.judging), self._checked_s)

    def judge_features(self, cut: int) -> tuple[npt.NDArray[np.generic], ...] | None:
        """The features of the samples that judge; None where they have not run."""
        return self._known.get(cut)

    def footprint(self, cut: int) -> Footprint:
        """See ``Reference``."""
        return self._engine.footprint(cut)

    def run_exclusive(self, call: Callable[[], T]) -> T:
        """See ``Reference``."""
        return call()

    def features(self, samples: npt.NDArray[np.float32], cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``Reference``."""
        if not np.array_equal(samples, self.judging):
            return features(self._engine, samples, cut)
        if cut not in self._known:
            self._timed(cut)
        return self._known[cut]

    def _timed(self, cut: int) -> float:
        started = time.perf_counter()
        self._known[cut] = features(self._engine, self.judging, cut)
        return time.perf_counter() - started
