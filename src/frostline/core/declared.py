"""Types that say what a field may hold: from these alone JSON is read, values are checked, and schemas are made.

A field is ``Annotated[int, Within(0, 63)]``, a text ``Annotated[str, Sized(1, 64)]``, and so on. The docstring of its
class says what it means, under ``Attributes:``; the schema says the same.
"""

import inspect
import json
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from frostline.core.errors import BadRequest, FrostlineError, SettingError
from frostline.core.hints import suggest_names

__all__ = (
    "PARSED_BYTES",
    "Amount",
    "As",
    "Count",
    "Digest",
    "FieldTwice",
    "Flat",
    "Matching",
    "OneOf",
    "Read",
    "Refer",
    "Schemas",
    "Sized",
    "Within",
    "check_declared",
    "first_twice",
    "parse_json",
    "read_declared",
    "refuse_unknown_fields",
)


PARSED_BYTES = 50
"""Bytes of Python objects per byte of JSON while it is parsed.

In the worst case, lists within lists with a character beyond 16 bits among them, they are 48.
"""


@dataclass(frozen=True, slots=True)
class Within:
    """Bounds of a number.

    Attributes:
        least: minimum value.
        most: the most that it may be.
        is_above: True if it must be more than ``least``.
    """

    least: float = -math.inf
    most: float = math.inf
    is_above: bool = False

    def holds(self, value: float) -> bool:
        """Whether a number lies within."""
        return self.least <= value <= self.most and not (self.is_above and value == self.least)

    @property
    def words(self) -> str:
        """The bounds in a sentence; empty where there are none."""
        if self.is_above:
            return f" above {_number(self.least)}" + ("" if math.isinf(self.most) else f", up to {_number(self.most)}")
        if math.isinf(self.most):
            return "" if math.isinf(self.least) else f", {_number(self.least)} or more"
        return f" from {_number(self.least)} to {_number(self.most)}"

    @property
    def schema(self) -> dict[str, Any]:
        """The bounds in words of JSON Schema."""
        least = "exclusiveMinimum" if self.is_above else "minimum"
        return {name: bound for name, bound in ((least, self.least), ("maximum", self.most)) if math.isfinite(bound)}


@dataclass(frozen=True, slots=True)
class Sized:
    """Bounds of the characters of a text, or of the entries of a list.

    Attributes:
        least: minimum number of items.
        most: the most that there may be; None for any number.
        is_printable: True if a text may have no control characters.
    """

    least: int = 0
    most: int | None = None
    is_printable: bool = False

    def holds(self, value: Any) -> bool:
        """Whether a text or a list has as many."""
        return self.least <= len(value) and (self.most is None or len(value) <= self.most)

    @property
    def words(self) -> str:
        """The bounds in a sentence."""
        if self.most is None:
            return f"at least {self.least}"
        return f"{self.least} to {self.most}" if self.least else f"up to {self.most}"

    def schema(self, *names: str) -> dict[str, int]:
        """The bounds in words of JSON Schema, by those for the fewest and the most."""
        return {name: bound for name, bound in zip(names, (self.least or None, self.most), strict=True) if bound}


@dataclass(frozen=True, slots=True)
class Matching:
    """A regular expression that a whole text fits.

    Attributes:
        pattern: the expression.
        words: a name for such texts, as a sentence goes on behind "must be".
    """

    pattern: str
    words: str


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of some texts."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Read:
    """A reader of its own, where a type does not say it all.

    Attributes:
        read: function of a value and the name of its field, which raises ``SettingError`` or ``BadRequest``.
        schema: JSON Schema of what it takes.
    """

    read: Callable[[Any, str], Any]
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refer:
    """A component that the description has, in place of a type."""

    name: str


@dataclass(frozen=True, slots=True, eq=False)
class As:
    """Another type, as which a value is written in JSON.

    Attributes:
        kind: the type.
        make: function that makes the value of one of these.
    """

    kind: Any
    make: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Flat:
    """Has the fields of a message stand among those of the message that holds it."""


Count = Annotated[int, Within(0, 2**63 - 1)]
Amount = Annotated[float, Within(0)]
Digest = Annotated[str, Matching("[0-9a-f]{64}", "a SHA-256 in 64 small hexadecimal digits")]

