"""Answers requests for profiles: what reading, decoding, cuts, codecs and engines cost on a job's first samples."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from frostline.batching import ROWS, batch_size, padded
from frostline.config import NodeSettings
from frostline.core import EXACT, REFERENCE
from frostline.engines.base.identity import levels_of
from frostline.engines.choice.choice import Choice
from frostline.engines.machine.hardware import hardware_name, host_digest
from frostline.node.request.decode import SampleReader
from frostline.node.request.pipeline import Slab
from frostline.node.request.prefix_run import PrefixRun
from frostline.node.request.validation import checked_preprocess
from frostline.node.scheduling.cancel_scope import CancelScope
from frostline.node.scheduling.statistics import Counters
from frostline.node.scheduling.tenants import Account
from frostline.node.service.open import Opening
from frostline.node.service.profiling import (
    Bench,
    Loaded,
    MeasuredReference,
    NetworkProfile,
    Networks,
    cut_costs,
    load,
    under_engine,
)
from frostline.node.service.resources import Sharing
from frostline.node.trials.requesters import Patron
from frostline.node.weights.prefix_registry import Resident
from frostline.node.weights.torch_bridge import TorchDoor
from frostline.preprocess import Preprocess
from frostline.processors import usable_cores
from frostline.profiles import CodecCost, CutCost, Profile
from frostline.wire.messages import FeatureRequest, ProfileRequest

__all__ = ("Profiler",)

# Samples on which engines are tried take at most this part of the room for batches, where nothing else took more.
_PART = 4
_FLOAT = np.dtype(np.float32).itemsize
# The first run of a network is slower than those after it.
_REPEATS = 3
_NOTHING = Loaded(rows=0, row_bytes=0, read_s=0.0, decode_s=0.0)


class Profiler:
    """Measures for jobs. Safe for threads; what the network itself costs is kept for each prefix.

    Args:
        settings: of the node.
        opening: opens what requests need.
        sharing: the node's memory and threads.
        door: to the trials of engines.
    """

    def __init__(self, settings: NodeSettings, opening: Opening, sharing: Sharing, door: TorchDoor) -> None:
        self._settings = settings
        self._opening = opening
        self._sharing = sharing
        self._door = door
        self._networks = Networks()

    def profile(self, wanted: ProfileRequest, account: Account, leash: CancelScope, held: ExitStack) -> Profile:
        """See ``Node.profile``; what it takes is given back when ``held`` is closed."""
        request, counters = wanted.features, Counters()
        preprocess = checked_preprocess(request)
        reader = self._opening.reader(request, preprocess, account, counters, leash, held, is_measured=True)
        resident = self._opening.resident(request, preprocess, account, held)
        run = PrefixRun(resident, len(resident.prefix.cuts), self._sharing.device, leash, account) if resident else None
        if wanted.only_engine:
            return self._engine(wanted, preprocess, resident, reader, account, leash, held)
        rows = self._profiled_rows(request, run)
        shape = (padded(rows), *preprocess.shape)
        # Hardware and engine are this node's for good, so that they need not be in the key.
        key = (request.prefix, padded(rows), preprocess.digest)
        lane, nbytes = self._sharing.lane(account), 2 * _FLOAT * math.prod(shape)
        bench = self._bench(wanted, run, resident, nbytes, self._networks.get(key)) if run and resident else None
        nbytes += 0 if bench is None else bench.nbytes
        max_bytes = max(nbytes, lane.total_bytes // _PART)
        tried = _shape_of_tried(wanted, preprocess, max_bytes) if bench is not None else ()
        kind = np.dtype(np.float32 if preprocess.levels is None else np.uint8)
        tried_bytes = kind.itemsize * math.prod(tried) if tried else 0
        # What engines are tried on is read when the rest has gone.
        room = held.enter_context(lane.reserve(max(nbytes, tried_bytes), leash.is_cut))
        slab = np.zeros(shape, np.float32)
        readers = self._sharing.readers.lane(account.name)
        loaded = load(reader, slab, rows, readers, leash, counters)
        network = None if bench is None else bench.network(slab)
        del slab
        if network is not None:
            self._networks.put(key, network)
        codecs = [] if network is None else [codec for codec in network.codecs.values() if codec.codec in wanted.codecs]
        costs = cut_costs(loaded, network, resident)
        if network is None or resident is None or run is None:
            return self._profile_of(loaded, costs, codecs, Choice(engine=REFERENCE, trials=()))
        reference = MeasuredReference(run, network, resident.prefix.cuts)
        if not self._door.trials.are_wanted(wanted, reference.seconds(len(resident.prefix.cuts))):
            return self._profile_of(loaded, costs, codecs, Choice(engine=REFERENCE, trials=()))
        room.shrink(tried_bytes)  # trials may take minutes, elsewhere
        pixels: Slab = np.zeros(tried, kind)
        kept = load(reader, pixels, len(pixels), readers, leash, counters)
        patron = self._patron(request, account, leash)
        choice = self._door.trials.wanted(wanted, resident.prefix, pixels, reference, patron, preprocess.levels)
        if choice.engine != REFERENCE:
            decode_s = (kept if levels_of(choice.engine) else loaded).decode_s
            costs = under_engine(costs, network, resident.prefix.cuts, decode_s, choice)
        return self._profile_of(loaded, costs, codecs, choice)

    def _engine(
        self,
        wanted: ProfileRequest,
        preprocess: Preprocess,
        resident: Resident | None,
        reader: SampleReader,
        account: Account,
        leash: CancelScope,
        held: ExitStack,
    ) -> Profile:
        """The engine alone, found on samples that are read for it."""
        lane, choice = self._sharing.lane(account), Choice(engine=REFERENCE, trials=())
        if resident is None:
            return self._profile_of(_NOTHING, (), (), choice)
        run = PrefixRun(resident, len(resident.prefix.cuts), self._sharing.device, leash, account)
        run.check()
        shape = _shape_of_tried(wanted, preprocess, lane.total_bytes // _PART)
        some = np.zeros((ROWS, *preprocess.shape), np.float32)
        is_wanted = shape[0] and wanted.accuracy != EXACT
        network = NetworkProfile(seconds=run.seconds(some, repeats=_REPEATS)) if is_wanted else None
        if network is None:
            return self._profile_of(_NOTHING, (), (), choice)
        reference = MeasuredReference(run, network, resident.prefix.cuts)
        if self._door.trials.are_wanted(wanted, reference.seconds(len(resident.prefix.cuts))):
            pixels: Slab = np.zeros(shape, np.dtype(np.float32 if preprocess.levels is None else np.uint8))
            held.enter_context(lane.reserve(pixels.nbytes, leash.is_cut))
            load(reader, pixels, len(pixels), self._sharing.readers.lane(account.name), leash, Counters())
            patron = self._patron(wanted.features, account, leash)
            choice = self._door.trials.wanted(wanted, resident.prefix, pixels, reference, patron, preprocess.levels)
        return self._profile_of(_NOTHING, (), (), choice)

    def _patron(self, request: FeatureRequest, account: Account, leash: CancelScope) -> Patron:
        assert request.prefix is not None, "the prefix was found by its name"
        room_bytes = self._opening.prefixes.room_bytes(request.prefix, account)
        return Patron(
            name=account.name,
            check=account.check_trials,
            is_abandoned=leash.is_cut,
            spent=partial(self._sharing.tried, account),
            room_bytes=room_bytes,
        )

    def _bench(
        self,
        wanted: ProfileRequest,
        run: PrefixRun,
        resident: Resident,
        loaded_bytes: int,
        known: NetworkProfile | None,
    ) -> Bench:
        room_bytes = self._sharing.pools["work"].total_bytes
        return Bench(
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
        most = batch_size(limits, wanted=len(request.samples), most=self._settings.device_batch)
        return min(len(request.samples), most)


def _shape_of_tried(wanted: ProfileRequest, preprocess: Preprocess, max_bytes: int) -> tuple[int, ...]:
    """Of all samples on which engines are tried: pixels where they can be had, else what the network takes."""
    channels, *sides = preprocess.shape
    row_bytes = math.prod(preprocess.shape) * (_FLOAT if preprocess.levels is None else 1)
    rows = min(len(wanted.features.samples), max_bytes // row_bytes)
    return (rows, channels, *sides) if preprocess.levels is None else (rows, *sides, channels)
