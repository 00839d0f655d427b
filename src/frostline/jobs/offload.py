"""Makes a job, or a plain loader: reach the node, find the frost line, ship the prefix, and begin."""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import Event
from types import NoneType
from typing import TYPE_CHECKING, Any

from frostline.cache import Scope
from frostline.core import EXACT, FLOAT32, Route, read_as
from frostline.core.config import LoaderSettings, NodeSettings, cache_folder, check_type
from frostline.core.errors import EngineNotReady, SettingError
from frostline.core.events import NodeExcluded, Observer, PhaseStarted, SetupWarning
from frostline.core.files import make_private_folder
from frostline.core.hints import add_hints
from frostline.core.system import collector_rests, usable_cores
from frostline.datasets import Dataset
from frostline.datasets.dataset import DatasetLike, dataset_from, steps_left_of
from frostline.datasets.manifest import skips_by_name
from frostline.datasets.source import is_loopback
from frostline.jobs.activity import PassProgress, control_address
from frostline.jobs.beginning import Beginning, begin
from frostline.jobs.connect import AskedNodes, ask_ahead, first_of, members_of, reach
from frostline.jobs.context import JobContext, first_batch_bytes, trial_request
from frostline.jobs.job import Job, JobParts
from frostline.jobs.loader_factory import CachePolicy, LoaderFactory, features_on_disk, finite_check
from frostline.jobs.measuring import UploadAhead
from frostline.jobs.router import Clocks, Router
from frostline.jobs.statistics import SkipLog, StatisticsCollector, warn_user
from frostline.jobs.workers import WorkerSetup
from frostline.loaders.arguments import shows_options
from frostline.loaders.fetch import EngineChoice, Fetcher, RetryPolicy, Shipment
from frostline.loaders.forked_workers import serve_forked
from frostline.loaders.local_stage import LocalStage
from frostline.models.cuts import input_cuts
from frostline.planning import ALL_IN_STORE, POLICIES
from frostline.preprocess import Preprocess, from_transform, imagenet
from frostline.preprocess.transforms import Declared, Form, Transform, declare
from frostline.wire.codecs import offered_precisions

if TYPE_CHECKING:
    from torch import nn

    from frostline.jobs.partition import PartitionedModel
    from frostline.loaders.torch_loader import Loader

__all__ = (
    "loader",
    "offload",
)


# Half of the distance between neighbouring 16-bit floats, relative.
_FP16_ERROR = 2.0**-11
# Of a disk's free bytes what features may take that no setting asks for, and the fewest for which it is worth a file.
_SHARE_OF_DISK, _MIN_DISK_BYTES = 4, 16 << 20


