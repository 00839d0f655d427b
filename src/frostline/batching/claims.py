"""Whose work a piece is, as a value."""

import math
from dataclasses import dataclass

__all__ = ("ANYBODY", "Claim")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a piece of work says when it asks for memory or for the device.

    Attributes:
        tenant: whose it is.
        device_s: what it will probably take of the device; only the order of tenants depends on it, and what it
            really took is charged later.
        max_bytes: its tenant never holds more than this, but for one piece alone.
    """

    tenant: str
    device_s: float = 0.0
    max_bytes: float = math.inf

    def __post_init__(self) -> None:
        assert self.device_s >= 0, f"work takes no less than nothing, not {self.device_s} s"


ANYBODY = Claim(tenant="")
"""Where nobody tells tenants apart."""
