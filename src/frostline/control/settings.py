"""What a control plane divides, between whom, and by which rules."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from frostline.checks import check_fields, check_minimums
from frostline.control.activity.summary import Prices
from frostline.control.amounts import Amounts
from frostline.errors import SettingError

__all__ = ("EVERY_TENANT", "NO_CONTROL", "POLICY_NAMES", "ControlSettings", "ControlTenant", "ControlledJob")

EVERY_TENANT = "everybody"
"""The name of the only tenant of a control plane that was started without tenants."""

# Far within the 64 bits of a table of stages.
_MAX_PRIORITY = 1_000_000
NO_CONTROL = "none"
"""The address of a control plane of whoever reports to none, and serves none."""

POLICY_NAMES = ("deadlines", "priorities", "max_min", "proportional")
"""Rules that a control plane may chain: each divides what those before it left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlTenant:
    """One tenant of a control plane.

    Attributes:
        name: name in the view and in sentences.
        token_sha256: SHA-256 of its token, in small hexadecimal digits.
        weight: its share is in proportion to this; its jobs divide that.
        sees_all: whether it may see the stages of all tenants.
        may_change: whether it may change weights, jobs and capacities of all while the control plane runs.
    """

    name: str
    token_sha256: str = field(repr=False)
    weight: float = 1.0
    sees_all: bool = False
    may_change: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        _check_weight(f"tenant {self.name}", self.weight)
        if not re.fullmatch(r"[0-9a-f]{64}", self.token_sha256):
            raise SettingError(f"token_sha256 of tenant {self.name} must be 64 small hexadecimal digits")
        if self.may_change and not self.sees_all:
            raise SettingError(f"tenant {self.name} may change what all have, so it must see them: set sees_all too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlledJob:
    """What is known of a job beforehand.

    Attributes:
        name: name that the job gives itself.
        tenant: name of its tenant.
        weight: its share of what its tenant has is in proportion to this.
        priority: with the policy ``priorities``, jobs with a greater one are served first.
        ends_at_s: when it must have ended, in seconds since 1970; infinite where it may take its time.
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
        _check_different("names of tenants", [tenant.name for tenant in self.tenants])
        _check_different("tokens of tenants", [tenant.token_sha256 for tenant in self.tenants])
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
