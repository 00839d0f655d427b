"""Following a running job: the link's rate is learned, a change needs a gain beyond noise, and nothing flutters."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core import Cut, Route
from frostline.core.events import BatchDelivered
from frostline.jobs.router import Clocks, Router
from frostline.planning import Link, Situation, make_plan, vary
from frostline.planning.replanning import (
    Observed,
    Rates,
    as_measured,
    find_better,
    is_news,
    learn,
    mixture_in_words,
    probe,
    resource_seconds,
)
from frostline.profiles import CutCost, Profile
from frostline.transport import TransportStatistics

MB = 1_000_000
ENCODED = 60_000


def situation(*, bytes_per_s=12.5 * MB, store_slowness=4.0):
    """A slow node and a faster trainer; cut 0 ships 60 kB, 2 is a layer with 30 kB, 3 the frost line with 5 kB."""
    sizes = (0, 600_000, 30_000, 5_000)
    cuts = tuple(
        Cut(
            number=n, name=f"layer{n}", after=n - 2, tensors=("x",), shapes=((1,),), dtypes=("float32",),
            bytes_per_sample=b,
        )
        for n, b in enumerate(sizes)
    )  # fmt: skip

    def side(name, slowness):
        return Profile(
            hardware=name, host=name, engine="torch", device_batch=32, read_s=0.0,
            cuts=tuple(
                CutCost(number=n, seconds=s * slowness, spread_s=0.0, fixed_bytes=MB, bytes_per_sample=MB)
                for n, s in enumerate((0.0, 0.002, 0.008, 0.02))
            ),
        )  # fmt: skip

    return Situation(
        cuts=cuts, encoded_bytes=ENCODED, store=side("node", store_slowness), trainer=side("trainer", 1.0),
        link=Link(bytes_per_s=bytes_per_s, round_trip_s=0.001), same_host=False, memory_bytes=1000 * MB,
    )  # fmt: skip


def shares_of(plan):
    return {item.route: item.share for item in plan.mixture}


def look(true, shares, *, rows=64, head_s=0.0):
    """What a job sees that runs a mixture in a true situation: every resource works for an average sample."""
    work = resource_seconds(true, shares)
    seconds = rows * max(max(work.values()), 1e-9)
    size = rows * work["link"] * true.link.bytes_per_s
    return Observed(
        seconds=seconds,
        stalled_s=seconds if head_s == 0 else 0.0,
        rows={route: max(1, round(share * rows)) for route, share in shares.items()},
        transfer_bytes=round(size),
        transfer_s=rows * work["link"],
        busy_s=rows * (work["trainer cpu"] + head_s),
    )


def run(profiled, true, shares, looks):
    """Follow a job for some looks; the mixtures after each change."""
    rates, judged, changes, silent_s = Rates(), None, [], 0.0
    for _ in range(looks):
        seen = look(true, shares)
        found = probe(as_measured(profiled, rates), shares, silent_s=silent_s, is_settled=rates.is_settled)
        if found is not None:  # one request more, with real samples
            size = found.rows * ENCODED
            seen = replace(
                seen,
                transfer_bytes=seen.transfer_bytes + size,
                transfer_s=seen.transfer_s + size / true.link.bytes_per_s,
            )
        rates = learn(profiled, rates, seen)
        silent_s = 0.0 if seen.transfer_bytes > 128 << 10 else silent_s + seen.seconds
        change = None
        if rates.is_reliable(profiled) and is_news(judged, rates):
            judged = rates
            change = find_better(as_measured(profiled, rates), shares, done_per_s=rates.done_per_s)
        if change is not None:
            rates, shares = rates.without_mixture(), shares_of(change.plan)
            changes.append(shares)
    return shares, changes


def test_a_link_that_becomes_thin_is_followed_at_once_and_once():
    profiled = situation()
    first = shares_of(make_plan(profiled))
    true = vary(profiled, bandwidth=0.6 * MB)
    last, changes = run(profiled, true, first, looks=10)
    assert len(changes) == 1
    assert last == pytest.approx(shares_of(make_plan(true)), rel=1e-3)
    assert last != first


def test_a_share_of_a_control_plane_is_planned_with_as_a_link_that_gives_as_much():
    profiled = situation()
    first = shares_of(make_plan(profiled))
    seen = replace(look(profiled, first), allowed_bytes_per_s=0.6 * MB)
    rates = learn(profiled, Rates(), seen)
    assert rates.is_held(profiled)
    change = find_better(as_measured(profiled, rates), first)
    assert shares_of(change.plan) == pytest.approx(shares_of(make_plan(vary(profiled, bandwidth=0.6 * MB))))
    assert is_news(learn(profiled, rates, replace(seen, allowed_bytes_per_s=0.3 * MB)), rates)
    assert is_news(learn(profiled, rates, replace(seen, allowed_bytes_per_s=math.inf)), rates)


def test_a_share_that_binds_is_planned_with_however_much_the_link_beneath_it_varies():
    """As on a busy machine, where a fast link's rate is another one at every look."""
    profiled = situation()
    shares = shares_of(make_plan(profiled))
    rates = Rates()
    for times in (1.0, 3.0, 0.5, 8.0):
        seen = look(vary(profiled, bandwidth=times * profiled.link.bytes_per_s), shares)
        before, rates = rates, learn(profiled, rates, replace(seen, allowed_bytes_per_s=0.6 * MB))
        assert not rates.is_settled
        assert rates.is_reliable(profiled)
        assert is_news(before, rates) == (times == 1.0)  # once, and not at every look
    assert not learn(profiled, rates, look(vary(profiled, bandwidth=0.1 * MB), shares)).is_reliable(profiled)


