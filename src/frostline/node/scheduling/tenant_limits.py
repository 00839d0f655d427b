"""What a tenant of a node uses, and what it is bound to from outside or changed to while the node runs."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from frostline.config import TenantSettings
from frostline.errors import BadRequest, Forbidden, SettingError
from frostline.node.scheduling.memory_pool import Pool
from frostline.node.scheduling.tenants import Account, Tenants
from frostline.wire.patches import fields_of_patch

__all__ = ("QUOTAS", "TenantLimits", "TenantUsage", "changed_settings", "check_may_change", "tenant_to_json")

QUOTAS = ("requests", "work_bytes", "device_s_per_s", "weight_bytes")
"""Fields of ``TenantSettings`` that bound a tenant, where they are not None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantUsage:
    """What a tenant uses of a node.

    Attributes:
        device_s: device seconds so far: runs, trials and training.
        work_bytes: bytes that it holds of the memory for work.
        max_work_bytes: bytes of it that it may hold by the node's settings.
        devices: devices that are given work, each of which has one device second a second.
        is_held_back: whether it has asked for more device seconds than it was bound to since the last call.
    """

    device_s: float
    work_bytes: int
    max_work_bytes: int
    devices: int
    is_held_back: bool


class TenantLimits:
    """One tenant of a node, as a control plane sees it. Safe for threads.

    Args:
        account: account of the tenant.
        work: memory for work.
        devices: returns the number of devices that are given work.
    """

    def __init__(self, account: Account, work: Pool, devices: Callable[[], int]) -> None:
        self._account = account
        self._work = work
        self._devices = devices

    @property
    def name(self) -> str:
        """The name of the tenant."""
        return self._account.name

    def usage(self) -> TenantUsage:
        """What it uses; whether it was held back is told once."""
        totals = self._account.counters.totals()
        return TenantUsage(
            device_s=totals.compute_s + totals.trial_s + totals.train_s,
            work_bytes=self._work.held_bytes(self.name),
            max_work_bytes=int(self._account.max_work_bytes(self._work.total_bytes)),
            devices=self._devices(),
            is_held_back=self._account.was_held_back(),
        )

    def bound(self, *, device_s_per_s: float = math.inf, work_bytes: float = math.inf) -> None:
        """Bind it to this from now on, within what the node's settings allow.

        Args:
            device_s_per_s: device seconds a second; requests beyond are refused with 429.
            work_bytes: bytes of the memory for work; what needs more waits, but for one piece at a time.
        """
        self._account.bound(device_s_per_s, work_bytes)


def check_may_change(tenants: Tenants, asker: Account) -> None:
    """Check that somebody may change weights and quotas.

    Args:
        tenants: tenants of the node.
        asker: account that asks.

    Raises:
        Forbidden: It may not.
    """
    if tenants.accounts == [tenants.everybody]:
        raise Forbidden("this node has no tenants, so nobody may change it: see may_change in --tenants")
    if not asker.settings.may_change:
        raise Forbidden(f"tenant {asker.name} may change nothing here: it has no may_change = true in --tenants")


def changed_settings(before: TenantSettings, body: object) -> TenantSettings:
    """Settings with what a PATCH sets: the weight, and quotas, of which null is no bound but the node's own.

    Args:
        before: settings of a tenant.
        body: the PATCH, as JSON gave it.

    Raises:
        BadRequest: It makes no sense; the sentence names the field.
    """
    patch: dict[str, Any] = fields_of_patch(body, ("weight", *QUOTAS))
    try:
        return replace(before, **patch)
    except SettingError as error:
        raise BadRequest(str(error)) from error


def tenant_to_json(settings: TenantSettings) -> dict[str, Any]:
    """The name, the weight and the quotas of a tenant as plain values."""
    return {name: getattr(settings, name) for name in ("name", "weight", *QUOTAS)}
