"""Threads that wait for stores interrupt nobody who computes: on Linux, where the kernel has such a policy."""

import os
import subprocess
import sys
import threading

import pytest

from frostline.core.system import background, in_background

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")


def in_thread(call):
    """What a call gives in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def policy():
    return os.sched_getscheduler(0)


def test_a_thread_and_those_that_it_starts_are_in_the_background_and_no_other_is():
    def look():
        return in_background(), policy(), in_thread(policy)

    assert in_thread(look) == (True, os.SCHED_BATCH, os.SCHED_BATCH)
    assert policy() == os.SCHED_OTHER


def test_a_library_starts_its_threads_in_the_background_and_who_asked_for_it_stays():
    def look():
        with background():
            started = in_thread(policy)
        return started, policy()

    assert in_thread(look) == (os.SCHED_BATCH, os.SCHED_OTHER)


def test_keeps_the_scheduling_policy_that_a_thread_was_given():
    def look():
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        with background():
            within = policy()
        return in_background(), within, policy()

    assert in_thread(look) == (False, os.SCHED_IDLE, os.SCHED_IDLE)


def test_where_a_sandbox_forbids_it_nothing_happens(monkeypatch):
    def forbidden(*_):
        raise PermissionError("not in here")

    monkeypatch.setattr(os, "sched_setscheduler", forbidden)
    assert not in_background()
    with background():
        assert policy() == os.SCHED_OTHER


_JOB = """
import os, sys, threading
from pathlib import Path

import numpy as np
from PIL import Image

import frostline as fl
from frostline.preprocess import imagenet
from frostline.stores.cloud import memory_store

store = memory_store("memory://photographs", "photographs", "")
store.write("any", b"1")
store.read("any", 0, 1)

folder = Path(sys.argv[1])
(folder / "class").mkdir()
for number in range(8):
    noise = np.random.default_rng(number).integers(0, 255, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(folder / "class" / f"{number}.png")
with fl.offload(None, fl.Dataset(folder), preprocess=imagenet(32)) as job:
    batches = iter(job.arrays(4))
    next(batches)
    named = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        try:
            name = named.get(int(task)) or Path(f"/proc/self/task/{task}/comm").read_text().strip()
            print(name, os.sched_getscheduler(int(task)))
        except (FileNotFoundError, ProcessLookupError):
            pass  # a thread that has ended meanwhile
"""


@pytest.mark.usefixtures("plain_starts")
def test_reading_threads_are_in_the_background_and_the_loop_is_not(tmp_path):
    command = [sys.executable, "-c", _JOB, str(tmp_path)]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=200).stdout
    policies = [line.rsplit(" ", 1) for line in found.splitlines()]

    def of(name):
        return {int(policy) for thread, policy in policies if thread.startswith(name)}

    assert of("MainThread") == {os.SCHED_OTHER}
    assert of("tokio") == {os.SCHED_BATCH}
    assert of("frostline-prefetch") == {os.SCHED_BATCH}
