"""Turns to decode, in virtual time: samples that take long hold up those of their own tenant alone."""

import heapq

import pytest

from frostline.preprocess.turns import DecodingTurns

pytestmark = pytest.mark.promise(
    "apart", mended="a tenant's slow samples took every place to decode, and others waited"
)


def waits(slots, until_s, *, always=(), comes=()):
    """Runs turns until a time; gives each tenant's waits in seconds, and the seconds that it was decoded for.

    Args:
        slots: number of samples that are decoded at once.
        until_s: the end.
        always: tenants with seconds that a sample takes, of which twenty threads wait all the time.
        comes: triples of a tenant, the seconds that its samples take, and the times when each comes.
    """
    turns = DecodingTurns(slots)
    takes = {**dict(always), **{tenant: seconds for tenant, seconds, _ in comes}}
    events = [(at, 0, tenant) for tenant, _, times in comes for at in times]
    events += [(0.0, 0, tenant) for tenant, _ in always for _ in range(20)]
    heapq.heapify(events)
    waiting, waited, used = [], {tenant: [] for tenant in takes}, dict.fromkeys(takes, 0.0)
    while events and events[0][0] <= until_s:
        now, number, tenant = heapq.heappop(events)
        if number:
            turns.end(number, 1, now)
            used[tenant] += takes[tenant]
        if not number or tenant in dict(always):
            turns.note(tenant, now)
            waiting.append((tenant, now))
        while (chosen := turns.choose([name for name, _ in waiting], now)) is not None:
            found = next(entry for entry in waiting if entry[0] == chosen)
            waiting.remove(found)
            waited[chosen].append(now - found[1])
            heapq.heappush(events, (now + takes[chosen], turns.begin(chosen, now), chosen))
    return waited, used


def test_tenants_that_always_wait_have_the_same_seconds_whatever_a_sample_takes():
    _, used = waits(1, 400.0, always=[("ann", 20.0), ("bob", 0.25)])
    assert used["ann"] == pytest.approx(used["bob"], abs=20.0)
    _, used = waits(4, 400.0, always=[("ann", 20.0), ("bob", 0.25), ("eve", 1.0)])
    assert min(used.values()) > 0.9 * 400


@pytest.mark.parametrize("slots", [2, 16])
def test_a_tenant_whose_samples_take_long_leaves_a_slot_to_who_comes_now_and_then(slots):
    times = [float(second) for second in range(5, 300, 5)]
    waited, used = waits(slots, 300.0, always=[("ann", 20.0)], comes=[("bob", 0.1, times)])
    late = [wait for at, wait in zip(times, waited["bob"], strict=True) if at > 40]
    assert max(late) == 0.0, "once it is known that they take long"
    assert used["ann"] > 0.9 * (slots - 1) * 280


def test_an_occasional_client_waits_for_one_sample_at_most():
    waited, _ = waits(1, 300.0, always=[("ann", 3.0)], comes=[("bob", 0.1, [10.0, 100.0, 200.0])])
    assert max(waited["bob"]) <= 3.0


def test_all_slots_are_used_by_a_tenant_alone_and_by_one_whose_samples_are_quick():
    _, used = waits(4, 100.0, always=[("ann", 20.0)])
    assert used["ann"] == 4 * 100
    _, used = waits(4, 300.0, always=[("ann", 20.0)], comes=[("bob", 0.1, [1.0])])
    assert used["ann"] > 4 * 200, "nobody has come for a minute"
    _, used = waits(4, 10.0, always=[("ann", 0.5)], comes=[("bob", 0.1, [float(second) for second in range(10)])])
    assert used["ann"] > 3.7 * 10


def test_of_equal_tenants_whoever_waits_longest_is_next():
    turns = DecodingTurns(1)
    assert turns.choose(["bob", "ann", "bob"], 0.0) == "bob"
    turns.end(turns.begin("bob", 0.0), 1, 1.0)
    assert turns.choose(["bob", "ann"], 1.0) == "ann"
    assert turns.choose([], 1.0) is None
