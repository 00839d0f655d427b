"""Make a job: reach the node, find the frost line, ship the prefix, measure, plan."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import nn

from frostline.client.http import HttpTransport
from frostline.client.local import LocalTransport
from frostline.client.transport import Transport
from frostline.config import LoaderSettings, NodeSettings
from frostline.core import Cut, View
from frostline.datasets import Dataset
from frostline.engines.hardware import hardware_name, host_digest
from frostline.errors import OverBudget, SettingError
from frostline.events import Event, Observer, PhaseStarted
from frostline.loaders.fetch import Fetcher, Shipment
from frostline.loaders.job import Job
from frostline.loaders.measure import measure_link, profile_trainer
from frostline.loaders.trainer_side import TrainerSide
from frostline.models import CutNetwork, cut_network
from frostline.models.artifact import digest_of, write_prefix
from frostline.models.cuts import pixel_cuts
from frostline.node import Node
from frostline.planning import Plan, Situation, choose, fixed
from frostline.preprocess import Preprocess, imagenet
from frostline.profiles import Profile
from frostline.wire.messages import FeatureRequest

__all__ = ("offload",)

# Samples that the node measures on: one device batch of real ones keeps it within a second or two.
_PROFILED = 16
# Samples that cross to measure the link and this side; they count as traffic, so there are few.
_FETCHED = 8


def offload(
    model: nn.Module | None,
    data: Dataset,
    *,
    preprocess: Preprocess | None = None,
    near: str | None = None,
    cut: int | None = None,
    frozen_in_eval: bool = False,
    settings: LoaderSettings | None = None,
    node: NodeSettings | None = None,
    observe: Observer | None = None,
) -> Job:
    """Run the frozen part of ``model`` beside ``data``, and get its features here.

    Args:
        model: whose parameters require gradients where they are trained (see ``freeze``); None loads
            preprocessed pixels.
        data: the samples.
        preprocess: from encoded bytes to the network's input; ImageNet's at 224 pixels by default.
        near: URL of a node beside the data; None runs one in this process.
        cut: number of the cut to use; None lets the plan choose.
        frozen_in_eval: run frozen layers in eval mode even where they are in train mode now.
        settings: how to ask.
        node: of the node in this process.
        observe: told what happens.

    Returns:
        A job, to be used as a context manager or closed.

    Raises:
        ModelError: The network cannot be cut; the message says why.
        DataError: The data cannot be listed.
        SettingError: There is no such cut, or a figure makes no sense.
        NodeUnreachable: There is no node at ``near``.
        Refused: The node will not serve the data or run the network.
    """
    observe = observe or _ignore
    settings = settings or LoaderSettings()
    preprocess = preprocess or imagenet(224)
    with ExitStack() as stack:
        transport = _transport(near, data, settings, node or NodeSettings(), stack)
        network = None
        if model is not None:
            observe(PhaseStarted(name="tracing the network"))
            network = cut_network(model, preprocess.shape, frozen_in_eval=frozen_in_eval)
        shipment = None if network is None else _ship(network, transport, observe)
        cuts = pixel_cuts(preprocess.shape) if network is None else network.cuts
        plan = None
        if network is not None and shipment is not None:
            observe(PhaseStarted(name="measuring the cuts"))
            plan = _plan(network, shipment, data, preprocess, transport, cut)
        chosen = _cut(cuts, (cut or 0) if plan is None else plan.cut)
        fetcher = Fetcher(
            transport=transport,
            url=data.url,
            preprocess=preprocess,
            cut=chosen,
            shipment=shipment,
            trainer_side=_trainer_side(network, model, chosen, cuts[-1], settings),
        )
        return Job(
            data=data,
            fetcher=fetcher,
            frost_line=cuts[-1],
            head=None if network is None else network.head,
            plan=plan,
            settings=settings,
            observe=observe,
            where=_where(near, chosen, cuts[-1], network),
            close=stack.pop_all().close,
        )


def _ignore(_: Event) -> None:
    pass


def _transport(
    near: str | None, data: Dataset, settings: LoaderSettings, node: NodeSettings, stack: ExitStack
) -> Transport:
    """The way to the node; ``stack`` closes what was made."""
    if near is not None:
        transport: Transport = HttpTransport(near, settings)
    else:
        embedded = Node(node, (data.url,))
        stack.callback(embedded.close)
        transport = LocalTransport(embedded)
    stack.callback(transport.close)
    return transport


def _ship(network: CutNetwork, transport: Transport, observe: Observer) -> Shipment:
    observe(PhaseStarted(name="shipping the frozen layers"))
    artifact = write_prefix(network.prefix)
    shipment = Shipment(digest=digest_of(artifact), artifact=artifact)
    transport.put_prefix(shipment.digest, shipment.artifact)
    return shipment


def _plan(
    network: CutNetwork,
    shipment: Shipment,
    data: Dataset,
    preprocess: Preprocess,
    transport: Transport,
    wanted: int | None,
) -> Plan:
    """Measure both sides and the link on a few real samples, and choose a cut (or take the one that is wanted)."""
    health = transport.health()
    view = View(seed=0, epoch=0) if preprocess.is_random else None
    some = data.samples.take(_spread(len(data), _PROFILED))
    request = FeatureRequest(
        data=data.url,
        samples=some,
        prefix=shipment.digest,
        cut=network.frost_line.number,
        preprocess=preprocess.to_json(),
        view=view,
    )
    store, refused = _profile(transport, request)
    few = some.take(np.arange(min(_FETCHED, len(some))))
    crossed = measure_link(transport, replace(request, samples=few, prefix=None, cut=0))
    same_host = health.host == host_digest()
    is_alike = store is not None and same_host and store.hardware == hardware_name("cpu")
    trainer = store if is_alike else None
    if trainer is None:
        trainer = profile_trainer(network.prefix, preprocess, crossed.encoded, few, view)
    situation = Situation(
        cuts=network.cuts,
        encoded_bytes=data.samples.encoded_bytes / len(data),
        store=store or trainer,
        trainer=trainer,
        link=crossed.link,
        same_host=same_host,
        memory_bytes=health.memory_bytes,
        refused=refused,
    )
    return choose(situation) if wanted is None else fixed(situation, _cut(network.cuts, wanted).number)


def _profile(transport: Transport, request: FeatureRequest) -> tuple[Profile | None, str | None]:
    """The node's own measurement, or why it will not run the network in its memory: encoded samples always go."""
    try:
        return transport.profile(request), None
    except OverBudget as error:
        return None, str(error)


