"""Makes the rule that a loader's settings name."""

from frostline.config import LoaderSettings
from frostline.tuning.feedback import Following
from frostline.tuning.prisma import Prisma
from frostline.tuning.rule import Steady, TuningRule
from frostline.tuning.values import Setting

__all__ = ("rule_of",)


def rule_of(settings: LoaderSettings, *, window_bytes: int | None = None) -> TuningRule:
    """The rule for one job's windows.

    Args:
        settings: name it, and bound it.
        window_bytes: that a window that is followed may hold before it is known to need more; None is all of it.
    """
    most = Setting(requests=settings.last_requests, window_bytes=settings.window_bytes)
    if settings.is_followed:
        return Following(most, requests=settings.first_requests, window_bytes=window_bytes)
    if settings.requests_in_flight is None and settings.tuning == "prisma":
        return Prisma(most, rows_per_request=settings.samples_per_request)
    return Steady(most)
