"""Computes recorded steps of a run again, and says whether they are equal, within the bound, or what differs."""

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from frostline.core.errors import SettingError
from frostline.core.events import Observer, PhaseStarted, ProgressMade
from frostline.datasets import Dataset
from frostline.engines.choice import largest_error
from frostline.loaders import Batch, Loader
from frostline.planning import ALL_IN_STORE
from frostline.training.report.steps import (
    RecordedStep,
    RecordedSteps,
    SourceDigests,
    digests_of,
    fingerprint,
    sketched_error,
)
from frostline.training.run import LAYERS, SAMPLES, TrainValSplit, identity_of, loader_of, sides_of
from frostline.training.run_config import RunConfig
from frostline.training.settings import JobSettings, TrainSettings
from frostline.training.setup import Setup, set_up
from frostline.training.start import StartedJob

__all__ = (
    "DIFFERS",
    "EQUAL",
    "WITHIN",
    "Comparison",
    "Difference",
    "Verification",
    "compare_steps",
    "spread",
    "verify",
)

EQUAL, WITHIN, DIFFERS = "equal", "within", "differs"
# Names of one kind that are said.
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Something that is another one now than when the run was recorded.

    Attributes:
        part: ``record``, ``data``, ``weights``, ``layers``, ``order``, ``features`` or ``cache``.
        what: a sentence without its full stop, which names it.
    """

    part: str
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What came of computing steps of a run again.

    Attributes:
        run: folder of the run.
        verdict: ``equal`` to the bit, ``within`` the bound, or ``differs``.
        steps: numbers of the steps that were compared, from 1.
        samples: number of samples that were compared.
        recorded: number of steps in the record.
        equal_samples: number of samples of which each feature is equal to the bit.
        error: the relative error of the worst sample as estimated; 0 where all are equal, None where nobody can tell.
        allowed: sum of the errors that the run's accuracy and the one of now explain.
        engines: names of engines that ran the frozen layers, then and now.
        differences: parts that differ, the causes first.
        seconds: whole time.
    """

    run: str
    verdict: str
    steps: tuple[int, ...]
    samples: int
    recorded: int
    equal_samples: int
    error: float | None
    allowed: float
    engines: Mapping[str, tuple[str, ...]]
    differences: tuple[Difference, ...]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The same as plain values."""
        return asdict(self)


def verify(
    settings: TrainSettings,
    run: Path,
    on_event: Observer,
    *,
    steps: int,
    begun: StartedJob | None = None,
    began_at: float | None = None,
) -> Verification:
    """Compute steps of a run again, spread over what was recorded, and compare them.

    Without ``cache_folder`` all is computed; with it, the features that are kept there are compared too.

    Args:
        settings: settings of the run.
        run: folder of the run, of which files alone are read.
        on_event: function that is called with each event.
        steps: maximum number of steps.
        begun: work that has begun already, which the caller ends; None begins here.
        began_at: the time since when seconds count, as ``time.perf_counter`` does; now by default.

    Raises:
        UserError: The user can mend what is wrong: the run has no record, or one of another version.
        NodeUnreachable: the node stayed away.
    """
    began_at = time.perf_counter() if began_at is None else began_at
    if settings.job.policy == ALL_IN_STORE:
        raise SettingError(f"the run in {run} trained beside the store, where no steps are recorded")
    record, identity = RecordedSteps.read(run), RunConfig.read(run).identity
    chosen = spread(record.steps, steps)
    allowed = largest_error(record.accuracy) + largest_error(settings.job.accuracy)
    found = [Difference(part="record", what=f"line {number} is not as it was written") for number in record.damaged]
    if not record.steps:
        found.append(Difference(part="record", what="no step of it can be read"))
    with _made(settings, on_event, begun, keeps=False) as (setup, sides):
        found += _causes(settings, setup, sides, identity, record)
        now, failed = _computed(settings, setup, sides, chosen, on_event)
        name_of = _names(sides.train)
        found += [*failed, *_skipped(setup, chosen)]
    results = [compare_steps(was, now[was.step], name_of, allowed) for was in chosen if was.step in now]
    found += [difference for result in results for difference in result.differences]
    if settings.job.loader.cache_folder is not None:
        with _made(settings, on_event, begun, keeps=True) as (setup, sides):
            kept, _ = _computed(settings, setup, sides, [now[step] for step in now], on_event)
        twice = 2 * largest_error(settings.job.accuracy)
        for number, step in kept.items():
            found += compare_steps(now[number], step, name_of, twice, "cache").differences
    samples, equal = sum(result.samples for result in results), sum(result.equal for result in results)
    errors = [result.error for result in results]
    return Verification(
        run=str(run),
        verdict=DIFFERS if found else EQUAL if samples == equal else WITHIN,
        steps=tuple(sorted(now)),
        samples=samples,
        recorded=len(record.steps),
        equal_samples=equal,
        error=None if None in errors else max((error for error in errors if error is not None), default=None),
        allowed=allowed,
        engines={
            "then": tuple(sorted({was.engine for was in chosen if was.step in now})),
            "now": tuple(sorted({step.engine for step in now.values()})),
        },
        differences=tuple(found),
        seconds=time.perf_counter() - began_at,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What came of one step.

    Attributes:
        samples: number of samples that were compared.
        equal: number of those whose features are equal to the bit.
        error: the relative error of the worst sample as estimated; 0 where all are equal, None where nobody can tell.
        differences: parts that differ.
    """

    samples: int
    equal: int
    error: float | None
    differences: tuple[Difference, ...]


