"""Identifies tenants, counts what they use, and decides whether they may ask for more before any work is done."""

import math
import re
import threading
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, TypedDict

from frostline.batching import Allowance, Claim, readable_bytes
from frostline.core.config import TenantSettings, with_ends
from frostline.core.declared import PARSED_BYTES, Within
from frostline.core.errors import (
    BadRequest,
    Forbidden,
    NodeUnreachable,
    OverBudget,
    Overloaded,
    SettingError,
    Unauthenticated,
    UnknownName,
)
from frostline.core.files import require_guarded
from frostline.core.nouns import Closing
from frostline.core.tokens import TokenTable
from frostline.node.memory import Pool, Reservation
from frostline.node.statistics import Counters
from frostline.wire.messages import fields_of_patch

__all__ = (
    "EVERYBODY",
    "QUOTAS",
    "Account",
    "Admission",
    "ChangedTenant",
    "Gate",
    "TenantChange",
    "TenantLimits",
    "TenantUsage",
    "Tenants",
    "changed_settings",
    "check_may_change",
    "read_tenants",
    "tenant_to_json",
)


EVERYBODY = "everybody"
"""The name of the only tenant of a node that was started without tenants."""

_RETRY_AFTER_S = 1.0
# If there are several tenants, none may hold more than this part of the memory for work, so that a tenant that does not
# read its answers leaves some for the others.
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
        tenants: number of tenants of the node.
        clock: clock that returns monotonic seconds.
    """

    def __init__(
        self, settings: TenantSettings | None, counters: Counters, *, tenants: int, clock: Callable[[], float]
    ) -> None:
        self._settings = settings or TenantSettings(name=EVERYBODY, token_sha256="0" * 64, sees_all=True)
        self._tenants = tenants
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

    @property
    def tenants(self) -> int:
        """The number of tenants of the node, at least 1."""
        return self._tenants

    def change(self, settings: TenantSettings, *, tenants: int | None = None) -> None:
        """Let it have another weight, other quotas and rights from now on.

        What is under way goes on. Requests that have begun keep the bound of memory for work that they began with.

        Args:
            settings: settings of the same tenant.
            tenants: number of tenants of the node from now on; None for as before.
        """
        with self._lock:
            self._tenants = self._tenants if tenants is None else tenants
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

    def claim(self, device_s: float, pool_bytes: int) -> Claim:
        """The claim of its work on a pool of ``pool_bytes``."""
        maximum = min(self.max_work_bytes(pool_bytes), self._share_bytes)
        return Claim(tenant=self.name, device_s=device_s, max_bytes=maximum, tenants=self._tenants)

    def decode_claim(self, pool_bytes: int) -> Claim:
        """The claim of its samples on a pool to decode or to read ahead in; one that needs more gets it alone."""
        maximum = pool_bytes if self._is_alone else int(_MAX_WORK * pool_bytes)
        return Claim(tenant=self.name, max_bytes=maximum, tenants=self._tenants)

    def max_work_bytes(self, pool_bytes: int) -> int:
        """The maximum that its work may hold of a pool of ``pool_bytes``, by the node's settings."""
        if self._settings.work_bytes is not None:
            return self._settings.work_bytes
        return pool_bytes if self._is_alone else int(_MAX_WORK * pool_bytes)

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

    def max_weight_bytes(self, pool_bytes: int) -> float:
        """The maximum that its prefixes and engines may take of ``pool_bytes`` for weights."""
        if self._settings.weight_bytes is not None:
            return self._settings.weight_bytes
        return math.inf if self._is_alone else _MAX_WEIGHTS * pool_bytes

    def charge_device(self, device_s: float) -> None:
        """Charge it for device seconds."""
        self.counters.add(compute_s=device_s)
        self._spend(device_s)

    def charge_trial(self, trial_s: float) -> None:
        """Charge it for seconds of engine trials."""
        self.counters.add(trial_s=trial_s)
        with self._lock:
            self._trials.spend(trial_s, self._clock())
            for allowance in self._bounds():
                allowance.owe(trial_s)

    def check_trials(self) -> None:
        """Check that engines may be tried for this tenant.

        Raises:
            Overloaded: The node has other tenants, and this one has used up its share of trial time.
        """
        with self._lock:
            wait_s = 0.0 if self._is_alone else self._trials.wait_s(self._clock())
        if wait_s > 0:
            self._refuse("has used up its time for trials of engines for now (accuracy 'exact' needs none)", wait_s)

    def charge_training(self, train_s: float) -> None:
        """Charge it for training a head, in device seconds."""
        self.counters.add(train_s=train_s)
        self._spend(train_s)

    def check(self, *, has_memory: bool = True) -> None:
        """Check that another request of this tenant may be admitted.

        Args:
            has_memory: True if none of its work waits for memory that it holds itself.

        Raises:
            Overloaded: A quota is used up; the message names it.
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
        if wanted.work_bytes is not None and not has_memory:
            self._refuse(f"has used its {readable_bytes(wanted.work_bytes)} of memory for work", _RETRY_AFTER_S)

    def check_may(self, action: str, prefix: str | None = None) -> None:
        """Check that this tenant may do something.

        Args:
            action: one of ``ACTIONS``.
            prefix: digest of the prefix that it is done with; None for none.

        Raises:
            Forbidden: The tenant has no right to.
        """
        settings = self._settings
        if settings.actions is not None and action not in settings.actions:
            may = ", ".join(settings.actions) or "nothing"
            raise Forbidden(f"tenant {self.name} may not {action} here, but {may}: see actions in --tenants")
        if prefix is not None and settings.prefixes is not None and prefix not in settings.prefixes:
            raise Forbidden(f"tenant {self.name} may not use this prefix: see prefixes in --tenants")

    @property
    def _is_alone(self) -> bool:
        return self._tenants < 2

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
        clock: clock that returns monotonic seconds.
    """

    def __init__(
        self, settings: Sequence[TenantSettings], counters: Counters, clock: Callable[[], float] = time.monotonic
    ) -> None:
        count = max(1, len(settings))
        self._counters = counters
        self._clock = clock
        self._is_open = not settings
        self._tokens = TokenTable("this node", settings)
        self._everybody = Account(None, Counters(counters), tenants=count, clock=clock)
        self._accounts = [Account(setting, Counters(counters), tenants=count, clock=clock) for setting in settings] or [
            self._everybody
        ]

    @property
    def everybody(self) -> Account:
        """The account of requests from within the process, and of a node without tenants."""
        return self._everybody

    @property
    def has_restricted_tenants(self) -> bool:
        """Whether a tenant may not see all, as the user who started the node may."""
        return any(not account.settings.sees_all for account in self._accounts)

    @property
    def accounts(self) -> list[Account]:
        """The accounts that are counted separately; the list follows who joins and leaves."""
        return self._accounts

    def renew(self, settings: Sequence[TenantSettings]) -> None:
        """Serve these tenants from now on: those that are known keep what they use, those not named are not served.

        Requests that have begun go on.
        """
        assert not self._is_open, "a node that serves everybody has no file of tenants"
        before, count = {account.name: account for account in self._accounts}, max(1, len(settings))
        for setting in settings:
            if setting.name in before:
                before[setting.name].change(setting, tenants=count)
        self._accounts[:] = [
            before.get(setting.name) or Account(setting, Counters(self._counters), tenants=count, clock=self._clock)
            for setting in settings
        ]
        self._tokens.renew(settings)

    @property
    def weights(self) -> dict[str, float]:
        """The tenants' weights, by name."""
        return {account.name: account.settings.weight for account in self.accounts}

    def wrong_tokens(self) -> tuple[int, int]:
        """See ``TokenTable.wrong_tokens``."""
        return self._tokens.wrong_tokens()

    def account(self, name: str) -> Account:
        """The account of a tenant.

        Raises:
            UnknownName: The node has no such tenant.
        """
        found = next((account for account in self._accounts if account.name == name), None)
        if found is None or self._is_open:
            raise UnknownName(f"there is no tenant {name!r}")
        return found

    def identify(self, token: str | None, address: str = "") -> Account:
        """The account that a token belongs to; see ``TokenTable.owner`` for the arguments and errors."""
        if self._is_open:
            return self._everybody
        name = self._tokens.owner(token, address)
        found = next((account for account in self._accounts if account.name == name), None)
        if found is None:  # whose tenant has left in this moment
            raise Unauthenticated("this node does not know that token: see FROSTLINE_TOKEN")
        return found


