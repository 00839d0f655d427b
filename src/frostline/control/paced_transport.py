"""Has an I/O service ask its nodes or its store within its share."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from frostline.control.follower import ControlFollower
from frostline.core import FeatureBatch
from frostline.profiles import Profile
from frostline.transport.protocol import Cancellation, Transport, TransportStatistics
from frostline.wire.messages import FeatureRequest, Health, ProfileRequest

__all__ = ("PacedTransport",)


class PacedTransport:
    """The same transport, whose requests for rows go when they may. The caller closes what it is given.

    Args:
        transport: transport that asks.
        follower: says when.
    """

    def __init__(self, transport: Transport, follower: ControlFollower) -> None:
        self._transport = transport
        self._follower = follower

    def health(self) -> Health:
        """See ``Transport.health``."""
        return self._transport.health()

    def put_prefix(self, digest: str, artifact: bytes) -> None:
        """See ``Transport.put_prefix``."""
        self._transport.put_prefix(digest, artifact)

    def profile(self, wanted: ProfileRequest, cancellation: Cancellation | None = None) -> Profile:
        """See ``Transport.profile``; it is not paced, since it is rare and short."""
        return self._transport.profile(wanted, cancellation)

    def features(self, request: FeatureRequest) -> Iterator[FeatureBatch]:
        """See ``Transport.features``; the exchange begins when it may."""
        return self._follower.paced(partial(self._transport.features, request))

    def node_statistics(self) -> dict[str, Any]:
        """See ``Transport.node_statistics``."""
        return self._transport.node_statistics()

    def statistics(self) -> TransportStatistics:
        """See ``Transport.statistics``."""
        return self._transport.statistics()

    def close(self) -> None:
        """Stop the requests that wait."""
        self._follower.close()