def compare_steps(
    was: RecordedStep, now: RecordedStep, name_of: Callable[[int], str], allowed: float, part: str = "features"
) -> Comparison:
    """Compare a step with what it is now.

    Args:
        was: step as it was recorded.
        now: step as it was computed again.
        name_of: function that gives the object of a sample by its id.
        allowed: the largest relative error between the two; with 0 they must be equal to the bit.
        part: part to which a difference of the features is counted.
    """
    if not np.array_equal(was.ids, now.ids):
        place = next((row for row, (a, b) in enumerate(zip(was.ids, now.ids, strict=False)) if a != b), len(now.ids))
        what = f"step {was.step} has other samples, or others in front, from position {place} of its batch on"
        return Comparison(samples=0, equal=0, error=None, differences=(Difference(part="order", what=what),))
    found = []
    if listed := was.sources_unlike(now):
        names = _few([name_of(int(was.ids[row])) for row in listed])
        found.append(Difference(part="data", what=f"step {was.step}: other name, size or version of {names}"))
    unlike = was.rows_unlike(now)
    error = sketched_error(was, now) if unlike else 0.0
    if unlike and (error is None or error > allowed or not allowed):
        names = _few([name_of(int(was.ids[row])) for row in unlike])
        by = "by an amount that nobody can tell" if error is None else f"by {error:.2g} (allowed: {allowed:.2g})"
        what = f"step {was.step}: {len(unlike)} of {len(was.ids)} samples differ {by}, such as {names}"
        found.append(Difference(part=part, what=what))
    samples = len(was.ids)
    return Comparison(samples=samples, equal=samples - len(unlike), error=error, differences=tuple(found))