Reader = Callable[[object, str], Any]
T = TypeVar("T")
N = TypeVar("N", bound=Hashable)
_ANY_NUMBER, _ANY_SIZE = Within(), Sized()
_KNOWN_SCHEMAS: Mapping[Any, Mapping[str, Any]] = {
    Any: {},
    NoneType: {"type": "null"},
    bool: {"type": "boolean"},
    float: {"type": "number"},
    int: {"type": "integer"},
    str: {"type": "string"},
}


def read_declared(kind: type[T], value: object, what: str, path: str = "") -> T:
    """Read a message that an untrusted client sent as JSON.

    Args:
        kind: class of the message, a data class.
        value: the value, as JSON gave it.
        what: name of the message, for sentences.
        path: text before the names of its fields in sentences.

    Raises:
        BadRequest: A field is wrong, is missing, or is none that the message has; the sentence names it.
    """
    try:
        message: T = _object(kind, value, path, what)
    except SettingError as error:
        raise BadRequest(str(error)) from error
    return message


def check_declared(values: Any) -> None:
    """Make sure that the fields of a frozen data class hold what their types say; lists become tuples.

    Raises:
        SettingError: A field does not; the sentence names it.
    """
    kind: Any = type(values)
    for name, (_, reader) in _fields(kind).items():
        object.__setattr__(values, name, reader(getattr(values, name), name))


def refuse_unknown_fields(
    body: Mapping[str, Any], known: Iterable[str], what: str, error: type[FrostlineError] = BadRequest
) -> None:
    """Make sure that somebody's JSON has no field that nobody reads: one that is misspelt would be left out unseen.

    Args:
        body: the object.
        known: names of its fields.
        what: name of it, for the sentence.
        error: type of the error to raise.

    Raises:
        FrostlineError: The JSON has an unknown field; the sentence names it, and known fields that are spelt alike.
    """
    names = sorted(known)
    unknown = [str(name) for name in body if name not in names]
    if unknown:
        shown = unknown[0][:50]
        there_are = f": there are {', '.join(names)}" if names else ", and no other one"
        raise error(f"{what} has no field {shown!r}{suggest_names(shown, names) or there_are}")


def first_twice(names: Iterable[N]) -> N | None:
    """The first of some names that comes twice, in the order in which its second one comes; None if there is none.

    The names may be an untrusted client's, as many as a body holds: it looks at each once.
    """
    seen: set[N] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


class FieldTwice(ValueError):
    """An object of JSON has a field twice, of which one would be ignored."""


def parse_json(text: str | bytes | bytearray) -> Any:
    """The value of JSON that has each field of an object once.

    Raises:
        ValueError: The text is no JSON, or has a field twice (``FieldTwice``, which names it).
    """
    return json.loads(text, object_pairs_hook=_each_once)


def _each_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise FieldTwice(f"the field {str(first_twice(name for name, _ in pairs))[:50]!r} twice")
    return found


