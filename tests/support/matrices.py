"""Of a matrix of alike tests some run by default; the others are marked, and `make test-long` runs them."""

import pytest

__all__ = ("sampled",)


def sampled(cases, usual, *, name=None):
    """The cases of ``pytest.mark.parametrize``, of which only the usual ones run by default.

    Args:
        cases: all of them, each a value or a tuple of values.
        usual: names of those that run by default; each must be there.
        name: function that names a case; the case's first value by default.
    """
    cases = list(cases)
    names = [name(case) if name else case[0] if isinstance(case, tuple) else case for case in cases]
    assert set(usual) <= set(names), sorted(set(usual) - set(names))
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            id=known if isinstance(known, str) else None,
            marks=() if known in usual else pytest.mark.long,
        )
        for case, known in zip(cases, names, strict=True)
    ]
