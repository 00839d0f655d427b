"""Decides what each stage is answered: who is there, what they hold, what they may have next, and who sees it."""

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.control.changes import (
    ControlChanges,
    ControlEvent,
    ControlEventLog,
    JobShare,
    ShareWatch,
    describe_capacity_change,
    describe_job_change,
    describe_tenant_change,
)
from frostline.control.messages import (
    ControlAnswer,
    ControlView,
    JobActivity,
    JobView,
    StageReport,
    savings,
    summarise_job,
)
from frostline.control.settings import EVERY_TENANT, ControlledJob, ControlSettings, ControlTenant
from frostline.control.shares import (
    RESOURCES,
    Amounts,
    Division,
    Floats,
    Ints,
    Row,
    SharingPolicy,
    StageTable,
    chain_policies,
    policies_of,
    sum_groups,
)
from frostline.core.errors import BadRequest, Overloaded, SettingError, UnknownName

__all__ = (
    "PAGE_ROWS",
    "ControlState",
    "Decision",
    "StageColumns",
    "StageRecord",
    "ViewPage",
    "job_of",
    "tenant_of",
    "view_of",
)


_Key = tuple[str, str]
_COLUMNS = np.dtype(
    [
        ("demand", np.float64, len(RESOURCES)),
        ("held", np.float64, len(RESOURCES)),
        ("moved_bytes", np.float64),
        ("job", np.int64),
        ("heard_s", np.float64),
        ("asked_s", np.float64),
        ("is_there", np.bool_),
    ]
)
# A job of which nothing is known beforehand.
_PLAIN = ControlledJob(name="any")
# Jobs that no stage works for any more are forgotten beyond so many.
_MAX_FORMER_JOBS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decision:
    """What stages are given, and from what it follows.

    Attributes:
        jobs: tenant and name of each job, as the table numbers them.
        table: table of the stages that are there.
        division: amounts that they are given.
    """

    jobs: list[_Key]
    table: StageTable
    division: Division

    @property
    def notices(self) -> dict[_Key, tuple[str, ...]]:
        """The sentences about jobs."""
        return {self.jobs[number]: (sentence,) for number, sentence in self.division.notices}

    @property
    def shares(self) -> dict[_Key, JobShare]:
        """What each job is given in all its stages, and what of that it wants."""
        given, wanted = np.zeros((2, len(self.jobs), len(RESOURCES)))
        np.add.at(given, self.table.job, self.division.given)
        np.add.at(wanted, self.table.job, np.minimum(self.division.given, self.table.demand))
        rows = zip(map(tuple, given.tolist()), map(tuple, wanted.tolist()), strict=True)
        return {job: JobShare(*pair) for job, pair in zip(self.jobs, rows, strict=True)}


