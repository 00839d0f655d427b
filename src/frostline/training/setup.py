"""What every job starts with: the data, the frozen network and a node to run it on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from frostline.datasets import Dataset
from frostline.errors import EmptyDataset
from frostline.events import Event, NodeRestarted, Observer, PhaseStarted, RequestRetried
from frostline.loaders import Job, offload
from frostline.models import freeze
from frostline.node.process import NodeProcess, start_node
from frostline.planning import ALL_IN_STORE
from frostline.training.networks import Pretrained, load_model
from frostline.training.settings import JobSettings

__all__ = ("Setup", "chosen_of", "set_up")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setup:
    """A job that is ready to run.

    Attributes:
        data: the samples to use.
        whole: the data set that they are of.
        network: to train or run.
        job: on it.
    """

    data: Dataset
    whole: Dataset
    network: Pretrained
    job: Job


@contextmanager
def set_up(settings: JobSettings, observe: Observer, *, least_classes: int = 1, epochs: int = 1) -> Iterator[Setup]:
    """List the data, build and freeze the network, start a node unless there is one, plan; undo it at the end.

    Args:
        settings: what the job is about.
        observe: told what happens.
        least_classes: that the data must have.
        epochs: that the plan reckons with.

    Raises:
        UserError: what the user can put right.
        Refused: the node will not do it.
        Unavailable: there is no node at ``near``.
    """
    whole = Dataset(
        settings.data, form=settings.form, relist=settings.relist, changed=settings.changed, observe=observe
    )
    data = chosen_of(whole, settings, settings.split)
    data.require_classes(least_classes)
    observe(PhaseStarted(name="building the network"))
    network = load_model(
        settings.model,
        classes=len(data.classes),
        weights=settings.weights,
        seed=settings.seed,
        augment=settings.augment,
    )
    freeze(network.model, settings.until, input_shape=network.preprocess.shape)
    with ExitStack() as stack:
        watch = stack.enter_context(_node(settings, data, observe))
        job = offload(
            network.model,
            data,
            preprocess=network.preprocess,
            near=(watch.url, *settings.also_near),
            cut=settings.cut,
            codec=settings.codec,
            policy=settings.policy,
            accuracy=settings.accuracy,
            epochs=epochs,
            settings=settings.loader,
            observe=watch,
        )
        # As the job lists it: it may have listed it again.
        yield Setup(data=job.data, whole=whole, network=network, job=stack.enter_context(job))


def chosen_of(whole: Dataset, settings: JobSettings, split: str | None) -> Dataset:
    """The samples of a split that a job is to use.

    Raises:
        SettingError: there is no such split, or the selection makes no sense.
        EmptyDataset: there is no such sample.
    """
    data = whole if split is None else whole[split]
    data = data if settings.where is None else data.select(settings.where)
    if not len(data):
        where = "" if settings.where is None else f" for which {settings.where} holds"
        raise EmptyDataset(f"there is no sample in {f'split {split!r} of ' if split else ''}{whole.url}{where}")
    return data


@contextmanager
def _node(settings: JobSettings, data: Dataset, observe: Observer) -> Iterator["_Watch"]:
    """The node to use: the user's, the machine's I/O service, or one that is started."""
    near = settings.near or (None if settings.policy == ALL_IN_STORE else settings.loader.io)
    if near is not None:
        yield _Watch(near, None, observe)
        return
    observe(PhaseStarted(name="starting a node"))
    node = replace(settings.node, allow_training=settings.policy == ALL_IN_STORE)
    with start_node(data.roots, node) as process:
        yield _Watch(process.url, process, observe)


class _Watch:
    """Passes events on, and restarts the job's own node when a request failed because it is gone."""

    def __init__(self, url: str, process: NodeProcess | None, observe: Observer) -> None:
        self.url = url
        self._process = process
        self._observe = observe

    def __call__(self, event: Event) -> None:
        self._observe(event)
        if isinstance(event, RequestRetried) and self._process is not None and self._process.restart_if_dead():
            self._observe(NodeRestarted(url=self.url))
