"""Decides what each stage is given, from what is known of all of them as columns that stay between decisions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.control.amounts import RESOURCES, Row
from frostline.control.changes.share_watch import JobShare
from frostline.control.fairness import Floats, Ints, summed
from frostline.control.policies import Division, SharingPolicy, StageTable, chained
from frostline.control.settings import ControlledJob

__all__ = ("Decision", "StageColumns")

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
        # A forgotten stage leaves an empty row, and no key, until rows are moved to make room.
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
            heard_s: when it was heard, in seconds since 1970.
            asked_s: when it was first answered settings that it has not said to have taken.
            is_there: whether it has a part of what is divided.
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

    def given(self, key: _Key) -> Row:
        """What the last decision gives a stage; nothing where it was not there yet."""
        return tuple(self._given[self._rows[key]].tolist())

    def held(self) -> Row:
        """The amounts that all stages together may be using."""
        return tuple(self._used["held"].sum(axis=0).tolist())

    def silent(self, since_s: float) -> tuple[list[_Key], list[_Key]]:
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
        division = chained(table, policies)
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
        return summed(self._used["job"], self._used["moved_bytes"], len(self._jobs))

    def _new_row(self, key: _Key) -> int:
        if len(self._keys) == len(self._columns):
            self._make_room()
        self._rows[key] = len(self._keys)
        self._keys.append(key)
        return self._rows[key]

    def _make_room(self) -> None:
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
