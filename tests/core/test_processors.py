"""Which cores and how much memory a process may use."""

import os

import pytest

from frostline.core.config import NodeSettings
from frostline.core.system import threads_waited_s, usable_cores, usable_memory_bytes
from frostline.engines.machine import hardware_name
from frostline.node.trials.queue import policy_of

GIB = 1 << 30


def test_a_process_uses_the_cores_that_it_is_pinned_to(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {5, 2}, raising=False)
    assert usable_cores() == (2, 5)
    assert NodeSettings().decode_threads == 2


@pytest.mark.parametrize(("count", "cores"), [(3, (0, 1, 2)), (None, (0,))])
def test_a_process_uses_all_cores_where_the_system_pins_none(monkeypatch, count, cores):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    assert usable_cores() == cores
    assert NodeSettings().compute_threads == len(cores)
    assert hardware_name("cpu").endswith(f", {len(cores)} threads")


def machine(root, groups: str, limits: dict[str, str]):
    """A machine's files, as its process sees them."""
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": limit for name, limit in limits.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "gib"),
    [
        ("0::/", {}, 64),
        ("0::/", {"memory.max": "max"}, 64),
        ("0::/", {"memory.max": str(3 * GIB)}, 3),
        ("0::/user/job", {"user/memory.max": str(5 * GIB), "user/job/memory.max": "max"}, 5),
        ("0::/user/job", {"user/memory.max": str(5 * GIB), "user/job/memory.max": str(9 * GIB)}, 5),
        ("8:pids:/x\n4:memory:/docker/a", {"memory/memory.limit_in_bytes": str(7 * GIB)}, 7),
        ("4:cpu,memory:/a", {"memory/a/memory.limit_in_bytes": str(2 * GIB), "cpu/a/memory.max": str(GIB)}, 2),
        ("4:memory:/a", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, 64),
    ],
)
def test_a_process_may_use_what_the_least_control_group_around_it_leaves(tmp_path, monkeypatch, groups, limits, gib):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 64 << 18, "SC_PAGE_SIZE": 4096}.get)
    assert usable_memory_bytes(machine(tmp_path, groups, limits)) == gib * GIB


def test_counts_all_cores_where_the_system_has_no_control_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 16 << 18, "SC_PAGE_SIZE": 4096}.get)
    assert usable_memory_bytes(tmp_path) == 16 * GIB


@pytest.mark.parametrize(("usable", "node"), [(2, 1), (8, 4), (12, 6), (24, 6), (64, 16), (1024, 256)])
def test_a_node_takes_a_quarter_of_the_memory_and_more_of_little(monkeypatch, usable, node):
    monkeypatch.setattr("frostline.core.config.usable_memory_bytes", lambda: usable * GIB)
    assert NodeSettings().memory_bytes == node * GIB


@pytest.mark.parametrize(("memory", "trial"), [(1, 1), (2, 2), (3, 2), (6, 3), (64, 32)])
def test_a_trial_of_an_engine_has_half_of_a_large_nodes_memory(memory, trial):
    assert policy_of(NodeSettings(memory_bytes=memory * GIB)).max_bytes == trial * GIB


def test_threads_waited_for_a_core_as_long_as_the_scheduler_says(tmp_path):
    for thread, text in {"11": "500000000 2500000000 7", "12": "1000000000 0 1", "13": ""}.items():
        (tmp_path / f"proc/self/task/{thread}").mkdir(parents=True)
        (tmp_path / f"proc/self/task/{thread}/schedstat").write_text(f"{text}\n" if text else "")
    assert threads_waited_s(tmp_path) == {11: 2.5, 12: 0.0}


def test_no_thread_is_known_where_the_system_does_not_count_it(tmp_path):
    assert threads_waited_s(tmp_path) == {}
