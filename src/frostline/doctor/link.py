"""Looks at a link that was measured: can one connection's buffers hold what is under way on it."""

import math
from collections.abc import Iterator
from pathlib import Path

from frostline.core.units import in_bytes, in_seconds
from frostline.doctor.findings import FINE, WARNING, Finding
from frostline.planning import Link

__all__ = ("connections_needed", "examine_link", "max_receive_buffer")

# Linux keeps half of a socket's buffer for its own bookkeeping (tcp(7), tcp_adv_win_scale).
_USABLE = 0.5
# As many as a window begins with: more take seconds until they are found.
_FIRST_CONNECTIONS = 8


def max_receive_buffer(root: Path = Path("/")) -> int | None:
    """The largest buffer that this machine gives a connection, in bytes; None where the system does not say.

    Args:
        root: folder in which ``proc`` lies.
    """
    try:
        return int((root / "proc/sys/net/ipv4/tcp_rmem").read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return None


def connections_needed(link: Link, buffer_bytes: int) -> int:
    """How many connections a link needs to be full, each with at most its buffer under way: bandwidth times delay."""
    if math.isinf(link.bytes_per_s):
        return 1
    return max(1, math.ceil(link.bytes_per_s * link.round_trip_s / (_USABLE * buffer_bytes)))


def examine_link(link: Link, buffer_bytes: int | None) -> Iterator[Finding]:
    """What a link carries, and what keeps it from more.

    Args:
        link: link as it was measured.
        buffer_bytes: largest receive buffer of a connection; None where it is not known.
    """
    if math.isinf(link.bytes_per_s):
        return
    says = f"{in_bytes(link.bytes_per_s)}/s at a round trip of {in_seconds(link.round_trip_s)}"
    needed = 1 if buffer_bytes is None else connections_needed(link, buffer_bytes)
    if needed <= _FIRST_CONNECTIONS:
        yield Finding(part="link", level=FINE, says=says)
        return
    product = link.bytes_per_s * link.round_trip_s
    yield Finding(
        part="link",
        level=WARNING,
        says=f"{says}: {in_bytes(product)} are under way when it is full, and a connection's buffer is at most "
        f"{in_bytes(buffer_bytes or 0)}, so that it takes {needed} connections",
        mend=f"sysctl -w net.ipv4.tcp_rmem='4096 131072 {_next_power(2 * product)}', and tcp_wmem at the node",
    )


def _next_power(value: float) -> int:
    return 1 << max(0, math.ceil(math.log2(max(1.0, value))))
