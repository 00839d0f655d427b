"""Some rows of a manifest, or all: how they are chosen by a text, how they are divided, and what they hold.

Decides what a selection written as text means: comparisons of columns, read by an allow-list and never run.
"""

import ast
import hashlib
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import time
from decimal import Decimal
from functools import cached_property, reduce
from operator import or_
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from frostline.core.errors import DataError, SettingError
from frostline.core.hints import suggest_names
from frostline.datasets.formats.base import (
    ManifestColumns,
    PartOfSamples,
    SelectedRows,
    WholeSamples,
    is_text,
    label_column,
    simple_type,
)
from frostline.datasets.formats.labels import (
    LABEL_FIELDS,
    SOURCE,
    SPLIT,
    TAKEN,
    are_numbers,
    column_labels,
    encode_labels,
    find_name,
    label_text,
    no_classes,
)
from frostline.datasets.formats.tables import named_labels, plain_column
from frostline.datasets.manifest import (
    DatasetStatistics,
    JoinedRows,
    Manifest,
    as_chosen,
    formats_of,
    quantiles_of,
    rows_at,
    select_part,
    within,
)
from frostline.ordering import Chosen, Labels, RowIndices, count_labels, split_at_random, split_by_class, split_by_group

__all__ = (
    "Selection",
    "alike_classes",
    "check_names_agree",
    "few_of_a_class",
    "numbers_among_names",
    "numbers_without_samples",
    "parse_expression",
    "relabel",
    "values_of",
)


_LONGEST = 10_000
_NAMED = 3
_HALF, _FAR_FROM = 0.5, 1.25
_COMPARED = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_EXAMPLE = "label == 'glass' and width >= 200"
_IN_PYTHON = {"null": "None", "true": "True", "false": "False"}  # of those who know SQL or JSON


