"""What a control plane divides, between whom and by which rules, and the TOML file that says so."""

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from frostline.control.messages import Prices
from frostline.control.shares import Amounts
from frostline.core.config import TokenHolder, check_different_tokens, check_fields, check_minimums, with_ends
from frostline.core.errors import SettingError
from frostline.core.files import require_guarded

__all__ = (
    "EVERY_TENANT",
    "NO_CONTROL",
    "POLICY_NAMES",
    "ControlSettings",
    "ControlTenant",
    "ControlledJob",
    "read_control_settings",
)


EVERY_TENANT = "everybody"
"""The name of the only tenant of a control plane that was started without tenants."""

# Far within the 64 bits of a table of stages.
_MAX_PRIORITY = 1_000_000
NO_CONTROL = "none"
"""The address of a control plane of whoever reports to none, and serves none."""

POLICY_NAMES = ("deadlines", "priorities", "max_min", "proportional")
"""Rules that a control plane may chain: each divides what those before it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTenant(TokenHolder):
    """One tenant of a control plane.

    Attributes:
        weight: number; the share is in proportion to this; its jobs divide that.
        sees_all: True if it may see the stages of all tenants.
        may_change: True if it may change weights, jobs and capacities of all while the control plane runs.
    """

    weight: float = 1.0
    sees_all: bool = False
    may_change: bool = False

    def __post_init__(self) -> None:
        TokenHolder.__post_init__(self)
        _check_weight(f"tenant {self.name}", self.weight)
        if self.may_change and not self.sees_all:
            raise SettingError(f"tenant {self.name} may change what all have, so it must see them: set sees_all too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlledJob:
    """What is known of a job beforehand.

    Attributes:
        name: name that the job gives itself.
        tenant: name of its tenant.
        weight: number; the share of what its tenant has is in proportion to this.
        priority: number with the policy ``priorities``: jobs with a greater one are served first.
        ends_at_s: the time when it must have ended, in seconds since 1970; infinite where it may take its time.
        work_bytes: bytes that all its stages move until its end; needed for ``ends_at_s``.
    """

    name: str
    tenant: str = EVERY_TENANT
    weight: float = 1.0
    priority: int = 0
    ends_at_s: float = math.inf
    work_bytes: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        _check_weight(f"job {self.name}", self.weight)
        if abs(self.priority) > _MAX_PRIORITY:
            raise SettingError(f"the priority of job {self.name} must be within ±{_MAX_PRIORITY:,}")
        if self.ends_at_s < math.inf and not 0 < self.work_bytes < math.inf:
            raise SettingError(f"job {self.name} must end by a time, so it needs work_bytes: what it moves until then")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """What a control plane divides and how.

    Attributes:
        capacity: amounts that all stages together may use; resources without one are not bounded.
        tenants: tenants that may ask; empty lets everybody ask as one tenant.
        jobs: jobs with a weight, a priority or a deadline of their own.
        policies: names of the rules, in the order in which they divide.
        round_s: seconds between two reports of a stage.
        lease_s: seconds for which the share of a stage that says nothing stays its own.
        max_stages: maximum number of stages; one more is refused.
        prices: prices at which the view says what was saved; None says no money.
    """

    capacity: Amounts
    tenants: tuple[ControlTenant, ...] = ()
    jobs: tuple[ControlledJob, ...] = ()
    policies: tuple[str, ...] = ("deadlines", "max_min")
    round_s: float = 1.0
    lease_s: float = 30.0
    max_stages: int = 20_000
    prices: Prices | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_minimums(self, round_s=1e-3, lease_s=self.round_s, max_stages=1)
        if not self.policies or not set(self.policies) <= set(POLICY_NAMES):
            raise SettingError(f"policies must be some of {', '.join(POLICY_NAMES)}, not {list(self.policies)}")
        check_different_tokens(self.tenants)
        _check_different("jobs", [(job.tenant, job.name) for job in self.jobs])
        for job in self.jobs:
            self._check_job(job)

    @property
    def weights(self) -> dict[str, float]:
        """Weights of the tenants, by name."""
        return {tenant.name: tenant.weight for tenant in self.tenants}

    def _check_job(self, job: ControlledJob) -> None:
        if job.tenant not in (self.weights or (EVERY_TENANT,)):
            raise SettingError(f"job {job.name}: there is no tenant {job.tenant}")
        if job.ends_at_s == math.inf:
            return
        if "deadlines" not in self.policies or self.capacity.bytes_per_s == math.inf:
            raise SettingError(
                f"job {job.name} has ends_at, which needs the policy deadlines and a bytes_per_s to divide"
            )


def _check_weight(owner: str, weight: float) -> None:
    # Beyond a millionfold a share says nothing, and rounding says more.
    if not 1e-3 <= weight <= 1e3:
        raise SettingError(f"the weight of {owner} must be from 0.001 to 1000, not {weight}")


def _check_different(what: str, found: Sequence[object]) -> None:
    if len(set(found)) < len(found):
        raise SettingError(f"{what} must be different")


_TOP = ("capacity", "policies", "round_s", "lease_s", "max_stages", "prices", "tenant", "job")

T = TypeVar("T")


def read_control_settings(path: Path, tenants: tuple[ControlTenant, ...] | None = None) -> ControlSettings:
    """Read the settings of a control plane.

    Args:
        path: TOML file with a table ``[capacity]`` and, where they are wanted, ``policies``, ``round_s``, ``lease_s``,
            ``max_stages`` and tables ``[prices]``, ``[[tenant]]`` and ``[[job]]``.
        tenants: tenants of whoever serves it, who are named elsewhere; None has those of the file.

    Raises:
        SettingError: The file cannot be read, makes no sense, or can be written by other users; the sentence names file
            and field.
    """
    try:
        require_guarded(path)
        value = tomllib.loads(path.read_text(encoding="utf-8"))
        return _settings(value, tenants)
    except (OSError, ValueError) as error:
        raise SettingError(f"cannot read {path}: {error}") from error
    except SettingError as error:
        raise SettingError(f"{path}: {error}") from error


def _settings(value: dict[str, Any], tenants: tuple[ControlTenant, ...] | None) -> ControlSettings:
    _check_fields_known("the file", value, _TOP)
    if tenants is None:
        tenants = tuple(_made(ControlTenant, with_ends(table)) for table in _tables(value, "tenant"))
    elif "tenant" in value:
        raise SettingError("a node has its own tenants (--tenants); leave out the tables [[tenant]]")
    policies = value.get("policies", ["deadlines", "max_min"])
    if not isinstance(policies, list) or not all(isinstance(name, str) for name in policies):
        raise SettingError("policies must be a list of names")
    numbers = {name: value[name] for name in ("round_s", "lease_s", "max_stages") if name in value}
    return ControlSettings(
        capacity=Amounts.from_json(value.get("capacity", {}), "capacity"),
        policies=tuple(policies),
        tenants=tenants,
        jobs=tuple(_made(ControlledJob, _with_end(table)) for table in _tables(value, "job")),
        prices=_prices(value.get("prices")),
        **numbers,
    )


def _prices(value: object) -> Prices | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise SettingError("prices must be a table [prices]")
    return _made(Prices, value)


def _tables(value: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    tables = value.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SettingError(f"there must be a table [[{name}]] for each {name}")
    return tables


def _made(kind: type[T], table: dict[str, Any]) -> T:
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]  # both kinds are data classes
    _check_fields_known(f"a {kind.__name__}", table, known)
    try:
        return kind(**table)
    except TypeError as error:
        raise SettingError(f"a table lacks a field: {error}") from error


def _with_end(table: dict[str, Any]) -> dict[str, Any]:
    """The same table, with ``ends_at``, a date and time, in seconds."""
    rest = dict(table)
    ends_at = rest.pop("ends_at", None)
    if ends_at is None:
        return rest
    if not isinstance(ends_at, datetime) or ends_at.tzinfo is None:
        raise SettingError("ends_at of a job must be a date and time with its offset, such as 2030-01-31T07:00:00Z")
    return {**rest, "ends_at_s": ends_at.timestamp()}


def _check_fields_known(owner: str, table: Mapping[str, Any], known: Any) -> None:
    for name in table:
        if name not in known:
            raise SettingError(f"{owner} has an unknown field {name!r}; there are {', '.join(known)}")
