"""Changes of a control plane while it runs: each is checked, told with its author, and in the next decision."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.control.changes import ControlChanges
from frostline.control.messages import ControlledStage
from frostline.control.settings import ControlledJob, ControlSettings, ControlTenant
from frostline.control.shares import Amounts
from frostline.control.state import ControlState
from frostline.core.errors import BadRequest, SettingError, UnknownName

TENANTS = tuple(
    ControlTenant(name=name, token_sha256=f"{number:064x}", sees_all=name == "ann", may_change=name == "ann")
    for number, name in enumerate(("ann", "bob"))
)
JOBS = (ControlledJob(name="night", tenant="ann", weight=2.0),)
FILE = ControlSettings(capacity=Amounts(bytes_per_s=1000.0, requests=64.0), tenants=TENANTS, jobs=JOBS, lease_s=10.0)


def plane(changes=None):
    return ControlState(FILE, changes=changes, now_s=0.0)


def settle(state, stages, now_s, rounds=4):
    for number in range(rounds):
        for tenant, stage in stages:
            stage.take(state.receive(tenant, stage.report(Amounts()), now_s + number), now_s + number)
    return [stage.in_force.bytes_per_s for _, stage in stages]


def two_stages():
    return [("ann", ControlledStage(stage="a", job="night")), ("bob", ControlledStage(stage="b", job="day"))]


def sentences(state, tenant=None):
    return [event.sentence for event in state.events.events_for(tenant)]


def test_a_weight_is_in_the_next_decision_and_told_with_who_changed_it():
    state, stages = plane(), two_stages()
    assert settle(state, stages, 0.0) == [500, 500]
    state.change_tenant("ann", "bob", {"weight": 3}, 5.0)
    assert settle(state, stages, 5.1) == [250, 750]
    assert "ann changed the weight of tenant bob from 1 to 3" in sentences(state)
    assert "job day may use 750 B a second instead of 500 B: the weight of bob was changed" in sentences(state, "bob")
    assert sentences(state, "ann")[-1].endswith("instead of 500 B: the weight of another tenant was changed")


def test_the_same_change_twice_is_told_once_and_null_goes_back_to_the_file():
    state = plane()
    for _ in range(2):
        state.change_job("ann", "ann", "night", {"weight": 5, "priority": 1}, 1.0)
    assert sentences(state) == ["ann changed job night of tenant ann: weight from 2 to 5, priority from 0 to 1"]
    state.change_job("ann", "ann", "night", {"weight": None, "priority": None}, 2.0)
    assert state.changes == ControlChanges()
    assert state.find_job("ann", "night") == JOBS[0]


def test_a_job_that_only_stages_name_can_be_given_a_deadline():
    state, stages = plane(), two_stages()
    settle(state, stages, 0.0)
    state.change_job("ann", "bob", "day", {"ends_at": "1970-01-01T00:01:40Z", "work_bytes": 75_000}, 5.0)
    assert state.find_job("bob", "day").ends_at_s == 100.0
    mine, due = settle(state, stages, 5.0)
    assert due > 750 > mine
    assert "its end from never to 1970-01-01T00:01:40+00:00" in " ".join(sentences(state, "bob"))


def test_a_capacity_that_shrinks_is_given_to_nobody_before_stages_hold_less():
    state, stages = plane(), two_stages()
    settle(state, stages, 0.0)
    state.change_capacity("ann", {"bytes_per_s": 400}, 5.0)
    newcomer = ControlledStage(stage="c", job="late")
    newcomer.take(state.receive("bob", newcomer.report(Amounts()), 5.1), 5.1)
    assert newcomer.in_force.bytes_per_s == 0
    assert state.held.bytes_per_s == 1000, "the others may be using it still"
    assert sum(settle(state, [*stages, ("bob", newcomer)], 5.2)) <= 400
    assert state.held.bytes_per_s <= 400


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abcd"), st.floats(1, 2000)), max_size=12))
def test_what_is_granted_never_exceeds_the_greatest_capacity_in_force(steps):
    """All within one lease: what a silent stage holds after that is given to others."""
    state, there, now_s = plane(), {}, 0.0
    allowed = 1000.0
    for name, capacity in steps:
        now_s += FILE.lease_s / 12
        state.change_capacity("ann", {"bytes_per_s": capacity}, now_s)
        in_force = sum(stage.in_force.bytes_per_s for stage in there.values() if stage.version)
        allowed = max(capacity, in_force)
        stage = there.setdefault(name, ControlledStage(stage=name, job=name))
        stage.take(state.receive("bob", stage.report(Amounts()), now_s), now_s)
        assert sum(other.in_force.bytes_per_s for other in there.values() if other.version) <= allowed * (1 + 1e-9)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda state: state.change_tenant("ann", "bob", {"weight": 0}, 0.0),
            "weight of tenant bob must be from 0.001",
        ),
        (
            lambda state: state.change_tenant("ann", "bob", {"weight": True}, 0.0),
            "weight must be null, a finite number",
        ),
        (lambda state: state.change_tenant("ann", "bob", {"weight": float("nan")}, 0.0), "a finite number"),
        (lambda state: state.change_tenant("ann", "bob", {"weight": "3"}, 0.0), "weight takes a number, not '3'"),
        (lambda state: state.change_tenant("ann", "bob", {"weight": 10**400}, 0.0), "a finite number"),
        (lambda state: state.change_tenant("ann", "bob", {"token": "x"}, 0.0), "has no field 'token'"),
        (lambda state: state.change_tenant("ann", "bob", {}, 0.0), "one or more of weight"),
        (lambda state: state.change_tenant("ann", "bob", [], 0.0), "a change is an object"),
        (lambda state: state.change_job("ann", "ann", "night", {"priority": 10**12}, 0.0), "priority of job night"),
        (lambda state: state.change_job("ann", "ann", "night", {"ends_at": "2030-01-01"}, 0.0), "with its offset"),
        (lambda state: state.change_job("ann", "ann", "night", {"ends_at": 5}, 0.0), "with its offset"),
        (lambda state: state.change_job("ann", "ann", "night", {"ends_at": "2030-01-01T00:00Z"}, 0.0), "work_bytes"),
        (
            lambda state: state.change_capacity("ann", {"bytes_per_s": -1}, 0.0),
            "bytes_per_s must be a finite number from 0",
        ),
        (lambda state: state.change_capacity("ann", {"memory_bytes": 1}, 0.0), "memory_bytes is not divided here"),
    ],
)
def test_a_change_that_makes_no_sense_is_refused_by_its_field_and_changes_nothing(change, said):
    state = plane()
    with pytest.raises(BadRequest, match=said):
        change(state)
    assert state.changes == ControlChanges()
    assert sentences(state) == []


def test_unknown_tenants_and_jobs_are_named():
    with pytest.raises(UnknownName, match="no tenant 'carl'"):
        plane().change_tenant("ann", "carl", {"weight": 2}, 0.0)
    with pytest.raises(UnknownName, match="no job 'x' of a tenant 'bob'"):
        plane().change_job("ann", "bob", "x", {"weight": 2}, 0.0)


def test_changes_are_the_same_after_being_written_and_go_before_the_file():
    state = plane()
    state.change_capacity("ann", {"requests": 8}, 0.0)
    state.change_tenant("ann", "ann", {"weight": 4}, 0.0)
    state.change_job("ann", "ann", "night", {"ends_at": "2030-01-01T00:00:00+01:00", "work_bytes": 1e9}, 0.0)
    again = plane(ControlChanges.from_json(state.changes.to_json()))
    assert again.settings == state.settings
    assert again.settings.capacity.requests == 8


def test_changes_that_no_longer_fit_the_file_are_refused():
    state = plane()
    state.change_tenant("ann", "bob", {"weight": 4}, 0.0)
    alone = ControlSettings(capacity=FILE.capacity, tenants=TENANTS[:1])
    assert state.changes.apply(alone).weights == {"ann": 1}
    state.change_job("ann", "ann", "night", {"ends_at": "2030-01-01T00:00:00Z", "work_bytes": 1e9}, 0.0)
    with pytest.raises(SettingError, match="needs the policy deadlines"):
        state.changes.apply(ControlSettings(capacity=FILE.capacity, tenants=TENANTS, policies=("max_min",)))


def test_who_may_change_must_see_everybody():
    with pytest.raises(SettingError, match="set sees_all too"):
        ControlTenant(name="ann", token_sha256="0" * 64, may_change=True)
