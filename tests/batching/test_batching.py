import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from frostline.batching import (
    Claim,
    FairShares,
    Limit,
    MemoryBudget,
    batch_size,
    kept_part,
    readable_bytes,
    stretches_of_bytes,
    stretches_of_work,
)
from frostline.core.errors import OverBudget

BYTES = st.integers(0, 1000)
LIMITS = st.lists(st.builds(Limit, budget_bytes=BYTES, fixed_bytes=BYTES, bytes_per_row=st.integers(0, 50)), max_size=3)


@given(LIMITS, st.integers(1, 100), st.integers(1, 8).map(lambda n: 8 * n))
def test_a_batch_is_the_largest_multiple_of_eight_that_fits(limits, wanted, maximum):
    rows = batch_size(limits, wanted=wanted, maximum=maximum)

    def fits(count):
        return all(limit.fixed_bytes + count * limit.bytes_per_row <= limit.budget_bytes for limit in limits)

    assert rows % 8 == 0
    assert rows <= maximum
    assert rows < wanted + 8
    assert rows == 0 or fits(rows)
    assert rows + 8 > maximum or rows >= wanted or not fits(rows + 8)


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 10), st.integers(0, 20))
def test_a_request_has_rows_for_one_run_and_as_many_more_as_allowed(needs_work, run_rows, further):
    max_rows = run_rows + further
    found = stretches_of_work(needs_work, run_rows=run_rows, max_rows=max_rows)
    assert [row for item in found for row in item] == list(range(len(needs_work)))
    for item in found:
        work = sum(needs_work[row] for row in item)
        assert len(item) <= max_rows
        assert work <= run_rows
        is_last = item.stop == len(needs_work)
        assert is_last or len(item) == max_rows or work + needs_work[item.stop] > run_rows
    if all(needs_work):
        assert found == [
            range(row, min(row + run_rows, len(needs_work))) for row in range(0, len(needs_work), run_rows)
        ]


def test_refuses_what_can_never_fit_and_names_the_knob():
    with pytest.raises(OverBudget, match="--memory"):
        MemoryBudget(10).ask(11)


def test_no_request_overtakes_a_waiting_one():
    budget = MemoryBudget(10)
    first = budget.ask(6)
    large = budget.ask(8)
    assert budget.take(1) is None
    small = budget.ask(1)
    assert not budget.is_granted(large)
    assert not budget.is_granted(small)
    budget.release(first)
    assert budget.is_granted(large)
    assert budget.is_granted(small)


def test_withdrawing_a_waiting_reservation_admits_the_next():
    budget = MemoryBudget(10)
    budget.ask(6)
    large, small = budget.ask(8), budget.ask(4)
    budget.release(large)
    assert budget.is_granted(small)


def test_a_tenant_that_holds_all_it_may_lets_others_go_first():
    budget = MemoryBudget(100)
    mine, yours = Claim(tenant="mine", max_bytes=50), Claim(tenant="yours")
    first = budget.ask(40, mine)
    second = budget.ask(20, mine)
    assert budget.take(20, mine) is None
    other = budget.ask(20, yours)
    assert budget.take(20, yours) is not None
    assert not budget.is_granted(second)
    assert budget.is_granted(other)
    budget.release(first)
    assert budget.is_granted(second)


def test_one_piece_alone_may_be_larger_than_what_its_tenant_may_hold():
    budget = MemoryBudget(100)
    assert budget.is_granted(budget.ask(80, Claim(tenant="mine", max_bytes=50)))


@pytest.mark.parametrize("tenants", [2, 3, 7, 40])
def test_each_tenant_gets_its_own_part_whatever_all_others_hold_together(tenants):
    budget = MemoryBudget(1000)
    part = kept_part(1000, tenants)
    assert part == 1000 // (2 * tenants)
    *others, last = (Claim(tenant=f"t{number}", max_bytes=500, tenants=tenants) for number in range(tenants))
    for size in (500, 100, 10, 1):
        for claim in others:
            while budget.take(size, claim) is not None:
                pass
            budget.ask(size, claim)
    assert budget.reserved_bytes >= 500, "what is kept for nobody is used"
    waiting = budget.ask(part + 1, last)
    assert budget.is_granted(waiting) == (tenants == 2), "two have half each"
    budget.release(waiting)
    for size in (part - 1, 1):
        assert budget.is_granted(budget.ask(size, last)), "it waits for nobody, not even for itself"
    assert tenants == 2 or budget.take(1, last) is None


def test_what_is_kept_for_others_holds_nobody_for_ever():
    budget = MemoryBudget(100)
    mine, yours = (Claim(tenant=name, max_bytes=50, tenants=3) for name in ("mine", "yours"))
    held = budget.ask(50, mine)
    assert budget.is_granted(budget.ask(34, yours)), "16 are kept for the third"
    second = budget.ask(1, yours)
    assert not budget.is_granted(second)
    budget.release(held)
    assert budget.is_granted(second)
    budget = MemoryBudget(100)
    small = budget.ask(16, mine)
    large = budget.ask(90, yours)  # more at once than is kept for nobody
    assert not budget.is_granted(large)
    assert not budget.is_granted(budget.ask(20, mine))
    budget.release(small)
    assert budget.is_granted(large)


def test_grants_memory_to_the_tenant_with_the_least_in_work():
    shares = FairShares({"twice": 2.0})
    budget = MemoryBudget(40, shares)
    first = [budget.ask(10, Claim(tenant=name, device_s=1.0)) for name in ("once", "once", "once", "once")]
    waiting = [budget.ask(10, Claim(tenant=name, device_s=1.0)) for name in ("once", "once", "twice", "twice", "twice")]
    granted = []
    for item in [*first, *waiting[2:4]]:
        before = {number for number in waiting if budget.is_granted(number)}
        shares.charge("once" if item in first else "twice", 1.0)
        budget.release(item)
        granted += [waiting.index(number) for number in waiting if budget.is_granted(number) and number not in before]
    assert granted[:2] == [2, 3]  # nothing was promised to it yet
    assert set(granted) == {0, 1, 2, 3, 4}


