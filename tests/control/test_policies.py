"""Rules divide what the rules before them left, keep deadlines, and say at once where they cannot."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline.control.settings import POLICY_NAMES
from frostline.control.shares import (
    Amounts,
    Division,
    StageTable,
    chain_policies,
    deadlines,
    max_min,
    policies_of,
    priorities,
)

INF = float("inf")
EARLY_S = 3.0  # jobs are to be done so long before they must


def table(jobs, *, bytes_per_s=100.0, tenant_weight=(1.0, 1.0), now_s=0.0):
    """One row a stage: its demand and its job's tenant, weight, priority, end and bytes left."""
    base = {"demand": INF, "tenant": 0, "weight": 1.0, "priority": 0, "ends_at_s": INF, "left_bytes": 0.0}
    jobs = [{**base, **job} for job in jobs]
    column = {name: np.array([job[name] for job in jobs]) for name in base}
    demand = np.zeros((len(jobs), 5))
    demand[:, 1] = column["demand"]
    return StageTable(
        now_s=now_s,
        capacity=np.array(Amounts(bytes_per_s=bytes_per_s).row),
        demand=demand,
        job=np.arange(len(jobs)),
        jobs=[f"job{number}" for number in range(len(jobs))],
        tenant=column["tenant"],
        job_weight=column["weight"],
        tenant_weight=np.array(tenant_weight),
        priority=column["priority"],
        ends_at_s=column["ends_at_s"],
        left_bytes=column["left_bytes"],
    )


def bytes_given(table, *policies):
    division = Division.zero(table)
    for policy in policies:
        division = policy(table, division)
    return division.given[:, 1].tolist()


def test_tenants_divide_by_weight_and_their_jobs_divide_that():
    asked = table([{"tenant": 0}, {"tenant": 1, "weight": 3.0}, {"tenant": 1}], tenant_weight=(3.0, 1.0))
    assert bytes_given(asked, max_min) == pytest.approx([75, 18.75, 6.25])


def test_a_tenant_gains_nothing_by_more_jobs():
    asked = table([{"tenant": 0}] + [{"tenant": 1}] * 9)
    assert bytes_given(asked, max_min) == pytest.approx([50] + [50 / 9] * 9)


def test_greater_priorities_are_served_first_and_leave_the_rest():
    asked = table([{"demand": 70.0, "priority": 2}, {"demand": 20.0, "priority": 1}, {}, {}])
    assert bytes_given(asked, priorities) == pytest.approx([70, 20, 5, 5])


def test_a_job_with_a_deadline_gets_what_that_takes_and_no_more():
    asked = table([{"ends_at_s": 110.0, "left_bytes": 6000.0}, {}, {}], now_s=10.0)
    needed = 6000 / (110 - 10 - EARLY_S)
    assert bytes_given(asked, deadlines, max_min) == pytest.approx([needed, 50 - needed / 2, 50 - needed / 2])


def test_what_a_deadline_takes_is_found_again_as_time_passes():
    for now_s, left in ((0.0, 6000.0), (50.0, 4000.0), (75.0, 100.0)):
        asked = table([{"ends_at_s": 100.0, "left_bytes": left}, {}], now_s=now_s)
        assert bytes_given(asked, deadlines, max_min)[0] == pytest.approx(left / (100 - now_s - EARLY_S))


def test_a_job_that_moves_more_than_was_declared_divides_with_the_others():
    asked = table([{"ends_at_s": 100.0, "left_bytes": 0.0}, {}])
    assert bytes_given(asked, deadlines, max_min) == pytest.approx([50, 50])


def test_a_job_that_just_can_be_in_time_gets_all_there_is():
    asked = table([{"ends_at_s": 100.0, "left_bytes": 9900.0}, {}])
    division = chain_policies(asked, [deadlines, max_min])
    assert division.given[:, 1] == pytest.approx([100, 0])
    assert not division.notices


def test_a_deadline_that_cannot_be_kept_is_said_at_once_and_harms_nobody():
    asked = table([{"ends_at_s": 10.0, "left_bytes": 6000.0}, {}])
    division = chain_policies(asked, [deadlines, max_min])
    assert division.given[:, 1] == pytest.approx([50, 50])
    ((job, sentence),) = division.notices
    assert job == 0
    assert "job0 cannot end in time: it needs 600 B a second" in sentence.replace(" bytes", " B")


def test_of_several_deadlines_the_earliest_goes_first():
    asked = table([{"ends_at_s": 20.0, "left_bytes": 1600.0}, {"ends_at_s": 10.0, "left_bytes": 300.0}])
    division = chain_policies(asked, [deadlines, max_min])
    assert [job for job, _ in division.notices] == [0]
    assert division.given[1, 1] >= 30


def test_a_deadline_that_has_passed_is_no_division_by_nothing():
    asked = table([{"ends_at_s": 10.0, "left_bytes": 5.0}, {}], now_s=10.0)
    assert chain_policies(asked, [deadlines, max_min]).given[:, 1] == pytest.approx([50, 50])


def test_what_nobody_asked_for_is_given_by_weight():
    asked = table([{"demand": 10.0, "tenant": 0}, {"demand": 0.5, "tenant": 1}])
    assert chain_policies(asked, [max_min]).given[:, 1] == pytest.approx([54.75, 45.25])


def test_a_stage_that_never_uses_a_resource_gets_none_of_it():
    asked = table([{"demand": 10.0}, {"demand": 0.0}])
    assert chain_policies(asked, [max_min]).given[:, 1] == pytest.approx([100, 0])


JOB = st.fixed_dictionaries(
    {
        "demand": st.one_of(st.floats(0, 1e6), st.just(INF)),
        "tenant": st.integers(0, 1),
        "weight": st.floats(0.01, 100),
        "priority": st.integers(-2, 2),
        "ends_at_s": st.one_of(st.floats(0, 100), st.just(INF)),
        "left_bytes": st.floats(0, 1e6),
    }
)


@given(
    st.lists(JOB, min_size=1, max_size=12),
    st.lists(st.sampled_from(POLICY_NAMES), min_size=1, unique=True),
    st.floats(0, 1e6),
)
@settings(deadline=None)
def test_no_chain_of_rules_gives_more_than_there_is_or_less_than_all(jobs, names, bytes_per_s):
    asked = table(jobs, bytes_per_s=bytes_per_s, now_s=50.0)
    division = chain_policies(asked, policies_of(names))
    assert (division.given >= 0).all()
    all_of_it = bytes_per_s if any(job["demand"] > 0 for job in jobs) else 0.0
    assert division.given[:, 1].sum() == pytest.approx(all_of_it, rel=1e-9, abs=1e-9)
    assert division.given[:, [0, 2, 3, 4]].sum() == 0