class StageColumns:
    """What is known of all stages as columns, which stay between decisions: a decision takes nothing of each stage.

    Rows have the order in which stages came. Not for several threads.
    """

    def __init__(self) -> None:
        # A forgotten stage leaves an empty row, and no key, until rows are moved to free them.
        self._rows: dict[_Key, int] = {}
        self._keys: list[_Key | None] = []
        self._columns = np.zeros(0, _COLUMNS)
        self._given: Floats = np.zeros((0, len(RESOURCES)))
        self._jobs: dict[_Key, int] = {}

    def put(
        self,
        key: _Key,
        job: _Key,
        *,
        demand: Row,
        held: Row,
        moved_bytes: int,
        heard_s: float,
        asked_s: float,
        is_there: bool,
    ) -> None:
        """Know this of a stage from now on.

        Args:
            key: tenant and name of the stage.
            job: tenant and name of its job.
            demand: amounts that it wants.
            held: amounts that it may be using.
            moved_bytes: bytes that it has moved since it began.
            heard_s: the time when it was heard, in seconds since 1970.
            asked_s: the time when it was first sent settings that it has not confirmed.
            is_there: True if it has a part of what is divided.
        """
        row = self._rows.get(key)
        if row is None:
            row = self._new_row(key)
        number = self._jobs.get(job)
        if number is None:
            number = self._new_job(job)
        self._columns[row] = (demand, held, moved_bytes, number, heard_s, asked_s, is_there)

    def drop(self, key: _Key) -> None:
        """Forget a stage."""
        row = self._rows.pop(key)
        self._keys[row] = None
        self._columns[row] = np.zeros((), _COLUMNS)
        self._given[row] = 0.0

    def share_of(self, key: _Key) -> Row:
        """What the last decision gives a stage; nothing where it was not there yet."""
        return tuple(self._given[self._rows[key]].tolist())

    def held_amounts(self) -> Row:
        """The amounts that all stages together may be using."""
        return tuple(self._used["held"].sum(axis=0).tolist())

    def silent_stages(self, since_s: float) -> tuple[list[_Key], list[_Key]]:
        """The stages that were not heard since a time, and others that did not take what they were answered before it.

        Args:
            since_s: the time, in seconds since 1970.
        """
        columns = self._used
        unheard = columns["is_there"] & (columns["heard_s"] < since_s)
        waiting = columns["is_there"] & ~unheard & (columns["asked_s"] < since_s)
        return self._named(unheard), self._named(waiting)

    def divide(
        self,
        policies: Sequence[SharingPolicy],
        *,
        capacity: Row,
        known: Mapping[_Key, ControlledJob],
        weights: Mapping[str, float],
        now_s: float,
    ) -> Decision | None:
        """Decide what each stage is given from now on.

        Args:
            policies: rules, in their order.
            capacity: amounts that there are.
            known: jobs of which something is known beforehand.
            weights: weights of tenants; 1 where they have none.
            now_s: seconds since 1970.

        Returns:
            None where no stage is there.
        """
        there = np.flatnonzero(self._used["is_there"])
        self._given[:] = 0.0
        if not len(there):
            return None
        # Jobs are numbered as their first stages came.
        numbers, first, job = np.unique(self._used["job"][there], return_index=True, return_inverse=True)
        order = np.argsort(first)
        names = list(self._jobs)
        jobs = [names[number] for number in numbers[order].tolist()]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        table = _table(
            jobs,
            place[job],
            demand=self._used["demand"][there],
            moved=self._moved()[numbers[order]],
            capacity=capacity,
            known=known,
            weights=weights,
            now_s=now_s,
        )
        division = chain_policies(table, policies)
        self._given[there] = division.given
        return Decision(jobs=jobs, table=table, division=division)

    @property
    def _used(self) -> np.ndarray:
        return self._columns[: len(self._keys)]

    def _named(self, are_meant: npt.NDArray[np.bool_]) -> list[_Key]:
        found = (self._keys[row] for row in np.flatnonzero(are_meant).tolist())
        return [key for key in found if key is not None]

    def _moved(self) -> Floats:
        """The bytes that each job has moved, in all its stages, those that have ended among them."""
        return sum_groups(self._used["job"], self._used["moved_bytes"], len(self._jobs))

    def _new_row(self, key: _Key) -> int:
        if len(self._keys) == len(self._columns):
            self._grow()
        self._rows[key] = len(self._keys)
        self._keys.append(key)
        return self._rows[key]

    def _grow(self) -> None:
        rows = list(self._rows.values())
        columns, given = self._columns[rows], self._given[rows]
        self._rows = {key: row for row, key in enumerate(self._rows)}
        self._keys = list(self._rows)
        self._columns = np.concatenate([columns, np.zeros(len(rows) + 16, _COLUMNS)])
        self._given = np.concatenate([given, np.zeros((len(rows) + 16, len(RESOURCES)))])

    def _new_job(self, job: _Key) -> int:
        if len(self._jobs) >= 2 * len(self._keys) + _MAX_FORMER_JOBS:
            numbers, self._used["job"] = np.unique(self._used["job"], return_inverse=True)
            names = list(self._jobs)
            self._jobs = {names[number]: place for place, number in enumerate(numbers.tolist())}
        return self._jobs.setdefault(job, len(self._jobs))


