"""Who takes part in a job, as one value, and which of its samples everything is measured on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from frostline.core import EXACT, FLOAT32, Cut, Samples, View
from frostline.core.config import LoaderSettings
from frostline.core.system import usable_cores
from frostline.datasets import Dataset
from frostline.engines.machine import hardware_name, host_digest
from frostline.jobs.loader_factory import keeps_all
from frostline.loaders.ahead import SamplesAhead
from frostline.loaders.fetch import RetryPolicy, Shipment
from frostline.preprocess import Preprocess
from frostline.transport import Transport
from frostline.wire.codecs import offered_codecs
from frostline.wire.messages import FeatureRequest, Health

if TYPE_CHECKING:  # of PyTorch, which jobs without a model do without
    from frostline.models.artifact import Prefix

__all__ = (
    "JobContext",
    "first_batch_bytes",
    "has_engines",
    "has_same_hardware",
    "is_alike",
    "judges_of",
    "keeps_features",
    "measurement_key",
    "request_of",
    "shares_cores",
    "some_of",
    "total_samples",
    "trial_request",
)

# Samples that the node measures on: one device batch of real ones keeps it within a second or two.
_PROFILED = 16
# Where engines are tried that narrow numbers, two of three of these calibrate those of 8 bits, and the error is judged
# on the others: it is the worst sample's, which fewer may not show.
_TRIED = 96
# A run of the reference: the job's first samples wait until they are judged.
_JUDGES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class JobContext:
    """Who takes part in a job.

    Attributes:
        data: the samples.
        preprocess: the steps from encoded bytes to the network's input.
        transport: the transport to the node.
        asking: policy that waits where the node is full.
        cuts: cuts of the network, by number.
        prefix: the frozen part; None where there is none to ship.
        shipment: prefix as it is uploaded.
        device: the place where the trainer runs, in torch's words.
        settings: the way that the job asks.
        accuracy: accuracy that codecs and engines must keep.
        epochs: number of epochs that are planned for.
        cut: number of the one that the user chose; None lets the plan choose.
        ahead: samples, encoded, that were asked for while the network was traced, first those on which the trainer's
            engine is judged; None where none is.
    """

    data: Dataset
    preprocess: Preprocess
    transport: Transport
    asking: RetryPolicy
    cuts: Sequence[Cut]
    prefix: "Prefix | None"
    shipment: Shipment | None
    device: str
    settings: LoaderSettings
    accuracy: str | float
    epochs: int
    cut: int | None = None
    ahead: SamplesAhead | None = None

    @property
    def codecs(self) -> tuple[str, ...]:
        """Every codec that some cut may use."""
        found = [offered_codecs(self.accuracy, is_relu=cut.is_relu, dtypes=cut.dtypes) for cut in self.cuts[1:]]
        return tuple(dict.fromkeys(codec for codecs in found for codec in codecs))

    @property
    def view(self) -> View | None:
        """A random view to measure with, where the preprocessing is random."""
        return View(seed=0, epoch=0) if self.preprocess.is_random else None


def trial_request(context: JobContext) -> FeatureRequest:
    """What the node is to measure, and to try engines on: the same for all jobs on the same data.

    So engines that are calibrated are calibrated alike on every node and in every job.
    """
    narrows = context.accuracy not in (EXACT, FLOAT32)
    samples = _in_turns(some_of(context.data, _TRIED)) if narrows else some_of(context.data, _PROFILED)
    return request_of(context, samples, cut=context.cuts[-1].number)


def request_of(context: JobContext, samples: Samples, *, cut: int) -> FeatureRequest:
    """A request for some samples up to a cut, by the names under which the node has data and prefix."""
    preprocess = context.preprocess
    return FeatureRequest(
        data=context.data.url,
        reading=context.data.manifest.reading,
        samples=samples,
        prefix=context.shipment.digest if context.shipment is not None and cut >= preprocess.shipped_from else None,
        cut=cut,
        preprocess=preprocess.to_json(),
        view=context.view,
    )


def some_of(data: Dataset, maximum: int) -> Samples:
    """Samples spread evenly over a data set, so that they are of every kind."""
    size = len(data)
    rows: npt.NDArray[np.int64] = np.unique(np.linspace(0, size - 1, min(size, maximum)).astype(np.int64))
    return data.samples.take(rows)


def judges_of(data: Dataset) -> Samples:
    """The samples on which the trainer's engine is judged: the same in every job on a data set."""
    return some_of(data, _JUDGES)


def has_engines(data: Dataset, preprocess: Preprocess, accuracy: str | float) -> bool:
    """Whether another engine than eager torch may run at the trainer, as far as it is known without a trace."""
    return accuracy not in (EXACT, 0) and preprocess.dtype == "float32" and len(data) >= _JUDGES


def _in_turns(samples: Samples) -> Samples:
    """Every third of them first, and so on: a node measures some costs on the first, and its memory may end sooner."""
    return samples.take(np.argsort(np.arange(len(samples)) % 3, kind="stable"))


def keeps_features(context: JobContext) -> bool:
    """Whether all features stay at the trainer after the first epoch."""
    return keeps_all(context.cuts[-1].bytes_per_sample * len(context.data), context.preprocess, context.settings)


def total_samples(context: JobContext) -> int:
    """Samples that the frozen layers run on in the whole job, as far as it is known when it is made."""
    return len(context.data) * (1 if keeps_features(context) else context.epochs)


def first_batch_bytes(data: Dataset, settings: LoaderSettings) -> int:
    """Bytes of the encoded samples of one device batch, in the mean."""
    return data.samples.encoded_bytes * settings.device_batch // max(1, len(data))


def measurement_key(context: JobContext, health: Health, nodes: int) -> dict[str, Any]:
    """What a measurement of a job depends on, as plain values: network, data, both machines, and what is allowed."""
    return {
        "prefix": None if context.shipment is None else context.shipment.digest,
        "data": [context.data.url, context.data.digest],
        "preprocess": context.preprocess.digest,
        "accuracy": context.accuracy,
        "nodes": nodes,
        "node": [health.host, health.hardware, health.memory_bytes, health.cores],
        "trainer": [host_digest(), hardware_name(context.device), sorted(usable_cores())],
        "device_batch": context.settings.device_batch,
    }


def has_same_hardware(health: Health, device: str) -> bool:
    """Whether a node computes on as many cores of the same kind as a trainer on ``device``."""
    return health.hardware == hardware_name(device) and len(health.cores) == len(usable_cores())


def is_alike(health: Health, device: str) -> bool:
    """Whether a node has the same hardware and the same numbers of cores as a trainer on ``device``."""
    return health.hardware == hardware_name(device) and set(health.cores) == set(usable_cores())


def shares_cores(health: Health, device: str) -> bool:
    """Whether a node and a trainer on ``device`` use the same cores of one machine, and no accelerator."""
    return health.host == host_digest() and device == "cpu" and is_alike(health, device)
