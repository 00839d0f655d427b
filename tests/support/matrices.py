"""Of a matrix of alike tests some run by default; the others are marked, and `make test-long` runs them."""

from types import FunctionType

import pytest

__all__ = ("mostly_long", "sampled")


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


def mostly_long(*usual):
    """Decorator of a class that inherits the tests of a suite, of which only the usual ones run by default.

    Args:
        usual: names of those that run by default; each must be inherited.
    """

    def marked(cls):
        names = {name for name in dir(cls) if name.startswith("test_") and name not in vars(cls)}
        assert set(usual) <= names, sorted(set(usual) - names)
        for name in names.difference(usual):
            test = getattr(cls, name)
            if test is not None:
                setattr(cls, name, _marked(test))
        return cls

    return marked


def _marked(test):
    # A mark of the function itself would hold for the other classes that inherit it.
    again = FunctionType(test.__code__, test.__globals__, test.__name__, test.__defaults__, test.__closure__)
    again.__dict__.update(test.__dict__, pytestmark=[*getattr(test, "pytestmark", ()), pytest.mark.long.mark])
    return again
