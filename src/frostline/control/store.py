"""Keeps the view over stages in a file of SQLite, so that a control plane goes on where it was stopped."""

import json
import math
import sqlite3
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from frostline.control.messages import StageReport
from frostline.control.state import StageRecord
from frostline.errors import BadRequest, SettingError

__all__ = ("RecordStore", "RecordWriter")

_SCHEMA = 1
_TABLE = (
    "CREATE TABLE IF NOT EXISTS stages (tenant TEXT, stage TEXT, record TEXT NOT NULL, PRIMARY KEY (tenant, stage))"
)


class RecordWriter(Protocol):
    """Takes what has to outlive the process."""

    def write(self, changed: Mapping[tuple[str, str], StageRecord | None]) -> None:
        """Take records by their tenant and stage; None removes one."""


class RecordStore:
    """Records of stages on disk. Written before an answer leaves; not for several threads at once.

    Args:
        path: file of the records; it is made where it is missing.

    Raises:
        SettingError: The file is of something else, or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version not in (0, _SCHEMA):
                raise SettingError(f"{path} is the state of another version of Frostline: choose another --state")
            # What is written outlives this process; what a power cut takes with it, stages say again.
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = NORMAL")
            self._connection.execute(_TABLE)
            self._connection.execute(f"PRAGMA user_version = {_SCHEMA}")
        except sqlite3.Error as error:
            raise SettingError(f"cannot keep the state in {path}: {error}") from error

    def records(self) -> list[StageRecord]:
        """Everything that was written.

        Raises:
            SettingError: The file is damaged.
        """
        try:
            rows = self._connection.execute("SELECT tenant, record FROM stages").fetchall()
            return [_read(tenant, json.loads(text)) for tenant, text in rows]
        except (sqlite3.Error, ValueError, KeyError, TypeError, BadRequest) as error:
            raise SettingError(
                f"{self._path} is damaged; remove it, and stages will say what they hold: {error}"
            ) from error

    def write(self, changed: Mapping[tuple[str, str], StageRecord | None]) -> None:
        """Write records by their tenant and stage, all or none; None removes one.

        Raises:
            SettingError: The disk does not take them.
        """
        kept = [(*key, json.dumps(_written(record))) for key, record in changed.items() if record is not None]
        gone = [key for key, record in changed.items() if record is None]
        try:
            self._connection.execute("BEGIN")
            self._connection.executemany("REPLACE INTO stages VALUES (?, ?, ?)", kept)
            self._connection.executemany("DELETE FROM stages WHERE tenant = ? AND stage = ?", gone)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            raise SettingError(f"cannot write the state to {self._path}: {error}") from error

    def close(self) -> None:
        """Close the file."""
        self._connection.close()


def _written(record: StageRecord) -> dict[str, Any]:
    activity = record.report.activity
    report = record.report if activity is None else replace(record.report, activity=activity.brief())
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