@add_hints
def offload(
    model: "nn.Module | None",
    data: DatasetLike,
    *,
    preprocess: Preprocess | None = None,
    transform: Transform | None = None,
    near: str | Sequence[str] | None = None,
    cut: int | None = None,
    codec: str | None = None,
    policy: str = "best",
    accuracy: str | float = FLOAT32,
    epochs: int = 1,
    frozen_in_eval: bool = False,
    settings: LoaderSettings | None = None,
    node: NodeSettings | None = None,
    on_event: Observer | None = None,
) -> Job:
    """Run the frozen layers of ``model`` beside ``data``, and give their features to the training loop.

    Args:
        model: network whose parameters require gradients where they are trained (see ``freeze``); None loads
            preprocessed pixels.
        data: data set, or its path or URL, which the nodes of ``near`` list; or a part of a data set as PyTorch's
            ``random_split`` makes it. A path means the nodes' own machines. With ``on_change="rebuild"`` it is listed
            again now.
        preprocess: steps from encoded bytes to the network's input. Default: ImageNet's at 224 pixels. For a ready
            format give all steps too; those that were applied when it was made are not repeated.
        transform: preprocessing as a transform of torchvision or timm, an image processor of transformers, or a
            function that takes a Pillow image, instead of ``preprocess``. The part that can be translated into steps
            runs at the node. Without a model the rest is called here for each sample, and a warning and ``explain``
            name it; with a model it is refused. Default: the data set's transform.
        near: URL of a node beside the data, or URLs of several nodes that serve the same data; each caches a part of
            it, and if one fails the others take over. ``dns://service:7070`` means all addresses of a host name,
            ``file:///nodes.json`` those in a file, ``ray://frostline`` nodes under Ray; nodes may come and go while the
            job runs. ``unix:///…/io.sock`` is the I/O service of this machine. None uses the nodes that listed the
            data, or else ``settings.io``, or else runs the frozen layers in this process.
        cut: number of the cut to use, as in ``Job.cuts``; None lets the plan choose. Without a model, 0 fetches encoded
            samples and decodes them here, and 1 lets the node decode; None is 0, or 1 if this process reads a ready
            format.
        codec: name of the codec that packs the activations at ``cut``; by default the fastest that ``accuracy`` allows.
        policy: rule that chooses the cut: ``best``, the fastest mixture of cuts and codecs, adapted while the job runs;
            or one of ``planning.POLICIES``, which choose once, to compare with. With ``all_in_store`` the head is
            trained on the node too, by ``Job.train``.
        accuracy: error that inference engines and codecs may cause in features. ``"float32"`` allows rounding, at most
            1e-4 of a sample; ``"exact"`` none, so that features equal eager PyTorch's bit for bit; ``"fp16"``,
            ``"bf16"`` and ``"int8"`` the error of these types; a number is the largest relative root-mean-square error
            of a sample, engine and codec together. Unless it is ``"exact"``, the node benchmarks engines on some of the
            data if that saves time.
        epochs: number of epochs that you will train, 1 by default. The plan uses it to weigh work that is done once.
        frozen_in_eval: True runs frozen layers in eval mode even if they are in train mode now; those that run at the
            trainer are put into eval mode by ``job.head``.
        settings: requests, memory, caches and time limits of this job; by default ``LoaderSettings()``.
        node: resources of the node in this process, if ``near`` names none; by default ``NodeSettings()``.
        on_event: function that is called with each event (``core.events``). Default: a Python warning if the job
            differs from what you asked for.

    Returns:
        A job. Use it as a context manager, or call ``close``.

    Raises:
        ModelError: The network cannot be cut; the message says why.
        DataError: The data cannot be listed.
        SettingError: There is no such cut, codec or policy, a figure makes no sense, or the data is a ready format that
            was made with other steps.
        NodeUnreachable: No node answers at any of the addresses in ``near``.
        Refused: The node does not serve the data, or does not run the network; the message says why.
    """
    check_type("settings", settings, LoaderSettings, NoneType)
    _check_near(near)
    if not callable(on_event or warn_user):
        raise SettingError(f"on_event takes a function of an event, such as print, not {on_event!r}")
    ahead = near.ahead if isinstance(near, AskedNodes) else None
    data = dataset_from(data, near, None if settings is None else settings.token)
    if isinstance(node, str):
        raise SettingError(f"node takes the settings of a node in this process: for one elsewhere give near={node!r}")
    check_type("node", node, NodeSettings, NoneType)
    on_event = on_event or warn_user
    settings, node = settings or LoaderSettings(), node or NodeSettings()
    offered_precisions(accuracy)  # refuses what makes no sense before anything is done
    _check_policy(policy, cut, codec, epochs)
    data = data.refresh()
    if preprocess is not None and transform is not None:
        raise SettingError("preprocess and transform say the same thing: give one of them")
    preprocess, left = _prepared(
        preprocess, transform or data.transform, has_model=model is not None, on_event=on_event
    )
    preprocess = _left_to_do(preprocess, data, accuracy)
    with collector_rests(), nullcontext() if model is None else _outside_blocks(), ExitStack() as stack:
        near = near or data.source.near or settings.io
        nodes = [near] if isinstance(near, str) else list(near or ())
        lacking: set[str] = set()
        left_out, opened = partial(_left_out, lacking, on_event), None if ahead is None else ahead.transport
        transport = reach(nodes, data, settings, node, left_out, stack, on_event, opened=opened)
        asking = RetryPolicy(retry_for_s=settings.retry_for_s, on_event=on_event)
        begins_at_once = not settings.measure_first and policy == "best" and cut is None
        if ahead is None and begins_at_once and nodes and model is not None:
            ahead = ask_ahead(data, first_of(data, seed=0), preprocess, transport, asking, nodes, settings, accuracy)
        on_found = None
        if ahead is not None:
            upload = UploadAhead(transport, first_bytes=first_batch_bytes(data, settings))
            on_found = upload.begin
            stack.callback(ahead.close)
            stack.callback(upload.close)
        divided = partial(_partitioned, preprocess=preprocess, on_event=on_event, frozen_in_eval=frozen_in_eval)
        network = None if model is None else divided(model, accuracy=accuracy, on_found=on_found)
        if ahead is not None:
            ahead.stop()  # what makes a node ready goes first from now on, and the loop's own requests
        context = JobContext(
            data=data,
            preprocess=preprocess,
            transport=transport,
            asking=asking,
            cuts=input_cuts([preprocess.sample]) if network is None else network.parts.cuts,
            prefix=None if network is None else network.parts.prefix,
            shipment=None if network is None else network.pack(),
            device="cpu" if network is None else network.device,
            settings=settings,
            accuracy=accuracy,
            epochs=epochs,
            cut=cut,
            ahead=ahead,
        )
        members = members_of(transport, nodes)
        context = _kept_for_later_jobs(context, members)
        maker = partial(begin, nodes=members, lacking=lacking, policy=policy, codec=codec)
        anew = None
        if model is not None:
            anew = partial(divided, model, accuracy=accuracy, may_be_trained_whole=True)
        return _made(context, network, maker, anew, nodes, node, policy, left, on_event, stack)


