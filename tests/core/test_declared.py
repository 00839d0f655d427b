"""Fields whose types say their bounds: what is read is what the schema allows, and refusals name the field."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.core.declared import (
    As,
    Count,
    Digest,
    Flat,
    Matching,
    OneOf,
    Schemas,
    Sized,
    Within,
    check_declared,
    read_declared,
)
from frostline.core.errors import BadRequest, SettingError


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    """One part.

    Attributes:
        name: the name, or
            more of it.
    """

    name: Annotated[str, Sized(1, 3, is_printable=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """What every message has.

    Attributes:
        kind: ``a`` or ``b``.
        at: a count.
    """

    kind: Literal["a", "b"]
    at: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A message."""

    base: Annotated[Base, Flat()]
    share: Annotated[float, Within(0, 1, is_above=True)] | None = None
    names: Annotated[tuple[Annotated[str, OneOf(("x", "y", "z"))], ...], Sized(0, 2)] = ()
    pair: tuple[int, int] = (0, 0)
    is_on: bool = False
    inner: Inner | None = None
    table: dict[str, Any] | None = None
    word: Annotated[str, Matching("[a-z]+", "small letters")] = "a"
    doubled: Annotated[int, As(Annotated[int, Within(0, 9)], lambda number: 2 * number)] = 0


def schema_of(kind):
    schemas = Schemas()
    found = schemas.of(kind, is_asked=True)
    return {**found, "components": {"schemas": schemas.components}}


SCHEMA = schema_of(Message)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 12) | st.just(2**63) | st.sampled_from(["", "a", "x", "abcd", "A"]),
    lambda some: st.lists(some, max_size=3) | st.dictionaries(st.sampled_from(["name", "x"]), some, max_size=2),
    max_leaves=4,
)
FIELDS = ["kind", "at", "share", "names", "pair", "is_on", "inner", "table", "word", "doubled", "knid"]
# Half of the messages are nearly right, so that both outcomes are common.
MESSAGES = st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4).map(lambda found: {"kind": "a", **found}) | JSON


@given(MESSAGES)
def test_what_is_read_is_what_the_schema_allows(value):
    is_allowed = jsonschema.Draft202012Validator(SCHEMA).is_valid(value)
    try:
        read_declared(Message, value, "a message")
    except BadRequest:
        assert not is_allowed
    else:
        assert is_allowed


def test_a_message_has_lists_as_tuples_its_own_objects_and_the_fields_of_its_base():
    found = read_declared(Message, {"kind": "b", "names": ["x"], "inner": {"name": "n"}, "doubled": 4}, "a message")
    assert found == Message(base=Base(kind="b"), names=("x",), inner=Inner(name="n"), doubled=8)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "a message must be an object"),
        ({}, "kind is missing: a message must have it"),
        ({"kind": "c"}, "kind must be a or b"),
        ({"kind": "a", "at": -1}, "at must be a whole number from 0 to 2^63 - 1"),
        ({"kind": "a", "at": True}, "at must be a whole number"),
        ({"kind": "a", "share": 0}, "share must be a finite number above 0, up to 1"),
        ({"kind": "a", "share": 10**400}, "share must be a finite number"),
        ({"kind": "a", "share": float("nan")}, "share must be a finite number"),
        ({"kind": "a", "share": "1"}, "share must be a number"),
        ({"kind": "a", "names": ["x", "q"]}, "names must be one of x, y, z"),
        ({"kind": "a", "names": ["x"] * 3}, "names must be a list of up to 2 entries"),
        ({"kind": "a", "pair": [1]}, "pair must be a list of 2 to 2 entries"),
        ({"kind": "a", "is_on": 1}, "is_on must be true or false"),
        ({"kind": "a", "inner": {"name": "a\n"}}, "inner.name must be a printable text of 1 to 3 characters"),
        ({"kind": "a", "inner": {"nmae": "a"}}, "inner has no field 'nmae'; did you mean name"),
        ({"kind": "a", "word": "A"}, "word must be small letters"),
        ({"knid": "a"}, "a message has no field 'knid'; did you mean kind"),
    ],
)
def test_a_refusal_names_the_field_and_what_it_must_be(value, said):
    with pytest.raises(BadRequest) as refused:
        read_declared(Message, value, "a message")
    assert said in str(refused.value)


@dataclass(frozen=True, slots=True)
class Step:
    """A step, as users make it."""

    size: Annotated[int, Within(1, 4)]
    mean: tuple[float, ...] = ()

    def __post_init__(self):
        check_declared(self)


def test_values_that_users_make_are_checked_and_their_lists_are_tuples():
    assert Step(1, mean=[1, 2]) == Step(1, (1.0, 2.0))
    with pytest.raises(SettingError, match="size must be a whole number from 1 to 4"):
        Step(5)


def test_a_schema_says_what_the_docstring_says():
    schemas = schema_of(Inner)["components"]["schemas"]
    assert schemas["Inner"]["description"] == "One part."
    assert schemas["Inner"]["properties"]["name"]["description"] == "The name, or more of it."
    assert Schemas().of(Digest)["pattern"] == "^(?:[0-9a-f]{64})$"
