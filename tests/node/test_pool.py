"""A memory pool: released memory wakes only the thread that gets it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from frostline.node.memory import Cancelled, Pool
from support.nodes import until


def test_released_memory_wakes_only_the_thread_that_gets_it():
    pool = Pool(100)
    held = [pool.reserve(50, lambda: False), pool.reserve(50, lambda: False)]
    looked = [0] * 8

    def wait(number):
        def look():
            looked[number] += 1
            return False

        return pool.reserve(50, look)

    with ThreadPoolExecutor(8) as threads:
        waiting = []
        for number in range(8):
            waiting.append(threads.submit(wait, number))
            until(lambda: pool.statistics().waiting == len(waiting))
        until(lambda: all(looked))
        before = list(looked)
        held[0].shrink(10)
        held[0].release()
        first = waiting[0].result()
        assert looked[1:] == before[1:]
        for reservation in (held[1], first):
            reservation.release()
        for future in waiting[1:]:
            future.result().release()
    assert pool.statistics().reserved_bytes == 0


def test_a_cancelled_wait_ends_and_those_behind_it_go_on():
    pool = Pool(100)
    held = pool.reserve(60, lambda: False)
    cut = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(pool.reserve, 90, cut.is_set)
        until(lambda: pool.statistics().waiting == 1)
        small = threads.submit(pool.reserve, 40, lambda: False)
        until(lambda: pool.statistics().waiting == 2)
        cut.set()
        pool.wake()
        with pytest.raises(Cancelled):
            large.result()
        small.result().release()
    held.release()
    assert pool.statistics().reserved_bytes == 0


def test_a_wait_that_timed_out_leaves_the_memory_to_others():
    pool = Pool(100)
    with pool.reserve(60, lambda: False):
        with pytest.raises(Cancelled):
            pool.reserve(90, lambda: False, longest_s=0.01)
        pool.reserve(40, lambda: False).release()
    assert pool.statistics().waiting == 0