def test_a_share_that_holds_requests_says_nothing_about_the_store():
    profiled = situation(store_slowness=1.0)
    true = vary(profiled, store_speed=0.25)
    seen = look(true, {Route(3): 1.0})
    rate = seen.transfer_bytes / seen.seconds
    for allowed, speed in ((1.01 * rate, 1.0), (2.0 * rate, pytest.approx(0.25))):
        rates = learned(profiled, true, {Route(3): 1.0}, looks=4, allowed_bytes_per_s=allowed)
        assert rates.store_speed == speed


def test_a_share_that_is_more_than_the_link_gives_changes_no_plan():
    profiled = situation()
    rates = learn(profiled, Rates(), replace(look(profiled, shares_of(make_plan(profiled))), allowed_bytes_per_s=1e9))
    assert not rates.is_held(profiled)
    assert as_measured(profiled, rates).link.bytes_per_s == pytest.approx(profiled.link.bytes_per_s)


def test_a_link_that_comes_back_is_found_by_asking_for_more():
    profiled = situation()
    thin = shares_of(make_plan(vary(profiled, bandwidth=0.05 * MB)))
    assert set(thin) == {Route(3)}
    learned = replace(profiled, link=Link(bytes_per_s=0.05 * MB, round_trip_s=0.001))
    last, changes = run(learned, profiled, thin, looks=60)
    assert changes
    assert 1 / max(resource_seconds(profiled, last).values()) >= 0.85 * make_plan(profiled).samples_per_s


@given(st.floats(0.05, 100), st.floats(0.3, 8))
def test_a_situation_that_stays_is_never_planned_again_after_it_was_learned(mb_per_s, slowness):
    profiled = situation(bytes_per_s=mb_per_s * MB, store_slowness=slowness)
    shares = shares_of(make_plan(profiled))
    assert run(profiled, profiled, shares, looks=12)[1] == []


@given(st.floats(0.05, 100), st.floats(0.05, 100), st.floats(0.3, 8))
def test_after_any_change_of_the_link_the_job_runs_near_the_best(before, after, slowness):
    profiled = situation(bytes_per_s=before * MB, store_slowness=slowness)
    true = vary(profiled, bandwidth=after * MB)
    last, changes = run(profiled, true, shares_of(make_plan(profiled)), looks=40)
    assert 1 / max(resource_seconds(true, last).values()) >= 0.85 * make_plan(true).samples_per_s
    assert len(changes) <= 3


