"""Identifies tenants, counts what they use, and decides whether they may ask for more now."""

import hashlib
import math
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path

from frostline.batching import Allowance, Claim, readable_bytes
from frostline.config import TenantSettings
from frostline.errors import Overloaded, SettingError, Unauthenticated, UnknownName
from frostline.node.scheduling.statistics import Counters

__all__ = ("EVERYBODY", "Account", "Tenants", "read_tenants")

EVERYBODY = "everybody"
"""The name of the only tenant of a node that was started without tenants."""

_RETRY_AFTER_S = 1.0
# If there are several tenants, none may hold more than this part of the memory for work, so that a tenant that does not
# read its answers leaves room for the others.
_MAX_WORK = 0.5
# The same for the memory for weights: weights in use leave only after a turn, and a tenant whose network fills the
# memory would shut out all others until then.
_MAX_WEIGHTS = 0.5
# The same for the time of trials. Unused time is saved up to half an hour, which pays for the ten minutes that trials
# of one prefix take at most, and for half of another.
_MAX_TRIALS = 0.5
_TRIALS_SAVED_S = 1800.0
# A control plane gives another share each second, so little of it is saved; and one of nothing still ends.
_SHARE_SAVED_S = 2.0
_MIN_SHARE = 1e-3


class Account:
    """Counts what one tenant uses. Safe for threads.

    Args:
        settings: settings of the tenant; None for a node without tenants.
        counters: counters of the tenant.
        is_alone: whether there are no other tenants.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, settings: TenantSettings | None, counters: Counters, *, is_alone: bool, clock: Callable[[], float]
    ) -> None:
        self._settings = settings or TenantSettings(name=EVERYBODY, token_sha256="0" * 64, sees_all=True)
        self._is_alone = is_alone
        self._clock = clock
        self._lock = threading.Lock()
        rate = self._settings.device_s_per_s
        self._allowance = None if rate is None else Allowance(rate)
        self._share: Allowance | None = None
        self._share_bytes = math.inf
        self._was_held_back = False
        self._trials = Allowance(_MAX_TRIALS, _TRIALS_SAVED_S)
        self._inside = 0
        self.counters = counters

    @property
    def name(self) -> str:
        """The name of the tenant."""
        return self._settings.name

    @property
    def settings(self) -> TenantSettings:
        """The settings of the tenant."""
        return self._settings

    def change(self, settings: TenantSettings) -> None:
        """Let it have another weight and other quotas from now on.

        What is under way goes on. Requests that have begun keep the bound of memory for work that they began with.

        Args:
            settings: settings of the same tenant, of which only weight and quotas differ.
        """
        with self._lock:
            rate, self._settings = settings.device_s_per_s, settings
            if rate is None:
                self._allowance = None
            elif self._allowance is None:
                self._allowance = Allowance(rate)
            else:
                self._allowance.change(rate, self._clock())

    @property
    def inside(self) -> int:
        """The number of its requests under way."""
        return self._inside

    def claim(self, device_s: float, room_bytes: int) -> Claim:
        """The claim of its work on a pool of ``room_bytes``."""
        maximum = min(self.max_work_bytes(room_bytes), self._share_bytes)
        return Claim(tenant=self.name, device_s=device_s, max_bytes=maximum)

    def max_work_bytes(self, room_bytes: int) -> int:
        """The maximum that its work may hold of a pool of ``room_bytes``, by the node's settings."""
        if self._settings.work_bytes is not None:
            return self._settings.work_bytes
        return room_bytes if self._is_alone else int(_MAX_WORK * room_bytes)

    def bound(self, device_s_per_s: float, work_bytes: float) -> None:
        """Bind it from outside, as a control plane does, beside the quotas of its settings.

        Args:
            device_s_per_s: device seconds a second; infinite for no bound, and 0 lets nothing begin.
            work_bytes: bytes of the memory for work; infinite for no bound.
        """
        with self._lock:
            self._share_bytes = work_bytes
            if math.isinf(device_s_per_s):
                self._share = None
            elif self._share is None:
                self._share = Allowance(max(_MIN_SHARE, device_s_per_s), _SHARE_SAVED_S)
            else:
                self._share.change(max(_MIN_SHARE, device_s_per_s), self._clock())

    def was_held_back(self) -> bool:
        """Whether the share that ``bound`` gave has kept work from beginning since the last call, or still does."""
        with self._lock:
            was, self._was_held_back = self._was_held_back, False
            return was or (self._share is not None and self._share.wait_s(self._clock()) > 0)

    def max_weight_bytes(self, room_bytes: int) -> float:
        """The maximum that its prefixes and engines may take of ``room_bytes`` for weights."""
        if self._settings.weight_bytes is not None:
            return self._settings.weight_bytes
        return math.inf if self._is_alone else _MAX_WEIGHTS * room_bytes

    def used(self, device_s: float) -> None:
        """Charge it for device seconds."""
        self.counters.add(compute_s=device_s)
        self._spend(device_s)

    def tried(self, trial_s: float) -> None:
        """Charge it for seconds of engine trials."""
        self.counters.add(trial_s=trial_s)
        with self._lock:
            self._trials.spend(trial_s, self._clock())
            for allowance in self._bounds():
                allowance.owe(trial_s)

    def check_trials(self) -> None:
        """Check that engines may be tried for this tenant.

        Raises:
            Overloaded: if there are other tenants, and it has used up its share of trial time.
        """
        with self._lock:
            wait_s = 0.0 if self._is_alone else self._trials.wait_s(self._clock())
        if wait_s > 0:
            self._refuse("has used up its time for trials of engines for now (accuracy 'exact' needs none)", wait_s)

    def trained(self, train_s: float) -> None:
        """Charge it for training a head, in device seconds."""
        self.counters.add(train_s=train_s)
        self._spend(train_s)

    def check(self, *, has_room: bool = True) -> None:
        """Check that another request of this tenant may be admitted.

        Args:
            has_room: whether none of its work waits for memory that it holds itself.

        Raises:
            Overloaded: if a quota is used up; the message names it.
        """
        wanted = self._settings
        with self._lock:
            wait_s = 0.0 if self._allowance is None else self._allowance.wait_s(self._clock())
            share_s = 0.0 if self._share is None else self._share.wait_s(self._clock())
            self._was_held_back |= share_s > 0
        if wait_s > 0:
            self._refuse(f"has used its {wanted.device_s_per_s} device seconds a second", wait_s)
        if share_s > 0:  # the share may be another one in a second
            self._refuse("has used its share of the device, which a control plane gives", min(share_s, _RETRY_AFTER_S))
        if wanted.requests is not None and self._inside >= wanted.requests:
            self._refuse(f"has {self._inside} requests in work already", _RETRY_AFTER_S)
        if wanted.work_bytes is not None and not has_room:
            self._refuse(f"has used its {readable_bytes(wanted.work_bytes)} of memory for work", _RETRY_AFTER_S)

    def enter(self) -> None:
        """Count a request as admitted."""
        with self._lock:
            self._inside += 1

    def leave(self) -> None:
        """Count a request as ended."""
        with self._lock:
            self._inside -= 1

    def _bounds(self) -> list[Allowance]:
        return [allowance for allowance in (self._allowance, self._share) if allowance is not None]

    def _spend(self, device_s: float) -> None:
        with self._lock:
            for allowance in self._bounds():
                allowance.spend(device_s, self._clock())

    def _refuse(self, why: str, wait_s: float) -> None:
        self.counters.add(refused_quota=1)
        raise Overloaded(f"tenant {self.name} {why}: ask again later", retry_after_s=wait_s)