@cache
def _fields(kind: Any) -> dict[str, tuple[bool, Reader]]:
    """Whether each field must be there, and what reads it."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        each.name: (each.default is MISSING and each.default_factory is MISSING, _reader(hints[each.name]))
        for each in fields(kind)
    }


@cache
def _flat(kind: Any) -> tuple[str, Any] | None:
    """The field whose own fields stand among the others, and its type."""
    hints = get_type_hints(kind, include_extras=True)
    return next((item for item in hints.items() if Flat() in getattr(item[1], "__metadata__", ())), None)


def _names(kind: Any) -> list[str]:
    flat, names = _flat(kind), [each.name for each in fields(kind)]
    return names if flat is None else [*(name for name in names if name != flat[0]), *_names(get_args(flat[1])[0])]


def _object(kind: Any, value: object, path: str, what: str) -> Any:
    if not isinstance(value, Mapping):
        raise SettingError(f"{what} must be an object")
    refuse_unknown_fields(value, _names(kind), what)
    found, flat = {}, _flat(kind)
    if flat is not None:
        own = _fields(kind).keys() - {flat[0]}
        inner = {name: said for name, said in value.items() if name not in own}
        found[flat[0]] = _object(get_args(flat[1])[0], inner, path, what)
    for name, (is_needed, reader) in _fields(kind).items():
        if name in value:
            found[name] = reader(value[name], f"{path}{name}")
        elif is_needed and name not in found:
            raise SettingError(f"{path}{name} is missing: {what} must have it")
    return kind(**found)


@cache
def _reader(kind: Any) -> Reader:
    """What reads a value of that type, and refuses all others by a sentence."""
    marks = getattr(kind, "__metadata__", ())
    bare = get_args(kind)[0] if marks else kind
    for mark in marks:
        match mark:
            case Read(read, _):
                return read
            case As(other, make):
                reader = _reader(other)
                return lambda value, name: make(reader(value, name))
            case OneOf(names):
                return _one_of(names)
    origin, parts = get_origin(bare), get_args(bare)
    if origin in (Union, UnionType):
        (inner,) = (part for part in parts if part is not NoneType)
        some = _reader(Annotated[(inner, *marks)] if marks else inner)
        return lambda value, name: None if value is None else some(value, name)
    if origin is tuple:
        return _list(parts, next((mark for mark in marks if isinstance(mark, Sized)), _ANY_SIZE))
    if origin is Literal:
        return _one_of(parts)
    return _plain(origin or bare, marks)


def _plain(kind: Any, marks: tuple[Any, ...]) -> Reader:
    within = next((mark for mark in marks if isinstance(mark, Within)), _ANY_NUMBER)
    if isinstance(kind, type) and is_dataclass(kind):
        return lambda value, name: value if isinstance(value, kind) else _object(kind, value, f"{name}.", name)
    if kind is int:
        return _whole(within)
    if kind is float:
        return lambda value, name: _real(value, name, within)
    if kind is str:
        sized = next((mark for mark in marks if isinstance(mark, Sized)), _ANY_SIZE)
        matching = next((mark for mark in marks if isinstance(mark, Matching)), None)
        pattern = None if matching is None else re.compile(matching.pattern)
        return lambda value, name: _text(value, name, sized, pattern, matching)
    if kind is bool:
        return _switch
    if kind is dict:
        return _table
    assert kind is Any, f"{kind} needs a reader of its own"
    return lambda value, _: value


def _whole(within: Within) -> Reader:
    least, most = within.least, within.most  # a request has some hundred thousand numbers

    def read(value: object, name: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise SettingError(f"{name} must be a whole number{within.words}")
        return value

    return read


def _real(value: object, name: str, within: Within) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SettingError(f"{name} must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or not within.holds(number):
        raise SettingError(f"{name} must be a finite number{within.words}")
    return number


def _text(value: object, name: str, sized: Sized, pattern: re.Pattern[str] | None, matching: Matching | None) -> str:
    if matching is not None and pattern is not None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise SettingError(f"{name} must be {matching.words}")
        return value
    is_right = isinstance(value, str) and sized.holds(value) and "\0" not in value
    if not isinstance(value, str) or not is_right or (sized.is_printable and not value.isprintable()):
        kind = "a printable text" if sized.is_printable else "a text"
        raise SettingError(f"{name} must be {kind}" + ("" if sized == _ANY_SIZE else f" of {sized.words} characters"))
    return value


def _switch(value: object, name: str) -> bool:
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be true or false")
    return value


def _table(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise SettingError(f"{name} must be an object")
    return value


def _one_of(names: tuple[str, ...]) -> Reader:
    words = " or ".join(names) if len(names) < 3 else f"one of {', '.join(names)}"

    def read(value: object, name: str) -> Any:
        if not isinstance(value, str) or value not in names:
            raise SettingError(f"{name} must be {words}")
        return value

    return read


def _list(parts: tuple[Any, ...], sized: Sized) -> Reader:
    reader = _reader(parts[0])
    if parts[-1] is not ...:
        sized = Sized(len(parts), len(parts))

    def read(value: object, name: str) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple):
            raise SettingError(f"{name} must be a list")
        if not sized.holds(value):
            raise SettingError(f"{name} must be a list of {sized.words} entries")
        return tuple([reader(entry, name) for entry in value])

    return read


def _number(value: float) -> str:
    """A bound in words; far from everything else, powers of two."""
    whole = int(value)
    if whole == value and whole >= 1 << 31:
        for less, words in ((0, ""), (1, " - 1")):
            if (whole + less) & (whole + less - 1) == 0:
                return f"2^{(whole + less).bit_length() - 1}{words}"
    return f"{value:g}" if whole != value else str(whole)


@dataclass(frozen=True, slots=True)
class Schemas:
    """Makes JSON Schemas of types; those of classes are components, which others refer to."""

    components: dict[str, Any] = field(default_factory=dict)
    _made: dict[str, Any] = field(default_factory=dict, init=False)

    def of(self, kind: Any, *, is_asked: bool = False) -> dict[str, Any]:
        """The schema of a type.

        Args:
            kind: the type.
            is_asked: True for what clients send: fields with a default may be left out, and others are refused. Of
                what is answered, all fields are there, and later versions may have more.
        """
        marks = getattr(kind, "__metadata__", ())
        bare = get_args(kind)[0] if marks else kind
        for mark in marks:
            match mark:
                case Refer(name):
                    return _reference(name)
                case Read(_, schema):
                    return dict(schema)
                case As(other, _):
                    return self.of(other, is_asked=is_asked)
        origin, parts = get_origin(bare), get_args(bare)
        if origin in (Union, UnionType):
            some = [self.of(Annotated[(part, *marks)] if marks else part, is_asked=is_asked) for part in parts]
            return {"anyOf": some}
        if origin in (tuple, list):
            return self._list(parts if origin is tuple else (*parts, ...), marks, is_asked=is_asked)
        if origin is dict:
            return {"type": "object", "additionalProperties": self.of(parts[1], is_asked=is_asked)}
        if origin in (Literal, NotRequired):
            return {"enum": list(parts)} if origin is Literal else self.of(parts[0], is_asked=is_asked)
        if is_dataclass(bare) or is_typeddict(bare):
            self._add(bare, is_asked=is_asked)
            return _reference(bare.__name__)
        return {**_KNOWN_SCHEMAS[bare], **(_bounds(marks) if bare is not NoneType else {})}

    def _list(self, parts: tuple[Any, ...], marks: tuple[Any, ...], *, is_asked: bool) -> dict[str, Any]:
        sized = next((mark for mark in marks if isinstance(mark, Sized)), _ANY_SIZE)
        if parts[-1] is not ...:
            sized = Sized(len(parts), len(parts))
        return {
            "type": "array",
            "items": self.of(parts[0], is_asked=is_asked),
            **sized.schema("minItems", "maxItems"),
        }

    def _add(self, kind: Any, *, is_asked: bool) -> None:
        if kind.__name__ in self.components:
            assert self._made.get(kind.__name__, kind) is kind, f"two classes are called {kind.__name__}"
            return
        self._made[kind.__name__] = kind
        made = self.components[kind.__name__] = {"type": "object"}
        made |= self.object(kind, is_asked=is_asked)

    def object(self, kind: Any, *, is_asked: bool) -> dict[str, Any]:
        """The schema of a class itself, for a component of another name or with more fields."""
        hints, said, flat = get_type_hints(kind, include_extras=True), _said_of(kind), _flat(kind)
        properties = {
            name: {**self.of(hint, is_asked=is_asked), **({"description": said[name]} if name in said else {})}
            for name, hint in hints.items()
            if flat is None or name != flat[0]
        }
        needed = list(properties)
        if is_typeddict(kind):
            needed = sorted(kind.__required_keys__)
        elif is_asked:
            needed = [name for name, (is_needed, _) in _fields(kind).items() if is_needed]
        made = {"type": "object", "description": _first_line(kind), "properties": properties, "required": needed}
        if flat is not None:
            inner = self.object(get_args(flat[1])[0], is_asked=is_asked)
            made["properties"] = {**inner["properties"], **properties}
            made["required"] = [*inner["required"], *(name for name in needed if name != flat[0])]
        return {**made, "additionalProperties": False} if is_asked else made


def _reference(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _bounds(marks: tuple[Any, ...]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for mark in marks:
        match mark:
            case Within():
                made |= mark.schema
            case Sized():
                made |= mark.schema("minLength", "maxLength")
            case Matching(pattern, _):
                made["pattern"] = f"^(?:{pattern})$"
            case OneOf(names):
                made["enum"] = list(names)
    return made


def _first_line(kind: Any) -> str:
    return (inspect.getdoc(kind) or "").partition("\n")[0].replace("``", "`")


def _said_of(kind: Any) -> dict[str, str]:
    """What the docstring of a class says of its fields."""
    said: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        attributes = inspect.cleandoc(each.__doc__ or "").partition("Attributes:\n")[2]
        for name, text in re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", attributes, re.MULTILINE):
            plain = re.sub(r"\s+", " ", text).replace("``", "`").replace("None", "null")
            said[name] = plain[0].upper() + plain[1:]
    return said