def test_a_gain_within_the_noise_changes_nothing():
    profiled = situation()
    shares = shares_of(make_plan(profiled))
    assert find_better(vary(profiled, bandwidth=profiled.link.bytes_per_s * 1.05), shares) is None


def test_a_change_says_what_was_measured_and_what_it_gains():
    profiled = situation()
    change = find_better(vary(profiled, bandwidth=0.6 * MB), {Route(0): 1.0})
    assert "600 kB/s may cross the link" in change.reason
    assert "held to 10 samples/s by the link" in change.reason


@given(st.floats(0.3, 4.0), st.floats(1.0, 4.0))
def test_the_fastest_mixture_stays_while_it_does_more_than_its_costs_allow(slowness, times):
    """Rows arrive in bursts, so that the loop's own time is learned as much longer than it is, now and then."""
    profiled = situation(store_slowness=slowness)
    shares = shares_of(make_plan(profiled))
    seen = look(profiled, shares, rows=3000)
    rates = learn(profiled, Rates(), replace(seen, busy_s=times * seen.busy_s))
    assert rates.done_per_s == pytest.approx(make_plan(profiled).samples_per_s, rel=0.01)
    assert find_better(as_measured(profiled, rates), shares, done_per_s=rates.done_per_s) is None


def test_a_mixture_that_did_less_than_another_promises_is_changed():
    profiled = situation(store_slowness=1.0)
    shares = shares_of(make_plan(profiled))
    seen = look(profiled, shares, rows=3000)
    rates = learn(profiled, Rates(), replace(seen, busy_s=2 * seen.busy_s))
    found = as_measured(profiled, rates)
    promised = find_better(found, shares).plan.samples_per_s
    assert promised < rates.done_per_s
    assert "the mixture before had 55 samples/s" in find_better(found, shares, done_per_s=55).reason
    assert find_better(found, shares, done_per_s=promised) is None


@pytest.mark.parametrize("changed", ["link", "share", "mixture"])
def test_the_rate_of_a_mixture_counts_for_as_long_as_as_much_may_cross(changed):
    profiled = situation()
    shares = shares_of(make_plan(profiled))
    seen = look(profiled, shares, rows=2000)
    rates = learn(profiled, Rates(), seen)
    assert rates.done_per_s > 0
    if changed == "mixture":
        assert rates.without_mixture().done_per_s == 0
        return
    thin = {
        "link": look(vary(profiled, bandwidth=0.1 * MB), shares),
        "share": replace(look(profiled, shares), allowed_bytes_per_s=0.1 * MB),
    }[changed]
    rates = learn(profiled, rates, thin)
    assert rates.done_per_s == 0
    assert learn(profiled, rates, replace(seen, allowed_bytes_per_s=thin.allowed_bytes_per_s)).done_per_s == 0


class VirtualJob:
    """A job in virtual time that deals by a router, on sides as they are, seen as busier than they are."""

    def __init__(self, true, *, times_busy):
        self.true, self.times_busy = true, times_busy
        self.wall_s = self.busy_s = 0.0
        self.statistics = TransportStatistics()
        plan = make_plan(true)
        self.router = Router(
            cuts=true.cuts, plan=plan, situation=true, follows=True, samples_per_request=8, cores=1,
            transport=SimpleNamespace(statistics=lambda: self.statistics),
            clocks=Clocks(wall=lambda: self.wall_s, busy=lambda: self.busy_s),
        )  # fmt: skip
        self.tell(0.0)

    def tell(self, stall_s):
        return self.router.on_event(BatchDelivered(epoch=0, samples=8, from_cache=0, stall_s=stall_s))

    def run(self, looks):
        """The changes of its plan within so many looks."""
        changes = []
        for _ in range(looks):
            seen = look(self.true, self.router.shares, rows=100)
            self.wall_s += seen.seconds
            self.busy_s += self.times_busy * seen.busy_s
            had = self.statistics
            self.statistics = replace(
                had,
                transfer_bytes=had.transfer_bytes + seen.transfer_bytes,
                transfer_s=had.transfer_s + seen.transfer_s,
            )
            for route, rows in seen.rows.items():
                self.router.take_batch(route, range(rows))
            changes.append(self.tell(seen.stalled_s))
        return [change for change in changes if change is not None]


