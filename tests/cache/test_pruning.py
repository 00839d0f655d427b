"""What is evicted from a shared cache: what nobody used for long, and of that no more than is needed."""

from hypothesis import given
from hypothesis import strategies as st

from frostline.cache.shared_layout import PackedObject, mark_of, surplus
from frostline.stores.protocols import Dated

NOW_S = 10_000.0
IDLE_S = 3600.0
SCOPES = [bytes([number]) * 32 for number in range(4)]


def packed(scope, number, modified_s, rows=100):
    one = PackedObject(scope=scope, rows=rows, value_bytes=84, digest=f"{number:032x}")
    return Dated(one.name, one.nbytes, modified_s)


def left(listing, wanted_bytes, budget_bytes, **options):
    options = {"now_s": NOW_S, "idle_s": IDLE_S, **options}
    return surplus(listing, wanted_bytes=wanted_bytes, budget_bytes=budget_bytes, **options)


times = st.floats(0, NOW_S)
packed_objects = st.builds(packed, st.sampled_from(SCOPES), st.integers(0, 2**64), times, st.integers(1, 200))
marks = st.builds(lambda scope, at: Dated(mark_of(scope), 1, at), st.sampled_from(SCOPES), times)
partials = st.builds(
    lambda scope, size, at: Dated(f"{scope.hex()}/.partial-abc", size, at),
    st.sampled_from(SCOPES),
    st.integers(0, 10_000),
    times,
)
strangers = st.builds(Dated, st.sampled_from(["notes.txt", "other/used", "ab/x.rows1"]), st.integers(0, 10_000), times)
listings = st.lists(
    st.one_of(packed_objects, marks, partials, strangers), max_size=30, unique_by=lambda item: item.object
)


@given(listings, st.integers(0, 50_000), st.integers(0, 400_000))
def test_room_is_made_for_all_that_is_wanted_or_nothing_is_removed(listing, wanted_bytes, budget_bytes):
    gone = left(listing, wanted_bytes, budget_bytes)
    assert len({item.object for item in gone}) == len(gone)
    assert set(gone) <= set(listing)
    there = sum(item.size for item in listing)
    if gone:
        assert there + wanted_bytes > budget_bytes
        freed = sum(item.size for item in gone)
        assert there - freed + wanted_bytes <= budget_bytes
        assert freed - gone[-1].size < max(there + wanted_bytes - budget_bytes, budget_bytes // 16)


@given(listings, st.integers(0, 50_000), st.integers(0, 400_000))
def test_keeps_recently_used_files_and_those_of_others(listing, wanted_bytes, budget_bytes):
    def is_used(one):
        return PackedObject.parse(one.object, one.size) is not None or one.object.endswith("/used")

    for item in left(listing, wanted_bytes, budget_bytes):
        folder = item.object.partition("/")[0]
        assert folder in {scope.hex() for scope in SCOPES}
        beside = [other for other in listing if other.object.startswith(folder) and is_used(other)]
        ages = [other.modified_s for other in beside] if is_used(item) else [item.modified_s]
        assert max(ages) <= NOW_S - IDLE_S


@given(listings, st.integers(0, 50_000), st.integers(0, 400_000))
def test_two_nodes_that_look_at_once_remove_the_same(listing, wanted_bytes, budget_bytes):
    gone = left(listing, wanted_bytes, budget_bytes)
    assert gone == left(list(reversed(listing)), wanted_bytes, budget_bytes)
    # One that was killed in the middle leaves what the next one goes on from.
    half = [item for item in listing if item not in gone[: len(gone) // 2]]
    assert set(left(half, wanted_bytes, budget_bytes)) <= set(gone)


def test_the_longest_unused_scope_goes_first_with_its_oldest_objects():
    listing = [packed(SCOPES[0], number, 100.0 + number) for number in range(3)]
    listing += [packed(SCOPES[1], number, 50.0 + number) for number in range(3)]
    listing.append(Dated(mark_of(SCOPES[1]), 1, 200.0))
    size = listing[0].size
    gone = left(listing, 4 * size, 6 * size)
    assert gone == [*listing[:3], *listing[3:5]]


def test_a_mark_keeps_old_rows():
    listing = [packed(SCOPES[0], number, 1.0) for number in range(3)]
    size = listing[0].size
    assert left(listing, size, 3 * size) == listing[:1]
    assert left([*listing, Dated(mark_of(SCOPES[0]), 1, NOW_S)], size, 3 * size) == []


def test_nothing_goes_for_what_can_never_fit():
    listing = [packed(SCOPES[0], 0, 1.0)]
    assert left(listing, 20_000, 10_000) == []
