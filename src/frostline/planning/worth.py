"""Decides whether measuring pays for itself in what is left of a job."""

__all__ = ("SHARE", "is_worth_measuring", "is_worth_trying")

SHARE = 0.05
"""Of the time that a job has left: what measuring may take of it."""
# A profile runs three batches of sixteen samples on each side and packs a few samples with every codec: about the time
# of this many samples of real work, and this many seconds beside it (``benchmarks/first_step.py`` measures both).
_SAMPLES = 64
_SECONDS = 2.0


def is_worth_measuring(*, samples_left: int, samples_per_s: float) -> bool:
    """Whether both sides and the link are measured for a plan.

    Args:
        samples_left: that are still to be computed.
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
        samples_left: that are still to be computed.
        samples_per_s: at which they were computed until now; above 0.
    """
    return _TRIED_S + _TRIED_SAMPLES / samples_per_s <= _SAVED * samples_left / samples_per_s
