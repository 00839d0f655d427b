"""Has a job tell a control plane what it does, and keep to what that answers: the one it names, or its first node's."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

from frostline.config import LoaderSettings
from frostline.control.settings import NO_CONTROL
from frostline.jobs.activity import ActivityMeter
from frostline.jobs.connect import members_of
from frostline.jobs.loader_factory import CachePolicy
from frostline.jobs.router import Router
from frostline.prefetch import Tuner
from frostline.transport.protocol import ReportsRequests, Transport
from frostline.tuning import Setting

if TYPE_CHECKING:  # of jobs that report; others do without
    from frostline.control.follower import ControlFollower

__all__ = ("control_address", "followed")


def followed(
    settings: LoaderSettings,
    tuner: Tuner,
    transport: Transport,
    router: Router,
    cache_policy: CachePolicy,
    nodes: Sequence[str],
    activity: ActivityMeter,
    close: Callable[[], None],
) -> "tuple[ControlFollower | None, Callable[[], None]]":
    """What tells a control plane of a job and keeps it to its share, and what ends that and closes the rest of the job.

    Args:
        settings: settings of the job.
        tuner: tuner of its windows, which is bounded.
        transport: way to its nodes.
        router: router of the job, which plans with its share.
        cache_policy: policy of its caches.
        nodes: addresses of its nodes, as they were given.
        activity: says what this process of the job does.
        close: closes the rest of the job.

    Raises:
        SettingError: The address of the control plane is none.
    """
    address = control_address(settings, nodes, transport)
    if address is None:
        return None, close
    from frostline.control.cache_stage import CacheStage
    from frostline.control.follower import ControlFollower
    from frostline.control.link import ControlLink

    link, was_named = ControlLink(address, settings.token), settings.control is not None
    cache = CacheStage(link.job, settings.cache_bytes, lambda: cache_policy.held_bytes, cache_policy.bound)
    elsewhere = transport.reports_requests if isinstance(transport, ReportsRequests) else lambda: False
    follower = ControlFollower(
        link,
        tuner.limit,
        Setting(requests=settings.last_requests, window_bytes=settings.window_bytes),
        beside=[cache] if settings.cache_bytes and was_named else [],
        counted_elsewhere=elsewhere,
        activity=activity,
        was_named=was_named,
    )
    router.count_on(lambda: follower.share.bytes_per_s)
    return follower, partial(_close_all, (activity.close, follower.close, close))


def control_address(settings: LoaderSettings, nodes: Sequence[str], transport: Transport) -> str | None:
    """URL of the control plane that a job reports to: the one that was named, else its first node's.

    Args:
        settings: how the job asks.
        nodes: addresses that its nodes were given by; a node in this process needs no reports.
        transport: way to them.

    Returns:
        None where there is neither, or nobody is to be told.
    """
    if settings.control is not None:
        return None if settings.control == NO_CONTROL else settings.control
    first = next(iter(members_of(transport, nodes)), "")
    return first if first.startswith("http:") else None


def _close_all(closes: Sequence[Callable[[], None]]) -> None:
    with ExitStack() as stack:
        for close in reversed(closes):
            stack.callback(close)