def _table(
    jobs: list[_Key],
    job: Ints,
    *,
    demand: Floats,
    moved: Floats,
    capacity: Row,
    known: Mapping[_Key, ControlledJob],
    weights: Mapping[str, float],
    now_s: float,
) -> StageTable:
    tenants = {tenant: number for number, tenant in enumerate(dict.fromkeys(tenant for tenant, _ in jobs))}
    found = [known.get(key, _PLAIN) for key in jobs]
    work = np.array([job.work_bytes for job in found])
    return StageTable(
        now_s=now_s,
        capacity=np.array(capacity),
        demand=demand,
        job=job,
        jobs=[name for _, name in jobs],
        tenant=np.array([tenants[tenant] for tenant, _ in jobs], np.int64),
        job_weight=np.array([job.weight for job in found], np.float64),
        tenant_weight=np.array([weights.get(tenant, 1.0) for tenant in tenants], np.float64),
        priority=np.array([job.priority for job in found], np.int64),
        ends_at_s=np.array([job.ends_at_s for job in found]),
        left_bytes=np.maximum(0.0, work - moved),
    )


_NONE: Row = (0.0,) * len(RESOURCES)
# A decision takes less than 5 µs a stage, so that at this rate decisions take a tenth of a processor at most.
_DECIDE_S = 5e-5
# Settings that differ by less are the same where nobody lacks the difference: a new version costs a message.
_SAME = 1e-3
_JobName = tuple[str, str]
# Versions of settings that a stage may have and a restored state does not know of: one a second for 136 years.
_MAX_AHEAD = 2**32
# Bytes of JSON that the jobs of one page of a view have, but for the last: with the plan of each, some sixty.
_JOBS_BYTES = 512 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """What is known of one stage.

    Attributes:
        tenant: name of its tenant.
        report: the latest report.
        heard_s: the time when that came, in seconds since 1970.
        version: version of the settings that it was answered last.
        settings: the settings; resources without a bound have 0.
        held: the most that it may be using: what is in force, and what it was answered since.
        asked_s: the time when it was first sent settings that it has not confirmed.
        is_gone: True if it has ended, or has not been heard for a lease.
    """

    tenant: str
    report: StageReport
    heard_s: float
    version: int = 0
    settings: Row = _NONE
    held: Row = _NONE
    asked_s: float = math.inf
    is_gone: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """The stage by tenant and name."""
        return self.tenant, self.report.stage

    @property
    def job(self) -> tuple[str, str]:
        """The job by tenant and name."""
        return self.tenant, self.report.job