def read_tenants(path: Path) -> tuple[TenantSettings, ...]:
    """Read tenants from a TOML file with a table ``[[tenant]]`` each, whose keys are fields of ``TenantSettings``.

    Raises:
        SettingError: The file cannot be read, is not valid, or others may write to it; the message names the file and
            the field.
    """
    try:
        require_guarded(path)
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
        "expires_at": (datetime,),
        "next_token_sha256": (str,),
        "next_expires_at": (datetime,),
        "weight": (int, float),
        "requests": (int,),
        "work_bytes": (int,),
        "device_s_per_s": (int, float),
        "weight_bytes": (int,),
        "roots": (list,),
        "actions": (list,),
        "prefixes": (list,),
        "sees_all": (bool,),
        "may_change": (bool,),
    }
    assert set(kinds) == {re.sub("_at_s$", "_at", field.name) for field in fields(TenantSettings)}, "all can be set"
    for name, value in table.items():
        if name not in kinds:
            raise SettingError(f"{path}: unknown field {name!r} of a tenant; its fields are {', '.join(kinds)}")
        if not isinstance(value, kinds[name]) or (isinstance(value, bool) and bool not in kinds[name]):
            raise SettingError(f"{path}: {name} of a tenant must be {kinds[name][-1].__name__}, not {value!r}")
    if not {"name", "token_sha256"} <= set(table):
        raise SettingError(f"{path}: a tenant needs a name and a token_sha256")
    for name in ("roots", "actions", "prefixes"):
        listed = table.get(name)
        if isinstance(listed, list):
            if not all(isinstance(item, str) for item in listed):
                raise SettingError(f"{path}: {name} of a tenant must be a list of texts")
            table = {**table, name: tuple(listed)}
    return TenantSettings(**with_ends(table))  # checked above


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
        is_held_back: True if it has asked for more device seconds than it was bound to since the last call.
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
        devices: function that returns the number of devices that are given work.
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

    Raises:
        Forbidden: The tenant has no right to.
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
        BadRequest: The PATCH makes no sense; the sentence names the field.
    """
    patch: dict[str, Any] = fields_of_patch(body, ("weight", *QUOTAS))
    try:
        return replace(before, **patch)
    except SettingError as error:
        raise BadRequest(str(error)) from error


_Number = Annotated[float, Within(0, 2**52, is_above=True)]
_Whole = Annotated[int, Within(1, 2**52)]


class TenantChange(TypedDict, total=False):
    """What is to change of a tenant, one field at least; see ``config.TenantSettings``. A quota of null is no bound."""

    weight: _Number
    requests: _Whole | None
    work_bytes: _Whole | None
    device_s_per_s: _Number | None
    weight_bytes: _Whole | None


class ChangedTenant(TypedDict):
    """A tenant's name, its weight and its quotas as they are now; see ``config.TenantSettings``."""

    name: str
    weight: _Number
    requests: _Whole | None
    work_bytes: _Whole | None
    device_s_per_s: _Number | None
    weight_bytes: _Whole | None


