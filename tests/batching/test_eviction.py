"""What leaves a memory that cannot hold all: never more than is needed, nobody's turn cut short, and all have turns."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.batching import FairShares
from frostline.node.weights import Evictable, Incoming, to_evict

IDLE, SERVED = 60.0, 60.0


def stay(key, nbytes=10, *, owner="other", idle_s=0.0, served_s=0.0, tag=0.0, asked_s=None):
    return Evictable(
        key=key,
        owner=owner,
        nbytes=nbytes,
        counted_bytes=nbytes,
        idle_s=idle_s,
        served_s=served_s,
        tag=tag,
        asked_s=asked_s,
    )


def incoming(lacking_bytes, *, tenant="me", tag=0.0, over_bytes=0):
    return Incoming(tenant=tenant, tag=tag, lacking_bytes=lacking_bytes, over_bytes=over_bytes)


STAYS = st.lists(
    st.builds(
        stay,
        st.integers(),
        st.integers(1, 50),
        owner=st.sampled_from(["me", "other"]),
        idle_s=st.sampled_from([0.0, 0.5, 2.0, 9.0]),
        served_s=st.sampled_from([0.0, 0.5, 1.5, 9.0]),
        tag=st.sampled_from([0.0, 1.0, 5.0]),
        asked_s=st.sampled_from([None, None, 0.5, 9.0, 60.0]),
    ),
    unique_by=lambda build: build.key,
    max_size=8,
)


@given(STAYS, st.integers(-5, 120), st.integers(-5, 80), st.sampled_from([0.0, 2.0]))
def test_evicts_just_enough_and_cuts_no_turn_short(stays, lacking, over, tag):
    wanted = incoming(lacking, tag=tag, over_bytes=over)
    keys = to_evict(wanted, stays)
    gone = [stay for stay in stays if keys and stay.key in keys]
    for entry in gone:
        had_its_turn = entry.served_s >= 1 and entry.tag >= tag
        assert entry.idle_s >= 1 or entry.asked_s is not None or had_its_turn

    def is_enough(those):
        mine = sum(item.counted_bytes for item in those if item.owner == "me")
        return sum(item.nbytes for item in those) >= lacking and mine >= over

    if keys:
        assert is_enough(gone)
        fresh = [item for item in gone if item.asked_s is None]
        assert not any(is_enough([other for other in gone if other is not item]) for item in fresh)
    if keys is None:
        assert not is_enough([stay for stay in stays if stay.asked_s is None])


def test_evicts_unused_weights_first_and_the_least_recently_used_before_others():
    stays = [stay("busy", served_s=SERVED), stay("late", idle_s=2), stay("long", idle_s=IDLE)]
    assert to_evict(incoming(10), stays) == ("long",)
    assert set(to_evict(incoming(20), stays)) == {"long", "late"}
    assert set(to_evict(incoming(30), stays)) == {"long", "late", "busy"}


def test_a_pause_between_two_requests_is_not_the_end_of_a_turn():
    assert to_evict(incoming(10), [stay("pausing", idle_s=0.3)]) == ()
    assert to_evict(incoming(10), [stay("pausing", idle_s=0.3, served_s=SERVED)]) == ("pausing",)


def test_evicts_the_tenant_with_the_most_device_time_first():
    stays = [stay("new", served_s=0.5), stay("old", served_s=9), stay("older", served_s=20), stay("poor", served_s=99)]
    stays[3] = stay("poor", served_s=99, tag=-1.0)
    assert to_evict(incoming(10), stays) == ("older",)
    assert set(to_evict(incoming(20), stays)) == {"older", "old"}
    assert to_evict(incoming(30), stays) == (), "the others may, but that is not yet enough"


def test_one_large_stay_goes_rather_than_it_and_small_ones():
    stays = [stay("small", 2, idle_s=9), stay("large", 30, idle_s=5)]
    assert to_evict(incoming(20), stays) == ("large",)


def test_a_quota_is_kept_by_ones_own():
    stays = [stay("theirs", 50, idle_s=IDLE), stay("mine", 10, owner="me", idle_s=2)]
    assert to_evict(incoming(0, over_bytes=5), stays) == ("mine",)
    assert set(to_evict(incoming(30, over_bytes=5), stays)) >= {"theirs", "mine"}
    assert to_evict(incoming(0, over_bytes=20), stays) is None


def test_waits_for_an_eviction_before_asking_for_another():
    second = stay("second", served_s=2)
    assert to_evict(incoming(10), [stay("first", served_s=1, asked_s=1.0), second]) == ("first",)
    assert to_evict(incoming(10), [stay("first", served_s=9, asked_s=11.0), second]) == ("second",)
    assert to_evict(incoming(10), [stay("first", served_s=9, asked_s=31.0), second]) == ("first",)


def test_tells_requests_that_never_fit_from_those_that_have_to_wait():
    stays = [stay("one"), stay("other")]
    assert to_evict(incoming(20), stays) == ()
    assert to_evict(incoming(21), stays) is None
    assert to_evict(incoming(0), stays) == ()


def simulated(sizes, room, weights, seconds, step_s=0.05):
    """Device seconds of networks that always have work, in a memory that holds only some of them."""
    names = [str(number) for number in range(len(sizes))]
    shares = FairShares(dict(zip(names, weights, strict=True)))
    nbytes = dict(zip(names, sizes, strict=True))
    for name in names:
        shares.arrive(name)
    held, had = {}, dict.fromkeys(names, 0.0)
    for _ in range(int(seconds / step_s)):
        for name in sorted(set(names) - set(held), key=lambda name: (shares.tag(name), name)):
            lacking = sum(nbytes[item] for item in held) + nbytes[name] - room
            stays = [
                stay(item, nbytes[item], owner=item, served_s=served, tag=shares.tag(item))
                for item, served in held.items()
            ]
            keys = to_evict(incoming(lacking, tenant=name, tag=shares.tag(name)), stays)
            for key in keys:
                del held[key]
            if lacking > 0 and not keys:
                break  # nobody overtakes
            held[name] = 0.0
        name = min(held, key=lambda item: (shares.tag(item), item))
        shares.begin(name)
        shares.charge(name, step_s)
        had[name] += step_s
        held[name] += step_s / shares.weight(name)
    return np.array(list(had.values()))


@pytest.mark.parametrize("parts", [0.15, 0.3, 0.6])
@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0, 4.0)])
def test_all_have_their_share_of_the_device_however_little_memory_there_is(parts, weights):
    sizes = list(itertools.islice(itertools.cycle([45, 4, 3, 9, 5, 4, 16, 12]), 16))
    weights = list(itertools.islice(itertools.cycle(weights), 16))
    room = max(int(sum(sizes) * parts), max(sizes))
    had = simulated(sizes, room, weights, seconds=600) / np.array(weights)
    jain = had.sum() ** 2 / (len(had) * (had**2).sum())
    assert jain > 0.99
    assert had.min() > 0.8 * had.mean()