def parse_expression(text: str, schema: pa.Schema, classes: Sequence[str]) -> pc.Expression:
    """Read a selection such as ``label == 'glass' and width >= 200``.

    It knows columns, texts, numbers, ``True``, ``False``, ``and``, ``or``, ``not``, brackets, ``== != < <= > >=`` (also
    chained), ``in`` and ``not in`` a list, ``'part' in column`` for texts, and ``is None``. The column ``label`` is
    compared with names of classes, dates and times with texts such as ``'2026-11-21'`` and ``'2026-11-21T08:30:00'``.
    A column whose name is no single word is written ``column('taken at')``.

    Args:
        text: the written by whoever asks; nothing of it is run.
        schema: schema of the table.
        classes: names, by label.

    Raises:
        SettingError: the text cannot be read, or names a column or a class that is not there.
    """
    if len(text) > _LONGEST:
        raise SettingError(f"a selection has up to {_LONGEST} characters, not {len(text)}")
    try:
        tree = _Named().visit(ast.parse(text.strip(), mode="eval"))
        return _Reader(schema, classes).condition(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SettingError(f"the selection {_short(text)} cannot be read: write it like {_EXAMPLE}") from error


class _Named(ast.NodeTransformer):
    """Takes ``column('any name')`` for the column's name."""

    def visit_Call(self, node: ast.Call) -> ast.expr:
        match node:
            case ast.Call(func=ast.Name(id="column"), args=[ast.Constant(value=str(name))], keywords=[]):
                return ast.copy_location(ast.Name(id=name, ctx=ast.Load()), node)
        return node


class _Reader:
    """Turns the tree of an expression into one of Arrow; whatever is not named here is refused."""

    def __init__(self, schema: pa.Schema, classes: Sequence[str]) -> None:
        self._schema = schema
        self._classes = classes

    def condition(self, node: ast.expr) -> pc.Expression:
        match node:
            case ast.BoolOp(op=joined, values=values):
                found = self.condition(values[0])
                for value in values[1:]:
                    other = self.condition(value)
                    found = found & other if isinstance(joined, ast.And) else found | other
                return found
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return ~self.condition(operand)
            case ast.Compare(left=left, ops=operators, comparators=others):
                sides = [left, *others]
                found = self._compared(sides[0], operators[0], sides[1])
                for place, operator in enumerate(operators[1:], 1):
                    found &= self._compared(sides[place], operator, sides[place + 1])
                return found
            case ast.Name(id=name) if pa.types.is_boolean(self._type(name)):
                return pc.field(name)
        raise _refused(node)

    def _compared(self, left: ast.expr, operator: ast.cmpop, right: ast.expr) -> pc.Expression:
        match operator, left, right:
            case ((ast.Is() | ast.IsNot()), ast.Name(id=name), ast.Constant(value=None)):
                self._type(name)
                empty = pc.field(name).is_null()
                return empty if isinstance(operator, ast.Is) else ~empty
            case ((ast.In() | ast.NotIn()), ast.Constant(value=str(part)), ast.Name(id=name)):
                if not _is_text(self._type(name)):
                    raise SettingError(f"column {name!r} holds no text in which {part!r} could be")
                found = pc.match_substring(pc.field(name), part)
                return found if isinstance(operator, ast.In) else ~found
            case ((ast.In() | ast.NotIn()), ast.Name(id=name), (ast.Tuple() | ast.List() | ast.Set())):
                found = self._is_in(name, right.elts)
                return found if isinstance(operator, ast.In) else ~found
            case _, ast.Name(id=name), ast.Name(id=other) if type(operator) in _COMPARED:
                if _is_text(self._type(name)) != _is_text(self._type(other)):
                    raise SettingError(f"columns {name!r} and {other!r} cannot be compared")
                return _compare(pc.field(name), operator, pc.field(other))
            case _, ast.Name(id=name), _ if type(operator) in _COMPARED:
                column, value = self._sides(name, right)
                return _compare(column, operator, value)
            case _, _, ast.Name(id=name) if type(operator) in _COMPARED:
                column, value = self._sides(name, left)
                return _compare(value, operator, column)
        raise _refused(left)

    def _is_in(self, name: str, listed: Sequence[ast.expr]) -> pc.Expression:
        """Whether a value is one of some; unknown where there is none, so that neither this nor its opposite holds."""
        if pa.types.is_decimal(self._type(name)) or not listed:  # of no values Arrow knows no type
            equal = [column == value for column, value in (self._sides(name, node) for node in listed)]
            found = reduce(or_, equal, pc.scalar(False))
        else:
            found = pc.field(name).isin([self._value(name, node) for node in listed])
        return pc.if_else(pc.field(name).is_valid(), found, pc.scalar(pa.scalar(None, pa.bool_())))

    def _sides(self, name: str, node: ast.expr) -> tuple[pc.Expression, pc.Expression]:
        """A column and a value, of types that can be compared."""
        value, kind = self._value(name, node), self._type(name)
        if not pa.types.is_decimal(kind):
            return pc.field(name), pc.scalar(value)
        number = Decimal(repr(value))
        exponent = number.as_tuple().exponent
        scale = max(kind.scale, -exponent) if isinstance(exponent, int) else _DECIMAL_DIGITS + 1
        try:
            wide = pa.decimal256(2 * _DECIMAL_DIGITS, scale)
            if scale <= _DECIMAL_DIGITS:
                return pc.field(name).cast(wide), pc.scalar(pa.scalar(number, wide))
        except (pa.ArrowException, ValueError):
            pass  # it has more digits before its point
        raise SettingError(f"column {name!r} holds {kind} and cannot be compared with {value!r}, which has more digits")

    def _value(self, name: str, node: ast.expr) -> Any:
        """A value as a column can be compared with it."""
        value, kind = _constant(node), self._type(name)
        if name == "label" and isinstance(value, str):
            if value not in self._classes:
                raise SettingError(f"there is no class {value!r}{suggest_names(value, self._classes)}")
            return self._classes.index(value)
        if pa.types.is_temporal(kind):
            return _moment(name, value, kind)
        if isinstance(value, str) != _is_text(kind) or (isinstance(value, bool) and pa.types.is_decimal(kind)):
            raise SettingError(f"column {name!r} holds {kind} and cannot be compared with {value!r}")
        return value

    def _type(self, name: str) -> pa.DataType:
        if name not in self._schema.names:
            known, python = ", ".join(self._schema.names), _IN_PYTHON.get(name.lower())
            hint = suggest_names(name, self._schema.names) if python is None else f"; write {python} for the value"
            raise SettingError(f"there is no column {name!r}, only {known}{hint}")
        return self._schema.field(name).type


# Before the point and behind it, of numbers that decimals are compared as.
_DECIMAL_DIGITS = 38


def _compare(left: pc.Expression, operator: ast.cmpop, right: pc.Expression) -> pc.Expression:
    match _COMPARED[type(operator)]:
        case "==":
            return left == right
        case "!=":
            return left != right
        case "<":
            return left < right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case _:
            return left >= right


def _moment(name: str, value: str | float, kind: pa.DataType) -> pa.Scalar:
    try:
        if pa.types.is_time(kind) and isinstance(value, str):
            return pa.scalar(time.fromisoformat(value), kind)
        return pa.scalar(value).cast(kind)
    except (pa.ArrowException, ValueError) as error:
        written = "'2026-11-21T08:30:00Z'" if getattr(kind, "tz", None) else "'2026-11-21' or '2026-11-21T08:30:00'"
        raise SettingError(
            f"column {name!r} holds {kind}, and {value!r} is not one: write it like {written}"
        ) from error


def _constant(node: ast.expr) -> str | int | float | bool:
    match node:
        case ast.Constant(value=str() | int() | float() as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
    raise _refused(node)


def _is_text(kind: pa.DataType) -> bool:
    while pa.types.is_dictionary(kind):
        kind = kind.value_type
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _refused(node: ast.expr) -> SettingError:
    text = ast.unparse(node)
    named = f"; a column of such a name is column({text!r})" if isinstance(node, ast.Attribute) else ""
    return SettingError(f"a selection compares columns with values, as in {_EXAMPLE}; not {_short(text)}{named}")


def _short(text: str) -> str:
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def _select_rows(
    columns: ManifestColumns, rows: SelectedRows | None, chosen: str | pc.Expression, classes: Sequence[str]
) -> SelectedRows:
    """The rows, of those given or of all, for which a selection holds; where it is unknown, it does not.

    Raises:
        SettingError: the selection makes no sense for these columns.
    """
    expression = parse_expression(chosen, columns.table.schema, classes) if isinstance(chosen, str) else chosen
    mask = np.empty(len(columns), np.bool_)
    done = 0
    for piece in columns.scan(columns.table.column_names):
        found = _evaluated(piece, expression)
        mask[done : done + len(found)] = found
        done += len(found)
    return rows_at(rows, mask)


def relabel(manifest: Manifest, label: str, url: str) -> Manifest:
    """A manifest with labels by one of its columns; its splits stay those of the listing.

    Args:
        manifest: manifest of a whole data set.
        label: name of the column, in whatever case it is written.
        url: address of the data, for sentences.

    Raises:
        SettingError: there is no such column.
        DataError: The column's values cannot be labels.
    """
    known = [name for name in manifest.columns.table.column_names if name not in TAKEN]
    name = find_name(known, (label, f"meta_{label}"))
    if name is None:
        if find_name((label,), LABEL_FIELDS) is not None and len(manifest.classes):
            return manifest
        there = f"only {', '.join(known)}" if known else "nor any other: leave the label out where folders are classes"
        raise SettingError(f"{url} has no column {label!r} of labels, {there}{suggest_names(label, known)}")
    column = manifest.columns.table[name]
    try:
        check_names_agree(manifest.named, name)
        names, plain = manifest.named.get(name, ()), plain_column(column)
        is_named = names and pa.types.is_integer(plain.type)
        texts = named_labels(f"column {name!r}", plain, names) if is_named else column_labels(plain, label_text)
        said = encode_labels(texts, names)
    except DataError as error:
        raise DataError(f"the column {name!r} of {url} says no labels: {error}") from error
    columns = manifest.columns.with_labels(label_column(said.labels))
    if said.other is not None:
        raise DataError(f"the column {name!r} of {url} says no classes: {no_classes(said.other)}")
    samples = WholeSamples(columns)
    digest = hashlib.sha256(f"{manifest.digest} label {name}".encode()).hexdigest()
    listing = manifest.listing or manifest.digest
    return replace(
        manifest,
        samples=samples,
        etags=samples.versions,
        columns=columns,
        classes=said.classes,
        named={other: of_other for other, of_other in manifest.named.items() if other != name},
        digest=digest,
        listing=listing,
    )


def check_names_agree(named: Mapping[str, Sequence[str]], column: str) -> None:
    """Make sure that the numbers of a column mean the same classes in all files.

    Args:
        named: names that numbers stand for, by the column; none where files say different ones.
        column: name of the column.

    Raises:
        DataError: The numbers do not.
    """
    if column in named and not named[column]:
        raise DataError(
            f"the numbers of {column!r} stand for other names of classes in some files than in others: write the same "
            "table of classes into all of them"
        )


def _likely_label(schema: pa.Schema) -> str | None:
    """The column to name as that of labels: a field of one that is called so, else the first of texts, or at all."""
    names = [field.name for field in schema if field.name not in (*TAKEN, SOURCE, SPLIT)]
    fields = [name for name in names if name.rpartition(".")[0] in LABEL_FIELDS]
    texts = [name for name in names if is_text(simple_type(schema.field(name).type))]
    return next(iter((*fields, *texts, *names)), None)


def values_of(columns: ManifestColumns, rows: SelectedRows | None, name: str) -> pa.ChunkedArray:
    """A column's values at the given rows, or at all.

    Raises:
        SettingError: the data set has no column of that name.
    """
    known = columns.table.column_names
    if name not in known:
        raise SettingError(f"there is no column {name!r}, only {', '.join(known)}{suggest_names(name, known)}")
    column = columns.table.column(name)
    if rows is None:
        return column
    whole = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return pa.chunked_array([whole.take(pa.array(some)) for some in rows.pieces()], column.type)


def _groups_of(
    columns: ManifestColumns, rows: SelectedRows | None, name: str
) -> tuple[npt.NDArray[np.int64], list[object]]:
    """Numbers of the groups that equal values of a column make, in the order of the values; and the values.

    Raises:
        SettingError: the data set has no column of that name.
        DataError: a sample has no value there.
    """
    values = values_of(columns, rows, name)
    if values.null_count:
        raise DataError(
            f"{values.null_count} samples have no {name!r}: leave them out first, select('{name} is not None')"
        )
    encoded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    encoded = encoded.unify_dictionaries().combine_chunks()
    if isinstance(encoded, pa.ChunkedArray):  # of no chunks at all
        return np.zeros(0, np.int64), []
    order = pc.sort_indices(encoded.dictionary).to_numpy()
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    return number[encoded.indices.to_numpy()], encoded.dictionary.take(pa.array(order)).to_pylist()


def _evaluated(piece: pa.Table, expression: pc.Expression) -> npt.NDArray[np.bool_]:
    from pyarrow import acero

    steps = [
        acero.Declaration("table_source", acero.TableSourceNodeOptions(piece)),
        acero.Declaration("project", acero.ProjectNodeOptions([expression], ["kept"])),
    ]
    try:
        # One thread: Arrow's pool would not survive a fork of the process, and rows keep their order.
        found = acero.Declaration.from_sequence(steps).to_table(use_threads=False).column("kept")
        if not pa.types.is_boolean(found.type):
            raise SettingError(f"a selection says of each sample whether it is wanted; this one gives {found.type}")
    except (pa.ArrowException, TypeError) as error:
        raise SettingError(f"the selection does not fit the columns: {str(error).splitlines()[0]}") from error
    return np.asarray(pc.fill_null(found, False).to_numpy(), np.bool_)


@dataclass(frozen=True, eq=False)
class Selection:
    """A manifest, and which of its rows are meant. Immutable, safe for threads.

    Attributes:
        whole: the manifest.
        rows: the selected rows of the manifest; None selects all of them.
    """

    whole: Manifest
    rows: SelectedRows | None

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest of these rows alone, with a digest of its own; its columns are still those of the whole."""
        if self.rows is None:
            return self.whole
        samples = PartOfSamples(self.whole_samples, self.rows)
        digest = hashlib.sha256(self.whole.digest.encode() + self.rows.fingerprint).hexdigest()
        names = samples.texts_of(self.whole.names)
        return replace(self.whole, samples=samples, names=names, etags=samples.versions, digest=digest)

    @property
    def whole_samples(self) -> WholeSamples:
        """All samples of the manifest."""
        assert isinstance(self.whole.samples, WholeSamples), "the manifest of all has all samples"
        return self.whole.samples

    @property
    def listing(self) -> str:
        """SHA-256 that names the listing that the manifest was made from."""
        return self.whole.digest

    @property
    def chosen(self) -> Chosen:
        """The rows in the manifest's order, a bit for each of its rows."""
        return as_chosen(self.rows, len(self.whole.samples))

    def take(self, rows: npt.NDArray[Any]) -> SelectedRows:
        """The rows at some positions, or where a mask is true; see ``Dataset.take``."""
        if rows.dtype != np.bool_:
            rows = rows.astype(np.int64, copy=False)
            return RowIndices(rows if self.rows is None else self.rows.at(rows))
        if len(rows) != len(self.manifest.samples):
            count = len(self.manifest.samples)
            raise SettingError(f"a mask has one value for each of the {count} samples, not {len(rows)}")
        return self.select_part(rows.view(np.uint8), 1)

    def select_part(self, parts: npt.NDArray[np.uint8], number: int) -> SelectedRows:
        """The rows whose part has that number, of a division that has a value for each of them."""
        return select_part(self.rows, parts, number)

    def within(self, chosen: Chosen) -> SelectedRows:
        """The rows that a choice has too, in the order that they have here."""
        return within(self.rows, chosen)

    def where(self, chosen: str | pc.Expression) -> SelectedRows:
        """The rows for which a condition holds; see ``Dataset.select``."""
        return _select_rows(self.whole.columns, self.rows, chosen, self.whole.classes)

    def concatenate(self, others: Iterable["Selection"]) -> SelectedRows:
        """The rows, and after them those of other selections from the same manifest."""
        parts = (self, *others)
        return JoinedRows([part.chosen if part.rows is None else part.rows for part in parts])

    def count_shared(self, other: "Selection") -> int:
        """How many of these samples another selection of the same data has too, by their ids if it was listed anew."""
        if self.listing != other.listing:
            return len(np.intersect1d(self.manifest.samples.ids, other.manifest.samples.ids))
        return len(self.within(other.chosen))

    @property
    def labels(self) -> Labels:
        """The labels of these rows, counted."""
        known = self.whole.columns.labels if self.rows is None else None
        if known is not None:
            return known
        return count_labels(lambda: self.whole_samples.pieces("label", self.rows))

    @property
    def per_label(self) -> Mapping[int, int]:
        """How many of these rows have each label that lies between the least and the greatest."""
        labels = self.labels
        return dict(zip(range(labels.first, labels.first + len(labels.counts)), labels.counts.tolist(), strict=True))

    def column(self, name: str) -> pa.ChunkedArray:
        """See ``Dataset.column``."""
        return values_of(self.whole.columns, self.rows, name)

    def groups(self, column: str) -> tuple[npt.NDArray[np.int64], Sequence[Any]]:
        """Which of a column's values each row has, by its number; and the values."""
        return _groups_of(self.whole.columns, self.rows, column)

    def divide(self, shares: Sequence[float], seed: int, *, by: str | None, balanced: bool) -> npt.NDArray[np.uint8]:
        """Which part each row belongs to; see ``Dataset.split``."""
        if by is not None:
            return split_by_group(self.groups(by)[0], shares, seed)
        if not balanced:
            return split_at_random(len(self.manifest.samples), shares, seed)
        return split_by_class(self.labels, shares, seed)

    def with_columns(self, columns: Mapping[str, Sequence[Any]]) -> Manifest:
        """The manifest with further columns; see ``Dataset.with_columns``."""
        if self.rows is not None:
            raise SettingError("columns are added to a whole data set: add them before select, split or take")
        table = self.whole.columns.table
        for name, values in columns.items():
            if len(values) != len(self.whole.samples) or name in table.column_names:
                raise SettingError(
                    f"column {name!r} has {len(values)} values for {len(self.whole.samples)} samples, or its name is "
                    "taken"
                )
            table = table.append_column(name, pa.array(values))
        return replace(self.whole, columns=self.whole.columns.of(table))

    def require_classes(self, at_least: int, url: str) -> None:
        """Make sure that the samples have at least so many classes.

        Args:
            at_least: number of classes that training needs.
            url: address of the data, for sentences.

        Raises:
            DataError: fewer classes have samples.
        """
        present = [self.whole.classes[label] for label, count in self.per_label.items() if count and label >= 0]
        if at_least and not present:
            other = _likely_label(self.whole.columns.table.schema)
            named = f"; or name one of its columns, such as --label {other} (in Python label={other!r})"
            raise DataError(
                f"not one of the {len(self.manifest.samples)} samples of {url} has a label: put files into class "
                f"folders such as cats/1.jpg, or fill a column {' or '.join(LABEL_FIELDS)} of the list or table"
                f"{named if other else ''}"
            )
        if len(present) < at_least:
            names = ", ".join(repr(name) for name in present)
            inner = folders_within(self.whole.columns.table["object"], present[0])
            inside = f": {url}/{present[0]} holds {', '.join(inner)}, which may be what to give" if inner else ""
            raise DataError(f"{url} has {len(present)} class ({names}); training needs at least {at_least}{inside}")

    def require_labels(self, url: str) -> None:
        """Make sure that every sample has a label, as a loop that learns classes needs.

        Args:
            url: address of the data, for sentences.

        Raises:
            DataError: a sample has none.
        """
        without = self.per_label.get(-1, 0)
        if without:
            raise DataError(
                f"{without} of {len(self.manifest.samples)} samples of {url} have no label: leave them out "
                "(--where 'label is not None'; in Python data.select('label is not None'))"
            )

    def statistics(self, splits: Mapping[str, int]) -> DatasetStatistics:
        """See ``Dataset.statistics``; ``splits`` are the samples in each that was saved, by its name."""
        manifest, lengths = self.manifest, self.manifest.samples.lengths
        counts = self.per_label
        return DatasetStatistics(
            samples=len(lengths),
            per_class=tuple((name, counts.get(label, 0)) for label, name in enumerate(manifest.classes)),
            without_label=counts.get(-1, 0),
            total_bytes=int(lengths.sum()),
            mean_bytes=float(lengths.mean()) if len(lengths) else 0.0,
            min_bytes=int(lengths.min()) if len(lengths) else 0,
            max_bytes=int(lengths.max(initial=0)),
            quantiles=quantiles_of(lengths),
            formats=formats_of(manifest),
            columns=tuple((field.name, str(field.type)) for field in manifest.columns.table.schema),
            splits=tuple(splits.items()),
            manifest=manifest.place,
            manifest_found=manifest.found,
            left_out=manifest.left_out,
        )


def folders_within(names: pa.ChunkedArray, folder: str) -> tuple[str, ...]:
    """Some of the folders in a folder that holds all objects, each in one of several; empty where it is none such.

    Archives are often unpacked into a folder of their own, around those of the classes.
    """
    found = pc.struct_field(pc.extract_regex(names, f"^{re.escape(folder)}/(?P<inner>[^/]+)/"), "inner")
    inner = pc.unique(found).to_pylist()
    return () if None in inner or len(inner) == 1 else tuple(sorted(inner)[:_NAMED])


def few_of_a_class(counts: Mapping[int, int], share: float, real: float) -> str:
    """What becomes of classes that are too small to be divided by the share to hold out; empty where none is.

    Args:
        counts: number of samples by label, below 0 for none.
        share: share that was asked for.
        real: share that is held out.
    """
    there = [count for label, count in counts.items() if label >= 0 and count] if share else []
    alone = sum(count == 1 for count in there)
    more = sum(count > 1 and count * share < (1 if real > _FAR_FROM * share else _HALF) for count in there)
    said = []
    if more:
        said.append(
            f"{more} of {len(there)} classes have so few samples that one of each is more than the share to hold out: "
            f"{real:.0%} of all samples are held out, and {share:.0%} were asked for"
        )
    if alone:
        said.append(f"{alone} of {len(there)} classes have a single sample, which is trained on and never scored")
    return "; ".join(said)


def alike_classes(classes: Sequence[str]) -> str:
    """What is said of classes whose names differ in capitals, or in the form that Unicode has of a letter, alone.

    Two machines, or two people, may have written one name; nothing says that they are one class, so that they stay two.
    """
    if are_numbers(classes):
        return ""
    seen: dict[str, str] = {}
    pairs = [
        f"{other!a} and {name!a}"
        for name in classes
        if (other := seen.setdefault(unicodedata.normalize("NFKC", name).casefold(), name)) != name
    ]
    more = f" and {len(pairs) - _NAMED} more" if len(pairs) > _NAMED else ""
    named = f"{', '.join(pairs[:_NAMED])}{more}"
    return f"classes are called alike, and learned apart: {named}; where they are one, write one name" if pairs else ""


def numbers_among_names(classes: Sequence[str]) -> str:
    """What is said of classes of which some are called by whole numbers, and others are not; empty without both."""
    numbers = [name for name in classes if name.isdecimal() and str(int(name)) == name]
    if len(numbers) in (0, len(classes)) or len(set(map(str.isdecimal, classes))) == 1:
        return ""
    return (
        f"{len(numbers):,} of {len(classes):,} classes are called by numbers, as {numbers[0]}, and others by names, as "
        f"{next(name for name in classes if not name.isdecimal())!a}: all are taken for names; where numbers stand for "
        "names, write the same kind everywhere"
    )


def numbers_without_samples(classes: Sequence[str], counts: Mapping[int, int]) -> str:
    """What is said of labels that are numbers where some below the largest label no sample; empty where all do.

    Names without samples are the data's own table of classes: nothing is said of those.

    Args:
        classes: name of each class.
        counts: number of samples by label, below 0 for none.
    """
    there = sum(1 for label, count in counts.items() if label >= 0 and count)
    if there in (0, len(classes)) or not are_numbers(classes):
        return ""
    missing = next(label for label in range(len(classes)) if not counts.get(label))
    return (
        f"{there:,} of {len(classes):,} classes have samples: labels are numbers up to {len(classes) - 1:,}, and none "
        f"is {missing:,}; the head has an output for each number: where numbers stand for something else, such as "
        "years, write them as texts, which name classes"
    )
