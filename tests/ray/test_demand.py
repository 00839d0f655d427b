"""How many nodes there should be follows how busy they are: up soon, down late, within bounds."""

from hypothesis import given
from hypothesis import strategies as st

from frostline.ray.scaling import Load, busy_share, nodes_for

IDLE = {"compute_s": 0.0, "train_s": 0.0, "decode_s": 0.0}


def loads(*busy, nodes=2, every_s=1.0):
    return [Load(at_s=place * every_s, nodes=nodes, busy=share) for place, share in enumerate(busy)]


def wanted(some, current=2, min_nodes=1, max_nodes=10):
    now_s = some[-1].at_s if some else 0.0
    return nodes_for(some, now_s, current=current, min_nodes=min_nodes, max_nodes=max_nodes)


def test_without_a_measurement_nothing_changes():
    assert wanted([]) == 2


def test_nodes_that_are_busy_all_the_time_get_help_after_some_seconds():
    assert wanted(loads(*[2.0] * 5)) == 2, "a burst is none yet"
    assert wanted(loads(*[2.0] * 17)) == 3


def test_nodes_near_their_target_stay_as_many():
    assert wanted(loads(*[2 * 0.75] * 400)) == 2
    assert wanted(loads(*[2 * 0.65] * 400)) == 2


def test_idle_nodes_go_only_after_minutes_without_demand():
    assert wanted(loads(*[1.4] * 10, *[0.0] * 200)) == 2
    assert wanted(loads(*[0.0] * 400)) == 1


def test_after_less_demand_as_many_stay_as_the_busiest_moment_of_some_minutes_needs():
    some = loads(*[0.0] * 150, 3.4, *[0.0] * 150, nodes=8)
    assert wanted(some, current=8) == 5


def test_bounds_are_kept():
    assert wanted(loads(*[2.0] * 400), max_nodes=2) == 2
    assert wanted(loads(*[0.0] * 400), min_nodes=2) == 2
    assert wanted([], current=1, min_nodes=3) == 3


@given(
    some=st.lists(st.floats(0, 1), max_size=60),
    current=st.integers(1, 10),
    bounds=st.tuples(st.integers(1, 10), st.integers(0, 5)),
)
def test_any_demand_gives_a_number_of_nodes_within_its_bounds(some, current, bounds):
    low, high = bounds[0], bounds[0] + bounds[1]
    measured = [Load(at_s=10.0 * place, nodes=current, busy=share * current) for place, share in enumerate(some)]
    found = wanted(measured, current, low, high)
    assert low <= found <= high
    assert found <= max(low, -(-current * 10 // 7))


def test_a_node_is_as_busy_as_its_device_or_its_decoders():
    assert busy_share(IDLE, {**IDLE, "compute_s": 1.0, "train_s": 0.5}, 2.0, 4) == 0.75
    assert busy_share(IDLE, {**IDLE, "decode_s": 4.0, "compute_s": 0.1}, 2.0, 4) == 0.5
    assert busy_share(IDLE, {**IDLE, "decode_s": 40.0}, 2.0, 4) == 1.0


def test_a_node_that_was_started_again_counts_as_idle_once():
    assert busy_share({**IDLE, "compute_s": 9.0}, {**IDLE, "compute_s": 1.0}, 2.0, 4) == 0.0
    assert busy_share(IDLE, IDLE, 0.0, 4) == 0.0
