"""What holds a job back, named from how busy each part was, with the gain that the utilisation law gives."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.planning.replanning import (
    CACHE,
    LINK,
    NODE,
    NOTHING_YET,
    PROCESSORS,
    QUOTA,
    ROUND_TRIP,
    SHARE,
    STORE,
    TRAINER,
    Usage,
    diagnose,
)


def usage(**fields):
    """Ten seconds of a job at 100 samples a second, whose loop waits for 6 of them; parts cost what they were busy."""
    busy = fields.get("busy", {})
    costs_s = {part: share / 100 for part, share in busy.items() if part != PROCESSORS}
    costs_s |= {PROCESSORS: (busy[PROCESSORS] - fields.get("others", 0.0)) / 100} if PROCESSORS in busy else {}
    plain = {"seconds": 10.0, "samples": 1000, "arrived": 1000, "stall_s": 6.0, "requests": 40, "request_s": 0.2}
    return Usage(**{**plain, "costs_s": costs_s, **fields})


@pytest.mark.parametrize(
    ("fields", "part", "gain"),
    [
        ({"stall_s": 0.5, "busy": {NODE: 0.25}}, TRAINER, 4.0),
        ({"busy": {LINK: 0.96, NODE: 0.5, PROCESSORS: 0.3}}, LINK, 0.96 / 0.5),
        ({"busy": {LINK: 0.4, NODE: 0.95, PROCESSORS: 0.3}}, NODE, 2.5),
        ({"busy": {LINK: 0.1, NODE: 0.2, PROCESSORS: 0.99}, "others": 0.04}, PROCESSORS, 2.5),
        ({"busy": {NODE: 0.9, PROCESSORS: 1.0}, "others": 0.5, "same_host": True}, PROCESSORS, 2.0),
        ({"busy": {PROCESSORS: 1.0}, "others": 0.5}, PROCESSORS, 2.0),
        ({"busy": {NODE: 0.9, PROCESSORS: 0.95}, "others": 0.05, "same_host": True}, PROCESSORS, 1 / 0.9),
        ({"busy": {LINK: 0.1, NODE: 0.2, PROCESSORS: 0.3}}, STORE, 2.5),
        ({"busy": {LINK: 0.1, NODE: 0.2, PROCESSORS: 0.3}, "round_trip_s": 0.15}, ROUND_TRIP, 2.5),
        # Of 0.8 s the node and the link explain 25 samples of 3 ms, and nothing 0.725 s less the way.
        ({"busy": {LINK: 0.1, NODE: 0.2}, "request_s": 0.8, "round_trip_s": 0.35}, STORE, 2.5),
        ({"busy": {LINK: 0.1, NODE: 0.2}, "request_s": 0.8, "round_trip_s": 0.37}, ROUND_TRIP, 2.5),
        ({"busy": {NODE: 0.5}, "refusals": 30}, QUOTA, 2.0),
        ({"busy": {NODE: 0.5}, "held_s": 6.0}, SHARE, 2.0),
        ({"busy": {NODE: 0.95}, "fetched_again": 900}, CACHE, 2.5),
    ],
)
def test_names_the_busy_part_and_the_gain_that_the_next_one_allows(fields, part, gain):
    found = diagnose(usage(**fields))
    assert found.held_back_by == part
    assert found.gain == pytest.approx(gain)
    assert found.mend


def test_the_gain_is_over_what_arrives_while_the_window_fills():
    """The loop took 1,000 samples, and the link, which is busy all the time, brought 2,000."""
    found = diagnose(usage(arrived=2000, busy={LINK: 1.0}, costs_s={LINK: 0.005, NODE: 0.0025}, stall_s=9.9))
    assert found.gain == pytest.approx(2.0)


def test_a_loop_that_took_no_time_would_take_no_processor_either():
    fields = {"stall_s": 0.0, "busy": {PROCESSORS: 0.9}, "loop_cores_s": 0.007}
    assert diagnose(usage(**fields)).gain == pytest.approx(5.0)


def test_work_that_was_done_ahead_costs_a_sample_no_more():
    """The node has computed twice as many samples as the loop took: it could do so for twice as many again."""
    found = diagnose(usage(stall_s=0.0, arrived=2000, busy={NODE: 0.5}, costs_s={NODE: 0.0025}))
    assert found.held_back_by == TRAINER
    assert found.gain == pytest.approx(4.0)


def test_says_nothing_before_anything_was_measured():
    for little in (None, usage(seconds=0.5), usage(samples=0)):
        found = diagnose(little)
        assert found.held_back_by == NOTHING_YET
        assert found.mend is None
        assert found.gain == 1.0


def test_a_few_refusals_are_no_quota_and_few_samples_that_come_again_no_full_cache():
    assert diagnose(usage(busy={LINK: 0.9}, refusals=1, fetched_again=100)).held_back_by == LINK


def test_the_sentence_has_the_evidence_and_stands_alone():
    said = str(diagnose(usage(busy={LINK: 1.0, NODE: 0.5})))
    assert said.startswith("held back by the link (busy 100.0 % of the time): the loop waits 60.0 % of the time")
    also = "the node's compute had nothing to do 50.0 % of the time"
    assert f"without that, up to 2.0 × this rate; {also}. What to do: " in said
    assert "--accuracy" in said


@pytest.mark.parametrize(
    ("busy", "idle"),
    [
        ({PROCESSORS: 1.0, NODE: 0.25, LINK: 0.1}, {NODE: 0.75}),
        ({NODE: 0.95, PROCESSORS: 0.5, LINK: 0.1}, {PROCESSORS: 0.5}),
        ({LINK: 0.95, NODE: 0.5, PROCESSORS: 0.5}, {NODE: 0.5}),
        ({NODE: 0.95, PROCESSORS: 0.93}, {}),
        ({NODE: 0.95}, {}),
        ({LINK: 0.1, NODE: 0.2, PROCESSORS: 0.3}, {}),  # the store: both wait for it
    ],
)
def test_names_the_side_that_had_nothing_to_do_while_the_other_held_the_job_back(busy, idle):
    found = diagnose(usage(busy=busy))
    assert found.idle == pytest.approx(idle)
    assert ("had nothing to do" in found.says) == bool(idle)
    assert not diagnose(usage(busy=busy, same_host=True)).idle, "it works on the same processors"


@pytest.mark.parametrize(
    ("fields", "untried"),
    [
        ({"busy": {NODE: 0.95}, "untried": (NODE, PROCESSORS)}, (NODE,)),
        ({"busy": {PROCESSORS: 0.95}, "untried": (NODE, PROCESSORS)}, (PROCESSORS,)),
        ({"busy": {PROCESSORS: 0.95}, "untried": (NODE,), "same_host": True}, (NODE,)),
        ({"busy": {LINK: 0.95}, "untried": (NODE, PROCESSORS)}, ()),
        ({"busy": {NODE: 0.95}}, ()),
    ],
)
def test_names_an_engine_that_nobody_tried_where_it_holds_the_job_back(fields, untried):
    found = diagnose(usage(**fields))
    assert found.untried == untried
    assert found.says.count("no faster engine was tried") == len(untried)


def test_json_has_plain_values():
    found = json.loads(json.dumps(diagnose(usage(busy={LINK: 0.97, NODE: 0.5}, untried=(NODE,))).to_json()))
    assert found["held_back_by"] == LINK
    assert found["idle"] == {NODE: 0.5}


shares = st.floats(0.0, 1.0)


@given(waiting=shares, link=shares, node=shares, processors=shares, others=shares, same_host=st.booleans())
def test_whatever_was_measured_the_gain_is_finite_and_no_loss(waiting, link, node, processors, others, same_host):
    found = diagnose(
        usage(
            stall_s=10 * waiting,
            busy={LINK: link, NODE: node, PROCESSORS: processors},
            others=others * processors,
            same_host=same_host,
        )
    )
    assert 1.0 <= found.gain <= 100.0


@given(link=st.floats(0.85, 1.0), node=st.floats(0.0, 0.8), noise=st.floats(-0.04, 0.04))
def test_small_changes_of_what_is_measured_name_no_other_part(link, node, noise):
    before = diagnose(usage(busy={LINK: link, NODE: node}))
    after = diagnose(usage(busy={LINK: min(1.0, link + noise), NODE: max(0.0, node + noise)}))
    assert before.held_back_by == after.held_back_by == LINK


def test_says_that_little_is_gained_where_another_part_is_as_busy():
    assert "another part would hold it back as much" in str(diagnose(usage(busy={LINK: 0.97, NODE: 0.96})))
