"""What every job starts with: the data, the frozen network and a node to run it on."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from frostline.config import LoaderSettings, NodeSettings
from frostline.datasets import Dataset
from frostline.errors import SettingError
from frostline.events import Event, NodeRestarted, Observer, PhaseStarted, RequestRetried
from frostline.loaders import Job, offload
from frostline.models import freeze
from frostline.node.process import NodeProcess, start_node
from frostline.training.networks import Pretrained, load_model

__all__ = ("JobSettings", "Setup", "set_up")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings:
    """What a job is about.

    Attributes:
        data: folder or ``s3://`` prefix of images in class folders.
        model: name of the network (``training.networks.load_model``).
        until: the last frozen module, or ``features``: all but the classifier.
        near: URL of a node beside the data; None starts one in a process of its own.
        weights: safetensors file of the whole network; None takes the name's own.
        seed: of the order, the split, the fresh classifier, dropout and random preprocessing.
        cut: number of the cut to use; None lets the plan choose.
        augment: random crops and flips, computed anew each epoch.
        loader: how to ask.
        node: of the node that is started when ``near`` is None.
    """

    data: str
    model: str
    until: str
    near: str | None = None
    weights: str | None = None
    seed: int = 0
    cut: int | None = None
    augment: bool = False
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    node: NodeSettings = field(default_factory=NodeSettings)

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise SettingError(f"seed must be from 0 to 2^63 - 1, not {self.seed}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setup:
    """A job that is ready to run."""

    data: Dataset
    network: Pretrained
    job: Job


@contextmanager
def set_up(settings: JobSettings, observe: Observer, *, least_classes: int = 1) -> Iterator[Setup]:
    """List the data, build and freeze the network, start a node unless there is one, plan; undo it at the end.

    Raises:
        UserError: what the user can put right.
        Refused: the node will not do it.
        Unavailable: there is no node at ``near``.
    """
    observe(PhaseStarted(name="listing the data"))
    data = Dataset(settings.data)
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
            near=watch.url,
            cut=settings.cut,
            settings=settings.loader,
            observe=watch,
        )
        yield Setup(data=data, network=network, job=stack.enter_context(job))


@contextmanager
def _node(settings: JobSettings, data: Dataset, observe: Observer) -> Iterator["_Watch"]:
    """The node to use: the user's, or one of the job's own that is started again if it dies."""
    if settings.near is not None:
        yield _Watch(settings.near, None, observe)
        return
    observe(PhaseStarted(name="starting a node"))
    with start_node((data.url,), settings.node) as process:
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
