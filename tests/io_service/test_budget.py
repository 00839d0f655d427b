"""Bytes under way are shared fairly, within their bound, and nobody stands still."""

from hypothesis import given
from hypothesis import strategies as st

from frostline.io_service.rows import InFlightBudget

TOTAL = 1000


def test_a_job_alone_has_all_of_it():
    budget = InFlightBudget(TOTAL)
    tickets = [budget.ask("a", 100) for _ in range(12)]
    assert budget.take_granted() == tickets[:10]
    budget.end(tickets[0])
    assert budget.take_granted() == tickets[10:11]


def test_jobs_that_want_more_than_there_is_come_to_have_the_same():
    budget = InFlightBudget(TOTAL)
    greedy = [budget.ask("greedy", 100) for _ in range(30)]
    assert len(budget.take_granted()) == 10
    for _ in range(30):
        budget.ask("late", 100)
    assert len(budget.take_granted()) == 1  # one at once, so that it does not stand still
    for ticket in greedy[:6]:
        budget.end(ticket)
        budget.take_granted()
    used = {job: item.expected_bytes for job, item in budget.jobs().items()}
    assert used == {"greedy": 500, "late": 500}


def test_grants_less_where_less_is_wanted():
    budget = InFlightBudget(TOTAL)
    for _ in range(50):
        budget.ask("greedy", 100)
    modest = [budget.ask("modest", 100) for _ in range(2)]
    granted = set(budget.take_granted())
    assert granted.issuperset(modest)
    assert len(granted) == 10


def test_bounds_change_while_requests_are_under_way():
    budget = InFlightBudget(TOTAL)
    tickets = [budget.ask("a", 100) for _ in range(8)]
    budget.bound(TOTAL, 3)
    assert budget.take_granted() == tickets[:3]
    other = budget.ask("b", 100)
    assert budget.take_granted() == [other], "each job may make one"
    budget.bound(600, 100)
    assert budget.take_granted() == tickets[3:5]


def test_borrowed_memory_counts_until_it_is_returned():
    budget = InFlightBudget(TOTAL)
    first = budget.ask("a", 1000)
    second = budget.ask("b", 500)
    third = budget.ask("b", 500)
    assert set(budget.take_granted()) == {first, second}
    budget.lend(first, 900)
    budget.end(first)
    assert budget.take_granted() == []
    budget.give_back("a", 900)
    assert budget.take_granted() == [third]


def test_a_job_that_holds_the_whole_budget_may_still_make_one_request():
    budget = InFlightBudget(TOTAL)
    early = budget.ask("a", 1000)
    assert budget.take_granted() == [early]
    budget.lend(early, 1000)
    budget.end(early)  # held, because what comes before it in the order is still missing
    needed = budget.ask("a", 100)
    assert budget.take_granted() == [needed]


def test_a_job_that_is_gone_is_forgotten():
    budget = InFlightBudget(TOTAL)
    for number in range(100):
        ticket = budget.ask(f"job {number}", 10)
        budget.take_granted()
        budget.lend(ticket, 10)
        budget.end(ticket)
        budget.give_back(f"job {number}", 10)
    assert budget.jobs() == {}
    assert budget.used_bytes == 0


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 400), st.integers(0, 5)), max_size=60))
def test_keeps_the_bound_but_for_one_request_a_job_and_grants_all_in_the_end(steps):
    budget = InFlightBudget(TOTAL)
    waiting, granted, largest = set(), [], 0
    for job, nbytes, ends in steps:
        waiting.add(budget.ask(job, nbytes))
        largest = max(largest, nbytes)
        for ticket in budget.take_granted():
            waiting.remove(ticket)
            granted.append(ticket)
        assert budget.used_bytes <= TOTAL + 3 * largest
        for _ in range(min(ends, len(granted))):
            budget.end(granted.pop(0))
    while granted or waiting:
        for ticket in budget.take_granted():
            waiting.remove(ticket)
            granted.append(ticket)
        assert granted, "requests wait and nothing is under way"
        budget.end(granted.pop(0))
    assert budget.jobs() == {}
