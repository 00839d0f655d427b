"""Gathers what a plan is made from: both sides measured at the same time, and the link between them."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from frostline.config import cache_folder
from frostline.core import REFERENCE
from frostline.engines.machine.hardware import free_device_bytes, host_digest
from frostline.errors import OverBudget
from frostline.jobs.context import JobContext, computed_in_all, is_alike, keeps_features, request_of, some_of, tried
from frostline.jobs.profiling import ProfileCache, TrainerProfiler, measure_link
from frostline.planning import Situation
from frostline.processors import usable_cores, usable_memory_bytes
from frostline.profiles import Profile
from frostline.wire.messages import ProfileRequest

__all__ = ("agreed", "situate")

# What crosses to measure the link and this side counts as traffic: enough for a rate, and no more.
_CROSSING_BYTES = 512 << 10
_MIN, _MAX = 8, 256
# The trainer's own run needs no more than one small batch.
_DECODED = 8


def situate(context: JobContext) -> Situation:
    """Measure both sides and the link on a few real samples.

    Where both sides use the same cores and the same engine one profile serves both. Where they use other cores they
    are measured at the same time, as they will work at the same time: neighbours on one machine slow each other.

    Raises:
        Refused: The node will not serve the data, or not run the network for another reason than its memory.
        StoreError: The samples cannot be read.
        Unavailable: The node does not answer.
    """
    data, transport = context.data, context.transport
    health = context.asking(transport.health)
    mean_bytes = data.samples.encoded_bytes / len(data)
    crossing = some_of(context, round(min(max(_CROSSING_BYTES / max(1, mean_bytes), _MIN), _MAX)))
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
        theirs, refused = _profile_node(context)
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


def agreed(context: JobContext, store: Profile, cut: int) -> Profile:
    """Have the engine that one node chose made ready at all, and know its error where it is furthest off.

    Args:
        context: context of the job.
        store: profile of that node.
        cut: up to which the engine is to run.

    Raises:
        EngineNotReady: None of them can run it so far on these samples, exactly enough.
        Unavailable: None of them answers.
    """
    if store.engine == REFERENCE or cut < 2:
        return store
    request = replace(tried(context), engine=store.engine, cut=cut)
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
    if context.shipment is not None and context.shipment.refused is not None:
        return None, context.shipment.refused
    request, only_here = tried(context), 1 < (context.cut or 0) <= context.cuts[-1].number
    if only_here and context.cut is not None:  # engines are tried for some seconds at each cut that a plan may want
        request = replace(request, cut=context.cut)
    trial_s = context.settings.trial_s
    wanted = ProfileRequest(
        features=request,
        codecs=context.codecs,
        accuracy=context.accuracy,
        only_here=only_here,
        trial_s=trial_s,
        samples_left=computed_in_all(context) if trial_s is None else None,
    )
    try:
        return context.asking(lambda: context.transport.profile(wanted)), None
    except OverBudget as error:
        return None, str(error)
