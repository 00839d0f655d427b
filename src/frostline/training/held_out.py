"""Decides what held-out samples may decide: they choose which head is kept, unless they are a last test."""

import re

__all__ = ("in_words", "is_test")

_TESTS = {"test", "tests", "testing"}
_NO_WORD = re.compile(r"[^a-z]+")


def is_test(split: str | None) -> bool:
    """Whether a split is called as one that is scored at the very end, and chooses nothing."""
    return split is not None and not _TESTS.isdisjoint(_NO_WORD.split(split.lower()))


def in_words(split: str | None, share: float, *, is_empty: bool, decided: bool) -> str:
    """What was held out, and what its accuracy therefore says.

    Args:
        split: its name; None for a share of each class.
        share: that was held out, where it is no split.
        is_empty: nothing was.
        decided: it chose which head is kept.
    """
    if is_empty:
        return "nothing"
    what = f"{share * 100:g} % of each class" if split is None else f"split {split!r}"
    if decided:
        return f"{what}, which also chose the epoch: a little optimistic"
    return f"{what}; nothing was chosen by it"
