import threading
from concurrent.futures import wait

import pytest

from frostline.errors import Unavailable
from frostline.node.scheduling.read_pool import Readers


def held(lane, count, go):
    """Reads that do not end before they are told to."""
    begun = [threading.Event() for _ in range(count)]
    return [lane.submit(lambda one=one: (one.set(), go.wait(60))) for one in begun], begun


def test_a_tenant_whose_store_hangs_leaves_threads_to_others():
    go = threading.Event()
    readers = Readers(threads=4, most=2)
    try:
        slow, begun = held(readers.lane("slow"), 50, go)
        assert begun[0].wait(60)
        assert begun[1].wait(60)
        quick = [readers.lane("quick").submit(lambda number=number: number) for number in range(50)]
        assert [one.result(60) for one in quick] == list(range(50))
        assert sum(one.is_set() for one in begun) == 2
    finally:
        go.set()
        readers.close()
    assert all(one.done() for one in slow)


def test_tenants_take_turns_however_much_one_has_asked_for():
    go, order = threading.Event(), []
    readers = Readers(threads=1, most=1)
    try:
        (first,), _ = held(readers.lane("first"), 1, go)
        made = [readers.lane(name).submit(order.append, name) for name in ["many"] * 5 + ["few", "few"]]
        go.set()
        wait([first, *made], 20)
    finally:
        readers.close()
    assert order == ["many", "few", "many", "few", "many", "many", "many"]


def test_what_is_cancelled_is_not_done_and_what_fails_tells_who_waits():
    go, done = threading.Event(), []
    readers = Readers(threads=1, most=1)
    lane = readers.lane("one")
    try:
        (first,), begun = held(lane, 1, go)
        assert begun[0].wait(60)
        cancelled, failing, last = (
            lane.submit(done.append, 1),
            lane.submit(lambda: 1 / 0),
            lane.submit(done.append, 2),
        )
        assert cancelled.cancel()
        go.set()
        with pytest.raises(ZeroDivisionError):
            failing.result(60)
        last.result(60)
    finally:
        readers.close()
    assert first.done()
    assert done == [2]


def test_what_comes_when_the_node_is_stopping_is_told_so():
    readers = Readers(2, 1)
    readers.close()
    with pytest.raises(Unavailable, match="the node is stopping"):
        readers.lane("ann").submit(int)


def test_what_is_urgent_is_done_before_what_the_tenant_asked_for_earlier():
    go, order = threading.Event(), []
    readers = Readers(threads=1, most=1)
    try:
        (first,), begun = held(readers.lane("one"), 1, go)
        assert begun[0].wait(60)
        made = [readers.lane("one").submit(order.append, number) for number in range(3)]
        made += [readers.lane("one", is_urgent=True).submit(order.append, f"urgent {one}") for one in "ab"]
        go.set()
        wait([first, *made], 20)
    finally:
        readers.close()
    assert order == ["urgent a", "urgent b", 0, 1, 2]
