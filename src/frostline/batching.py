"""Decides how many samples run at once, which ones together, where, and whose turn it is. Pure: no clock or threads."""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import numpy as np

from frostline.core.errors import OverBudget

__all__ = (
    "ANYBODY",
    "ROWS",
    "Allowance",
    "BatchingRule",
    "Claim",
    "DeviceLoad",
    "FairMerging",
    "FairShares",
    "FirstCome",
    "Hapi",
    "Limit",
    "MemoryBudget",
    "QueueHead",
    "QueuedRequest",
    "Turn",
    "allot_rows",
    "batch_seconds",
    "batch_size",
    "combined_speed",
    "first_to_finish",
    "kept_beside",
    "kept_part",
    "pad_rows",
    "readable_bytes",
    "stretches_of_bytes",
    "stretches_of_work",
)


ROWS = 8
"""Device batches are a multiple of this, in which vector units and convolutions work well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A bound on the rows of a batch: ``fixed_bytes + rows * bytes_per_row`` may be at most ``budget_bytes``."""

    budget_bytes: int
    fixed_bytes: int = 0
    bytes_per_row: int = 0

    @property
    def max_rows(self) -> float:
        """The most rows that fit; infinite where a row takes nothing."""
        free = self.budget_bytes - self.fixed_bytes
        if free < 0:
            return 0
        return free // self.bytes_per_row if self.bytes_per_row else float("inf")