class Tenants:
    """All tenants of a node. Safe for threads.

    Args:
        settings: settings of each tenant; if there are none, everybody may use the node as one tenant.
        counters: counters of the node, to which those of the tenants add up.
        clock: returns monotonic seconds.
    """

    def __init__(
        self, settings: Sequence[TenantSettings], counters: Counters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        is_alone = len(settings) < 2
        self._by_token = {
            setting.token_sha256: Account(setting, Counters(counters), is_alone=is_alone, clock=clock)
            for setting in settings
        }
        self._everybody = Account(None, Counters(counters), is_alone=is_alone, clock=clock)

    @property
    def everybody(self) -> Account:
        """The account of requests from within the process, and of a node without tenants."""
        return self._everybody

    @property
    def accounts(self) -> list[Account]:
        """The accounts that are counted separately."""
        return list(self._by_token.values()) or [self._everybody]

    @property
    def weights(self) -> dict[str, float]:
        """The tenants' weights, by name."""
        return {account.name: account.settings.weight for account in self.accounts}

    def named(self, name: str) -> Account:
        """The account of a tenant.

        Raises:
            UnknownName: if there is no such tenant.
        """
        found = next((account for account in self._by_token.values() if account.name == name), None)
        if found is None:
            raise UnknownName(f"there is no tenant {name!r}")
        return found

    def identify(self, token: str | None) -> Account:
        """The account that a token belongs to.

        Raises:
            Unauthenticated: if no tenant has this token. The message does not repeat it.
        """
        if not self._by_token:
            return self._everybody
        if token is None:
            raise Unauthenticated("this node serves its tenants only: set FROSTLINE_TOKEN to the token you were given")
        # The digest is looked up instead of the token, so that the time of the lookup reveals nothing about the tokens.
        account = self._by_token.get(hashlib.sha256(token.encode()).hexdigest())
        if account is None:
            raise Unauthenticated("this node does not know that token: see FROSTLINE_TOKEN")
        return account


def read_tenants(path: Path) -> tuple[TenantSettings, ...]:
    """Read tenants from a TOML file with a table ``[[tenant]]`` each, whose keys are fields of ``TenantSettings``.

    Raises:
        SettingError: if the file cannot be read or is not valid; the message names the file and the field.
    """
    try:
        value = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingError(f"cannot read the tenants in {path}: {error}") from error
    tables = value.get("tenant")
    if set(value) != {"tenant"} or not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise SettingError(f"{path} must hold one table [[tenant]] per tenant, and nothing else")
    return tuple(_tenant(path, table) for table in tables)


def _tenant(path: Path, table: dict[str, object]) -> TenantSettings:
    kinds: dict[str, tuple[type, ...]] = {
        "name": (str,),
        "token_sha256": (str,),
        "weight": (int, float),
        "requests": (int,),
        "work_bytes": (int,),
        "device_s_per_s": (int, float),
        "weight_bytes": (int,),
        "roots": (list,),
        "sees_all": (bool,),
        "may_change": (bool,),
    }
    assert set(kinds) == {field.name for field in fields(TenantSettings)}, "every field can be set"
    for name, value in table.items():
        if name not in kinds:
            raise SettingError(f"{path}: unknown field {name!r} of a tenant; its fields are {', '.join(kinds)}")
        if not isinstance(value, kinds[name]) or (isinstance(value, bool) and bool not in kinds[name]):
            raise SettingError(f"{path}: {name} of a tenant must be {kinds[name][-1].__name__}, not {value!r}")
    if not {"name", "token_sha256"} <= set(table):
        raise SettingError(f"{path}: a tenant needs a name and a token_sha256")
    roots = table.get("roots")
    if isinstance(roots, list):
        if not all(isinstance(root, str) for root in roots):
            raise SettingError(f"{path}: roots of a tenant must be a list of URLs")
        table = {**table, "roots": tuple(roots)}
    return TenantSettings(**table)  # type: ignore[arg-type]  # checked above
