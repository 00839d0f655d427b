"""What every job starts with: the data, the frozen network, and the job on a node."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial

from frostline.core import Samples
from frostline.core.events import Event, NodeRestarted, Observer, PhaseStarted, RequestRetried
from frostline.datasets import Dataset
from frostline.jobs import Job
from frostline.jobs.connect import asked_early
from frostline.jobs.offload import offload
from frostline.models import freeze
from frostline.training.lora import add_adapters, check_trained
from frostline.training.networks import Pretrained, load_model
from frostline.training.recipe import LowRank
from frostline.training.settings import IMAGES, JobSettings, by_input, preprocess_of
from frostline.training.start import StartedJob, begin, outputs_of

__all__ = ("Setup", "measure_first", "set_up")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setup:
    """A job that is ready to run.

    Attributes:
        data: the samples to use.
        whole: the data set that they are of.
        network: the network to train or run.
        samples: kind of the samples, in the words of ``training.settings``.
        job: the settings of data and node.
        again: function that makes another job of so many epochs, for a network whose frozen part is another now; it
            ends with the first.
    """

    data: Dataset
    whole: Dataset
    network: Pretrained
    samples: str
    job: Job
    again: Callable[[int], Job]


@contextmanager
def set_up(
    settings: JobSettings,
    on_event: Observer,
    *,
    begun: StartedJob | None = None,
    min_classes: int = 0,
    epochs: int = 1,
    first: Callable[[Dataset, Dataset], Samples] | None = None,
) -> Iterator[Setup]:
    """Build and freeze the network, and make the job; undo it at the end.

    Args:
        settings: settings of the job.
        on_event: function that is called with each event.
        begun: work that has begun already, which the caller ends; None begins here.
        min_classes: minimum number of classes that the data must have; with 0 samples need no labels.
        epochs: number of epochs that the plan reckons with.
        first: function that gives the samples which the loop takes first, of a whole data set and what of it is used;
            None where that is not known.

    Raises:
        UserError: The user can mend what is wrong: data, network, node or settings.
        Refused: the node will not do it.
        Unavailable: there is no node at ``near``.
    """
    with ExitStack() as stack:
        if begun is None:
            begun = stack.enter_context(begin(settings, on_event, min_classes=min_classes))
        near = None
        if first is not None and begun.samples == IMAGES and begun.near is not None and _begins_at_once(settings):
            nodes, samples = (begun.near, *settings.also_near), first(begun.whole, begun.data)
            near = stack.enter_context(asked_early(begun.data, samples, nodes, settings.loader, settings.accuracy))
        on_event(PhaseStarted(name="building the network"))
        parts = by_input(begun.samples, "--samples")
        network = load_model(
            settings.model,
            classes=outputs_of(begun.data, settings),
            weights=settings.weights,
            seed=settings.seed,
            augment=settings.augment,
            tokenizer=settings.tokenizer,
            max_length=settings.max_length,
            samples=None if parts else preprocess_of(begun.samples),
            parts=parts,
            is_tuned=settings.outputs is not None,
            on_event=on_event,
        )
        _freeze(network, settings)
        watch = _Watch(begun, on_event)
        made = partial(_job, _known(settings, begun), network, watch, stack)
        job = made(begun.data, epochs, near)
        # As the job lists it: it may have listed it again.
        yield Setup(
            data=job.data,
            whole=begun.whole,
            network=network,
            samples=begun.samples,
            job=job,
            again=partial(made, job.data),
        )


def _known(settings: JobSettings, begun: StartedJob) -> JobSettings:
    """The settings of a job that its own node knows."""
    return settings if begun.token is None else replace(settings, loader=replace(settings.loader, token=begun.token))


def _begins_at_once(settings: JobSettings) -> bool:
    return not settings.loader.measure_first and settings.policy == "best" and settings.cut is None


def _job(
    settings: JobSettings,
    network: Pretrained,
    watch: "_Watch",
    stack: ExitStack,
    data: Dataset,
    epochs: int,
    near: Sequence[str] | None = None,
) -> Job:
    return stack.enter_context(
        offload(
            network.model,
            data,
            preprocess=network.preprocess,
            near=near or (watch.url, *settings.also_near),
            cut=settings.cut,
            codec=settings.codec,
            policy=settings.policy,
            accuracy=settings.accuracy,
            epochs=epochs,
            settings=settings.loader,
            on_event=watch,
        )
    )


def _freeze(network: Pretrained, settings: JobSettings) -> None:
    inputs, until = network.preprocess.inputs, [layer.strip() for layer in settings.until.split("+")]
    if settings.lora is None:
        freeze(network.model, until, input_shape=inputs)
        return
    add_adapters(network.model, LowRank.parse(settings.lora), inputs, seed=settings.seed)
    freeze(network.model, until, input_shape=inputs)
    check_trained(network.model, settings.until)


def measure_first(settings: JobSettings) -> JobSettings:
    """The same job, measured before it hands out anything."""
    return replace(settings, loader=replace(settings.loader, measure_first=True))


class _Watch:
    """Passes events on, and restarts the job's own node when a request failed because it is gone.

    Args:
        begun: the job begun with the node, which is waited for.
        on_event: function that is called with each event.

    Raises:
        NodeUnreachable: The job's own node did not come up.
    """

    def __init__(self, begun: StartedJob, on_event: Observer) -> None:
        self._process = begun.process
        self._on_event = on_event
        if begun.process is not None:
            begun.process.start()
        self.url = begun.near or (begun.process.url if begun.process else "")

    def __call__(self, event: Event) -> None:
        self._on_event(event)
        if isinstance(event, RequestRetried) and self._process is not None and self._process.restart_if_dead():
            self._on_event(NodeRestarted(url=self.url))