_CAST = ("cpu", "cuda", "xpu", "mps")  # devices whose operations may be cast


@contextmanager
def _outside_blocks() -> Iterator[None]:
    """Leave the caller's autocast, inference mode and ``no_grad`` meanwhile: what is made is for all blocks."""
    import torch  # which a job without a network does without

    with torch.inference_mode(False), torch.enable_grad(), ExitStack() as uncast:
        for kind in filter(torch.is_autocast_enabled, _CAST):
            uncast.enter_context(torch.autocast(kind, enabled=False))
        yield


def _prepared(
    preprocess: object, transform: Transform | None, *, has_model: bool, on_event: Observer
) -> tuple[Preprocess, Declared | None]:
    """The steps of a job, and what they do not say of its transform; None where they say all of it.

    Raises:
        SettingError: A model is given and the job has no steps; or a transform was given as steps.
    """
    if preprocess is not None and not isinstance(preprocess, Preprocess) and callable(preprocess):
        if preprocess is imagenet:
            raise SettingError("preprocess takes the steps that imagenet gives: write imagenet(224)")
        raise SettingError("preprocess takes steps of frostline.preprocess: give a transform as transform=")
    if isinstance(preprocess, str | int):
        raise SettingError(f"preprocess takes steps, not {preprocess!r}: write frostline.preprocess.imagenet(224)")
    check_type("preprocess", preprocess, Preprocess, NoneType)
    if isinstance(preprocess, Preprocess):
        return preprocess, None
    if transform is None:
        return imagenet(224), None
    found = declare(transform)
    for sentence in found.otherwise:
        on_event(SetupWarning(reason=sentence))
    if has_model or found.is_whole or not (found.rest or found.form is Form.PIXELS):
        return from_transform(transform), None
    on_event(SetupWarning(reason=str(found)))
    return found.preprocess or imagenet(224), found


def _left_out(lacking: set[str], on_event: Observer, url: str, engine: str, why: EngineNotReady) -> None:
    """Remember and tell of a node that cannot run the engine that was chosen."""
    lacking.add(url)
    on_event(NodeExcluded(url=url, engine=engine, reason=str(why)))


def _partitioned(
    model: "nn.Module",
    preprocess: Preprocess,
    on_event: Observer,
    *,
    frozen_in_eval: bool,
    accuracy: str | float,
    may_be_trained_whole: bool = False,
    on_found: Callable[[Shipment], None] | None = None,
) -> "PartitionedModel":
    """Trace the network, and tell where it is not divided as it was meant."""
    on_event(PhaseStarted(name="tracing the network"))
    # PyTorch takes a second to import and 220 MB, of which a plain loader has no use.
    from frostline.jobs.partition import PartitionedModel

    network = PartitionedModel.of(
        model,
        preprocess,
        frozen_in_eval=frozen_in_eval,
        may_shorten=accuracy not in (EXACT, 0),
        may_be_trained_whole=may_be_trained_whole,
        on_found=on_found,
    )
    for reason in filter(None, (network.parts.fallback, network.not_averaged)):
        on_event(SetupWarning(reason=reason))
    return network


