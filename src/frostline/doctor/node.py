"""Looks at a node from here: does it answer, may this user use it, has it the data, and do both clocks agree."""

import http.client
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from statistics import median

from frostline.client.http import HttpTransport
from frostline.client.membership import can_talk
from frostline.config import LoaderSettings
from frostline.core.units import in_bytes, in_seconds
from frostline.doctor.findings import FINE, PROBLEM, WARNING, Finding
from frostline.stores.base.urls import is_within
from frostline.transport.protocol import Transport
from frostline.version import __version__
from frostline.wire.http.pool import address_of

__all__ = ("examine_node", "skew_of")

_ASKED = 7
_DEADLINE_S = 10.0
# Object stores refuse requests whose time differs by more than 15 minutes; much less makes logs hard to read.
_MAX_SKEW_S = 900.0
_NOTED_SKEW_S = 30.0


def examine_node(url: str, settings: LoaderSettings, data: str | None = None) -> Iterator[Finding]:
    """What a job finds at a node.

    Args:
        url: URL of the node.
        settings: settings of the job's loader.
        data: URL of the data that it is to serve; None asks for none.

    Raises:
        NodeUnreachable: nothing answers there.
        Refused: the node does not know this user.
    """
    part = f"node {url}"
    transport = HttpTransport(url, settings)
    try:
        health = transport.health()
        if not can_talk(health.version):
            yield Finding(
                part=part,
                level=PROBLEM,
                says=f"it runs Frostline {health.version}, which does not talk with {__version__}",
                mend="bring both to one version",
            )
            return
        round_trip_s = _round_trip_s(transport)
        transport.node_statistics()  # which only those whom it knows may read
    finally:
        transport.close()
    yield Finding(
        part=part,
        level=FINE,
        says=f"{health.hardware}, {in_bytes(health.memory_bytes)} of memory, round trip {in_seconds(round_trip_s)}",
    )
    if data is not None and not any(is_within(data, root) for root in health.roots):
        yield Finding(
            part=part,
            level=PROBLEM,
            says=f"it serves {', '.join(health.roots)}, and not {data}",
            mend=f"start it with --data-root {data} too",
        )
    yield from skew_of(part, _clock_of(url), datetime.now(UTC))


def _round_trip_s(transport: Transport) -> float:
    """The median of some small requests, over a connection that is open."""
    seconds = []
    for _ in range(_ASKED):
        started = time.perf_counter()
        transport.health()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def _clock_of(url: str) -> datetime | None:
    """The time of day at a node, by the date of an answer; None where it says none."""
    connection = http.client.HTTPConnection(*address_of(url), timeout=_DEADLINE_S)
    try:
        connection.request("GET", "/v1/health")
        said = connection.getresponse().headers.get("Date")
        return None if said is None else parsedate_to_datetime(said)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def skew_of(part: str, there: datetime | None, here: datetime) -> Iterator[Finding]:
    """What two clocks say of each other.

    Args:
        part: where the other clock is.
        there: the time that it shows; None where it does not.
        here: the time of this machine.
    """
    if there is None:
        return
    seconds = abs((there - here).total_seconds())
    if seconds > _NOTED_SKEW_S:
        yield Finding(
            part=part,
            level=PROBLEM if seconds > _MAX_SKEW_S else WARNING,
            says=f"its clock and this machine's differ by {in_seconds(seconds)}; object stores refuse 15 minutes",
            mend="set both by NTP (timedatectl set-ntp true)",
        )