def pad_rows(rows: int) -> int:
    """The next multiple of ``ROWS``."""
    return -(-rows // ROWS) * ROWS


def batch_size(limits: Iterable[Limit], *, wanted: int, maximum: int) -> int:
    """The rows of a device batch.

    Args:
        limits: limits of memory that the rows must fit.
        wanted: rows that there are to do.
        maximum: a bound beside them, a multiple of ``ROWS``.

    Returns:
        The largest multiple of ``ROWS`` within all bounds and not above ``wanted`` padded; 0 where not even
        ``ROWS`` rows fit.
    """
    fitting = min((limit.max_rows for limit in limits), default=float("inf"))
    return int(min(fitting, maximum, pad_rows(wanted))) // ROWS * ROWS


def stretches_of_bytes(lengths: Sequence[int], *, max_rows: int, max_bytes: int) -> list[range]:
    """Cut rows of unequal length into stretches; a row that is longer than ``max_bytes`` stands alone."""
    stretches: list[range] = []
    start = held = 0
    for row, length in enumerate(lengths):
        if row > start and (held + length > max_bytes or row - start == max_rows):
            stretches.append(range(start, row))
            start, held = row, 0
        held += length
    return [*stretches, range(start, len(lengths))]


def stretches_of_work(needs_work: Sequence[bool], *, run_rows: int, max_rows: int) -> list[range]:
    """Cut rows into stretches; what lies ready costs a stretch nothing but its length.

    Args:
        needs_work: True if each row needs work.
        run_rows: the most rows of a stretch that need work, so that they are done in one run.
        max_rows: maximum rows of a stretch.
    """
    stretches: list[range] = []
    start = work = 0
    for row, is_work in enumerate(needs_work):
        if row - start == max_rows or work + is_work > run_rows:
            stretches.append(range(start, row))
            start, work = row, 0
        work += is_work
    return [*stretches, range(start, len(needs_work))] if start < len(needs_work) else stretches


def readable_bytes(nbytes: float) -> str:
    """Bytes for a sentence, such as ``1.5 MB``."""
    for unit in ("bytes", "kB", "MB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} GB"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuedRequest:
    """Rows of one request that wait for the device.

    Attributes:
        number: number of the request; the lower came first.
        tenant: tenant that owns it.
        kind: rows of one kind may run together: the same prefix, cut, engine and rows of a run.
        rows: number of rows still to run.
        run_rows: rows of a run of this kind, at least ``rows``.
        is_apart: True if it runs with no rows of others.
        bytes_per_row: memory of a run for each row.
        model_bytes: memory of a run whatever its rows, weights counted.
    """

    number: int
    tenant: str
    kind: Hashable
    rows: int
    run_rows: int
    is_apart: bool = False
    bytes_per_row: int = 0
    model_bytes: int = 0

    def __post_init__(self) -> None:
        assert 1 <= self.rows <= self.run_rows, f"{self.rows} rows do not wait for runs of {self.run_rows}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueHead:
    """So many of the rows that wait under a number, the first of them."""

    number: int
    rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One run of the device.

    Attributes:
        parts: requests whose rows it runs: first the one whose turn it is, then those that fill it up.
        rows: rows of the run; rows left over are zeros.
    """

    parts: tuple[QueueHead, ...]
    rows: int

    def __post_init__(self) -> None:
        assert 1 <= sum(part.rows for part in self.parts) <= self.rows, "a run holds its parts, and is not empty"


class BatchingRule(Protocol):
    """Decides the next run. Not for several threads."""

    def next(self, waiting: Sequence[QueuedRequest], tag: Callable[[str], float]) -> Turn:
        """The next run.

        Args:
            waiting: requests that wait, first come first; at least one.
            tag: the place where a tenant stands; the least is next.
        """


class FairMerging:
    """The least tag is next, and rows of the same kind fill its run up, in the order of their own turns.

    Those that fill up are charged for it, so that they have had part of their share and not more of it. A piece of
    which a part has run goes on when its turn comes.
    """

    def next(self, waiting: Sequence[QueuedRequest], tag: Callable[[str], float]) -> Turn:
        """See ``BatchingRule``."""
        tags = {tenant: tag(tenant) for tenant in {request.tenant for request in waiting}}
        lead, *others = sorted(waiting, key=lambda item: (tags[item.tenant], item.number))
        parts = [QueueHead(number=lead.number, rows=lead.rows)]
        free_rows = 0 if lead.is_apart else lead.run_rows - lead.rows
        for other in others:
            if free_rows and other.kind == lead.kind and not other.is_apart:
                parts.append(QueueHead(number=other.number, rows=min(free_rows, other.rows)))
                free_rows -= parts[-1].rows
        return Turn(parts=tuple(parts), rows=lead.run_rows)


class FirstCome:
    """A fixed batch of one request after another: what ``FairMerging`` and ``Hapi`` have to be better than."""

    def next(self, waiting: Sequence[QueuedRequest], tag: Callable[[str], float]) -> Turn:  # noqa: ARG002 (no order but one)
        """See ``BatchingRule``."""
        first = min(waiting, key=lambda item: item.number)
        return Turn(parts=(QueueHead(number=first.number, rows=first.rows),), rows=first.run_rows)


def allot_rows(waiting: Sequence[QueuedRequest], free_bytes: int) -> dict[int, int]:
    """The rows of each request's batch, by its number; requests that found no memory are not named.

    HAPI's batch adaptation ("Accelerating Transfer Learning with Near-Data Computation on Cloud Object Stores",
    arXiv 2210.08650): with ``M_r`` bytes a row and ``model_r`` for the model of request ``r``, choose ``b_r`` to

        maximise sum_r b_r M_r   subject to   sum_r (b_r M_r + model_r) <= free,   b_min <= b_r <= requested_r,

    and where there is no such choice, leave out a request, here the last that came, and solve again.

    Batches are multiples of ``ROWS`` and ``b_min`` is one ``ROWS``; otherwise kernels would work on odd sizes.
    """
    asking = list(waiting)
    while asking:
        found = _solved(asking, free_bytes)
        if found is not None:
            return found
        asking.pop()
    return {}


def _solved(asking: Sequence[QueuedRequest], free_bytes: int) -> dict[int, int] | None:
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes a second to import, and few nodes need it

    budget_bytes = free_bytes - sum(request.model_bytes for request in asking)
    nbytes = [request.bytes_per_row * ROWS for request in asking]
    if sum(nbytes) > budget_bytes:  # not even the smallest batches fit
        return None
    # In shares of the budget, since the solver's tolerances are absolute.
    takes = np.array(nbytes, np.float64) / max(1, budget_bytes)
    maximum = np.array([pad_rows(request.rows) // ROWS for request in asking])
    found = milp(
        -takes,
        constraints=LinearConstraint(takes[np.newaxis], ub=1.0),
        bounds=Bounds(1, maximum),
        integrality=np.ones(len(asking)),
    )
    assert found.x is not None, f"the smallest batches fit, so there is a choice: {found.message}"
    eights = np.clip(np.floor(found.x + 0.5).astype(int), 1, maximum).tolist()
    return _within(budget_bytes, asking, eights)


def _within(budget_bytes: int, asking: Sequence[QueuedRequest], eights: list[int]) -> dict[int, int]:
    """The solver's answer held to the byte: it may be beyond the bound by its tolerance."""
    rows = {request.number: ROWS * count for request, count in zip(asking, eights, strict=True)}
    while (over := sum(request.bytes_per_row * rows[request.number] for request in asking) - budget_bytes) > 0:
        shrinking = [request for request in asking if rows[request.number] > ROWS]
        nearest = min(shrinking, key=lambda item: abs(item.bytes_per_row * ROWS - over))
        rows[nearest.number] -= ROWS
    return rows


class Hapi:
    """Rounds of HAPI's programme: the batches that it chose run one after another, then it is solved again.

    Its requests share an accelerator at the same time, for which the programme divides the memory; here they take
    turns on it in the order in which they came. Tenants have no shares. How many rows a sample runs with depends on
    who else asks, so that features may differ in their last bits.

    Args:
        free_bytes: the bytes for models and activations.
    """

    def __init__(self, free_bytes: int) -> None:
        self._free_bytes = free_bytes
        self._round: deque[tuple[int, int]] = deque()

    def next(self, waiting: Sequence[QueuedRequest], tag: Callable[[str], float]) -> Turn:  # noqa: ARG002 (no shares)
        """See ``BatchingRule``."""
        present = {request.number: request for request in sorted(waiting, key=lambda item: item.number)}
        while self._round and self._round[0][0] not in present:
            self._round.popleft()
        if not self._round:
            first = next(iter(present))
            # One that finds no memory even alone runs in the smallest batches: the node has checked that those fit.
            self._round.extend((allot_rows(list(present.values()), self._free_bytes) or {first: ROWS}).items())
        number, rows = self._round.popleft()
        one = present[number]
        return Turn(parts=(QueueHead(number=number, rows=min(rows, one.rows)),), rows=min(rows, one.run_rows))


# Expected seconds of a batch that no device has run yet.
_UNKNOWN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLoad:
    """What one of several devices has to do.

    Attributes:
        waiting_s: the expected seconds of the batches that it was given and has not finished.
        batch_s: the measured seconds of a batch like the next one; None if it has run none.
        may_take: True if it may be given the next batch.
    """

    waiting_s: float
    batch_s: float | None
    may_take: bool = True


def batch_seconds(loads: Sequence[DeviceLoad]) -> tuple[float, ...]:
    """The expected seconds of the next batch on each device.

    A device that has run none is taken for as fast as the fastest one, so that it is soon measured.
    """
    known = [load.batch_s for load in loads if load.batch_s is not None]
    fastest = min(known, default=_UNKNOWN_S)
    return tuple(fastest if load.batch_s is None else load.batch_s for load in loads)


def first_to_finish(loads: Sequence[DeviceLoad]) -> int:
    """The number of the device that is expected to finish the next batch first; of equal ones the first.

    Args:
        loads: work of each device; at least one may take the batch.
    """
    ends = [load.waiting_s + seconds for load, seconds in zip(loads, batch_seconds(loads), strict=True)]
    return min((number for number, load in enumerate(loads) if load.may_take), key=ends.__getitem__)


def combined_speed(seconds: Sequence[float | None]) -> float:
    """How many times as fast some devices are together as the first of them.

    Args:
        seconds: the measured seconds of the same work on each device; None if it was not measured there, which is then
            taken for as fast as the first.
    """
    first_s = seconds[0]
    if first_s is None:
        return float(len(seconds))
    return sum(1.0 if each_s is None or each_s <= 0 else first_s / each_s for each_s in seconds)


# Device seconds at weight 1 that a tenant who always has work may lag behind: several of the longest runs (32 rows of
# VGG-19 take 3 s on two cores), so that nobody loses what other work under way kept from it, and few enough that
# others never wait longer than this for one who comes back from a store that was slow.
_CREDIT_S = 10.0


class FairShares:
    """Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over tenants. Not for several threads.

    Each tenant has a tag: the device seconds that it was charged, divided by its weight. The one with the least tag
    is next. Its tag at that moment is the virtual time, and one that comes without work under way begins there: what
    it did not ask for earlier is not owed to it. What a piece takes need not be known before it has run, which is why
    this rule and not one that sorts by finish times.

    Where all always have work, the seconds of any two, divided by their weights, differ by at most what one piece
    of each takes, divided likewise (theorem 1 there), and who asks for less than its share gets what it asks for. So
    shares are weighted max-min fair, and nobody starves.

    Args:
        weights: the weights by tenant; 1 for those who are not named.
        credit_s: device seconds at weight 1 that a tenant with work under way may lag behind the virtual time. Work
            that is still read from a slow store keeps its tenant's place, but no longer than this is worth.
    """

    def __init__(self, weights: Mapping[str, float] = MappingProxyType({}), *, credit_s: float = _CREDIT_S) -> None:
        assert all(weight > 0 for weight in weights.values()), "a weight is above 0"
        self._weights = dict(weights)
        self._credit_s = credit_s
        self._now = 0.0
        self._tags: dict[str, float] = {}
        self._owed: defaultdict[str, float] = defaultdict(float)
        self._under_way: Counter[str] = Counter()

    def weight(self, tenant: str) -> float:
        """What its share is in proportion to."""
        return self._weights.get(tenant, 1.0)

    def change_weight(self, tenant: str, weight: float) -> None:
        """Let its share be in proportion to another weight from now on; what it was charged stays charged."""
        assert weight > 0, "a weight is above 0"
        self._weights[tenant] = weight

    def tag(self, tenant: str) -> float:
        """The tenant's start time in the queue: the tenant with the least is served next."""
        return max(self._tags.get(tenant, 0.0), self._floor(tenant))

    def arrive(self, tenant: str) -> None:
        """A piece of its work came; ``depart`` follows for each."""
        self._tags[tenant] = self.tag(tenant)
        self._under_way[tenant] += 1

    def depart(self, tenant: str) -> None:
        """A piece of its work has run or was given up."""
        self._tags[tenant] = self.tag(tenant)
        self._under_way[tenant] -= 1
        assert self._under_way[tenant] >= 0, f"{tenant!r} has no work under way"

    def begin(self, tenant: str) -> None:
        """Mark the tenant as being served."""
        self._now = max(self._now, self.tag(tenant))

    def charge(self, tenant: str, device_s: float) -> None:
        """Charge the tenant for seconds of the device, which count twice while it owes some."""
        paid_s = min(self._owed[tenant], device_s)
        self._owed[tenant] -= paid_s
        self._tags[tenant] = self.tag(tenant) + (device_s + paid_s) / self.weight(tenant)

    def owe(self, tenant: str, device_s: float) -> None:
        """Record device seconds as a debt of the tenant.

        Until it is paid, the tenant gets half of its share. Charging minutes at once would lock it out.
        """
        self._owed[tenant] += device_s

    def _floor(self, tenant: str) -> float:
        return self._now - self._credit_s if self._under_way[tenant] else self._now


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What a piece of work says when it asks for memory or for the device.

    Attributes:
        tenant: tenant that owns it.
        device_s: device seconds it will probably take; only the order of tenants depends on this, and the time it
            really takes is charged later.
        max_bytes: the tenant never holds more than this, but for one piece alone.
        tenants: number of tenants that share the memory, of which each has a part of its own; see ``kept_part``.
    """

    tenant: str
    device_s: float = 0.0
    max_bytes: float = math.inf
    tenants: int = 1

    def __post_init__(self) -> None:
        assert self.device_s >= 0, f"work takes no less than nothing, not {self.device_s} s"
        assert self.tenants >= 1, f"whoever asks is a tenant, not one of {self.tenants}"


def kept_part(total_bytes: int, tenants: int) -> int:
    """The bytes of a memory that are each tenant's own, so that whatever all others hold together leaves them to it.

    Half of the memory is divided like this; a tenant with more work than its part may have of the other half.
    """
    return total_bytes // (2 * tenants) if tenants > 1 else 0


def kept_beside(total_bytes: int, nbytes: int, claim: Claim, held: Mapping[str, int]) -> int:
    """The bytes of a memory that are kept for tenants other than the one that asks, and not in use.

    None where it asks for its own part, nor where it needs more at once than all that is kept for nobody.

    Args:
        total_bytes: size of the memory.
        nbytes: bytes that are asked for.
        claim: claim of the tenant that asks.
        held: bytes that each tenant holds already.
    """
    part, others = kept_part(total_bytes, claim.tenants), claim.tenants - 1
    if held.get(claim.tenant, 0) + nbytes <= part or nbytes > total_bytes - others * part:
        return 0
    used = sum(min(nbytes, part) for tenant, nbytes in held.items() if nbytes and tenant != claim.tenant)
    return max(0, others * part - used)


ANYBODY = Claim(tenant="")
"""Where nobody tells tenants apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    nbytes: int
    claim: Claim


class MemoryBudget:
    """Who may use how much of a fixed amount of memory. Not for several threads.

    A reservation is a number. It is granted at once or waits. First come is first served, or by the tenants' shares
    where those are given: next is the tenant that stands lowest once what it has in work has run. Whoever is next
    is not overtaken until there is memory for it, so that a large reservation is not starved by small ones; only one
    whose tenant may hold no more lets others go first, and whoever asks for its own part (``kept_part``) waits for
    nobody.

    Args:
        total_bytes: bound that what is granted never exceeds.
        shares: the order between tenants.
    """

    def __init__(self, total_bytes: int, shares: FairShares | None = None) -> None:
        self._total = total_bytes
        self._shares = shares
        self._reserved = 0
        self._peak = 0
        self._granted: dict[int, _Asked] = {}
        self._waiting: dict[int, _Asked] = {}  # first come first
        self._held: Counter[str] = Counter()
        self._promised: defaultdict[str, float] = defaultdict(float)
        self._unsettled: set[int] = set()
        self._next = 0

    @property
    def total_bytes(self) -> int:
        """All that there is."""
        return self._total

    @property
    def reserved_bytes(self) -> int:
        """What is granted now."""
        return self._reserved

    @property
    def peak_bytes(self) -> int:
        """The most that was ever granted at once."""
        return self._peak

    @property
    def waiting(self) -> int:
        """Reservations that wait."""
        return len(self._waiting)

    def held_bytes(self, tenant: str) -> int:
        """What is granted to a tenant now."""
        return self._held[tenant]

    def is_full(self, tenant: str) -> bool:
        """Whether a tenant's work waits for memory that it holds itself."""
        mine = [claimant for claimant in self._waiting.values() if claimant.claim.tenant == tenant]
        return any(self._is_full(claimant.nbytes, claimant.claim) for claimant in mine)

    def ask(self, nbytes: int, claim: Claim = ANYBODY) -> int:
        """Ask for memory; look with ``is_granted`` whether it may be used.

        Raises:
            OverBudget: The claim is larger than the budget ever grants.
        """
        self.check(nbytes)
        self._next += 1
        self._waiting[self._next] = _Asked(nbytes=nbytes, claim=claim)
        self._unsettled.add(self._next)
        if self._shares is not None:
            self._shares.arrive(claim.tenant)
        self._grant()
        return self._next

    def take(self, nbytes: int, claim: Claim = ANYBODY) -> int | None:
        """Memory that is there now, or None where it is not, or where somebody waits for it already."""
        is_next = self._is_own(nbytes, claim) or self._first() is None
        return self.ask(nbytes, claim) if is_next and self._may_hold(nbytes, claim) else None

    def check(self, nbytes: int) -> None:
        """Do nothing if so much could be granted at all.

        Raises:
            OverBudget: The bytes are more than the total.
        """
        if nbytes > self._total:
            raise OverBudget(
                f"this needs {readable_bytes(nbytes)} at once, and the node has {readable_bytes(self._total)} "
                "for it: start the node with more --memory"
            )

    def is_granted(self, reservation: int) -> bool:
        """Whether the memory may be used."""
        return reservation in self._granted

    def shrink(self, reservation: int, nbytes: int) -> None:
        """Keep only so much of a granted reservation, whose work on the device has been done."""
        asked = self._granted[reservation]
        assert 0 <= nbytes <= asked.nbytes, f"a reservation of {asked.nbytes} bytes cannot shrink to {nbytes}"
        self._granted[reservation] = replace(asked, nbytes=nbytes)
        self._give_back(asked.nbytes - nbytes, asked.claim)
        self._settle(reservation, asked.claim)
        self._grant()

    def release(self, reservation: int) -> None:
        """Give back a reservation, granted or waiting. Giving back again does nothing."""
        granted = self._granted.get(reservation)
        asked = granted or self._waiting.get(reservation)
        if asked is None:
            return
        self._settle(reservation, asked.claim)
        if granted is not None:
            self._give_back(granted.nbytes, granted.claim)
        self._granted.pop(reservation, None)
        self._waiting.pop(reservation, None)
        self._grant()

    def _give_back(self, nbytes: int, claim: Claim) -> None:
        self._reserved -= nbytes
        self._held[claim.tenant] -= nbytes

    def _settle(self, reservation: int, claim: Claim) -> None:
        """It takes no more of the device than was charged until now."""
        if reservation not in self._unsettled:
            return
        self._unsettled.discard(reservation)
        if reservation in self._granted:
            self._promised[claim.tenant] -= claim.device_s
        if self._shares is not None:
            self._shares.depart(claim.tenant)

    def _grant(self) -> None:
        while (number := self._next_granted()) is not None:
            asked = self._granted[number] = self._waiting.pop(number)
            self._reserved += asked.nbytes
            self._held[asked.claim.tenant] += asked.nbytes
            self._promised[asked.claim.tenant] += asked.claim.device_s
            self._peak = max(self._peak, self._reserved)

    def _next_granted(self) -> int | None:
        """The reservation that is granted next: the first, or the first of those within their tenants' own parts."""
        first = self._first()
        if first is None or self._may_hold(self._waiting[first].nbytes, self._waiting[first].claim):
            return first
        own = [number for number, asked in self._waiting.items() if self._is_own(asked.nbytes, asked.claim)]
        able = [number for number in own if self._may_hold(self._waiting[number].nbytes, self._waiting[number].claim)]
        return min(able, key=self._place, default=None)

    def _first(self) -> int | None:
        """The reservation that is next, of those whose tenants may hold more."""
        able = [
            number for number, claimant in self._waiting.items() if not self._is_full(claimant.nbytes, claimant.claim)
        ]
        return min(able, key=self._place, default=None)

    def _may_hold(self, nbytes: int, claim: Claim) -> bool:
        """Whether so much is free for a tenant now, beside what is kept for the others."""
        kept_bytes = kept_beside(self._total, nbytes, claim, self._held)
        return not self._is_full(nbytes, claim) and self._reserved + nbytes + kept_bytes <= self._total

    def _is_own(self, nbytes: int, claim: Claim) -> bool:
        """Whether a reservation is within its tenant's own part, and within what the tenant may hold."""
        part = kept_part(self._total, claim.tenants)
        return self._held[claim.tenant] + nbytes <= part and not self._is_full(nbytes, claim)

    def _place(self, number: int) -> tuple[float, int]:
        return self._standing(self._waiting[number].claim.tenant), number

    def _standing(self, tenant: str) -> float:
        if self._shares is None:
            return 0.0
        return self._shares.tag(tenant) + self._promised[tenant] / self._shares.weight(tenant)

    def _is_full(self, nbytes: int, claim: Claim) -> bool:
        held = self._held[claim.tenant]
        return held > 0 and held + nbytes > claim.max_bytes


# Seconds' worth of it that may be used at once after a pause, so that a request need not be cut up.
_SAVED_S = 10.0


class Allowance:
    """A bucket of device seconds that fills at a rate. Not for several threads.

    Work is paid when it has run, since nobody knows before what it takes; what is owed must be saved up again before
    more begins. So in the long run no more than the rate is used, and beyond it only what was let in at once.

    Args:
        per_s: device seconds a second.
        saved_s: seconds' worth of it that may be used at once after a pause.
    """

    def __init__(self, per_s: float, saved_s: float = _SAVED_S) -> None:
        assert per_s > 0, "an allowance is above 0"
        self._per_s = per_s
        self._saved_s = saved_s
        self._left = saved_s * per_s
        self._at_s = 0.0
        self._owed = 0.0

    def change(self, per_s: float, now_s: float) -> None:
        """Fill at another rate from now on."""
        assert per_s > 0, "an allowance is above 0"
        self._fill(now_s)
        self._per_s = per_s
        self._left = min(self._left, self._saved_s * per_s)

    def spend(self, device_s: float, now_s: float) -> None:
        """So much was used, which counts twice while some is owed."""
        self._fill(now_s)
        paid_s = min(self._owed, device_s)
        self._owed -= paid_s
        self._left -= device_s + paid_s

    def owe(self, device_s: float) -> None:
        """So much was used that is to be paid by instalments: minutes at once would shut its tenant out for long."""
        self._owed += device_s

    def wait_s(self, now_s: float) -> float:
        """Seconds until more may begin; 0 where it may now."""
        self._fill(now_s)
        return max(0.0, -self._left / self._per_s)

    def _fill(self, now_s: float) -> None:
        passed_s, self._at_s = now_s - self._at_s, now_s
        self._left = min(self._saved_s * self._per_s, self._left + self._per_s * max(0.0, passed_s))