def _made(
    context: JobContext,
    network: "PartitionedModel | None",
    beginning: Callable[[JobContext, "PartitionedModel | None"], Beginning],
    partitioned: "Callable[[], PartitionedModel] | None",
    nodes: Sequence[str],
    node: NodeSettings,
    policy: str,
    transform: Declared | None,
    on_event: Observer,
    stack: ExitStack,
) -> Job:
    """Put the parts of a job together; what ``stack`` holds is closed with the job from then on."""
    data, settings, skipped = context.data, context.settings, SkipLog()
    progress = PassProgress(on_event)
    is_reported = control_address(settings, nodes, context.transport) is not None
    collector = StatisticsCollector(
        progress if is_reported else on_event,
        max_skipped=settings.max_skipped(len(data)),
        refuses_changes=data.source.on_change == "refuse",
        named=skips_by_name(data.whole.samples, data.whole.names),
        shared=skipped,
    )
    stack.callback(collector.close)
    setup = partial(
        WorkerSetup,
        data=data,
        nodes=nodes,
        node=node,
        settings=settings,
        preprocess=context.preprocess,
        skipped=skipped,
        forked=serve_forked(nodes, context.transport, data, settings, node, stack),
    )
    parts = partial(_parts, setup=setup, collector=collector, policy=policy, beginning=beginning, closed=Event())
    first = parts(context, network, stack=stack)
    cache_policy = _cache_policy(context, first.scope, stack)
    rest = stack.pop_all()
    anew = None if partitioned is None else partial(_parts_anew, context, partitioned, partial(parts, stack=rest))
    return Job(
        data=data,
        parts=first,
        made_anew=anew,
        cache_policy=cache_policy,
        collector=collector,
        progress=progress,
        settings=settings,
        near=", ".join(nodes) or None,
        trains_in_store=policy == ALL_IN_STORE,
        transform=transform,
        close=rest.close,
    )


def _parts_anew(
    context: JobContext,
    partitioned: "Callable[[], PartitionedModel]",
    parts: "Callable[[JobContext, PartitionedModel], JobParts]",
    before: JobParts,
) -> JobParts:
    """The parts of a job whose network is another one now; what measured the one before ends."""
    with _outside_blocks():
        network = partitioned()
        context = replace(
            context,
            cuts=network.parts.cuts,
            prefix=network.parts.prefix,
            shipment=network.pack(),
            device=network.device,
        )
        made = parts(context, network)
    if before.measuring is not None:
        before.measuring.close()
    return made


def _parts(
    context: JobContext,
    network: "PartitionedModel | None",
    *,
    setup: partial[WorkerSetup],
    collector: StatisticsCollector,
    policy: str,
    beginning: Callable[[JobContext, "PartitionedModel | None"], Beginning],
    closed: Event,
    stack: ExitStack,
) -> JobParts:
    """What of a job depends on its network; ``stack`` ends what measures it."""
    begun = beginning(context, network)
    if begun.measuring is not None:
        stack.callback(begun.measuring.close)
    if begun.trainer is not None:
        stack.callback(begun.trainer.close)
    settings, line = context.settings, 0 if begun.refused else context.cuts[-1].number
    cut = _plain_cut(setup.keywords["nodes"], context.preprocess) if context.shipment is None else line
    router = _router(context, begun, follows=settings.replan and policy == "best" and context.cut is None, cut=cut)
    fetcher, scope = _fetcher(context, network, router, collector, begun, closed), _scope(context, network)
    return JobParts(
        fetcher=fetcher,
        scope=scope,
        worker_setup=setup(
            cuts=tuple(context.cuts),
            scope=scope,
            shipment=context.shipment,
            device=context.device,
            engine=fetcher.engine,
            tried=trial_request(context),
        ),
        router=router,
        measuring=begun.measuring,
        cuts=context.cuts,
        head=None if network is None else network.parts.head,
        fallback=_fallback(network, begun),
        watch=None if network is None else network.watch,
        behind="" if network is None else network.behind,
        here=partial(_engine_here, begun),
    )