def spread(steps: Sequence[RecordedStep], maximum: int) -> list[RecordedStep]:
    """So many of the steps, the first and the last among them, as far apart as they can be."""
    count = min(maximum, len(steps))
    return [steps[place * (len(steps) - 1) // max(1, count - 1)] for place in range(count)]


@contextmanager
def _made(
    settings: TrainSettings, on_event: Observer, begun: StartedJob | None, *, keeps: bool
) -> Iterator[tuple[Setup, TrainValSplit]]:
    """The run's job, and the samples of both its sides; each comes once, so nothing is kept in memory."""
    loader = replace(settings.job.loader, cache_bytes=0)
    job: JobSettings = replace(settings.job, loader=loader if keeps else replace(loader, cache_folder=None))
    if keeps and begun is not None and begun.process is not None:  # which is there already
        begun = replace(begun, near=begun.process.url, process=None)
    with set_up(job, on_event, begun=begun, min_classes=2) as setup:
        yield setup, sides_of(settings, setup.whole, setup.data)


def _causes(
    settings: TrainSettings, setup: Setup, sides: TrainValSplit, identity: Mapping[str, str], record: RecordedSteps
) -> Iterator[Difference]:
    """What of the digests of the whole run is another one now."""
    mine = identity_of(settings, sides, setup.job)
    if mine[SAMPLES] != identity.get(SAMPLES):
        yield Difference(
            part="data", what=f"the listing of {SAMPLES} is another one (names, sizes, versions or the split)"
        )
    tensors = digests_of(setup.network.model) if record.weights else {}
    changed = [name for name in {**record.weights, **tensors} if record.weights.get(name) != tensors.get(name)]
    if changed:
        yield Difference(part="weights", what=f"of the tensors that are not trained, {_few(changed)} hold other values")
    elif mine[LAYERS] != identity.get(LAYERS):
        yield Difference(part="layers", what=f"{LAYERS} are others, on the same weights")


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}"


def _skipped(setup: Setup, chosen: Sequence[RecordedStep]) -> list[Difference]:
    """Samples that could be read then and cannot now."""
    read = {sample for was in chosen for sample in was.ids.tolist()}
    skipped = [sample for sample in setup.job.statistics().skipped if sample.id in read]
    return [
        Difference(part="data", what=f"{sample.object} cannot be read ({sample.reason})") for sample in skipped[:_NAMED]
    ]


def _names(data: Dataset) -> Callable[[int], str]:
    """Gives the object of a sample by its id."""

    def name_of(sample: int) -> str:
        rows = np.flatnonzero(data.samples.ids == sample)
        return data.samples.take(rows[:1]).objects[0] if len(rows) else f"sample {sample}"

    return name_of


def _computed(
    settings: TrainSettings, setup: Setup, sides: TrainValSplit, chosen: Sequence[RecordedStep], on_event: Observer
) -> tuple[dict[int, RecordedStep], list[Difference]]:
    """The same steps as they are now, by their numbers, and those that there are none of."""
    on_event(PhaseStarted(name="computing steps again"))
    sources, found, failed = SourceDigests(sides.train.samples), {}, []
    with closing(_Passes(settings, setup, sides.train)) as passes:
        for done, was in enumerate(chosen, 1):
            batch = passes.batch(was.epoch, was.number)
            if batch is None:
                what = f"step {was.step} is said to be batch {was.number} of epoch {was.epoch + 1}, which has fewer"
                failed.append(Difference(part="order", what=what))
                continue
            found[was.step] = fingerprint(
                batch,
                sources.of(batch.ids[: len(was.ids)].numpy()),
                step=was.step,
                epoch=was.epoch,
                number=was.number,
                engine=setup.job.engine.engine,
            )
            on_event(ProgressMade(done=done, total=len(chosen)))
    return found, failed


class _Passes:
    """Batches of a run by epoch and number; one pass is gone on with where the next batch is the one behind."""

    def __init__(self, settings: TrainSettings, setup: Setup, data: Dataset) -> None:
        self._loader: Callable[[int], Loader] = lambda epoch: loader_of(
            settings, setup, setup.job, data, epoch, shuffle=True
        )
        self._at: tuple[int, int] | None = None
        self._pass: Generator[Batch] | None = None

    def batch(self, epoch: int, number: int) -> Batch | None:
        """That one; None where the epoch ends before it."""
        if self._pass is None or self._at != (epoch, number):
            self.close()
            loader = self._loader(epoch)
            if number >= len(loader):
                return None
            loader.load_state_dict(loader.state_after(number))
            self._pass = _each(loader)
        self._at = epoch, number + 1
        return next(self._pass, None)

    def close(self) -> None:
        """Leave the pass."""
        if self._pass is not None:
            self._pass.close()
        self._pass = None


def _each(loader: Loader) -> Generator[Batch]:
    yield from loader
