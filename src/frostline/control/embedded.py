"""The control plane within a node: its tenants see their jobs there, and nothing is bounded unless a file says so."""

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from starlette.routing import Route

from frostline.control.app import ControlPlane, stage_routes
from frostline.control.changes import ControlChanges, ControlEvent
from frostline.control.messages import Prices
from frostline.control.settings import NO_CONTROL, ControlSettings, ControlTenant, read_control_settings
from frostline.control.shares import Amounts
from frostline.control.state import ControlState, StageRecord
from frostline.core.config import LoaderSettings, NodeSettings, TenantSettings
from frostline.core.errors import SettingError

__all__ = ("control_plane", "control_routes", "embedded_settings", "tenants_of")

# Each takes at most some 16 KiB of memory, which comes on top of the node's.
_MAX_STAGES = 2_000
# A job that waits for most of its time has few processor seconds, and a report takes about a thousandth of one
# (``benchmarks/results/2026-11-25-job-reports.json``): where nothing is bounded, nobody needs it sooner.
_UNBOUNDED_ROUND_S = 2.0
_UNBOUNDED = ControlSettings(capacity=Amounts(), round_s=_UNBOUNDED_ROUND_S, max_stages=_MAX_STAGES)
_MIN_WEIGHT, _MAX_WEIGHT = 1e-3, 1e3


def control_plane(settings: ControlSettings | None) -> ControlPlane | None:
    """Make a control plane that keeps its state in memory; none without settings."""
    return None if settings is None else ControlPlane(ControlState(settings, now_s=time.time()), _Forgets())


def control_routes(settings: ControlSettings | None) -> list[Route]:
    """Make the routes of a control plane that keeps its state in memory; none without settings."""
    plane = control_plane(settings)
    return [] if plane is None else stage_routes(plane)


def tenants_of(node: NodeSettings) -> tuple[ControlTenant, ...]:
    """The tenants of a node, as its control plane knows them."""
    return tuple(map(_tenant, node.tenants))


def embedded_settings(
    node: NodeSettings, config: Path | None = None, prices: Prices | None = None, control: str | None = None
) -> ControlSettings | None:
    """What the control plane within a node divides, between the tenants of the node.

    Args:
        node: settings of the node, whose tenants have the same names, tokens and weights here.
        config: file of what is bounded, as of ``frostline control``; None bounds nothing.
        prices: prices of what is saved, before those of the file.
        control: address of the control plane that the node itself reports to; the environment's by default.

    Returns:
        None where the node is to have no control plane.

    Raises:
        SettingError: The file makes no sense, names tenants of its own, or divides devices.
    """
    if (control or LoaderSettings().control) == NO_CONTROL:
        if config is not None or prices is not None:
            raise SettingError("--control none serves no control plane: leave out --control-config and --prices")
        return None
    given = _UNBOUNDED if config is None else _read(config, node)
    return replace(given, tenants=tenants_of(node), prices=prices or given.prices)


def _read(config: Path, node: NodeSettings) -> ControlSettings:
    given = read_control_settings(config, tenants=tenants_of(node))
    if math.isfinite(given.capacity.compute_s_per_s):
        raise SettingError(
            f"{config}: a node divides its devices by the weights of its tenants; leave out compute_s_per_s"
        )
    return given


def _tenant(tenant: TenantSettings) -> ControlTenant:
    return ControlTenant(
        name=tenant.name,
        token_sha256=tenant.token_sha256,
        expires_at_s=tenant.expires_at_s,
        next_token_sha256=tenant.next_token_sha256,
        next_expires_at_s=tenant.next_expires_at_s,
        weight=min(_MAX_WEIGHT, max(_MIN_WEIGHT, tenant.weight)),
        sees_all=tenant.sees_all,
    )


class _Forgets:
    """Keeps nothing: after a restart stages say again what they hold."""

    def write(
        self,
        changed: Mapping[tuple[str, str], StageRecord | None],
        events: Mapping[int, ControlEvent | None],
        changes: ControlChanges | None,
    ) -> None:
        """Take nothing."""
