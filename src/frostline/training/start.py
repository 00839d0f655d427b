"""Begins a job before PyTorch is imported: lists the data, and starts a node, which gets ready meanwhile."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from frostline.config import LoaderSettings
from frostline.datasets import Dataset
from frostline.errors import EmptyDataset
from frostline.events import Observer, PhaseStarted
from frostline.node.process.subprocess import NodeProcess
from frostline.planning import ALL_IN_STORE
from frostline.training.settings import JobSettings

__all__ = ("StartedJob", "begin", "chosen_of")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StartedJob:
    """A job that has its data, and a node on its way.

    Attributes:
        whole: the data set.
        data: the samples of it to use.
        near: URL of the user's node, or of the machine's I/O service; None where ``process`` is the node.
        process: the job's own node, which was launched and may not take requests yet.
    """

    whole: Dataset
    data: Dataset
    near: str | None
    process: NodeProcess | None


@contextmanager
def begin(settings: JobSettings, observe: Observer, *, min_classes: int = 1) -> Iterator[StartedJob]:
    """List the data, or have the job's node list it, and launch a node unless there is one; end it with the context.

    To import PyTorch takes seconds at the node and here, each on a core of its own: so nobody waits for the other.

    Args:
        settings: settings of the job.
        observe: told what happens.
        min_classes: minimum number of classes that the data must have.

    Raises:
        UserError: what the user can put right.
    """
    whole = Dataset(
        settings.data,
        form=settings.form,
        relist=settings.relist,
        changed=settings.changed,
        near=settings.listed_by,
        # One that stands in the environment is left there: data sets travel to worker processes.
        token=None if settings.loader.token == LoaderSettings().token else settings.loader.token,
        observe=observe,
    )
    data = chosen_of(whole, settings, settings.split)
    data.require_classes(min_classes)
    near = settings.near or (None if settings.policy == ALL_IN_STORE else settings.loader.io)
    if near is not None:
        yield StartedJob(whole=whole, data=data, near=near, process=None)
        return
    observe(PhaseStarted(name="starting a node"))
    allow_training = settings.policy == ALL_IN_STORE
    node = replace(settings.node, allow_training=allow_training, trial_niceness=0, trials_here=True)
    with NodeProcess(data.roots, node, "127.0.0.1", 0) as process:
        process.launch()
        yield StartedJob(whole=whole, data=data, near=None, process=process)


def chosen_of(whole: Dataset, settings: JobSettings, split: str | None) -> Dataset:
    """The samples of a split that a job is to use.

    Raises:
        SettingError: there is no such split, or the selection makes no sense.
        EmptyDataset: no sample is left.
    """
    data = whole if split is None else whole[split]
    data = data if settings.where is None else data.select(settings.where)
    if not len(data):
        where = "" if settings.where is None else f" for which {settings.where} holds"
        raise EmptyDataset(f"there is no sample in {f'split {split!r} of ' if split else ''}{whole.url}{where}")
    return data