def _engine_here(begun: Beginning) -> EngineChoice:
    here = begun.trainer
    return EngineChoice() if here is None else EngineChoice(engine=here.name, trials=here.choice.trials)


def _fallback(network: "PartitionedModel | None", begun: Beginning) -> str | None:
    if begun.refused is not None:
        return f"the node does not run it, and all of it runs here: {begun.refused}"
    return None if network is None else network.parts.fallback


def _plain_cut(nodes: Sequence[str], preprocess: Preprocess) -> int:
    """Where no frozen layers are shipped: samples wait encoded, and are decoded when there is memory for their pixels.

    A ready format has pixels, which a node in this process hands on from where its files are mapped.
    """
    return 0 if nodes or preprocess.stored is None else 1


def _check_near(near: object) -> None:
    is_empty = near is not None and not near
    if (
        is_empty
        or not isinstance(near, str | Sequence | NoneType)
        or not all(isinstance(url, str) for url in near or ())
    ):
        without = "; leave it out, and a node begins here" if is_empty else ""
        raise SettingError(
            f"near takes a node's address, such as http://store-1:7070, or a list of them, not {near!r}{without}"
        )


def _check_policy(policy: str, cut: int | None, codec: str | None, epochs: int) -> None:
    check_type("cut", cut, int, NoneType)
    check_type("epochs", epochs, int)
    if epochs < 1:
        raise SettingError(f"epochs must be at least 1, not {epochs}")
    if policy not in POLICIES:
        raise SettingError(f"there is no policy {policy!r}; there are {', '.join(POLICIES)}")
    if cut is not None and policy != "best":
        raise SettingError(f"policy {policy} chooses the cut itself: give a cut or a policy, not both")
    if codec is not None and cut is None:
        raise SettingError(f"codec {codec} needs the cut that it is for: give both, or let the plan choose")


def _left_to_do(declared: Preprocess, data: Dataset, accuracy: str | float) -> Preprocess:
    """What the data set leaves to do of a declared preprocessing: all, but where it is a ready format."""
    rest = steps_left_of(declared, data)
    if rest.stored is not None and rest.stored.dtype == "fp16":
        allowed = accuracy not in (EXACT, FLOAT32) if isinstance(accuracy, str) else accuracy >= _FP16_ERROR
        if not allowed:
            raise SettingError(
                f"{data.url} keeps what the network takes in 16-bit floats, which are rounded: allow that with "
                "accuracy='fp16', or make a ready format of uint8"
            )
    return rest


def _cache_policy(context: JobContext, scope: Scope, stack: ExitStack) -> CachePolicy:
    """What is kept of the job's features; ``stack`` closes the cache on disk."""
    settings = context.settings
    store = features_on_disk(settings)
    if store is not None:
        stack.enter_context(store)
    return CachePolicy(scope, context.data.samples, settings, store)


def _kept_for_later_jobs(context: JobContext, nodes: Sequence[str]) -> JobContext:
    """The same job, with a folder for features that came over a network, unless its settings or the disk forbid it."""
    settings, folder = context.settings, cache_folder() / "features"
    is_asked = settings.cache_folder is not None or not settings.cache_bytes or settings.cache_disk_bytes == 0
    if is_asked or context.prefix is None or not nodes or any(map(is_loopback, nodes)):
        return context
    needed, kept = context.cuts[-1].bytes_per_sample * len(context.data), replace(settings, cache_folder=str(folder))
    try:
        make_private_folder(folder)
        there = sum(file.stat().st_size for file in folder.iterdir())
        usable_bytes = (there + shutil.disk_usage(folder).free) // _SHARE_OF_DISK
        kept = replace(kept, cache_disk_bytes=min(usable_bytes, kept.max_disk_bytes))
        store = features_on_disk(kept) if max(needed, _MIN_DISK_BYTES) <= kept.max_disk_bytes else None
    except (OSError, SettingError):  # nobody asked for it
        return context
    if store is None:
        return context
    store.close()
    return replace(context, settings=kept)


