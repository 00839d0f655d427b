"""Runs an I/O service that keeps to what a control plane says."""

import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager

from frostline.config import IoSettings
from frostline.control.cache_stage import CacheStage
from frostline.control.follower import ControlFollower
from frostline.control.link import ControlLink
from frostline.control.paced_transport import PacedTransport
from frostline.io_service.service import IoService
from frostline.transport.protocol import Transport
from frostline.tuning import Setting

__all__ = ("controlled_service",)


@contextmanager
def controlled_service(
    upstream: Transport, settings: IoSettings, listening: socket.socket, link: ControlLink
) -> Iterator[IoService]:
    """Serve until the end, as one stage of kind ``io`` and one of kind ``cache``.

    Args:
        upstream: way to the nodes or the store, which the caller closes; its requests go when they may.
        settings: bounds of the service, which a share never exceeds.
        listening: socket that it listens on; the caller closes it.
        link: way to the control plane, which is closed at the end.
    """

    def limit(setting: Setting) -> None:
        service.bound(requests=setting.requests, window_bytes=setting.window_bytes)

    def limit_cache(nbytes: int) -> None:
        service.bound_cache(nbytes)

    def cached_bytes() -> int:
        return service.cached_bytes()

    cache = CacheStage(link.job, settings.memory_bytes - settings.window_bytes, cached_bytes, limit_cache)
    maximum = Setting(requests=settings.max_connections, window_bytes=settings.window_bytes)
    with closing(ControlFollower(link, limit, maximum, kind="io", beside=[cache])) as follower:
        service = IoService(PacedTransport(upstream, follower), settings, listening, reports_requests=True)
        with service:
            follower.begin()
            yield service
