"""Nodes become what they should be one after another, and never fewer serve than must."""

import random

from hypothesis import given
from hypothesis import strategies as st

from frostline.ray.scaling import NodeView, Steps, next_steps


def nodes(*numbers, **about):
    return [NodeView(number=number, **about) for number in numbers]


def test_missing_nodes_are_started_and_surplus_ones_drained_at_once():
    assert next_steps(nodes(1, 3, 4), 3, {}, 0.0) == Steps(start=(0, 2), drain=(3, 4))


def test_nodes_that_are_as_they_should_be_are_left_alone():
    assert next_steps(nodes(0, 1), 2, {}, 0.0) == Steps()


def test_a_drained_node_stops_after_its_requests_are_answered():
    busy, idle = nodes(0, 1), [*nodes(0), *nodes(1, requests=3)]
    assert not next_steps(busy, 1, {1: 0.0}, 3.0).stop, "jobs may not have looked yet"
    assert not next_steps(idle, 1, {1: 0.0}, 5.0).stop, "requests are in work"
    assert next_steps(busy, 1, {1: 0.0}, 5.0).stop == (1,)
    assert next_steps(idle, 1, {1: 0.0}, 61.0).stop == (1,), "a request hangs"


def test_a_drained_node_that_serves_nobody_is_stopped_at_once():
    assert next_steps(nodes(0, is_ready=False), 1, {0: 0.0}, 0.0).stop == (0,)


def test_outdated_nodes_are_drained_one_at_a_time():
    old = nodes(0, 1, 2, is_current=False)
    assert next_steps(old, 3, {}, 0.0) == Steps(drain=(0,))
    assert next_steps(old, 3, {0: 0.0}, 1.0) == Steps()
    assert next_steps(old[1:], 3, {}, 0.0) == Steps(start=(0,))
    assert next_steps([*nodes(0, is_ready=False), *old[1:]], 3, {}, 0.0) == Steps(), "the new one is not ready yet"
    assert next_steps([*nodes(0), *old[1:]], 3, {}, 0.0) == Steps(drain=(1,))


def test_an_outdated_node_that_serves_nobody_is_replaced_first():
    some = [*nodes(0, is_current=False), *nodes(1, is_current=False, is_ready=False)]
    assert next_steps(some, 2, {}, 0.0) == Steps(drain=(1,))


@given(
    before=st.dictionaries(st.integers(0, 7), st.booleans(), max_size=8),
    wanted=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_any_nodes_become_what_they_should_be_and_at_most_one_that_serves_is_away(before, wanted, seed):
    """Starting takes a while; nodes finish starting at random."""
    draw, now_s, draining = random.Random(seed), 0.0, {}
    there = {number: NodeView(number=number, is_current=is_current) for number, is_current in before.items()}
    enough = min(wanted, sum(number < wanted for number in there))
    for _ in range(400):
        steps = next_steps(list(there.values()), wanted, draining, now_s)
        for number in steps.start:
            assert number not in there
            there[number] = NodeView(number=number, is_ready=False)
        draining |= dict.fromkeys(steps.drain, now_s)
        for number in steps.stop:
            del there[number], draining[number]
        serving = [node for node in there.values() if node.is_ready and node.number not in draining]
        assert sum(node.number < wanted for node in serving) >= enough - 1
        if sorted(there) == list(range(wanted)) and all(node.is_current and node.is_ready for node in there.values()):
            assert next_steps(list(there.values()), wanted, draining, now_s) == Steps()
            return
        now_s += 1.0
        for number, node in there.items():
            if not node.is_ready and draw.random() < 0.3:
                there[number] = NodeView(number=number, is_current=node.is_current)
    raise AssertionError("it did not come about")
