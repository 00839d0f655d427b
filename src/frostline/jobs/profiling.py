"""Profiles both sides of a job on real samples, and gathers the situation that a plan is made from."""

import hashlib
import json
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import REFERENCE, Cut, FeatureBatch, Samples, View
from frostline.core.config import cache_folder
from frostline.core.declared import parse_json
from frostline.core.errors import OverBudget, SettingError
from frostline.core.files import FileCache, with_schema, without_schema
from frostline.core.system import __version__, usable_cores, usable_memory_bytes
from frostline.engines.codec_costs import codec_costs, cuts_worth_packing
from frostline.engines.machine import free_device_bytes, hardware_name, host_digest
from frostline.engines.torch import TorchEngine
from frostline.jobs.context import (
    JobContext,
    is_alike,
    keeps_features,
    request_of,
    some_of,
    total_samples,
    trial_request,
)
from frostline.loaders.fetch import join_batches
from frostline.loaders.local_stage import decode
from frostline.models.artifact import Prefix
from frostline.planning import Link, Situation
from frostline.prefetch.requests import Slabs
from frostline.preprocess import Preprocess
from frostline.profiles import CodecCost, CutCost, Profile
from frostline.transport import Transport
from frostline.wire.messages import FeatureRequest, ProfileRequest

__all__ = (
    "LinkSample",
    "MeasuredPrefix",
    "ProfileCache",
    "ProfileKey",
    "TrainerProfiler",
    "agree_on_engine",
    "measure_link",
    "situate",
)