def _spread(size: int, most: int) -> npt.NDArray[np.int64]:
    """Rows spread evenly over the data set, so that the measured samples are of every kind."""
    return np.unique(np.linspace(0, size - 1, min(size, most)).astype(np.int64))


def _cut(cuts: Sequence[Cut], number: int) -> Cut:
    if not 0 <= number < len(cuts):
        raise SettingError(f"there is no cut {number}: this job has cuts 0 to {len(cuts) - 1}")
    return cuts[number]


def _trainer_side(
    network: CutNetwork | None,
    model: nn.Module | None,
    cut: Cut,
    frost_line: Cut,
    settings: LoaderSettings,
) -> TrainerSide:
    parameter = None if model is None else next(model.parameters(), None)
    return TrainerSide(
        cut=cut,
        frost_line=frost_line,
        rest=None if network is None else network.rest_of_prefix(cut),
        tensors={} if network is None else network.prefix.tensors,
        device="cpu" if parameter is None else parameter.device,
        device_batch=settings.device_batch,
    )


def _where(near: str | None, cut: Cut, frost_line: Cut, network: CutNetwork | None) -> list[tuple[str, str]]:
    node = "node in this process" if near is None else f"node at {near}"
    parts = [("reading", node), ("decoding", "trainer" if cut.number == 0 else node)]
    if network is not None:
        first = f"frozen layers up to {cut.name} (cut {cut.number})"
        parts += [(first, node)] if cut.number > 1 else []
        parts += [(f"frozen layers up to {frost_line.name}", "trainer")] if cut.number < frost_line.number else []
        parts += [("head", "trainer")]
    return parts
