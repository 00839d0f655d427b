"""Begins a job before PyTorch is imported: lists the data, and starts a node, which gets ready meanwhile."""

import hashlib
import secrets
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from threading import Event, Thread

import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.config import LoaderSettings, TenantSettings
from frostline.core.errors import DataError, EmptyDataset
from frostline.core.events import Observer, PhaseStarted
from frostline.core.system import collector_rests
from frostline.datasets import Dataset, MultiLabel
from frostline.datasets.dataset import roots_of
from frostline.datasets.formats.known import part_names
from frostline.datasets.targets import NUMBER, TargetSpec
from frostline.node.process import NodeProcess
from frostline.planning import ALL_IN_STORE
from frostline.training.settings import IMAGES, JobSettings, by_input, describe_parts, describe_samples, preprocess_of

__all__ = ("StartedJob", "begin", "chosen_samples", "outputs_of", "samples_of", "target_declaration")

_MAX_CLASSES = 1 << 20
_OWN = "job"
_BROUGHT = ("torch", "frostline.models.freezing", "frostline.models.cutting")
"""What a job imports next, for a second and more."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartedJob:
    """A job that has its data, and a node on its way.

    Attributes:
        whole: the data set.
        data: the samples of it to use.
        near: URL of the user's node, or of the machine's I/O service; None where ``process`` is the node.
        samples: kind of the samples, in the words of ``training.settings``.
        process: the job's own node, which was launched and may not take requests yet.
        token: token that ``process`` knows; None where there is none.
    """

    whole: Dataset
    data: Dataset
    near: str | None
    samples: str
    process: NodeProcess | None
    token: str | None = field(default=None, repr=False)


@contextmanager
def begin(settings: JobSettings, on_event: Observer, *, min_classes: int = 0) -> Iterator[StartedJob]:
    """List the data, or have the job's node list it, and launch a node unless there is one; end it with the context.

    To import PyTorch takes seconds at the node and here, each on a core of its own: so nobody waits for the other.

    Args:
        settings: settings of the job.
        on_event: function that is called with each event.
        min_classes: minimum number of classes that the data must have; with 0 samples need no labels.

    Raises:
        UserError: The user can mend what is wrong: data, node or settings.
    """
    with _torch_comes() if settings.listed_by else nullcontext():
        whole, data = _listed(settings, on_event, min_classes)
    samples = samples_of(data, settings)
    near = settings.near or (None if settings.policy == ALL_IN_STORE else settings.loader.io)
    if near is not None:
        yield StartedJob(whole=whole, data=data, near=near, samples=samples, process=None)
        return
    on_event(PhaseStarted(name="starting a node"))
    allow_training = settings.policy == ALL_IN_STORE
    # Every user of this machine reaches its loopback, and is nobody to whom the node would read this user's data.
    token = settings.loader.token or secrets.token_urlsafe(32)
    own = TenantSettings(name=_OWN, token_sha256=hashlib.sha256(token.encode()).hexdigest(), sees_all=True)
    node = replace(settings.node, allow_training=allow_training, trial_niceness=0, trials_in_process=True)
    node = replace(node, tenants=(own,))
    with NodeProcess(roots_of(data), node, "127.0.0.1", 0, reports=False) as process:
        process.launch()
        yield StartedJob(whole=whole, data=data, near=None, samples=samples, process=process, token=token)


def _listed(settings: JobSettings, on_event: Observer, min_classes: int) -> tuple[Dataset, Dataset]:
    """The data set and the samples of it to use, of which a job can be made."""
    whole = Dataset(
        settings.data,
        format=settings.format,
        column=by_input(settings.column, "--column") or settings.column,
        file_column=settings.file_column,
        label=settings.label,
        relist=settings.relist,
        on_change=settings.on_change,
        targets=target_declaration(settings),
        near=settings.listed_by,
        # One that stands in the environment is left there: data sets travel to worker processes.
        token=None if settings.loader.token == LoaderSettings().token else settings.loader.token,
        on_event=on_event,
    )
    data = chosen_samples(whole, settings, settings.split)
    if settings.outputs is None and settings.targets is None:
        data.selection.require_classes(min_classes, data.url)
        if min_classes and (settings.split is not None or not whole.splits_brought):  # else that of the sides counts
            data.selection.require_labels(data.url)
    else:
        outputs_of(data, settings)  # refuses what makes no sense before a node is started
    return whole, data


@contextmanager
def _torch_comes() -> Iterator[None]:
    """Import PyTorch while a node elsewhere lists the data; what takes longer than that is left to whoever needs it."""
    listed = Event()

    def bring() -> None:
        with collector_rests(), suppress(ImportError):  # whoever needs it says that it is missing
            for name in _BROUGHT:
                if not listed.is_set():
                    import_module(name)

    thread = Thread(target=bring, name="frostline-imports")
    thread.start()
    try:
        yield
    finally:
        listed.set()
    # No two threads import at once: each would see what the other has half imported.
    thread.join()


def samples_of(data: Dataset, settings: JobSettings) -> str:
    """What the samples of a job are: what was said, else what the data looks like where no network takes texts.

    Raises:
        SettingError: The option makes no sense, or the kind of the samples cannot be told here.
    """
    parts = part_names(data.source.format)
    if parts:
        looks = not settings.model.startswith("hf:")
        return describe_parts(data, parts, settings.samples, looks=looks)
    if settings.samples is None:
        takes_texts = settings.tokenizer is not None or settings.max_length is not None
        return (
            IMAGES
            if takes_texts or settings.model.startswith("hf:")
            else describe_samples(data, is_column_named=settings.column is not None)
        )
    preprocess_of(settings.samples)  # which refuses what makes no sense before a node is started
    return settings.samples


def target_declaration(settings: JobSettings) -> str | MultiLabel | Sequence[str] | None:
    """The targets that a job's data set declares; none where it need not say what is learned."""
    if settings.outputs is not None:
        return ()
    if settings.targets is None or settings.learns != "labels":
        return settings.targets
    return MultiLabel(column=settings.targets)


