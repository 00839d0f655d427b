"""Decides how long to wait before a failed request is made again, and when to give up. Pure."""

from dataclasses import dataclass

from frostline.errors import NodeUnreachable, Overloaded, StoreUnavailable, Unavailable

__all__ = ("Failing", "delay_s")

# A node that restarts is back within seconds: the first retry costs little, and later ones stay within one step.
_FIRST_DELAY_S = 0.1
_LONGEST_DELAY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Failing:
    """What was asked for in vain.

    Attributes:
        samples: how many are missing; 0 where something else was asked for.
        failures: attempts that failed in a row, the last one counted.
        since: when the first of these failed, in seconds.
    """

    samples: int
    failures: int
    since: float


def delay_s(
    failing: Failing, reason: Unavailable | StoreUnavailable, now: float, retry_for_s: float, jitter: float = 0.0
) -> float:
    """Seconds until the next attempt, the last of them when ``retry_for_s`` ends.

    It doubles with each failure in a row, and is at least what an ``Overloaded`` node asked for. Jitter shortens it by
    up to a half, and makes it up to a quarter longer than the node asked for: clients that failed at one time would
    else come back at one time ("equal jitter": Brooker, Exponential Backoff And Jitter, AWS Architecture Blog, 2015).

    Args:
        failing: what was asked for in vain.
        reason: of the last failure.
        now: in seconds.
        retry_for_s: how long to try.
        jitter: from 0, for none, to 1.

    Raises:
        NodeUnreachable: it has been failing for ``retry_for_s``, or would be before the node wants to be
            asked again.
        StoreUnavailable: the same, where it is the store that does not answer.
    """
    left_s = failing.since + retry_for_s - now
    asked_s = reason.retry_after_s if isinstance(reason, Overloaded) else 0.0
    if left_s <= 0 or asked_s > left_s:
        raise _surrender(failing, reason, now, retry_for_s) from reason
    # The exponent is bounded so that a long outage does not overflow.
    backoff_s = min(_FIRST_DELAY_S * 2.0 ** min(failing.failures - 1, 16), _LONGEST_DELAY_S)
    asked_s = min(asked_s * (1 + jitter / 4), left_s)
    return max(min(backoff_s * (1 - jitter / 2), left_s), asked_s)


def _surrender(
    failing: Failing, reason: Unavailable | StoreUnavailable, now: float, retry_for_s: float
) -> NodeUnreachable | StoreUnavailable:
    store = isinstance(reason, StoreUnavailable)
    did_not = f"did not give {failing.samples} samples in" if failing.samples else "was full at"
    sentence = (
        f"the {'store' if store else 'node'} {did_not} {failing.failures} attempts "
        f"over {now - failing.since:.0f} s: {reason}; bring it back, or raise retry_for_s (now {retry_for_s:g} s)"
    )
    return StoreUnavailable(sentence) if store else NodeUnreachable(sentence)
