"""Answers requests for profiles: the costs of reading, decoding, cuts, codecs and engines on a job's first samples."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from frostline.batching import ROWS, batch_size, padded
from frostline.config import NodeSettings
from frostline.core import EXACT, REFERENCE
from frostline.engines.base.identity import Pixels, levels_of
from frostline.engines.choice.choice import Choice
from frostline.engines.machine.hardware import hardware_name, host_digest
from frostline.node.request.decode import SampleReader
from frostline.node.request.prefix_run import PrefixRun
from frostline.node.request.validation import checked_preprocess
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.statistics import Counters
from frostline.node.scheduling.tenants import Account
from frostline.node.service.open import RequestOpener
from frostline.node.service.profiling import (
    Loaded,
    MeasuredReference,
    NetworkProfile,
    Networks,
    PrefixMeasurement,
    cut_costs,
    load,
    sped_up_choice,
    under_engine,
)
from frostline.node.service.resources import Resources
from frostline.node.trials.trial_policy import Requester
from frostline.node.weights.prefix_registry import Resident
from frostline.node.weights.torch_bridge import TorchBridge
from frostline.preprocess import Preprocess
from frostline.processors import usable_cores
from frostline.profiles import CodecCost, CutCost, Profile
from frostline.wire.messages import FeatureRequest, ProfileRequest

__all__ = ("Profiler",)

# Samples for trials take at most this part of the memory for batches, unless the profile needed more already.
_PART = 4
_FLOAT = np.dtype(np.float32).itemsize
# Runs per measurement; the first run of a network is slower than later ones.
_REPEATS = 3
_NOTHING = Loaded(rows=0, row_bytes=0, read_s=0.0, decode_s=0.0)


class Profiler:
    """Measures profiles for jobs. Safe for threads; the cost of the network itself is cached per prefix.

    Args:
        settings: settings of the node.
        opener: opens the resources of requests.
        resources: memory and threads of the node.
        bridge: gives access to torch and to the trials of engines.
    """

    def __init__(
        self, settings: NodeSettings, opener: RequestOpener, resources: Resources, bridge: TorchBridge
    ) -> None:
        self._settings = settings
        self._opener = opener
        self._resources = resources
        self._bridge = bridge
        self._networks = Networks()

    def profile(self, wanted: ProfileRequest, account: Account, scope: CancelScope, held: ExitStack) -> Profile:
        """See ``Node.profile``; its memory is released when ``held`` is closed."""
        request, counters = wanted.features, Counters()
        preprocess = self._opener.equipped(request, checked_preprocess(request), account, held)
        reader = self._opener.reader(request, preprocess, account, counters, scope, held, is_measured=True)
        resident = self._opener.resident(request, preprocess, account, held)
        run = (
            PrefixRun(resident, len(resident.prefix.cuts), self._resources.devices, scope, account)
            if resident
            else None
        )
        if wanted.only_engine:
            return self._engine(wanted, preprocess, resident, reader, account, scope, held)
        rows = self._profiled_rows(request, run)
        shape = (padded(rows), *preprocess.shape)
        # The node's hardware and reference engine never change, so they are not part of the key.
        key = (request.prefix, padded(rows), preprocess.digest)
        lane, nbytes = self._resources.lane(account), 2 * np.dtype(preprocess.dtype).itemsize * math.prod(shape)
        measurement = (
            self._measurement(wanted, run, resident, nbytes, self._networks.get(key)) if run and resident else None
        )
        nbytes += 0 if measurement is None else measurement.nbytes
        max_bytes = max(nbytes, lane.total_bytes // _PART)
        tried = _shape_of_tried(wanted, preprocess, max_bytes) if measurement is not None else ()
        kind = np.dtype(np.float32 if preprocess.levels is None else np.uint8)
        tried_bytes = kind.itemsize * math.prod(tried) if tried else 0
        # The samples for trials are read when those of the measurement have been freed.
        room = held.enter_context(lane.reserve(max(nbytes, tried_bytes), scope.is_cancelled))
        slab = np.zeros(shape, preprocess.dtype)
        readers = self._resources.readers.lane(account.name)
        loaded = load(reader, slab, rows, readers, scope, counters)
        network = None if measurement is None else measurement.network(slab)
        del slab
        if network is not None:
            self._networks.put(key, network)
        codecs = [] if network is None else [codec for codec in network.codecs.values() if codec.codec in wanted.codecs]
        speed = self._resources.devices.speed
        shared = None if network is None else network.sped_up(speed)
        costs = cut_costs(loaded, shared, resident)
        if network is None or shared is None or resident is None or run is None:
            return self._profile_of(loaded, costs, codecs, Choice(engine=REFERENCE, trials=()))
        reference = MeasuredReference(run, network, resident.prefix.cuts)
        if not _can_be_tried(preprocess) or not self._bridge.trials.are_wanted(
            wanted, reference.seconds(len(resident.prefix.cuts))
        ):
            return self._profile_of(loaded, costs, codecs, Choice(engine=REFERENCE, trials=()))
        room.shrink(tried_bytes)  # trials may take minutes, in other processes
        pixels: Pixels = np.zeros(tried, kind)
        kept = load(reader, pixels, len(pixels), readers, scope, counters)
        requester = self._requester(request, account, scope)
        choice = self._bridge.trials.wanted(wanted, resident.prefix, pixels, reference, requester, preprocess.levels)
        if choice.engine != REFERENCE:
            decode_s = (kept if levels_of(choice.engine) else loaded).decode_s
            costs = under_engine(costs, shared, resident.prefix.cuts, decode_s, sped_up_choice(choice, speed))
        return self._profile_of(loaded, costs, codecs, choice)

    def _engine(
        self,
        wanted: ProfileRequest,
        preprocess: Preprocess,
        resident: Resident | None,
        reader: SampleReader,
        account: Account,
        scope: CancelScope,
        held: ExitStack,
    ) -> Profile:
        """Choose the engine only, on samples that are read for its trials."""
        lane, choice = self._resources.lane(account), Choice(engine=REFERENCE, trials=())
        if resident is None:
            return self._profile_of(_NOTHING, (), (), choice)
        run = PrefixRun(resident, len(resident.prefix.cuts), self._resources.devices, scope, account)
        run.check()
        shape = _shape_of_tried(wanted, preprocess, lane.total_bytes // _PART)
        some = np.zeros((ROWS, *preprocess.shape), np.float32)
        is_wanted = shape[0] and wanted.accuracy != EXACT and _can_be_tried(preprocess)
        network = NetworkProfile(seconds=run.seconds(some, repeats=_REPEATS)) if is_wanted else None
        if network is None:
            return self._profile_of(_NOTHING, (), (), choice)
        reference = MeasuredReference(run, network, resident.prefix.cuts)
        if self._bridge.trials.are_wanted(wanted, reference.seconds(len(resident.prefix.cuts))):
            pixels: Pixels = np.zeros(shape, np.dtype(np.float32 if preprocess.levels is None else np.uint8))
            held.enter_context(lane.reserve(pixels.nbytes, scope.is_cancelled))
            load(reader, pixels, len(pixels), self._resources.readers.lane(account.name), scope, Counters())
            requester = self._requester(wanted.features, account, scope)
            choice = self._bridge.trials.wanted(
                wanted, resident.prefix, pixels, reference, requester, preprocess.levels
            )
        return self._profile_of(_NOTHING, (), (), choice)

    def _requester(self, request: FeatureRequest, account: Account, scope: CancelScope) -> Requester:
        assert request.prefix is not None, "the prefix was found by its name"
        room_bytes = self._opener.prefixes.room_bytes(request.prefix, account)
        return Requester(
            name=account.name,
            check=account.check_trials,
            is_abandoned=scope.is_cancelled,
            spent=partial(self._resources.tried, account),
            room_bytes=room_bytes,
        )

    def _measurement(
        self,
        wanted: ProfileRequest,
        run: PrefixRun,
        resident: Resident,
        loaded_bytes: int,
        known: NetworkProfile | None,
    ) -> PrefixMeasurement:
        room_bytes = self._resources.pools["work"].total_bytes
        return PrefixMeasurement(
            run,
            resident.prefix.cuts,
            codecs=wanted.codecs,
            encoded_bytes=wanted.features.samples.encoded_bytes / len(wanted.features.samples),
            cores=len(usable_cores()),
            known=known,
            room_bytes=min(room_bytes // 2, room_bytes - loaded_bytes),
        )

    def _profile_of(
        self, loaded: Loaded, cuts: Sequence[CutCost], codecs: Sequence[CodecCost], choice: Choice
    ) -> Profile:
        rows = [trial.rows for trial in choice.trials if trial.engine == choice.engine != REFERENCE]
        return Profile(
            hardware=hardware_name(self._settings.device),
            host=host_digest(),
            cores=usable_cores(),
            engine=choice.engine,
            device=self._settings.device.partition(":")[0],
            device_batch=max(rows, default=loaded.rows),
            read_s=loaded.read_s,
            cuts=tuple(cuts),
            codecs=tuple(codecs),
            trials=choice.trials,
        )

    def _profiled_rows(self, request: FeatureRequest, run: PrefixRun | None) -> int:
        if run is not None:
            run.check()
        limits = [] if run is None else [run.limit]
        maximum = batch_size(limits, wanted=len(request.samples), maximum=self._settings.device_batch)
        return min(len(request.samples), maximum)


def _can_be_tried(preprocess: Preprocess) -> bool:
    """Engines are tried on floats: tokens and other whole numbers have the reference."""
    return preprocess.dtype == "float32"


def _shape_of_tried(wanted: ProfileRequest, preprocess: Preprocess, max_bytes: int) -> tuple[int, ...]:
    """The shape of all samples for trials: pixels if available, else the input of the network."""
    channels, *sides = preprocess.shape
    row_bytes = math.prod(preprocess.shape) * (_FLOAT if preprocess.levels is None else 1)
    rows = min(len(wanted.features.samples), max_bytes // row_bytes)
    return (rows, channels, *sides) if preprocess.levels is None else (rows, *sides, channels)
