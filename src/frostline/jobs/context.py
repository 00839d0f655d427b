"""Who takes part in a job, as one value, and which of its samples everything is measured on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from frostline.config import LoaderSettings
from frostline.core import EXACT, FLOAT32, Cut, Samples, View
from frostline.datasets import Dataset
from frostline.engines.machine.hardware import hardware_name, host_digest
from frostline.jobs.loader_factory import keeps_all
from frostline.loaders.epoch.fetch import Shipment
from frostline.loaders.epoch.retry import Asking
from frostline.preprocess import Preprocess
from frostline.processors import usable_cores
from frostline.transport.protocol import Transport
from frostline.wire.codecs import offered
from frostline.wire.messages import FeatureRequest, Health

if TYPE_CHECKING:  # of PyTorch, which jobs without a model do without
    from frostline.models.files.artifact import Prefix

__all__ = (
    "Scene",
    "asked_of",
    "computed_in_all",
    "is_alike",
    "keeps_features",
    "request_of",
    "shares_cores",
    "some_of",
    "tried",
)

# Samples that the node measures on: one device batch of real ones keeps it within a second or two.
_PROFILED = 16
# Where engines are tried that narrow numbers, two of three of these calibrate those of 8 bits, and the error is judged
# on the others: it is the worst sample's, which fewer may not show.
_TRIED = 96


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """Who takes part in a job.

    Attributes:
        data: the samples.
        preprocess: from encoded bytes to the network's input.
        transport: to the node.
        asking: waits where it is full.
        cuts: cuts of the network, by number.
        prefix: its frozen part; None where there is none to ship.
        shipment: the same as it travels.
        device: where the trainer runs, in torch's words.
        settings: how the job asks.
        accuracy: accuracy that codecs and engines must keep.
        epochs: number of epochs that are planned for.
        cut: number of the one that the user chose; None lets the plan choose.
    """

    data: Dataset
    preprocess: Preprocess
    transport: Transport
    asking: Asking
    cuts: Sequence[Cut]
    prefix: "Prefix | None"
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


def tried(scene: Scene) -> FeatureRequest:
    """What the node is to measure, and to try engines on: the same for all jobs on the same data.

    So engines that are calibrated are calibrated alike on every node and in every job.
    """
    narrows = scene.accuracy not in (EXACT, FLOAT32)
    samples = _in_turns(some_of(scene, _TRIED)) if narrows else some_of(scene, _PROFILED)
    return request_of(scene, samples, cut=scene.cuts[-1].number)


def request_of(scene: Scene, samples: Samples, *, cut: int) -> FeatureRequest:
    """A request for some samples up to a cut, by the names under which the node has data and prefix."""
    return FeatureRequest(
        data=scene.data.url,
        reading=scene.data.reading,
        samples=samples,
        prefix=scene.shipment.digest if scene.shipment is not None and cut > 1 else None,
        cut=cut,
        preprocess=scene.preprocess.to_json(),
        view=scene.view,
    )


def some_of(scene: Scene, most: int) -> Samples:
    """Samples spread evenly over the data set, so that they are of every kind."""
    size = len(scene.data)
    rows: npt.NDArray[np.int64] = np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))
    return scene.data.samples.take(rows)


def _in_turns(samples: Samples) -> Samples:
    """Every third of them first, and so on: a node measures some costs on the first, and its memory may end sooner."""
    return samples.take(np.argsort(np.arange(len(samples)) % 3, kind="stable"))


def keeps_features(scene: Scene) -> bool:
    """Whether all features stay at the trainer after the first epoch."""
    return keeps_all(scene.cuts[-1].bytes_per_sample * len(scene.data), scene.preprocess, scene.settings)


def computed_in_all(scene: Scene) -> int:
    """Samples that the frozen layers run on in the whole job, as far as it is known when it is made."""
    return len(scene.data) * (1 if keeps_features(scene) else scene.epochs)


def asked_of(scene: Scene, health: Health, nodes: int) -> dict[str, Any]:
    """What a measurement of a job depends on, as plain values: network, data, both machines, and what is allowed."""
    return {
        "prefix": None if scene.shipment is None else scene.shipment.digest,
        "data": [scene.data.url, scene.data.digest],
        "preprocess": scene.preprocess.digest,
        "accuracy": scene.accuracy,
        "nodes": nodes,
        "node": [health.host, health.hardware, health.memory_bytes, health.cores],
        "trainer": [host_digest(), hardware_name(scene.device), sorted(usable_cores())],
        "device_batch": scene.settings.device_batch,
    }


def is_alike(health: Health, device: str) -> bool:
    """Whether a node has the same hardware and the same numbers of cores as a trainer on ``device``."""
    return health.hardware == hardware_name(device) and set(health.cores) == set(usable_cores())


def shares_cores(health: Health, device: str) -> bool:
    """Whether a node and a trainer on ``device`` use the same cores of one machine, and no accelerator."""
    return health.host == host_digest() and device == "cpu" and is_alike(health, device)
