"""Decides whether measuring pays for itself in what is left of a job."""

__all__ = ("SHARE", "is_worth_measuring")

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
