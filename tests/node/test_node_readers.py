import threading
from concurrent.futures import wait

import pytest

from frostline.core.errors import Unavailable
from frostline.node.memory import Readers


def held(lane, count, go):
    """Reads that do not end before they are told to."""
    begun = [threading.Event() for _ in range(count)]
    return [lane.submit(lambda event=event: (event.set(), go.wait(60))) for event in begun], begun


def test_a_tenant_whose_store_hangs_leaves_threads_to_others():
    go = threading.Event()
    readers = Readers(threads=4, maximum=2)
    try:
        slow, begun = held(readers.lane("slow"), 50, go)
        assert begun[0].wait(60)
        assert begun[1].wait(60)
        quick = [readers.lane("quick").submit(lambda number=number: number) for number in range(50)]
        assert [future.result(60) for future in quick] == list(range(50))
        assert sum(event.is_set() for event in begun) == 2
    finally:
        go.set()
        readers.close()
    assert all(future.done() for future in slow)


def test_tenants_alternate_however_much_one_has_queued():
    go, order = threading.Event(), []
    readers = Readers(threads=1, maximum=1)
    try:
        (first,), _ = held(readers.lane("first"), 1, go)
        made = [readers.lane(name).submit(order.append, name) for name in ["many"] * 5 + ["few", "few"]]
        go.set()
        wait([first, *made], 20)
    finally:
        readers.close()
    assert order == ["many", "few", "many", "few", "many", "many", "many"]


def test_cancelled_tasks_do_not_run_and_failed_ones_pass_their_error_on():
    go, done = threading.Event(), []
    readers = Readers(threads=1, maximum=1)
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


def test_refuses_tasks_while_the_node_stops():
    readers = Readers(2, 1)
    readers.close()
    with pytest.raises(Unavailable, match="the node is stopping"):
        readers.lane("ann").submit(int)


def test_urgent_tasks_run_before_the_tenants_earlier_ones():
    go, order = threading.Event(), []
    readers = Readers(threads=1, maximum=1)
    try:
        (first,), begun = held(readers.lane("one"), 1, go)
        assert begun[0].wait(60)
        made = [readers.lane("one").submit(order.append, number) for number in range(3)]
        made += [readers.lane("one", is_urgent=True).submit(order.append, f"urgent {letter}") for letter in "ab"]
        go.set()
        wait([first, *made], 20)
    finally:
        readers.close()
    assert order == ["urgent a", "urgent b", 0, 1, 2]
