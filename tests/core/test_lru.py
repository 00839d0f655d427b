"""A dictionary of a few entries, from which the one unused for longest goes first."""

from frostline.core.lru import LruDict


def test_drops_the_entry_unused_for_longest():
    known = LruDict(2)
    known.keep("a", 1)
    known.keep("b", 2)
    assert known.use("a") == 1
    known.keep("c", 3)
    assert list(known) == ["a", "c"]
    assert known.use("b") is None


def test_a_value_set_again_counts_as_used():
    known = LruDict(2)
    known.keep("a", 1)
    known.keep("b", 2)
    known.keep("a", 4)
    known.keep("c", 3)
    assert dict(known) == {"a": 4, "c": 3}
