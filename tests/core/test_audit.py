"""The audit log: lines at once, sums each minute, bounded files, and what a full disk loses is said."""

import json
import logging
import os
import stat
import threading
from pathlib import Path

import pytest

from frostline.core import audit
from frostline.core.audit import AuditLog
from frostline.core.errors import SettingError


class Clock:
    now_s = 1_700_000_000.0

    def __call__(self):
        return self.now_s


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_events_are_written_at_once_and_repeated_ones_once_a_minute(tmp_path):
    clock, path = Clock(), tmp_path / "new" / "audit.jsonl"
    log = AuditLog(path, clock)
    for _ in range(5):
        log.note("read", tenant="ann", data="file:///a", prefix=None, samples=3)
    log.note("read", tenant="bob", data="file:///a", samples=4)
    assert [(line["tenant"], line["times"], line["samples"]) for line in lines(path)] == [("ann", 1, 3), ("bob", 1, 4)]
    assert "prefix" not in lines(path)[0]
    assert lines(path)[0]["time"] == "2023-11-14T22:13:20.000+00:00"
    clock.now_s += 60
    log.note("refused", kind="Forbidden")
    assert [(line["event"], line["times"]) for line in lines(path)[2:]] == [("read", 4), ("refused", 1)]
    assert lines(path)[2]["samples"] == 12
    log.note("refused", kind="Forbidden")
    log.close()
    log.close()
    assert [(line["event"], line["times"]) for line in lines(path)[4:]] == [("refused", 1)]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_nothing_is_lost_or_counted_twice_by_threads(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)

    def note(name):
        for _ in range(200):
            log.note("read", tenant=name, samples=2)

    threads = [threading.Thread(target=note, args=[f"t{number % 2}"]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    log.close()
    assert sum(line["times"] for line in lines(path)) == 800
    assert sum(line["samples"] for line in lines(path)) == 1600


def test_a_flood_of_different_things_takes_bounded_space(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "_MAX_KINDS", 64)
    monkeypatch.setattr(audit, "_FILE_BYTES", 4096)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    for number in range(5000):
        log.note("refused", address=f"10.0.{number >> 8}.{number & 255}", kind="x" * 9000)
    log.close()
    assert {file.name for file in tmp_path.iterdir()} <= {"audit.jsonl", *(f"audit.jsonl.{n}" for n in range(1, 5))}
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 5 * 4096 + 5 * 2048
    assert any("others" in line and line["times"] > 4000 for line in lines(path))


def test_no_flood_hides_who_did_what(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "_MAX_KINDS", 8)
    monkeypatch.setattr(audit, "_MAX_UNKNOWN", 8)
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    for number in range(100):
        log.note("refused", address=f"10.0.0.{number}")
        log.note("read", tenant="eve", data=f"file:///decoy/{number}", samples=1)
    log.note("read", tenant="ann", data="file:///a", samples=1)
    log.note("read", tenant="eve", data="file:///secret", samples=7)
    log.close()
    found = lines(path)
    assert [line["data"] for line in found if line.get("tenant") == "ann"] == ["file:///a"]
    assert sum(line["samples"] for line in found if line.get("tenant") == "eve") == 107
    assert sum(line["times"] for line in found) == 202
    assert len(found) < 32


def test_whoever_has_no_token_pushes_nothing_out_within_days(tmp_path):
    clock, path, minutes = Clock(), tmp_path / "audit.jsonl", 5
    log = AuditLog(path, clock)
    for minute in range(minutes):
        for number in range(1000):
            about = {"kind": "Unauthenticated", "route": "/v1/tenants/{name}"}
            log.note("refused", **about, address=f"2001:db8:{minute}::{number}")
        clock.now_s += 61.0
    log.close()
    assert sum(line["times"] for line in lines(path)) == 1000 * minutes
    assert path.stat().st_size / minutes * 60 * 24 * 7 < 5 * vars(audit)["_FILE_BYTES"]


def test_names_of_others_stay_on_their_line(tmp_path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path)
    log.note("read", data='file:///a\n{"event": "forged"}\x1b[2J')
    (line,) = lines(path)
    assert line["event"] == "read"
    assert "\x1b" not in line["data"]


def test_a_disk_that_is_full_is_said_and_what_was_lost_is_counted(caplog):
    clock = Clock()
    log = AuditLog(Path("/dev/full"), clock)
    for number in range(100):
        log.write_change("change", number=number)
    clock.now_s += 60
    log.write_change("change")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(said) == 2
    assert "the audit log /dev/full cannot be written, 1 lines are lost" in said[0]
    assert "101 lines are lost: [Errno 28] No space left on device" in said[1]
    log.write_change("change")
    log.close()
    log.close()
    (last,) = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR][2:]
    assert "102 lines are lost: [Errno 28] No space left on device" in last


def test_a_log_that_can_be_written_again_says_how_many_lines_it_lacks(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.mkdir()
    log = AuditLog(path)
    for number in range(3):
        log.write_change("change", number=number)
    path.rmdir()
    for number in range(3, 5):
        log.write_change("change", number=number)
    assert [(line["event"], line.get("lines"), line.get("number")) for line in lines(path)] == [
        ("lost", 3, None),
        ("change", None, 3),
        ("change", None, 4),
    ]


def test_a_place_that_takes_no_audit_log_is_refused_in_a_sentence(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").touch()
    for place in (tmp_path, tmp_path / "pipe", tmp_path / "file/a"):
        with pytest.raises(SettingError, match=f"cannot write.*{place}: (it is no regular file|File exists)"):
            AuditLog(place).require()
    AuditLog(tmp_path / "new/audit.jsonl").require()
    assert (tmp_path / "new/audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_a_clock_that_is_set_back_holds_no_sums_back(tmp_path):
    clock, path = Clock(), tmp_path / "audit.jsonl"
    log = AuditLog(path, clock)
    for back_s in (0, 0, 86_400, 0):
        clock.now_s -= back_s
        log.note("read", tenant="ann", samples=1)
    log.note("read", tenant="ann", samples=1)
    clock.now_s += 60
    log.note("read", tenant="bob", samples=1)
    assert [(line["tenant"], line["times"]) for line in lines(path)] == [
        ("ann", 1),
        ("ann", 1),
        ("ann", 1),
        ("ann", 2),
        ("bob", 1),
    ]


def test_none_writes_nothing(tmp_path):
    log = AuditLog(None)
    log.note("read")
    log.write_change("change")
    log.close()


def test_it_is_where_and_as_much_as_is_said(tmp_path, monkeypatch):
    """``docs/security.md`` says so of a server that names no file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = audit.audit_file("node", 7070)
    assert path == tmp_path / "cache" / "frostline" / "audit" / "node-7070.jsonl"
    path.parent.mkdir(parents=True, mode=0o700)
    for size in (63 << 20, *6 * [64 << 20]):
        path.touch(mode=0o600)
        os.truncate(path, size)
        log = AuditLog(path)
        for number in range(1100):
            log.note("read", tenant="ann", data=f"file:///{number}", samples=1)
        log.close()
        if size < 64 << 20:
            assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert {file.name for file in path.parent.iterdir()} == {path.name, *(f"{path.name}.{n}" for n in range(1, 5))}
    assert 1024 <= len(lines(path)) <= 1030
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