_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileKey:
    """What a measurement holds for.

    Attributes:
        prefix: the digest.
        hardware: name of the processor or accelerator and its threads.
        engine: engine that ran it, with its version.
        device_batch: rows of a run.
        codecs: codecs that were to be measured.
        packed_cuts: numbers of the cuts at which they were.
    """

    prefix: str
    hardware: str
    engine: str
    device_batch: int
    codecs: tuple[str, ...]
    packed_cuts: tuple[int, ...]

    @property
    def digest(self) -> str:
        """Names the key."""
        text = json.dumps({**asdict(self), "version": __version__}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredPrefix:
    """A prefix from its input on; reading and decoding belong to the data and are measured each time.

    Attributes:
        cuts: ``seconds`` counted from the network's input.
        codecs: costs of codecs on the activations of a few real samples.
    """

    cuts: tuple[CutCost, ...]
    codecs: tuple[CodecCost, ...]


class ProfileCache:
    """Measurements as JSON files in a folder. Whatever cannot be read or written there is measured again.

    Args:
        folder: the folder, made when something is kept.
    """

    def __init__(self, folder: Path) -> None:
        self._files = FileCache(folder, ".json")

    def get(self, key: ProfileKey) -> MeasuredPrefix | None:
        """What was kept under this key."""
        body = self._files.get(key.digest)
        if body is None:
            return None
        try:
            value = without_schema(parse_json(body), _FORMAT, key.digest, ("key", "cuts", "codecs"))
            return MeasuredPrefix(
                cuts=tuple(CutCost(**cut) for cut in value["cuts"]),
                codecs=tuple(CodecCost(**codec) for codec in value["codecs"]),
            )
        except (ValueError, KeyError, TypeError, SettingError):
            return None

    def put(self, key: ProfileKey, measured: MeasuredPrefix) -> None:
        """Keep it; a file is whole or not there."""
        costs = {"cuts": _plain(measured.cuts), "codecs": _plain(measured.codecs)}
        value = with_schema({"key": asdict(key), **costs}, _FORMAT)
        self._files.put(key.digest, json.dumps(value).encode())


def _plain(costs: Sequence[CutCost | CodecCost]) -> list[dict[str, object]]:
    return [asdict(cost) for cost in costs]


_ROUND_TRIPS = 3
_REPEATS = 3
# Rows of the measured runs: eight take a tenth less time a sample than the sixteen and more of real runs.
_MAX_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LinkSample:
    """A measured link, and the encoded samples that crossed it meanwhile."""

    link: Link
    encoded: FeatureBatch


def measure_link(transport: Transport, request: FeatureRequest) -> LinkSample:
    """Fetch a few encoded samples, which real work would fetch too, and time it.

    The rate is that of the bodies under way; where they came too fast or were too small to tell it, that of the
    whole exchange without a round trip.

    Args:
        transport: the transport to the node.
        request: the request for cut 0.
    """
    round_trips = []
    for _ in range(_ROUND_TRIPS):
        started = time.perf_counter()
        transport.health()
        round_trips.append(time.perf_counter() - started)
    before = transport.statistics()
    started = time.perf_counter()
    batches = list(transport.features(request))
    seconds = time.perf_counter() - started
    after = transport.statistics()
    # A round trip and the node's own reading are in the time; taking one round trip off keeps a short fetch
    # over a long link from looking like a thin one.
    busy_s = max(seconds - min(round_trips), seconds / 10)
    bytes_per_s = (after.bytes_received - before.bytes_received) / busy_s
    transfer_s = after.transfer_s - before.transfer_s
    if transfer_s > 0:
        bytes_per_s = (after.transfer_bytes - before.transfer_bytes) / transfer_s
    link = Link(bytes_per_s=max(1.0, bytes_per_s), round_trip_s=min(round_trips))
    return LinkSample(link=link, encoded=join_batches(batches or [FeatureBatch(ids=np.zeros(0, np.int64))]))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainerProfiler:
    """Measures decoding and every cut of a prefix at the trainer, on real samples.

    Attributes:
        prefix: the frozen part; None where there is no model.
        digest: digest of the prefix.
        device: the place where the trainer runs it, in torch's words.
        codecs: the codecs to be measured.
        encoded_bytes: bytes of a sample, the mean: cuts that ship far more are not worth packing.
        device_batch: rows of the runs that the memory is counted for.
        kept: earlier measurements.
    """

    prefix: Prefix | None
    digest: str
    device: str
    codecs: Sequence[str]
    encoded_bytes: float
    device_batch: int
    kept: ProfileCache

    def profile(self, preprocess: Preprocess, sample: FeatureBatch, samples: Samples, view: View | None) -> Profile:
        """The trainer's profile.

        Args:
            preprocess: the way that samples are decoded.
            sample: a few encoded samples.
            samples: ids and names of these samples.
            view: the random view, where the preprocessing is random.
        """
        started = time.perf_counter()
        pixels = decode(preprocess, sample, samples, view, Slabs()).tensors[0]
        decode_s = (time.perf_counter() - started) / max(1, len(sample)) / len(usable_cores())
        measured = self._network(_repeated(pixels, self._rows))
        cuts = [replace(cut, seconds=decode_s + cut.seconds) for cut in measured.cuts]
        free = CutCost(number=0, seconds=0.0, spread_s=0.0, fixed_bytes=0, bytes_per_sample=0)
        first = replace(cuts[0], number=0, seconds=0.0) if cuts else free
        return Profile(
            hardware=hardware_name(self.device),
            host=host_digest(),
            cores=usable_cores(),
            engine=TorchEngine.name,
            device=torch.device(self.device).type,
            device_batch=self._rows,
            read_s=0.0,
            cuts=(first, *(cuts or [replace(free, number=1, seconds=decode_s)])),
            codecs=measured.codecs,
        )

    @property
    def _rows(self) -> int:
        return min(self.device_batch, _MAX_ROWS)

    def _network(self, pixels: npt.NDArray[np.generic]) -> MeasuredPrefix:
        if self.prefix is None:
            return MeasuredPrefix(cuts=(), codecs=())
        packed = cuts_worth_packing(self.prefix.cuts, self.encoded_bytes) if self.codecs else ()
        key = ProfileKey(
            prefix=self.digest,
            hardware=hardware_name(self.device),
            engine=f"{TorchEngine.name} {torch.__version__}",
            device_batch=self.device_batch,
            codecs=tuple(self.codecs),
            packed_cuts=tuple(cut.number for cut in packed),
        )
        found = self.kept.get(key)
        if found is None:
            found = self._measure(self.prefix, pixels, packed)
            self.kept.put(key, found)
        return found

    def _measure(self, prefix: Prefix, pixels: npt.NDArray[np.generic], packed: Sequence[Cut]) -> MeasuredPrefix:
        cuts, device = prefix.cuts, self.device
        engine = TorchEngine(prefix.graph, cuts, prefix.tensors, device=device, max_rows=self.device_batch)
        seconds = engine.timed_run(pixels, repeats=_REPEATS, clock=time.perf_counter)[0]
        middle = np.median(seconds, axis=0)
        spread = np.subtract(*np.percentile(seconds, (75, 25), axis=0))
        measured = zip(cuts, middle.tolist(), spread.tolist(), strict=True)
        cores = len(usable_cores())
        return MeasuredPrefix(
            cuts=tuple(_cost(cut, engine, to_here_s, spread_s) for cut, to_here_s, spread_s in measured),
            codecs=codec_costs(engine.cut_values(packed, pixels), packed, self.codecs, cores=cores),
        )


def _cost(cut: Cut, engine: TorchEngine, seconds: float, spread_s: float) -> CutCost:
    here, rest = engine.footprint(cut.number), engine.remaining_footprint(cut.number)
    return CutCost(
        number=cut.number,
        seconds=seconds,
        spread_s=spread_s,
        fixed_bytes=engine.weight_bytes + here.fixed_bytes,
        bytes_per_sample=here.bytes_per_sample,
        remaining_fixed_bytes=engine.weight_bytes + rest.fixed_bytes,
        remaining_bytes_per_sample=rest.bytes_per_sample,
    )


def _repeated(pixels: npt.NDArray[np.generic], rows: int) -> npt.NDArray[np.generic]:
    """So many rows, repeated where there are too few."""
    return np.resize(pixels, (rows, *pixels.shape[1:]))


# What crosses to measure the link and this side counts as traffic: enough for a rate, and no more.
_CROSSING_BYTES = 512 << 10
_MIN, _MAX = 8, 256
# The trainer's own run needs no more than one small batch.
_DECODED = 8


def situate(context: JobContext, refused: str | None = None) -> Situation:
    """Measure both sides and the link on a few real samples.

    Where both sides use the same cores and the same engine one profile serves both. Where they use other cores they
    are measured at the same time, as they will work at the same time: neighbours on one machine slow each other.

    Args:
        context: context of the job.
        refused: the reason why the node has no memory for the frozen part; None where it has.

    Raises:
        Refused: The node will not serve the data, or not run the network for another reason than its memory.
        StoreError: The samples cannot be read.
        Unavailable: The node does not answer.
    """
    data, transport = context.data, context.transport
    health = context.asking(transport.health)
    mean_bytes = data.samples.encoded_bytes / len(data)
    crossing = some_of(context.data, round(min(max(_CROSSING_BYTES / max(1, mean_bytes), _MIN), _MAX)))
    crossed = context.asking(lambda: measure_link(transport, request_of(context, crossing, cut=0)))
    same_host = health.host == host_digest() and bool(set(health.cores).intersection(usable_cores()))
    few = crossing.take(np.arange(min(_DECODED, len(crossing))))
    encoded = replace(crossed.encoded, ids=crossed.encoded.ids[:_DECODED], encoded=crossed.encoded.encoded[:_DECODED])

    def profile_trainer() -> Profile:
        profiler = TrainerProfiler(
            prefix=context.prefix,
            digest="" if context.shipment is None else context.shipment.digest,
            device=context.device,
            codecs=context.codecs,
            encoded_bytes=mean_bytes,
            device_batch=context.settings.device_batch,
            kept=ProfileCache(cache_folder() / "profiles"),
        )
        return profiler.profile(context.preprocess, encoded, few, context.view)

    with ThreadPoolExecutor(1, "frostline-profile") as apart:
        alike = same_host and is_alike(health, context.device)
        ours = None if alike else apart.submit(profile_trainer)
        theirs, refused = (None, refused) if refused is not None else _profile_node(context)
        trainer = theirs if ours is None else ours.result()
        # The trainer's own part is the reference's, whatever the node takes.
        trainer = profile_trainer() if trainer is None or trainer.engine != REFERENCE else trainer
    return Situation(
        cuts=tuple(context.cuts),
        encoded_bytes=mean_bytes,
        store=theirs or trainer,
        trainer=trainer,
        link=crossed.link,
        same_host=same_host,
        memory_bytes=health.memory_bytes,
        trainer_memory_bytes=_trainer_memory_bytes(context),
        trainer_batch=context.settings.device_batch,
        refused=refused,
        epochs=context.epochs,
        keeps_features=keeps_features(context),
        accuracy=context.accuracy,
    )


def _trainer_memory_bytes(context: JobContext) -> int:
    """What the job allows; else what its accelerator has free, or this process may use."""
    if context.settings.trainer_memory_bytes is not None:
        return context.settings.trainer_memory_bytes
    found = free_device_bytes(context.device)
    return usable_memory_bytes() if found is None else found


def agree_on_engine(context: JobContext, store: Profile, cut: int) -> Profile:
    """Have the engine that one node chose made ready at all, and know its error where it is furthest off.

    Args:
        context: context of the job.
        store: profile of that node.
        cut: the cut up to which the engine is to run.

    Raises:
        EngineNotReady: No node can run the engine on these samples exactly enough.
        Unavailable: No node answers.
    """
    if store.engine == REFERENCE or cut < 2:
        return store
    request = replace(trial_request(context), engine=store.engine, cut=cut)
    wanted = ProfileRequest(features=request, accuracy=context.accuracy)
    found = context.asking(lambda: context.transport.profile(wanted))
    worst = max((trial.error for trial in found.trials), default=0.0)
    trials = (
        replace(trial, error=max(trial.error, worst)) if trial.engine == store.engine else trial
        for trial in store.trials
    )
    return replace(store, trials=tuple(trials))


def _profile_node(context: JobContext) -> tuple[Profile | None, str | None]:
    """The node's own measurement, or why it will not run the network in its memory: encoded samples always go."""
    request, only_here = trial_request(context), 1 < (context.cut or 0) <= context.cuts[-1].number
    if only_here and context.cut is not None:  # engines are tried for some seconds at each cut that a plan may want
        request = replace(request, cut=context.cut)
    trial_s = context.settings.trial_s
    wanted = ProfileRequest(
        features=request,
        codecs=context.codecs,
        accuracy=context.accuracy,
        only_here=only_here,
        trial_s=trial_s,
        samples_left=total_samples(context) if trial_s is None else None,
    )
    try:
        return context.asking(lambda: context.transport.profile(wanted)), None
    except OverBudget as error:
        return None, str(error)