def outputs_of(data: Dataset, settings: JobSettings) -> int:
    """How many scores a network gives for a sample: one a class, a label or a number.

    Raises:
        DataError: the column holds what the loss is not for, or samples have no value in it.
        SettingError: there is no such column.
    """
    if settings.outputs is not None:
        return settings.outputs
    if data.target_columns is None:
        return max(1, len(data.classes))  # where samples have none, no score is looked at
    (spec,) = data.target_columns.specs
    values = data.column(spec.column)
    if values.null_count:
        raise DataError(
            f"{values.null_count} of {len(values)} samples have no value in the column {spec.name!r}: leave them out "
            f"(--where {f'{spec.name} is not None'!r})"
        )
    if settings.learns == "classes":
        return _classes_of(spec, data.whole.column(spec.column))
    if not spec.is_fixed or 0 in spec.shape:
        raise DataError(
            f"the column {spec.name!r} holds values of the kind {spec.kind}, and {settings.loss} is for numbers and "
            "vectors"
        )
    return next(iter(spec.shape), None) or 1


def _classes_of(spec: TargetSpec, values: pa.ChunkedArray) -> int:
    if (spec.kind, spec.dtype) == (NUMBER, "int64") and not pa.types.is_boolean(values.type):
        minimum, maximum = int(pc.min(values).as_py()), int(pc.max(values).as_py())
        if 0 <= minimum <= maximum < (len(spec.classes) or _MAX_CLASSES):
            return len(spec.classes) or maximum + 1
    raise DataError(
        f"the column {spec.name!r} holds no whole numbers of classes from 0, as classes are: where its values name or "
        f"number classes, take it as the label: --label {shlex.quote(spec.name)} (in Python label={spec.name!r})"
    )


def chosen_samples(whole: Dataset, settings: JobSettings, split: str | None) -> Dataset:
    """The samples of a split that a job is to use.

    Raises:
        SettingError: there is no such split, or the selection makes no sense.
        EmptyDataset: The split or the selection has no sample.
    """
    data = whole if split is None else whole[split]
    data = data if settings.where is None else data.select(settings.where)
    if not len(data):
        where = "" if settings.where is None else f" for which {settings.where} holds"
        raise EmptyDataset(f"there is no sample in {f'split {split!r} of ' if split else ''}{whole.url}{where}")
    return data