PIECES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 100), st.floats(0.01, 3.0)), min_size=1, max_size=30)


@given(PIECES, st.sampled_from([1, 3, 5]), st.randoms(use_true_random=False))
def test_between_tenants_too_memory_is_never_exceeded_and_everybody_gets_some(pieces, tenants, chance):
    shares = FairShares({"a": 3.0})
    budget = MemoryBudget(100, shares)
    maximum = {"a": 60, "b": 100, "c": 30}
    claims = [
        Claim(tenant=tenant, device_s=cost, max_bytes=maximum[tenant], tenants=tenants) for tenant, _, cost in pieces
    ]
    asked = {budget.ask(nbytes, claim): (nbytes, claim) for (_, nbytes, _), claim in zip(pieces, claims, strict=True)}
    while asked:
        held = {number: request for number, request in asked.items() if budget.is_granted(number)}
        assert sum(nbytes for nbytes, _ in held.values()) == budget.reserved_bytes <= 100
        for tenant, allowed in maximum.items():
            mine = [nbytes for nbytes, claim in held.values() if claim.tenant == tenant]
            assert sum(mine) == budget.held_bytes(tenant)
            assert sum(mine) <= allowed or len(mine) == 1
        done = chance.choice(sorted(held))  # there is one: nobody waits for nothing
        _, claim = asked.pop(done)
        shares.charge(claim.tenant, claim.device_s)
        budget.release(done)
    assert budget.reserved_bytes == 0


@given(st.integers(1, 100), st.integers(1, 100), st.floats(0.1, 3.0))
def test_a_large_piece_is_let_in_however_many_small_ones_others_keep_asking_for(large, small, cost):
    shares = FairShares()
    budget = MemoryBudget(100, shares)
    busy = Claim(tenant="busy", device_s=cost)
    held = [budget.ask(small, busy) for _ in range(-(-100 // small))]
    patient = budget.ask(large, Claim(tenant="patient", device_s=cost))
    for count in range(2 * len(held) + 2):
        if budget.is_granted(patient):
            return
        budget.ask(small, busy)
        shares.charge("busy", cost)
        budget.release(held[count % len(held)])
    assert budget.is_granted(patient)


class BudgetMachine(RuleBasedStateMachine):
    reservations = Bundle("reservations")

    def __init__(self):
        super().__init__()
        self.budget = MemoryBudget(100)
        self.order = []  # (reservation, bytes) not given back, in order of asking
        self.granted = set()

    def look(self):
        self.granted = {index for index, _ in self.order if self.budget.is_granted(index)}

    @rule(target=reservations, nbytes=st.integers(0, 100))
    def ask(self, nbytes):
        made = self.budget.ask(nbytes)
        self.order.append([made, nbytes])
        return made

    @rule(nbytes=st.integers(0, 120))
    def take(self, nbytes):
        had = self.budget.reserved_bytes
        made = self.budget.take(nbytes)
        assert (made is not None) == (had + nbytes <= 100 and self.budget.waiting == 0)
        if made is not None:
            self.budget.release(made)

    @rule(one=reservations, share=st.floats(0, 1))
    def shrink(self, one, share):
        entry = next((entry for entry in self.order if entry[0] == one), None)
        if entry and self.budget.is_granted(one):
            entry[1] = int(entry[1] * share)
            self.budget.shrink(one, entry[1])

    @rule(one=consumes(reservations))
    def release(self, one):
        self.budget.release(one)
        self.budget.release(one)
        self.order = [entry for entry in self.order if entry[0] != one]

    @invariant()
    def never_above_the_total(self):
        held = sum(nbytes for index, nbytes in self.order if self.budget.is_granted(index))
        assert held == self.budget.reserved_bytes <= self.budget.peak_bytes <= 100

    @invariant()
    def those_who_wait_came_after_those_who_have(self):
        states = [self.budget.is_granted(index) for index, _ in self.order]
        assert states == sorted(states, reverse=True)
        assert self.budget.waiting == states.count(False)

    @invariant()
    def the_first_who_waits_does_not_fit(self):
        first = next((nbytes for index, nbytes in self.order if not self.budget.is_granted(index)), None)
        assert first is None or self.budget.reserved_bytes + first > 100


TestBudgetMachine = BudgetMachine.TestCase


@given(st.lists(st.integers(0, 20)), st.integers(1, 5), st.integers(0, 30))
def test_stretches_of_bytes_are_as_long_as_their_bounds_allow(lengths, max_rows, max_bytes):
    stretches = stretches_of_bytes(lengths, max_rows=max_rows, max_bytes=max_bytes)
    assert [row for stretch in stretches for row in stretch] == list(range(len(lengths)))

    def fits(rows):
        return len(rows) <= max_rows and sum(lengths[row] for row in rows) <= max_bytes

    assert all(len(stretch) == 1 or fits(stretch) for stretch in stretches if lengths)
    for stretch, following in itertools.pairwise(stretches):
        assert not fits([*stretch, following[0]])


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1 kB"), (1.5e6, "1.5 MB"), (999e6, "999 MB"), (2e12, "2e+03 GB")],
)
def test_bytes_are_named_in_the_largest_unit_of_which_there_is_one(nbytes, words):
    assert readable_bytes(nbytes) == words
