"""Keeps stages, changes and events in a file of SQLite, so that a control plane goes on where it was stopped."""

import json
import math
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from frostline.control.changes import ControlChanges, ControlEvent
from frostline.control.messages import StageReport
from frostline.control.settings import ControlSettings
from frostline.control.state import ControlState, StageRecord
from frostline.core.declared import parse_json, refuse_unknown_fields
from frostline.core.errors import BadRequest, SettingError, Unavailable
from frostline.core.files import make_private_file, require_guarded
from frostline.core.system import __version__
from frostline.core.units import log_named
from frostline.node.http.connection_guard import SeldomLog

__all__ = ("RecordStore", "RecordWriter")

_LOG = SeldomLog(log_named("frostline.control"))
_SCHEMA = 2
_TABLES = (
    "CREATE TABLE IF NOT EXISTS stages (tenant TEXT, stage TEXT, record TEXT NOT NULL, PRIMARY KEY (tenant, stage))",
    "CREATE TABLE IF NOT EXISTS events (number INTEGER PRIMARY KEY, event TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS changes (only INTEGER PRIMARY KEY CHECK (only = 1), changes TEXT NOT NULL)",
)


class RecordWriter(Protocol):
    """Takes what has to outlive the process."""

    def write(
        self,
        changed: Mapping[tuple[str, str], StageRecord | None],
        events: Mapping[int, ControlEvent | None],
        changes: ControlChanges | None,
    ) -> None:
        """See ``RecordStore.write``."""


class RecordStore:
    """Records of stages, changes and events on disk. Written before an answer leaves; not for several threads at once.

    Args:
        path: file of them; it is made for its user alone where it is missing.

    Raises:
        SettingError: The file is of something else, cannot be written, or others may write to it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            make_private_file(path)
            require_guarded(path, in_any_folder=True)
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, _SCHEMA):
                raise SettingError(
                    f"{path} was written by another version of Frostline (schema {version}), this is {__version__}, "
                    f"which reads schema {_SCHEMA}: go on with that version, or choose another --state"
                )
            # What is written outlives this process; what a power cut takes with it, stages say again.
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            for table in _TABLES:
                self._connection.execute(table)
            self._connection.execute(f"PRAGMA user_version = {_SCHEMA}")
        except (OSError, sqlite3.Error) as error:
            raise SettingError(f"cannot keep the state in {path}: {error}") from error

    def state(self, settings: ControlSettings, now_s: float) -> ControlState:
        """The state that was written, with the settings of now.

        Args:
            settings: settings that the file of the control plane says.
            now_s: seconds since 1970.

        Raises:
            SettingError: The file is damaged, or a change in it does not fit the settings any more.
        """
        records, events, changes = self.records(), self.events(), self.changes()
        try:
            return ControlState(settings, records, changes=changes, events=events, now_s=now_s)
        except SettingError as error:
            raise SettingError(
                f"what was changed while it ran does not fit --config (see --forget-changes): {error}"
            ) from error

    def records(self) -> list[StageRecord]:
        """Every record that was written.

        Raises:
            SettingError: The file is damaged.
        """
        with self._reading():
            rows = self._connection.execute("SELECT tenant, record FROM stages").fetchall()
            return [_read(tenant, parse_json(text)) for tenant, text in rows]

    def changes(self) -> ControlChanges:
        """What was changed of the settings, as it was written last; see ``records`` for the errors."""
        with self._reading():
            row = self._connection.execute("SELECT changes FROM changes").fetchone()
            return ControlChanges() if row is None else ControlChanges.from_json(parse_json(row[0]))

    def events(self) -> list[ControlEvent]:
        """The events that are kept; see ``records`` for the errors."""
        with self._reading():
            rows = self._connection.execute("SELECT event FROM events").fetchall()
            return [ControlEvent(**parse_json(text)) for (text,) in rows]

    def write(
        self,
        changed: Mapping[tuple[str, str], StageRecord | None],
        events: Mapping[int, ControlEvent | None] = MappingProxyType({}),
        changes: ControlChanges | None = None,
    ) -> None:
        """Write what changed, all or nothing.

        Args:
            changed: records by their tenant and stage; None removes one.
            events: events by their numbers; None removes one.
            changes: all changes of the settings; None where there are no other ones.

        Raises:
            Unavailable: The disk does not take them; nothing of them is written.
        """
        kept = [(*key, json.dumps(_written(record))) for key, record in changed.items() if record is not None]
        gone = [key for key, record in changed.items() if record is None]
        added = [(number, json.dumps(event.to_json())) for number, event in events.items() if event is not None]
        dropped = [(number,) for number, event in events.items() if event is None]
        try:
            self._connection.execute("BEGIN")
            self._connection.executemany("REPLACE INTO stages VALUES (?, ?, ?)", kept)
            self._connection.executemany("DELETE FROM stages WHERE tenant = ? AND stage = ?", gone)
            self._connection.executemany("REPLACE INTO events VALUES (?, ?)", added)
            self._connection.executemany("DELETE FROM events WHERE number = ?", dropped)
            if changes is not None:
                self._connection.execute("REPLACE INTO changes VALUES (1, ?)", [json.dumps(changes.to_json())])
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            _LOG.error("cannot write the state to %s: %s; reports are refused until it can be", self._path, error)
            raise Unavailable(f"the control plane cannot keep its state: {error}; free space on its disk") from error

    @contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, ValueError, KeyError, TypeError, AttributeError, BadRequest) as error:
            raise SettingError(
                f"{self._path} is damaged; remove it, and stages will say what they hold: {error}"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


_FIELDS = ("report", "heard_s", "version", "settings", "held", "asked_s", "is_gone")


def _written(record: StageRecord) -> dict[str, Any]:
    activity = record.report.activity
    report = record.report if activity is None else replace(record.report, activity=activity.abbreviate())
    return {
        "report": report.to_json(),
        "heard_s": record.heard_s,
        "version": record.version,
        "settings": record.settings,
        "held": record.held,
        "asked_s": None if math.isinf(record.asked_s) else record.asked_s,
        "is_gone": record.is_gone,
    }


def _read(tenant: str, value: dict[str, Any]) -> StageRecord:
    refuse_unknown_fields(value, _FIELDS, "a stage")
    record = StageRecord(
        tenant=tenant,
        report=StageReport.from_json(value["report"]),
        heard_s=value["heard_s"],
        version=value["version"],
        settings=tuple(value["settings"]),
        held=tuple(value["held"]),
        is_gone=value["is_gone"],
    )
    return record if value["asked_s"] is None else replace(record, asked_s=value["asked_s"])
