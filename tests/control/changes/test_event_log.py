"""Events of a control plane: what happened and why, the latest of each tenant, to those whose stages they are about."""

from dataclasses import replace

from frostline.control.changes import MAX_EVENTS, ControlEventLog, EventLines
from frostline.control.messages import ControlledStage
from frostline.control.settings import ControlledJob, ControlSettings, ControlTenant
from frostline.control.shares import Amounts
from frostline.control.state import ControlState

TENANTS = tuple(ControlTenant(name=name, token_sha256=f"{place:064x}") for place, name in enumerate(("ann", "bob")))
EVERYTHING = Amounts()
SETTINGS = ControlSettings(capacity=Amounts(bytes_per_s=1000.0), tenants=TENANTS, lease_s=10.0)


def report(state, tenant, stage, now_s, demand=EVERYTHING, **said):
    stage.take(state.receive(tenant, stage.report(demand, **said), now_s), now_s)


def kinds(state, tenant=None):
    return [(event.kind, event.sentence) for event in state.events.events_for(tenant)]


def test_stages_join_end_and_are_lost_and_others_are_told_no_names():
    state = ControlState(SETTINGS, now_s=0.0)
    mine, other = ControlledStage(stage="a", job="x"), ControlledStage(stage="b", job="y")
    report(state, "ann", mine, 0.0)
    report(state, "bob", other, 1.0)
    report(state, "bob", other, 2.0, has_ended=True)
    for now_s in (3.0, 11.0, 14.0):
        report(state, "ann", mine, now_s)
    silent = ControlledStage(stage="c", job="z")
    report(state, "bob", silent, 14.0)
    report(state, "ann", mine, 30.0)
    assert [kind for kind, _ in kinds(state, "bob")] == ["joined", "ended", "joined", "lost"]
    assert kinds(state, "bob")[-1][1] == (
        "window c of job z was lost: nothing was heard of it for 10 s, others have its share"
    )
    own = [sentence for kind, sentence in kinds(state, "ann") if kind == "share"]
    assert own[0] == "job x may use 500 B a second instead of 1.00 kB: a stage of another tenant joined"
    assert own[1] == "job x may use 1.00 kB a second instead of 500 B: a stage of another tenant ended"
    assert "bob" not in "".join(own)
    assert len(kinds(state)) == len(kinds(state, "ann")) + len(kinds(state, "bob"))


def test_a_job_that_is_left_what_it_wants_is_told_nothing():
    state = ControlState(SETTINGS, now_s=0.0)
    idle, other = ControlledStage(stage="a", job="x"), ControlledStage(stage="b", job="y")
    for now_s in (0.0, 1.0):
        report(state, "ann", idle, now_s, Amounts(bytes_per_s=1.0))
    for now_s in (2.0, 3.0, 4.0):
        report(state, "bob", other, now_s)
        report(state, "ann", idle, now_s, Amounts(bytes_per_s=1.0))
    assert idle.in_force.bytes_per_s == 1.0
    assert [kind for kind, _ in kinds(state, "ann")] == ["joined"]


def test_a_deadline_that_cannot_be_kept_is_an_event_once_and_so_is_that_it_can_again():
    late = ControlledJob(name="late", tenant="bob", ends_at_s=100.0, work_bytes=1e9)
    state, stage = ControlState(replace(SETTINGS, jobs=(late,)), now_s=0.0), ControlledStage(stage="a", job="late")
    for now_s in (0.0, 1.0, 2.0):
        report(state, "bob", stage, now_s)
    assert [kind for kind, _ in kinds(state, "bob")] == ["joined", "late"]
    state.change_job("ann", "bob", "late", {"work_bytes": 1000}, 3.0)
    report(state, "bob", stage, 3.0)
    assert [kind for kind, _ in kinds(state, "bob")] == ["joined", "late", "changed", "in_time"]


def test_the_latest_events_of_each_tenant_are_kept_whatever_others_do():
    log = ControlEventLog()
    log.add("joined", "ann", "the only one of ann", 0.0)
    for number in range(MAX_EVENTS + 5):
        log.add("joined", "bob", f"event {number}", 1.0)
    assert [event.sentence for event in log.events_for("ann")] == ["the only one of ann"]
    assert len(log.events_for("bob")) == len(log.events_for(None)) == MAX_EVENTS
    unsaved = log.take_unsaved()
    assert [number for number, event in unsaved.items() if event is None] == [2, 3, 4, 5, 6]
    assert log.take_unsaved() == {}
    again = ControlEventLog(event for event in unsaved.values() if event is not None)
    assert again.events_for(None) == log.events_for(None)
    again.add("ended", "ann", "a later one", 2.0)
    assert again.events_for("ann")[-1].number == MAX_EVENTS + 7


def test_a_log_has_a_bounded_number_of_lines_for_each_tenant_and_says_what_it_lacks():
    lines = EventLines()
    admitted = [lines.admit("ann", 0.05 * number) for number in range(1000)]
    assert admitted == [0] * 256 + [None] * 744
    assert lines.admit("bob", 50.0) == 0
    assert [lines.admit("ann", 60.0) for _ in range(2)] == [744, 0]
    assert lines.admit("ann", 500.0) == 0