def tenant_to_json(settings: TenantSettings) -> ChangedTenant:
    """The name, the weight and the quotas of a tenant as plain values."""
    return ChangedTenant(
        name=settings.name,
        weight=settings.weight,
        requests=settings.requests,
        work_bytes=settings.work_bytes,
        device_s_per_s=settings.device_s_per_s,
        weight_bytes=settings.weight_bytes,
    )


# Bytes that stay per byte of JSON: a name of two letters takes 51 bytes, and four numbers take 32.
_KEPT = 10
# Memory for the part of an answer that is being sent, the request's own objects and its connection.
_REQUEST_BYTES = 1 << 20
# What is kept for a tenant without requests: enough for one of some hundred samples.
_MIN_KEPT_BYTES = _REQUEST_BYTES + PARSED_BYTES * (32 << 10)


class Admission(Closing):
    """An admitted request. A context manager.

    Attributes:
        account: account of the tenant that asks.
    """

    def __init__(self, gate: "Gate", memory: Reservation, body_bytes: int, account: Account) -> None:
        self.account = account
        self._gate = gate
        self._memory = memory
        self._body_bytes = body_bytes

    def read(self) -> None:
        """Release the memory that only reading and parsing the body needed."""
        self._memory.shrink(_REQUEST_BYTES + _KEPT * self._body_bytes)

    def close(self) -> None:
        """End the request. Calling it again does nothing."""
        self._memory.release()
        self._gate.leave(self)


