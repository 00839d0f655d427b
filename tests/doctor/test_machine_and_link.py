"""What an examination says of this machine and of a link, from files and figures that a test writes."""

import math
from datetime import UTC, datetime, timedelta

import pytest

from frostline import doctor as machine_module
from frostline.doctor import (
    FINE,
    PROBLEM,
    WARNING,
    Finding,
    connections_needed,
    examine_devices,
    examine_link,
    examine_machine,
    max_receive_buffer,
    skew_of,
    worst_level,
)
from frostline.planning import Link

NOW = datetime(2026, 11, 25, 8, tzinfo=UTC)


def link(mbit, milliseconds):
    return Link(bytes_per_s=mbit * 1e6 / 8, round_trip_s=milliseconds / 1e3)


def not_fine(root):
    return [finding for finding in examine_machine(root) if finding.level != FINE]


def test_the_worst_level_is_the_verdict():
    levels = [Finding(part="x", level=level, says="y") for level in (FINE, PROBLEM, WARNING)]
    assert worst_level(levels) == PROBLEM
    assert worst_level(levels[:1]) == FINE
    assert worst_level([]) == FINE


def test_memory_that_others_have_taken(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal:  99 kB\nMemAvailable:  1048576 kB\n")
    (finding,) = not_fine(tmp_path)
    assert finding.level == WARNING
    assert "--memory 512MiB" in finding.mend


def test_one_core_for_node_and_loop(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_module, "usable_cores", lambda: (0,))
    (finding,) = not_fine(tmp_path)
    assert "one core" in finding.says


def test_an_accelerator_that_pytorch_cannot_use(tmp_path, monkeypatch):
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (finding,) = not_fine(tmp_path)
    assert finding.level == PROBLEM
    assert "NVIDIA" in finding.says


def test_devices_of_which_one_is_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda number: (1 << 30, 2 << 30))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: f"card {number}")
    here, gone = examine_devices("cuda:0,cuda:1")
    assert (here.part, here.level) == ("device cuda:0", FINE)
    assert here.says.startswith("card 0, 1.07 GB")
    assert (gone.part, gone.level) == ("device cuda:1", PROBLEM)
    assert "PyTorch sees cuda:0" in gone.says
    assert "--device cuda:0)" in gone.mend


def test_an_accelerator_where_there_is_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (finding,) = examine_devices("cuda")
    assert "no accelerator" in finding.says
    assert "--device cpu" in finding.mend


def test_more_parts_of_the_processor_than_it_has_cores(monkeypatch):
    monkeypatch.setattr(machine_module, "usable_cores", lambda: (0, 1))
    assert [finding.level for finding in examine_devices("cpu:0,cpu:1,cpu:2")] == [FINE, FINE, WARNING]


def test_a_cache_folder_that_is_a_file(tmp_path, monkeypatch):
    (tmp_path / "frostline").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (finding,) = not_fine(tmp_path)
    assert finding.level == PROBLEM
    assert "XDG_CACHE_HOME" in finding.mend


def test_few_open_files(tmp_path, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda _: (256, 4096))
    (finding,) = not_fine(tmp_path)
    assert "ulimit -n" in finding.mend


def test_an_almost_full_disk(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 5 << 20})())
    (finding,) = not_fine(tmp_path)
    assert "free space" in finding.mend


@pytest.mark.parametrize(
    ("mbit", "milliseconds", "needed"), [(100, 1, 1), (1000, 10, 1), (1000, 100, 4), (10_000, 150, 60)]
)
def test_a_full_link_needs_as_many_buffers_as_bandwidth_times_delay(mbit, milliseconds, needed):
    assert connections_needed(link(mbit, milliseconds), 6 << 20) == needed


def test_buffers_that_are_too_small_for_a_long_fast_link():
    (finding,) = examine_link(link(10_000, 150), 6 << 20)
    assert finding.level == WARNING
    assert "60 connections" in finding.says
    assert "tcp_rmem" in finding.mend
    (finding,) = examine_link(link(100, 1), 6 << 20)
    assert finding.level == FINE
    assert list(examine_link(Link(bytes_per_s=math.inf, round_trip_s=0.0), None)) == []


def test_reads_the_largest_buffer_where_linux_says_it(tmp_path):
    assert max_receive_buffer(tmp_path) is None
    (tmp_path / "proc/sys/net/ipv4").mkdir(parents=True)
    (tmp_path / "proc/sys/net/ipv4/tcp_rmem").write_text("4096\t131072\t6291456\n")
    assert max_receive_buffer(tmp_path) == 6 << 20


@pytest.mark.parametrize(("seconds", "level"), [(5, None), (-60, WARNING), (7200, PROBLEM)])
def test_clocks_may_differ_by_seconds_and_not_by_hours(seconds, level):
    findings = list(skew_of("node", NOW + timedelta(seconds=seconds), NOW))
    assert [finding.level for finding in findings] == ([] if level is None else [level])
    assert list(skew_of("node", None, NOW)) == []