def _scope(context: JobContext, network: "PartitionedModel | None") -> Scope:
    """What the job's features depend on beside preprocessing and view."""
    frost_line = context.cuts[-1]
    computed_by = "" if network is None else f"{network.computed_by}, "
    return Scope(
        data=read_as(context.data.url, context.data.manifest.reading),
        prefix="" if context.shipment is None else context.shipment.digest,
        cut=frost_line.number,
        preprocess="",
        # Whatever engines and ways the accuracy allows may have had a part in what is kept: what is kept is what came,
        # and the loop gets it again. ``exact`` has the reference alone.
        engine=f"{computed_by}accuracy {context.accuracy}",
        batch_rows=context.settings.device_batch,
        shapes=frost_line.shapes,
        dtypes=frost_line.dtypes,
    )


def _router(context: JobContext, begun: Beginning, *, follows: bool, cut: int) -> Router:
    cut = cut if context.cut is None else context.cut
    if not 0 <= cut < len(context.cuts):
        raise SettingError(f"there is no cut {cut}: this job has cuts 0 to {len(context.cuts) - 1}")
    return Router(
        cuts=context.cuts,
        shares={Route(cut): 1.0},
        both_sides=begun.both_sides if follows else None,
        plan=begun.plan,
        situation=begun.situation,
        follows=follows,
        samples_per_request=context.settings.samples_per_request,
        transport=context.transport,
        cores=len(usable_cores()),
        clocks=Clocks(wall=time.monotonic, busy=time.process_time),
    )


def _fetcher(
    context: JobContext,
    network: "PartitionedModel | None",
    router: Router,
    collector: StatisticsCollector,
    begun: Beginning,
    closed: Event,
) -> Fetcher:
    trainer, check = begun.trainer, None
    if context.shipment is not None:
        check = finite_check(
            context.cuts, begun.engine, collector, context.settings, here=lambda: _engine_here(begun).engine
        )
    return Fetcher(
        transport=context.transport,
        url=context.data.url,
        reading=context.data.manifest.reading,
        preprocess=context.preprocess,
        shipment=context.shipment,
        local_stage=LocalStage(
            cuts=context.cuts,
            rest=None if network is None else network.rest if trainer is None else network.rest_by(trainer),
            device=context.device,
            device_batch=context.settings.device_batch,
            check=check,
        ),
        engine=begun.engine,
        ahead=context.ahead,
        arrived=(router.take_batch, collector.take_batch),
        done=router.finish_rows,
        dropped=router.drop_rows,
        tried=trial_request(context),
        closed=closed,
    )


@add_hints
@shows_options(LoaderFactory.arrays)
def loader(
    data: DatasetLike,
    batch_size: int,
    *,
    preprocess: Preprocess | None = None,
    transform: Transform | None = None,
    near: str | Sequence[str] | None = None,
    settings: LoaderSettings | None = None,
    node: NodeSettings | None = None,
    on_event: Observer | None = None,
    **options: Any,
) -> "Loader":
    """Load batches of preprocessed samples, without a network.

    For several epochs write ``frostline.loader(...).epochs(range(10))``. Connections and threads end when the loader
    and all made from it are garbage-collected, or with the process. For statistics, and arrays for other frameworks,
    use ``offload`` with None as the model.

    Args:
        data: Data set, or its path or URL, or a part of one as PyTorch's ``random_split`` makes it.
        batch_size: Number of samples in a batch; the last one of an epoch may have fewer.
        preprocess: Steps from an encoded sample to its array; ImageNet's at 224 pixels by default, ``float32[3, 224,
            224]``.
        transform: A transform of torchvision or timm, a processor of transformers or a function of an image, in place
            of ``preprocess``; see ``offload``.
        near: URL of a node beside the data, or several; see ``offload``. By default this process reads the data itself.
        settings: Requests, memory, caches and time limits of the loader; by default ``LoaderSettings()``.
        node: Resources of the node in this process, which reads and decodes where ``near`` names none; by default
            ``NodeSettings()``.
        on_event: Function that is called with each event (``core.events``). Default: a Python warning if the loader
            differs from what you asked for.
        **options: Options of the epoch, such as ``shuffle=True``; see ``EpochOptions``.

    Raises:
        SettingError: An argument makes no sense; see ``offload`` and ``Job.loader``.
        DataError: The data cannot be listed.
        TypeError: An option is unknown.
    """
    job = offload(
        None,
        data,
        preprocess=preprocess,
        transform=transform,
        near=near,
        settings=settings,
        node=node,
        on_event=on_event,
    )
    return job.loader(batch_size, **options)
