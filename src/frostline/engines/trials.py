"""Tries one engine on real samples: how fast it is, how far from the reference, and what memory it takes."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Cut, Graph, Levels
from frostline.core.errors import EngineUnsupported, UnsafeArtifact
from frostline.core.nouns import widen_bfloat16
from frostline.core.system import give_back_freed
from frostline.engines.catalog import build, offer_of
from frostline.engines.machine import can_measure, look_anew, peak_bytes, resident_bytes
from frostline.engines.measure import LONG_RUN_S
from frostline.engines.protocols import Engine, Footprint, Pixels, calibration_pixels, evaluation_pixels, levels_of
from frostline.profiles import Trial
from frostline.wire.codecs import relative_error

__all__ = ("Arrays", "Subject", "compare_engine", "features", "try_briefly", "try_engine")

Arrays = tuple[npt.NDArray[np.generic], ...]

# Rows at which memory is seen first; every batch is a multiple of it.
_MIN_ROWS = 8
# Enough runs that a neighbour who has a core for a while is seen in few of them, and no more seconds than this on one
# setting; once all took so long, no other setting is tried: a job waits for the engine, and gains more by it than by
# the best setting of it.
_RUNS = 5
_RUNS_S = 1.5
# Fewer where a job waits for them; those samples that judge have warmed the engine up. Where they took this long, one
# more is enough, and the shorter of both counts: the first of OpenVINO takes a ResNet-50 a seventh longer than others.
_FEW_RUNS, _FEW_RUNS_S, _LONG_FIRST_S = 3, 0.5, 0.2
_SETTINGS_S = 3.0
# A larger batch or fewer threads must gain as much: two runs of one measurement differ by that.
_NOISE = 0.05
_NOT_FINITE = "gives values that are not finite"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Subject:
    """What engines are tried on.

    Attributes:
        graph: the frozen part.
        cuts: every place where it may stop, cut 1 first.
        tensors: the weights by name.
        pixels: the real samples, at least two; every third one is kept apart for the error, so that engines that are
            calibrated are not judged on what they were calibrated with.
        levels: meaning of pixels that are as they are kept, ``uint8[n, H, W, C]``; None where they are what the network
            takes, ``float32[n, ...]``.
        device: the device in torch's words.
        rows: batches to try, multiples of eight, the one to keep where they are equally fast first.
        threads: numbers of threads to try; the first is what the node would take.
        folder: the folder for converted files, of this prefix; one folder a cut is made in it.
        footprints: the reference's memory by cut, where whoever asks has checked the graph.
    """

    graph: Graph
    cuts: Sequence[Cut]
    tensors: Mapping[str, torch.Tensor]
    pixels: Pixels
    levels: Levels | None
    device: str
    rows: tuple[int, ...]
    threads: tuple[int, ...]
    folder: Path
    footprints: Mapping[int, Footprint] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert len(self.pixels) > 1, "one sample cannot both calibrate and judge"

    def inputs(self, name: str) -> Pixels:
        """The samples as an engine takes them."""
        if self.levels is None or levels_of(name):
            return self.pixels
        return self.levels.apply(self.pixels.astype(np.uint8, copy=False))

    def make_engine(self, name: str, cut: int, threads: int, pixels: Pixels | None = None) -> Engine:
        """An engine that is ready to run up to a cut; calibrated on some of these samples if it was not before."""
        return build(
            name,
            self.graph,
            self.cuts,
            self.tensors,
            cut=cut,
            device=self.device,
            max_rows=max(self.rows),
            threads=threads,
            levels=self.levels,
            calibration=None if pixels is None else calibration_pixels(pixels),
            folder=self.folder / f"cut-{cut}",
            checked=self.footprints.get(cut),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Timed:
    """A trial at one batch and so many threads.

    Attributes:
        trial: the trial with the median of its runs.
        low_s: seconds a sample that a quarter of the runs stayed below. Settings are compared by it: a neighbour makes
            runs longer and never shorter, those on many threads more than those on few, and the result is kept.
        runs_s: seconds that its runs took.
    """

    trial: Trial
    low_s: float
    runs_s: float


def try_engine(
    subject: Subject,
    name: str,
    cut: int,
    reference: Arrays | None,
    *,
    clock: Callable[[], float] | None = None,
) -> Trial:
    """Make an engine ready up to a cut and measure it. The process is to do nothing else meanwhile.

    Args:
        subject: subject to try it on.
        name: name of the engine.
        cut: number of the cut.
        reference: the reference's features of the samples that judge; None if this is the reference.
        clock: seconds; None takes what this process has of its threads' time, or an accelerator of everybody's.
    """
    trial = _empty(name, cut)
    try:
        return _tried(subject, trial, reference, clock)
    except (EngineUnsupported, UnsafeArtifact) as error:
        return replace(trial, why_not=str(error))


def try_briefly(
    subject: Subject,
    name: str,
    cut: int,
    reference: Arrays,
    alone: Callable[[Callable[[], Trial]], Trial] | None = None,
    keep: Callable[[str, Engine], None] | None = None,
) -> Trial:
    """Make an engine ready up to a cut and measure it at one setting, as for a job that waits.

    Its memory is by what the process has grown while it was made, and by what the reference takes in a run.

    Args:
        subject: subject to try it on; the first of its rows and threads are taken.
        name: name of the engine.
        cut: number of the cut.
        reference: the reference's features of the samples that judge.
        alone: function that runs a trial while no network is run, in a process that does other work too; None where
            this process does nothing else.
        keep: function that takes the engine once it was measured, by its name; None where it is not to be used.
    """
    trial = replace(_empty(name, cut), rows=subject.rows[0], threads=subject.threads[0])
    pixels, is_seen = subject.inputs(name), _is_memory_seen(subject.device)
    before = resident_bytes() if is_seen else 0
    try:
        engine = subject.make_engine(name, cut, trial.threads, pixels)
        tick = time.perf_counter if alone else _clock(subject.device, trial.threads)
        brief = partial(_brief, engine, pixels, trial, reference, tick)
        trial = alone(brief) if alone else brief()
    except (EngineUnsupported, UnsafeArtifact) as error:
        return replace(trial, why_not=str(error))
    grown = resident_bytes() - before if is_seen else 0
    said = engine.footprint(cut)
    if keep is not None:
        keep(name, engine)
    return replace(
        trial,
        weight_bytes=max(engine.weight_bytes, grown),
        load_bytes=max(2 * engine.weight_bytes, grown),
        fixed_bytes=said.fixed_bytes,
        bytes_per_sample=said.bytes_per_sample,
    )


def _brief(engine: Engine, pixels: Pixels, trial: Trial, reference: Arrays, clock: Callable[[], float]) -> Trial:
    judging, started = evaluation_pixels(pixels), clock()
    made = features(engine, judging, trial.cut)
    run_s = (clock() - started) / -(-len(judging) // _MIN_ROWS)
    error = _error(made, reference)
    if not np.isfinite(error):
        return replace(trial, why_not=_NOT_FINITE)
    # Of the fewest rows, which take little longer a sample than a whole batch. A very long run need not be warmed up.
    more = 0 if run_s > LONG_RUN_S else 1 if run_s > _LONG_FIRST_S else _FEW_RUNS
    runs = _seconds(engine, _batch(pixels, _MIN_ROWS), trial.cut, clock, more, _FEW_RUNS_S)
    runs = runs if more == _FEW_RUNS else np.array([min([run_s, *runs])])
    timed = _timed(replace(trial, rows=_MIN_ROWS), runs).trial
    return replace(timed, rows=trial.rows, error=error)


def compare_engine(subject: Subject, name: str, cut: int, reference: Arrays) -> Trial:
    """Measure nothing of an engine but its error, which belongs to the samples; arguments are as of ``try_engine``."""
    trial, pixels = _empty(name, cut), subject.inputs(name)
    try:
        engine = subject.make_engine(name, cut, subject.threads[0])  # on what its name says it was calibrated on
        error = _error(features(engine, evaluation_pixels(pixels), cut), reference)
    except (EngineUnsupported, UnsafeArtifact) as unfit:
        return replace(trial, why_not=str(unfit))
    return replace(trial, error=error) if np.isfinite(error) else replace(trial, why_not=_NOT_FINITE)


def features(engine: Engine, pixels: Pixels, cut: int) -> Arrays:
    """What crosses a cut for some samples, as the engine takes them, run by eights."""
    starts = range(0, len(pixels), _MIN_ROWS)
    parts = [engine.run(_batch(pixels[start : start + _MIN_ROWS], _MIN_ROWS), cut) for start in starts]
    return tuple(np.concatenate(columns)[: len(pixels)] for columns in zip(*parts, strict=True))


def _empty(name: str, cut: int) -> Trial:
    return Trial(engine=name, precision=offer_of(name).precision, cut=cut)


def _tried(subject: Subject, trial: Trial, reference: Arrays | None, clock: Callable[[], float] | None) -> Trial:
    # This one may be converted, and brings libraries into the process; it goes before memory is looked at.
    pixels = subject.inputs(trial.engine)
    error, best = _judged(subject, pixels, trial, reference, clock)
    if not np.isfinite(error):
        return replace(trial, why_not=_NOT_FINITE)
    return _weighed(subject, pixels, replace(best, error=error))


def _judged(
    subject: Subject, pixels: Pixels, trial: Trial, reference: Arrays | None, clock: Callable[[], float] | None
) -> tuple[float, Trial]:
    """The error, and the trial at the best threads and batch: every batch on the first threads, the best on others."""
    error, found = 0.0, list[_Timed]()
    for threads in subject.threads:
        if found and _is_enough(found):
            break
        engine = subject.make_engine(trial.engine, trial.cut, threads, pixels)
        tick = clock or _clock(subject.device, threads)
        if not found and reference is not None:
            error = _error(features(engine, evaluation_pixels(pixels), trial.cut), reference)
        sizes = (_best(found).rows,) if found else subject.rows
        for rows in sizes:
            if not found or not _is_enough(found):
                batch = _batch(pixels, rows)
                engine.run(batch, trial.cut)  # to warm up
                runs = _seconds(engine, batch, trial.cut, tick, _RUNS, _RUNS_S)
                found.append(_timed(replace(trial, threads=threads, rows=rows), runs))
        del engine  # two at once would take more memory than the node has to give one
    return error, _best(found)


def _clock(device: str, threads: int) -> Callable[[], float]:
    """Seconds in which an engine works on so many threads.

    On the processor those that it had: a trial lets what the node serves go first, and would seem slow by others' work.
    """
    if torch.device(device).type != "cpu":
        return time.perf_counter
    return lambda: time.process_time() / threads


def _is_enough(found: Sequence[_Timed]) -> bool:
    return sum(result.runs_s for result in found) >= _SETTINGS_S


def _best(found: Sequence[_Timed]) -> Trial:
    """The trial at its best setting; a later one must gain more than the noise."""
    best = found[0]
    for other in found[1:]:
        best = other if other.low_s < (1 - _NOISE) * best.low_s else best
    return best.trial


def _weighed(subject: Subject, pixels: Pixels, trial: Trial) -> Trial:
    """The trial with the memory that its engine takes, made as a node makes it and run at its batch.

    Seen as growth of the process; where that cannot be seen, as the engine says.
    """
    gc.collect()
    give_back_freed()
    is_seen = _is_memory_seen(subject.device)
    before = resident_bytes() if is_seen else 0
    engine = subject.make_engine(trial.engine, trial.cut, trial.threads)
    if not is_seen:
        said = engine.footprint(trial.cut)
        return replace(
            trial,
            weight_bytes=engine.weight_bytes,
            load_bytes=2 * engine.weight_bytes,
            fixed_bytes=said.fixed_bytes,
            bytes_per_sample=said.bytes_per_sample,
        )
    load_bytes = peak_bytes() - before
    give_back_freed()
    standing = resident_bytes()
    few, many = _peak(engine, pixels, trial.cut, _MIN_ROWS), _peak(engine, pixels, trial.cut, trial.rows)
    give_back_freed()
    after = resident_bytes()
    weight_bytes = max(engine.weight_bytes, after - before)
    # Some engines keep the arena of their largest run, in which the next ones run: it is counted once, as theirs.
    few, many = few - max(standing, after), many - max(standing, after)
    maximum, more_rows = max(0, few, many), trial.rows - _MIN_ROWS
    per_sample = max(0, -(-(many - few) // more_rows)) if more_rows and maximum else 0
    return replace(
        trial,
        weight_bytes=weight_bytes,
        load_bytes=max(load_bytes, weight_bytes),
        fixed_bytes=max(0, maximum - trial.rows * per_sample),
        bytes_per_sample=per_sample,
    )


def _is_memory_seen(device: str) -> bool:
    """Whether an engine's memory shows as growth of the process: an accelerator's is its own."""
    return torch.device(device).type == "cpu" and can_measure()


def _peak(engine: Engine, pixels: Pixels, cut: int, rows: int) -> int:
    """The most memory of the process during a run, the samples not counted."""
    batch = _batch(pixels, rows)
    look_anew()
    engine.run(batch, cut)
    return peak_bytes() - batch.nbytes


def _error(tensors: Arrays, reference: Arrays) -> float:
    if any(not np.isfinite(tensor).all() for tensor in map(widen_bfloat16, tensors) if tensor.dtype.kind == "f"):
        return float("inf")
    return max(
        relative_error(widen_bfloat16(ours), widen_bfloat16(theirs))
        for ours, theirs in zip(reference, tensors, strict=True)
    )


def _timed(trial: Trial, runs: npt.NDArray[np.float64]) -> _Timed:
    low_s, middle_s, high_s = np.percentile(runs / trial.rows, (25, 50, 75)).tolist()
    trial = replace(trial, seconds=middle_s, spread_s=high_s - low_s)
    return _Timed(trial=trial, low_s=low_s, runs_s=float(runs.sum()))


def _batch(pixels: Pixels, rows: int) -> Pixels:
    """So many samples, repeated where there are too few."""
    return np.resize(pixels, (rows, *pixels.shape[1:]))


def _seconds(
    engine: Engine, batch: Pixels, cut: int, clock: Callable[[], float], maximum: int, max_s: float
) -> npt.NDArray[np.float64]:
    """Seconds of some runs."""
    runs: list[float] = []
    while len(runs) < maximum and sum(runs) < max_s:
        started = clock()
        engine.run(batch, cut)
        runs.append(clock() - started)
    return np.array(runs)
