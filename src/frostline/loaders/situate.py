"""Gathers what a plan is made from: both sides measured at the same time, and the link between them."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from frostline.client.transport import Transport
from frostline.config import LoaderSettings, cache_folder
from frostline.core import EXACT, REFERENCE, Cut, Samples, View
from frostline.datasets import Dataset
from frostline.engines.hardware import hardware_name, host_digest
from frostline.errors import OverBudget
from frostline.loaders.asking import Asking
from frostline.loaders.fetch import Shipment
from frostline.loaders.kept_profiles import KeptProfiles
from frostline.loaders.measure import TrainerProfiler, measure_link
from frostline.models.artifact import Prefix
from frostline.planning import Situation
from frostline.preprocess import Preprocess
from frostline.profiles import Profile
from frostline.wire.codecs import offered
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest

__all__ = ("Scene", "agreed", "situate", "tried")

# Samples that the node measures on: one device batch of real ones keeps it within a second or two.
_PROFILED = 16
# Where engines are tried, two of three of these calibrate those of 8 bits, and the error is judged on the others: it is
# the worst sample's, which fewer may not show.
_TRIED = 96
# What crosses to measure the link and this side counts as traffic: enough for a rate, and no more.
_CROSSING_BYTES = 512 << 10
_FEWEST, _MOST = 8, 256
# The trainer's own run needs no more than one small batch.
_DECODED = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """Who takes part in a job.

    Attributes:
        data: the samples.
        preprocess: from encoded bytes to the network's input.
        transport: to the node.
        asking: waits where it is full.
        cuts: of the network, by number.
        prefix: its frozen part; None where there is none to ship.
        shipment: the same as it travels.
        device: where the trainer runs, in torch's words.
        settings: how the job asks.
        accuracy: what codecs and engines may lose.
        epochs: that are planned for.
        cut: number of the one that the user chose; None lets the plan choose.
    """

    data: Dataset
    preprocess: Preprocess
    transport: Transport
    asking: Asking
    cuts: Sequence[Cut]
    prefix: Prefix | None
    shipment: Shipment | None
    device: str
    settings: LoaderSettings
    accuracy: str | float
    epochs: int
    cut: int | None = None

    @property
    def codecs(self) -> tuple[str, ...]:
        """Every codec that some cut may use."""
        found = [offered(self.accuracy, is_relu=cut.is_relu, dtypes=cut.dtypes) for cut in self.cuts[1:]]
        return tuple(dict.fromkeys(codec for codecs in found for codec in codecs))

    @property
    def view(self) -> View | None:
        """A random view to measure with, where the preprocessing is random."""
        return View(seed=0, epoch=0) if self.preprocess.is_random else None


def situate(scene: Scene) -> Situation:
    """Measure both sides and the link on a few real samples.

    Where both sides use the same cores and the same engine one profile serves both. Where they use other cores they
    are measured at the same time, as they will work at the same time: neighbours on one machine slow each other.

    Raises:
        Refused: The node will not serve the data, or not run the network for another reason than its memory.
        StoreError: The samples cannot be read.
        Unavailable: The node does not answer.
    """
    data, transport = scene.data, scene.transport
    health = scene.asking(transport.health)
    mean_bytes = data.samples.encoded_bytes / len(data)
    crossing = _some(scene, round(min(max(_CROSSING_BYTES / max(1, mean_bytes), _FEWEST), _MOST)))
    crossed = scene.asking(lambda: measure_link(transport, _request(scene, crossing, cut=0)))
    same_host = health.host == host_digest() and bool(set(health.cores) & os.sched_getaffinity(0))
    few = crossing.take(np.arange(min(_DECODED, len(crossing))))
    encoded = replace(crossed.encoded, ids=crossed.encoded.ids[:_DECODED], encoded=crossed.encoded.encoded[:_DECODED])

    def profile_trainer() -> Profile:
        profiler = TrainerProfiler(
            prefix=scene.prefix,
            digest="" if scene.shipment is None else scene.shipment.digest,
            device=scene.device,
            codecs=scene.codecs,
            encoded_bytes=mean_bytes,
            device_batch=scene.settings.device_batch,
            kept=KeptProfiles(cache_folder() / "profiles"),
        )
        return profiler.profile(scene.preprocess, encoded, few, scene.view)

    with ThreadPoolExecutor(1, "frostline-profile") as apart:
        is_alike = same_host and _is_alike(health, scene.device)
        ours = None if is_alike else apart.submit(profile_trainer)
        theirs, refused = _profile_node(scene)
        trainer = theirs if ours is None else ours.result()
        # The trainer's own part is the reference's, whatever the node takes.
        trainer = profile_trainer() if trainer is None or trainer.engine != REFERENCE else trainer
    return Situation(
        cuts=tuple(scene.cuts),
        encoded_bytes=mean_bytes,
        store=theirs or trainer,
        trainer=trainer,
        link=crossed.link,
        same_host=same_host,
        memory_bytes=health.memory_bytes,
        refused=refused,
        epochs=scene.epochs,
        keeps_features=_keeps_features(scene),
        accuracy=scene.accuracy,
    )


def agreed(scene: Scene, store: Profile, cut: int) -> Profile:
    """Have the engine that one node chose made ready at all, and know its error where it is furthest off.

    Args:
        scene: of the job.
        store: that node's profile.
        cut: up to which the engine is to run.

    Raises:
        EngineNotReady: None of them can run it so far on these samples, exactly enough.
        Unavailable: None of them answers.
    """
    if store.engine == REFERENCE or cut < 2:
        return store
    request = replace(tried(scene), engine=store.engine, cut=cut)
    wanted = ProfileRequest(features=request, accuracy=scene.accuracy)
    found = scene.asking(lambda: scene.transport.profile(wanted))
    worst = max((one.error for one in found.trials), default=0.0)
    trials = (replace(one, error=max(one.error, worst)) if one.engine == store.engine else one for one in store.trials)
    return replace(store, trials=tuple(trials))


def tried(scene: Scene) -> FeatureRequest:
    """What the node is to measure, and to try engines on: the same for all jobs on the same data.

    So engines that are calibrated are calibrated alike on every node and in every job.
    """
    samples = _some(scene, _PROFILED) if scene.accuracy == EXACT else _in_turns(_some(scene, _TRIED))
    return _request(scene, samples, cut=scene.cuts[-1].number)


def _is_alike(health: Health, device: str) -> bool:
    return health.hardware == hardware_name(device) and set(health.cores) == os.sched_getaffinity(0)


def _profile_node(scene: Scene) -> tuple[Profile | None, str | None]:
    """The node's own measurement, or why it will not run the network in its memory: encoded samples always go."""
    request, only_here = tried(scene), 1 < (scene.cut or 0) <= scene.cuts[-1].number
    if only_here and scene.cut is not None:  # engines are tried for some seconds at each cut that a plan may want
        request = replace(request, cut=scene.cut)
    wanted = ProfileRequest(features=request, codecs=scene.codecs, accuracy=scene.accuracy, only_here=only_here)
    try:
        return scene.asking(lambda: scene.transport.profile(wanted)), None
    except OverBudget as error:
        return None, str(error)


def _request(scene: Scene, samples: Samples, *, cut: int) -> FeatureRequest:
    return FeatureRequest(
        data=scene.data.url,
        reading=scene.data.reading,
        samples=samples,
        prefix=scene.shipment.digest if scene.shipment is not None and cut > 1 else None,
        cut=cut,
        preprocess=scene.preprocess.to_json(),
        view=scene.view,
    )


def _some(scene: Scene, most: int) -> Samples:
    """Samples spread evenly over the data set, so that they are of every kind."""
    size = len(scene.data)
    rows: npt.NDArray[np.int64] = np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))
    return scene.data.samples.take(rows)


def _in_turns(samples: Samples) -> Samples:
    """Every third of them first, and so on: a node measures some costs on the first, and its memory may end sooner."""
    return samples.take(np.argsort(np.arange(len(samples)) % 3, kind="stable"))


def _keeps_features(scene: Scene) -> bool:
    """Whether all features stay at the trainer after the first epoch."""
    nbytes = scene.cuts[-1].bytes_per_sample * len(scene.data)
    settings = scene.settings
    room_bytes = settings.cache_bytes + (settings.cache_disk_bytes if settings.cache_folder is not None else 0)
    return not scene.preprocess.is_random and nbytes <= room_bytes