class Gate:
    """Counts the requests under way. Safe for threads.

    A slot and some memory are kept for every tenant that has no request under way, as far as half of all is enough
    for them, and no tenant has more than half of the memory: so whatever one announces leaves others their part.

    Args:
        maximum: maximum number of requests under way.
        memory: pool for messages.
        work: pool for work.
        accounts: accounts of all tenants.
    """

    def __init__(self, maximum: int, memory: Pool, work: Pool, accounts: Sequence[Account]) -> None:
        self._max_requests = maximum
        self._memory = memory
        self._work = work
        self._accounts = accounts
        self._lock = threading.Lock()
        self._inside: set[Admission] = set()
        self._is_shut = self._is_draining = False

    @property
    def is_full(self) -> bool:
        """Whether as many requests are under way as may be."""
        return len(self._inside) >= self._max_requests

    @property
    def is_draining(self) -> bool:
        """Whether the node takes no more requests, since it is about to stop."""
        return self._is_draining

    @property
    def inside(self) -> int:
        """The number of requests under way."""
        return len(self._inside)

    def enter(self, body_bytes: int, account: Account) -> Admission:
        """Admit a request.

        Args:
            body_bytes: length of its JSON; 0 if it comes as a value.
            account: account of the tenant that asks.

        Raises:
            NodeUnreachable: The node is about to stop.
            Overloaded: Too many requests are under way, or the tenant has used up a quota.
            OverBudget: The body is longer than this node can ever read.
        """
        if self._is_draining:
            raise NodeUnreachable("the node is draining: it is about to stop, and takes no more requests")
        self.check_body(body_bytes)
        admission = self._admission(body_bytes, account)
        if admission is None:
            account.counters.add(refused_busy=1)
            raise Overloaded(
                f"the node is busy with {self.inside} requests: ask again later, or with fewer at once",
                retry_after_s=_RETRY_AFTER_S,
            )
        account.counters.add(requests=1)
        return admission

    def check_body(self, body_bytes: int) -> None:
        """Check that a body of that length could be read.

        Raises:
            OverBudget: The body is too long.
        """
        maximum = (
            self._memory.total_bytes - self._kept_bytes(len(self._accounts) - 1) - _REQUEST_BYTES
        ) // PARSED_BYTES
        if body_bytes > maximum:
            raise OverBudget(
                f"the request has {readable_bytes(body_bytes)} and this node reads up to {readable_bytes(maximum)}: "
                "ask for fewer samples at once, or start it with more --memory"
            )

    def leave(self, admission: Admission) -> None:
        """Count a request as ended."""
        with self._lock:
            if admission in self._inside:
                self._inside.discard(admission)
                admission.account.leave()

    def drain(self) -> None:
        """Admit no more requests, and say that the node is about to stop; those under way go on."""
        self._is_draining = True

    def shut(self) -> None:
        """Admit no more requests."""
        with self._lock:
            self._is_shut = True

    def _admission(self, body_bytes: int, account: Account) -> Admission | None:
        with self._lock:
            account.check(has_memory=not self._work.is_full(account.name))
            if self._is_shut or not self._has_place(account):
                return None
            memory = self._taken(_REQUEST_BYTES + PARSED_BYTES * body_bytes, account)
            if memory is None:
                return None
            admission = Admission(self, memory, body_bytes, account)
            self._inside.add(admission)
            account.enter()
            return admission

    def _has_place(self, account: Account) -> bool:
        kept = min(self._idle_beside(account), self._max_requests // 2) if account.inside else 0
        return len(self._inside) + kept < self._max_requests

    def _taken(self, nbytes: int, account: Account) -> Reservation | None:
        total_bytes = self._memory.total_bytes
        is_kept_for_it = not account.inside and nbytes <= _MIN_KEPT_BYTES
        kept_bytes = 0 if is_kept_for_it else self._kept_bytes(self._idle_beside(account))
        if self._memory.statistics().reserved_bytes + nbytes + kept_bytes > total_bytes:
            return None
        is_alone = len(self._accounts) < 2
        share = total_bytes if is_alone else total_bytes // 2
        return self._memory.take(nbytes, Claim(tenant=account.name, max_bytes=share))

    def _kept_bytes(self, idle: int) -> int:
        return min(idle * _MIN_KEPT_BYTES, self._memory.total_bytes // 2)

    def _idle_beside(self, account: Account) -> int:
        """The number of other tenants that have no request under way."""
        return sum(not other.inside for other in self._accounts if other is not account)
