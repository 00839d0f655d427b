"""Decides what a situation would be with another link, other speeds, more nodes or more epochs: nothing is run."""

from dataclasses import replace

from frostline.errors import SettingError
from frostline.planning.candidates import sides
from frostline.planning.situation import Situation
from frostline.profiles import Profile

__all__ = ("SHARE", "is_worth_measuring", "is_worth_trying", "vary")


def vary(
    situation: Situation,
    *,
    bandwidth: float | None = None,
    store_speed: float | None = None,
    trainer_speed: float | None = None,
    nodes: int | None = None,
    epochs: int | None = None,
    trainer_memory: int | None = None,
    separate_machines: bool = False,
) -> Situation:
    """The situation with some figures changed; None leaves one as it is.

    Args:
        situation: as measured.
        bandwidth: bandwidth of the link, bytes a second.
        store_speed: how many times as fast as measured each node works, reading included.
        trainer_speed: how many times as fast as measured the trainer works, the head included.
        nodes: number of nodes that work beside the store.
        epochs: number of epochs that the job takes.
        trainer_memory: bytes that the frozen layers left to the trainer may take.
        separate_machines: node and trainer have a machine each, as the one that they were measured on.

    Raises:
        SettingError: A figure makes no sense.
    """
    if trainer_memory is not None and trainer_memory < 1:
        raise SettingError(f"trainer_memory must be at least 1 byte, not {trainer_memory}")
    store, trainer = sides(situation)
    trainer_speed = _speed("trainer_speed", trainer_speed)
    return replace(
        situation,
        link=situation.link if bandwidth is None else replace(situation.link, bytes_per_s=bandwidth),
        store=_faster(store, _speed("store_speed", store_speed)),
        trainer=_faster(trainer, trainer_speed),
        head_s=situation.head_s / trainer_speed,
        nodes=situation.nodes if nodes is None else nodes,
        trainer_memory_bytes=situation.trainer_memory_bytes if trainer_memory is None else trainer_memory,
        epochs=situation.epochs if epochs is None else epochs,
        same_host=situation.same_host and not separate_machines,
    )


def _speed(name: str, speed: float | None) -> float:
    if speed is None:
        return 1.0
    if not speed > 0:
        raise SettingError(f"{name} is how many times as fast as measured, so it must be above 0, not {speed}")
    return speed


def _faster(profile: Profile, speed: float) -> Profile:
    """The profile of hardware so many times as fast, which is other hardware by name too."""
    if speed == 1:
        return profile
    return replace(
        profile,
        hardware=f"{profile.hardware}, {speed:g} times as fast",
        read_s=profile.read_s / speed,
        cuts=tuple(replace(cut, seconds=cut.seconds / speed, spread_s=cut.spread_s / speed) for cut in profile.cuts),
        codecs=tuple(
            replace(
                codec,
                encode_s=codec.encode_s / speed,
                decode_s=codec.decode_s / speed,
                spread_s=codec.spread_s / speed,
            )
            for codec in profile.codecs
        ),
    )


SHARE = 0.05
"""Of the time that a job has left: what measuring may take of it."""
# A profile runs three batches of sixteen samples on each side and packs a few samples with every codec: about the time
# of this many samples of real work, and this many seconds beside it (``benchmarks/first_step.py`` measures both).
_SAMPLES = 64
_SECONDS = 2.0


def is_worth_measuring(*, samples_left: int, samples_per_s: float) -> bool:
    """Whether both sides and the link are measured for a plan.

    Args:
        samples_left: number of samples that are still to be computed.
        samples_per_s: at which they were computed until now; above 0.
    """
    return _SECONDS + _SAMPLES / samples_per_s <= SHARE * samples_left / samples_per_s


# A trial runs the reference on some eights of samples, and the engine on as many; the usual one takes a third of the
# time on networks of convolutions, and is expected to take this much less on any (``benchmarks/engines.py``).
_TRIED_SAMPLES = 48
_TRIED_S = 1.0
_SAVED = 0.4


def is_worth_trying(*, samples_left: int, samples_per_s: float) -> bool:
    """Whether another engine is tried on the node, which a job must win back.

    Args:
        samples_left: number of samples that are still to be computed.
        samples_per_s: at which they were computed until now; above 0.
    """
    return _TRIED_S + _TRIED_SAMPLES / samples_per_s <= _SAVED * samples_left / samples_per_s