class ControlState:
    """The view over all stages. Not for several threads.

    What all stages hold never exceeds the capacity: an amount is counted as held from the answer that grants it until
    the stage says that it has taken a later answer, or ends, or for a lease has said neither that nor anything. So an
    answer that is lost, late or doubled never lets two stages use the same amount; a newcomer waits until others say
    that they hold less. The exceptions are a stage that was cut off for longer than a lease, and used its amounts all
    the while, and a state that was lost, until each stage has reported once: what nobody was given is held by nobody.

    Args:
        settings: settings of the control plane, as its file says them.
        records: records that an earlier state had; it may have none.
        changes: changes of the settings since; a change goes before the file.
        events: events that an earlier state had.
        now_s: seconds since 1970.

    Attributes:
        settings: the settings with the changes.
        changes: the changes.
        events: log of what happened and why.

    Raises:
        SettingError: The settings and the changes make no sense together.
    """

    def __init__(
        self,
        settings: ControlSettings,
        records: Iterable[StageRecord] = (),
        *,
        changes: ControlChanges | None = None,
        events: Iterable[ControlEvent] = (),
        now_s: float,
    ) -> None:
        self._file = settings
        self._bounded = tuple(math.isfinite(amount) for amount in settings.capacity.row)
        self._policies = policies_of(settings.policies)
        self.events = ControlEventLog(events)
        self._watch = ShareWatch()
        self._set(changes or ControlChanges())
        # Whoever was there has another lease: the time without a control plane is nobody's silence.
        self._records = {record.key: replace(record, heard_s=now_s) for record in records}
        self._counts = Counter(tenant for tenant, _ in self._records)
        self._columns = StageColumns()
        for record in self._records.values():
            self._note(record)
        self._held = self._columns.held_amounts()
        self._notices: dict[_JobName, tuple[str, ...]] = {}
        self._decided_s = -math.inf
        self._touched: set[tuple[str, str]] = set()

    @property
    def records(self) -> list[StageRecord]:
        """Everything that is known of stages that are there."""
        return [record for record in self._records.values() if not record.is_gone]

    @property
    def remembered(self) -> list[StageRecord]:
        """The same, and of stages that have ended as far as they are remembered."""
        return list(self._records.values())

    @property
    def held(self) -> Amounts:
        """The most that all stages together may be using."""
        return self.amounts_of(self._held)

    def change_capacity(self, by: str, body: object, now_s: float) -> None:
        """Change what there is; see ``ControlChanges.with_capacity``. What stages hold counts until they hold less.

        Args:
            by: name of the tenant that changes it.
            body: a PATCH, as JSON gave it.
            now_s: seconds since 1970.
        """
        before = self.settings
        self._set(self.changes.with_capacity(self._file, body))
        if (told := describe_capacity_change(by, before, self.settings)) is not None:
            self.events.add("changed", None, told, now_s)
            self._watch.note(None, "what there is was changed", "what there is was changed")

    def change_tenant(self, by: str, name: str, body: object, now_s: float) -> None:
        """Change a tenant; see ``ControlChanges.with_tenant``, and ``change_capacity`` for the arguments."""
        before = self.settings
        self._set(self.changes.with_tenant(self._file, name, body))
        if (told := describe_tenant_change(by, name, before, self.settings)) is not None:
            self.events.add("changed", name, told, now_s)
            self._watch.note(name, f"the weight of {name} was changed", "the weight of another tenant was changed")

    def change_job(self, by: str, tenant: str, job: str, body: object, now_s: float) -> None:
        """Change a job; see ``ControlChanges.with_job``, and ``change_capacity`` for the arguments.

        Raises:
            UnknownName: No stage has named such a job, nor does the file or an earlier change.
        """
        key = tenant, job
        if key not in self._known and all(record.job != key for record in self._records.values()):
            raise UnknownName(f"there is no job {job!r} of a tenant {tenant!r}")
        before = self.find_job(tenant, job)
        self._set(self.changes.with_job(self._file, key, body))
        if (told := describe_job_change(by, before, self.find_job(tenant, job), key)) is not None:
            self.events.add("changed", tenant, told, now_s)
            self._watch.note(tenant, f"job {job} was changed", "a job of another tenant was changed")

    def find_job(self, tenant: str, job: str) -> ControlledJob:
        """What is known of a job; one of which nothing is has the weight 1."""
        return self._known.get((tenant, job), _PLAIN)

    def notices(self, tenant: str, job: str) -> tuple[str, ...]:
        """The sentences about a job."""
        return self._notices.get((tenant, job), ())

    def receive(self, tenant: str, report: StageReport, now_s: float) -> ControlAnswer:
        """Take a report, and answer what its stage may use from now on. A report that came before changes nothing.

        Args:
            tenant: name of the tenant that sent it.
            report: the report.
            now_s: seconds since 1970.

        Raises:
            Overloaded: There are as many stages as the settings allow.
            BadRequest: The report claims settings that its stage was never given.
        """
        key = tenant, report.stage
        before = self._records.get(key)
        if before is None or report.sequence > before.report.sequence:
            self._take(before, tenant, report, now_s)
        self._decide_if_due(now_s)
        return self._answer(self._grant(key, now_s))

    def take_touched(self) -> dict[tuple[str, str], StageRecord | None]:
        """The records that changed since the last call, to be stored before an answer leaves; None once forgotten."""
        found = {key: self._records.get(key) for key in self._touched}
        self._touched.clear()
        return found

    def decide(self, now_s: float) -> None:
        """Divide the capacity anew, without those who have not been heard for a lease."""
        self._expire(now_s)
        self._held = self._columns.held_amounts()
        decision = self._columns.divide(
            self._policies,
            capacity=self._capacity,
            known=self._known,
            weights=self.settings.weights,
            now_s=now_s,
        )
        before, self._notices = self._notices, {} if decision is None else decision.notices
        self._tell(before, {} if decision is None else decision.shares, now_s)
        self._decided_s, self._is_changed = now_s, False

    def renew_tenants(self, tenants: tuple[ControlTenant, ...]) -> None:
        """Take these for the tenants of the file.

        Raises:
            SettingError: The tenants contradict the rest of the file's settings.
        """
        before, self._file = self._file, replace(self._file, tenants=tenants)
        try:
            self._set(self.changes)
        except SettingError:
            self._file = before
            raise

    def _set(self, changes: ControlChanges) -> None:
        self.settings = changes.apply(self._file)
        self.changes = changes
        self._capacity: Row = self.settings.capacity.row
        self._known = {(job.tenant, job.name): job for job in self.settings.jobs}
        self._decided_s, self._is_changed = -math.inf, True

    def _tell(self, before: dict[_JobName, tuple[str, ...]], shares: dict[_JobName, JobShare], now_s: float) -> None:
        """Note whose shares changed by much, and which jobs are late now or no longer."""
        for (tenant, _), sentence in self._watch.news(shares):
            self.events.add("share", tenant, sentence, now_s)
        for job in self._notices.keys() - before.keys():
            self.events.add("late", job[0], self._notices[job][0], now_s)
        for tenant, name in before.keys() - self._notices.keys():
            if (tenant, name) in shares:
                self.events.add("in_time", tenant, f"job {name} can end in time again, or is done", now_s)

    def _take(self, before: StageRecord | None, tenant: str, report: StageReport, now_s: float) -> None:
        if report.version > _MAX_AHEAD + (0 if before is None else before.version):
            raise BadRequest(f"version: stage {report.stage} was given no settings of version {report.version}")
        if before is None:
            self._count_stage(tenant)
            before = StageRecord(tenant=tenant, report=report, heard_s=now_s)
        report = report.after(before.report)
        self._announce(before, report, now_s)
        self._is_changed |= before.is_gone or before.version == 0 or before.report.demand != report.demand
        asked_s = math.inf if report.version == before.version else before.asked_s
        held = _NONE if report.has_ended else self._held_after(before, report)
        self._put(replace(before, report=report, heard_s=now_s, held=held, asked_s=asked_s, is_gone=report.has_ended))

    def _announce(self, before: StageRecord, report: StageReport, now_s: float) -> None:
        """Note that a stage joined or ended."""
        was_there = before.version > 0 and not before.is_gone
        if was_there is not report.has_ended:
            return
        kind = "ended" if report.has_ended else "joined"
        self._event(kind, before.tenant, report, kind, now_s)

    def _event(self, kind: str, tenant: str, report: StageReport, words: str, now_s: float) -> None:
        self.events.add(kind, tenant, f"{report.kind} {report.stage} of job {report.job} {words}", now_s)
        self._watch.note(tenant, f"a stage of job {report.job} {kind}", f"a stage of another tenant {kind}")

    def _held_after(self, before: StageRecord, report: StageReport) -> Row:
        if before.is_gone or before.version == 0:  # its amounts may be others' by now: it holds what is left of them
            said = report.in_force.row if report.version else _NONE
            return self._bounded_row(map(min, said, before.settings, self._free()))
        return before.settings if report.version == before.version else before.held

    def _decide_if_due(self, now_s: float) -> None:
        after_s = now_s - self._decided_s
        is_due = after_s >= self.settings.round_s or after_s < 0
        if is_due or (self._is_changed and after_s >= _DECIDE_S * len(self._records)):
            self.decide(now_s)

    def _grant(self, key: tuple[str, str], now_s: float) -> StageRecord:
        """Give a stage what the last decision says, as far as nobody else may be using it still."""
        record = self._records[key]
        if record.is_gone:
            return record
        free = self._free()
        reach = zip(self._columns.share_of(key), record.held, free, strict=True)
        granted = self._bounded_row(min(want, has + rest) for want, has, rest in reach)
        # Whoever comes back after a lease no longer holds what it was answered last, though it may be given the same.
        is_held = all(has >= amount for has, amount in zip(record.held, record.settings, strict=True))
        if record.version and is_held and _are_same(granted, record.settings, free):
            return record
        # Above what it says that it has, which it would keep else: a state that was lost or restored knows less.
        version = max(record.version, record.report.version) + 1
        held = tuple(map(max, record.held, granted))
        asked_s = min(record.asked_s, now_s)
        return self._put(replace(record, version=version, settings=granted, held=held, asked_s=asked_s))

    def _free(self) -> Row:
        return tuple(max(0.0, amount - held) for amount, held in zip(self._capacity, self._held, strict=True))

    def _answer(self, record: StageRecord) -> ControlAnswer:
        return ControlAnswer(
            version=record.version,
            settings=self.amounts_of(record.settings),
            round_s=self.settings.round_s,
            lease_s=self.settings.lease_s,
            notices=self.notices(*record.job),
        )

    def _put(self, record: StageRecord) -> StageRecord:
        before = self._records.get(record.key)
        was = _NONE if before is None else before.held
        self._held = tuple(held - old + new for held, old, new in zip(self._held, was, record.held, strict=True))
        self._records[record.key] = record
        self._touched.add(record.key)
        self._note(record)
        return record

    def _note(self, record: StageRecord) -> None:
        self._columns.put(
            record.key,
            record.job,
            demand=record.report.demand.row,
            held=record.held,
            moved_bytes=record.report.moved_bytes,
            heard_s=record.heard_s,
            asked_s=record.asked_s,
            is_there=not record.is_gone,
        )

    def _expire(self, now_s: float) -> None:
        unheard, waiting = self._columns.silent_stages(now_s - self.settings.lease_s)
        for key in unheard:
            record = self._put(replace(self._records[key], held=_NONE, is_gone=True))
            words = f"was lost: nothing was heard of it for {self.settings.lease_s:g} s, others have its share"
            self._event("lost", record.tenant, record.report, words, now_s)
        for key in waiting:  # whoever does not say that it holds less keeps nobody waiting for ever
            record = self._records[key]
            self._put(replace(record, held=record.settings, asked_s=math.inf))

    def _count_stage(self, tenant: str) -> None:
        """Forget a stage of the tenant that has ended where it has too many; what that moved is in no count then."""
        maximum = max(1, self.settings.max_stages // max(1, len(self.settings.tenants)))
        if self._counts[tenant] < maximum:
            self._counts[tenant] += 1
            return
        gone = next((key for key, record in self._records.items() if record.is_gone and key[0] == tenant), None)
        if gone is None:
            sentence = f"tenant {tenant} has {maximum:,} stages, its part of the control plane's max_stages"
            raise Overloaded(sentence, retry_after_s=self.settings.lease_s)
        del self._records[gone]
        self._columns.drop(gone)
        self._touched.add(gone)

    def _bounded_row(self, row: Iterable[float]) -> Row:
        return tuple(amount if bounded else 0.0 for amount, bounded in zip(row, self._bounded, strict=True))

    def amounts_of(self, row: Row) -> Amounts:
        """A row of a record as amounts; resources that nothing bounds are infinite again."""
        bounds = zip(row, self._bounded, strict=True)
        return Amounts.of(amount if bounded else math.inf for amount, bounded in bounds)


def _are_same(row: Row, other: Row, free: Row) -> bool:
    return all(
        abs(amount - before) <= _SAME * before and before - amount <= rest
        for amount, before, rest in zip(row, other, free, strict=True)
    )


PAGE_ROWS = 200
"""Jobs, and stages, that one page of a view has at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewPage:
    """Which part of a view is meant.

    Attributes:
        jobs: number of the first job, counted from 0.
        stages: number of the first stage.
        rows: maximum number of each.
    """

    jobs: int = 0
    stages: int = 0
    rows: int = PAGE_ROWS


def view_of(
    state: ControlState,
    tenant: str | None,
    now_s: float,
    *,
    may_change: bool = False,
    page: ViewPage = ViewPage(),
) -> ControlView:
    """The stages that are there, their jobs and tenants, what was saved by all that are remembered, and what happened.

    Args:
        state: state of the control plane.
        tenant: tenant that asks, which sees its own alone; None sees all.
        now_s: seconds since 1970.
        may_change: True if whoever asks may change weights, jobs and capacities.
        page: jobs and stages that are given; ``next`` says where the following ones begin, with null for none.
    """
    records = [record for record in state.records if tenant in (None, record.tenant)]
    jobs: dict[tuple[str, str], list[StageRecord]] = {}
    for record in records:
        jobs.setdefault(record.job, []).append(record)
    ended: dict[tuple[str, str], list[StageRecord]] = {}
    for record in state.remembered:
        if record.is_gone and tenant in (None, record.tenant):
            ended.setdefault(record.job, []).append(record)
    prices = state.settings.prices
    weights = state.settings.weights or {EVERY_TENANT: 1.0}
    shown_jobs = (_within if page.rows == PAGE_ROWS else list)(
        _job(state, key, stages, ended.get(key, []))
        for key, stages in islice(jobs.items(), page.jobs, page.jobs + page.rows)
    )
    shown_stages = [_stage(state, record, now_s) for record in records[page.stages : page.stages + page.rows]]
    ends = {"jobs": page.jobs + len(shown_jobs), "stages": page.stages + len(shown_stages)}
    counts = {"jobs": len(jobs), "stages": len(records)}
    return {
        "now_s": now_s,
        "may_change": may_change,
        "capacity": state.settings.capacity.to_json(),
        "changed": sorted(state.changes.capacity),
        "policies": list(state.settings.policies),
        "held": state.held.to_json() if tenant is None else None,
        "tenants": [tenant_of(state, name) for name in weights if tenant in (None, name)],
        "prices": None if prices is None else asdict(prices),
        "saved": savings(_activities([*records, *(record for gone in ended.values() for record in gone)]), prices),
        "counts": counts,
        "next": {name: end if end < counts[name] else None for name, end in ends.items()},
        "jobs": shown_jobs,
        "stages": shown_stages,
        "events": [event.to_json() for event in state.events.events_for(tenant)],
    }


def _within(jobs: Iterable[JobView]) -> list[JobView]:
    """The first jobs that have ``_JOBS_BYTES`` together, one at least."""
    shown: list[JobView] = []
    nbytes = 0
    for job in jobs:
        nbytes += len(json.dumps(job))
        if shown and nbytes > _JOBS_BYTES:
            break
        shown.append(job)
    return shown


def _activities(records: Iterable[StageRecord]) -> list[JobActivity]:
    return [record.report.activity for record in records if record.report.activity is not None]


def tenant_of(state: ControlState, name: str) -> dict[str, Any]:
    """A tenant's weight, and which of its fields differ from the file because they were changed."""
    changed = ["weight"] if name in state.changes.tenants else []
    return {"tenant": name, "weight": state.settings.weights.get(name, 1.0), "changed": changed}


def job_of(state: ControlState, key: tuple[str, str]) -> dict[str, Any]:
    """What is known of a job, and which of that differs from the file because it was changed."""
    known = state.find_job(*key)
    return {
        "tenant": key[0],
        "job": key[1],
        "weight": known.weight,
        "priority": known.priority,
        "ends_at_s": None if math.isinf(known.ends_at_s) else known.ends_at_s,
        "work_bytes": known.work_bytes,
        "changed": sorted(name.removesuffix("_s") for name in state.changes.jobs.get(key, ())),
    }


def _job(state: ControlState, key: tuple[str, str], stages: list[StageRecord], ended: list[StageRecord]) -> JobView:
    shown: JobView = {
        **job_of(state, key),  # type: ignore[typeddict-item]  # has the first fields
        "stages": len(stages),
        "moved_bytes": sum(record.report.moved_bytes for record in stages),
        "notices": list(state.notices(*key)),
        "activity": summarise_job(_activities(stages), _activities(ended), state.settings.prices),
    }
    return shown


def _stage(state: ControlState, record: StageRecord, now_s: float) -> dict[str, Any]:
    return {
        "tenant": record.tenant,
        **replace(record.report, activity=None).to_json(),
        "silent_s": max(0.0, now_s - record.heard_s),
        "answered": {"version": record.version, "settings": state.amounts_of(record.settings).to_json()},
        "notices": list(state.notices(*record.job)),
    }
