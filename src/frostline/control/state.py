"""Decides what each stage is answered: who is there, what they hold, and what they may have next."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from frostline.control.amounts import RESOURCES, Amounts, Row
from frostline.control.changes.changes import ControlChanges
from frostline.control.changes.event_log import ControlEvent, ControlEventLog
from frostline.control.changes.share_watch import JobShare, ShareWatch
from frostline.control.changes.told import capacity_told, job_told, tenant_told
from frostline.control.columns import StageColumns
from frostline.control.messages import ControlAnswer, StageReport
from frostline.control.policies import policies_of
from frostline.control.settings import ControlledJob, ControlSettings
from frostline.errors import Overloaded, UnknownName

__all__ = ("ControlState", "StageRecord")

_NONE: Row = (0.0,) * len(RESOURCES)
# A decision takes less than 5 µs a stage, so that at this rate decisions take a tenth of a processor at most.
_DECIDE_S = 5e-5
# Settings that differ by less are the same: a new version costs a message to no effect.
_SAME = 1e-3
# A job of which nothing is known beforehand.
_PLAIN = ControlledJob(name="any")
_JobName = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRecord:
    """What is known of one stage.

    Attributes:
        tenant: name of its tenant.
        report: its latest report.
        heard_s: when that came, in seconds since 1970.
        version: version of the settings that it was answered last.
        settings: these settings; resources without a bound have 0.
        held: the most that it may be using: what is in force, and what it was answered since.
        asked_s: when it was first answered settings that it has not said to have taken.
        is_gone: whether it has ended, or has not been heard for a lease.
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
    that they hold less. The one exception is a stage that was cut off for longer than a lease, and used its amounts all
    the while.

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
        self._version = max((record.version for record in self._records.values()), default=0)
        self._counts = Counter(tenant for tenant, _ in self._records)
        self._columns = StageColumns()
        for record in self._records.values():
            self._note(record)
        self._held = self._columns.held()
        self._notices: dict[_JobName, tuple[str, ...]] = {}
        self._decided_s = -math.inf
        self._touched: set[tuple[str, str]] = set()

    @property
    def records(self) -> list[StageRecord]:
        """Everything that is known of stages that are there."""
        return [record for record in self._records.values() if not record.is_gone]

    @property
    def remembered(self) -> list[StageRecord]:
        """The same, and of stages that have ended as far as there was room to remember them."""
        return list(self._records.values())

    @property
    def held(self) -> Amounts:
        """The most that all stages together may be using."""
        return self.named(self._held)

    def change_capacity(self, by: str, body: object, now_s: float) -> None:
        """Change what there is; see ``ControlChanges.with_capacity``. What stages hold counts until they hold less.

        Args:
            by: name of the tenant that changes it.
            body: a PATCH, as JSON gave it.
            now_s: seconds since 1970.
        """
        before = self.settings
        self._set(self.changes.with_capacity(self._file, body))
        if (told := capacity_told(by, before, self.settings)) is not None:
            self.events.add("changed", None, told, now_s)
            self._watch.note(None, "what there is was changed", "what there is was changed")

    def change_tenant(self, by: str, name: str, body: object, now_s: float) -> None:
        """Change a tenant; see ``ControlChanges.with_tenant``, and ``change_capacity`` for the arguments."""
        before = self.settings
        self._set(self.changes.with_tenant(self._file, name, body))
        if (told := tenant_told(by, name, before, self.settings)) is not None:
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
        before = self.known(tenant, job)
        self._set(self.changes.with_job(self._file, key, body))
        if (told := job_told(by, before, self.known(tenant, job), key)) is not None:
            self.events.add("changed", tenant, told, now_s)
            self._watch.note(tenant, f"job {job} was changed", "a job of another tenant was changed")

    def known(self, tenant: str, job: str) -> ControlledJob:
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
        """
        key = tenant, report.stage
        before = self._records.get(key)
        if before is None or report.sequence > before.report.sequence:
            self._take(before, tenant, report, now_s)
        self._decide_if_due(now_s)
        return self._answer(self._grant(key, now_s))

    def touched(self) -> dict[tuple[str, str], StageRecord | None]:
        """The records that changed since the last call, to be stored before an answer leaves; None once forgotten."""
        found = {key: self._records.get(key) for key in self._touched}
        self._touched.clear()
        return found

    def decide(self, now_s: float) -> None:
        """Divide the capacity anew, without those who have not been heard for a lease."""
        self._expire(now_s)
        self._held = self._columns.held()
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

    def _set(self, changes: ControlChanges) -> None:
        self.settings = changes.applied(self._file)
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
        if before is None:
            self._make_room(tenant)
            before = StageRecord(tenant=tenant, report=report, heard_s=now_s)
        report = report.after(before.report)
        self._announce(before, report, now_s)
        self._is_changed |= before.is_gone or before.version == 0 or before.report.demand != report.demand
        self._version = max(self._version, report.version)
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
            in_force = report.in_force.row if report.version else _NONE
            return self._bounded_row(map(min, in_force, self._free()))
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
        reach = zip(self._columns.given(key), record.held, self._free(), strict=True)
        granted = self._bounded_row(min(want, has + rest) for want, has, rest in reach)
        # Whoever comes back after a lease no longer holds what it was answered last, though it may be given the same.
        is_held = all(has >= amount for has, amount in zip(record.held, record.settings, strict=True))
        if record.version and is_held and _are_same(granted, record.settings):
            return record
        self._version += 1
        held = tuple(map(max, record.held, granted))
        asked_s = min(record.asked_s, now_s)
        return self._put(replace(record, version=self._version, settings=granted, held=held, asked_s=asked_s))

    def _free(self) -> Row:
        return tuple(max(0.0, amount - held) for amount, held in zip(self._capacity, self._held, strict=True))

    def _answer(self, record: StageRecord) -> ControlAnswer:
        return ControlAnswer(
            version=record.version,
            settings=self.named(record.settings),
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
        unheard, waiting = self._columns.silent(now_s - self.settings.lease_s)
        for key in unheard:
            record = self._put(replace(self._records[key], held=_NONE, is_gone=True))
            words = f"was lost: nothing was heard of it for {self.settings.lease_s:g} s, others have its share"
            self._event("lost", record.tenant, record.report, words, now_s)
        for key in waiting:  # whoever does not say that it holds less keeps nobody waiting for ever
            record = self._records[key]
            self._put(replace(record, held=record.settings, asked_s=math.inf))

    def _make_room(self, tenant: str) -> None:
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

    def named(self, row: Row) -> Amounts:
        """A row of a record as amounts; resources that nothing bounds are infinite again."""
        bounds = zip(row, self._bounded, strict=True)
        return Amounts.of(amount if bounded else math.inf for amount, bounded in bounds)


def _are_same(row: Row, other: Row) -> bool:
    return all(abs(amount - before) <= _SAME * before for amount, before in zip(row, other, strict=True))