def test_a_job_keeps_a_plan_that_does_what_it_promised_and_changes_a_users():
    """What another mixture did is no reason to keep one."""
    job = VirtualJob(situation(store_slowness=1.0), times_busy=2.0)
    assert not job.run(60)
    job.router.use({Route(3): 1.0}, follow=True)
    assert [change.before for change in job.run(2)] == ["100 % cut 3 (layer3)"]


def test_small_bodies_say_nothing_about_the_link():
    profiled = situation()
    seen = replace(look(profiled, {Route(3): 1.0}), transfer_bytes=5_000, transfer_s=1.0)
    assert learn(profiled, Rates(), seen).bytes_per_s is None


def learned(profiled, true, shares, *, looks, head_s=0.0, **changes):
    rates = Rates()
    for _ in range(looks):
        rates = learn(profiled, rates, replace(look(true, shares, head_s=head_s), **changes))
    return rates


def test_learns_the_loops_own_time_alike_for_every_way():
    profiled = situation()
    rates = learned(profiled, profiled, {Route(0): 1.0}, looks=20, head_s=0.03)
    assert rates.head_s == pytest.approx(0.03)
    assert as_measured(profiled, rates).head_s == rates.head_s


def test_a_node_that_others_use_too_counts_as_slower_after_ten_seconds():
    profiled = situation(store_slowness=1.0)
    true = vary(profiled, store_speed=0.25)
    assert learned(profiled, true, {Route(3): 1.0}, looks=1).store_speed == 1.0
    assert learned(profiled, true, {Route(3): 1.0}, looks=4).store_speed == pytest.approx(0.25)


def test_a_busy_link_or_trainer_or_loop_says_nothing_about_the_store():
    profiled = situation(store_slowness=1.0)
    true = vary(profiled, store_speed=0.25)
    for changes in ({"transfer_s": 4.0}, {"busy_s": 4.0}, {"stalled_s": 1.0}):
        assert learned(profiled, true, {Route(3): 1.0}, looks=4, **changes).store_speed == 1.0


def test_a_link_that_changed_counts_when_two_sights_agree():
    profiled = situation()
    shares = {Route(0): 1.0}
    rates = learn(profiled, Rates(), look(profiled, shares))
    thin = look(vary(profiled, bandwidth=1 * MB), shares)
    first = learn(profiled, rates, thin)
    assert (first.is_settled, first.bytes_per_s) == (False, pytest.approx(1 * MB))
    assert learn(profiled, first, thin).is_settled


def test_a_link_in_use_or_without_bound_is_not_probed():
    profiled = situation()
    assert probe(profiled, {Route(3): 1.0}, silent_s=0.5) is None
    assert probe(vary(profiled, bandwidth=math.inf), {Route(3): 1.0}, silent_s=100) is None


@given(st.floats(1e3, 1e7))
def test_a_probe_takes_at_most_a_tenth_of_the_time(bytes_per_s):
    thin = situation(bytes_per_s=bytes_per_s)
    for silent_s in (3.0, 10.0, 100.0, 1000.0):
        found = probe(thin, {Route(3): 1.0}, silent_s=silent_s)
        if found is not None:
            assert (found.rows - 1) * ENCODED / bytes_per_s <= 0.1 * silent_s


def test_describes_a_mixture_in_words():
    cuts = situation().cuts
    assert (
        mixture_in_words({Route(0): 0.3, Route(3, "fp16"): 0.7}, cuts)
        == "70 % cut 3 (layer3) as fp16, 30 % cut 0 (layer0)"
    )
