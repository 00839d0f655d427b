"""Puts samples into a table over CQL: each is written, read back and given its digest, so that a run can go on."""

import hashlib
from collections.abc import Iterable, Sequence
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NamedTuple

from frostline.core.errors import DataError
from frostline.stores.cql.schema import WHOLE, Shape, key_from
from frostline.stores.protocols import Buffer
from frostline.stores.urls import CqlLocation

if TYPE_CHECKING:
    from frostline.stores.cql.session import CqlSession, PendingStatements

__all__ = ("TableSample", "find_damaged_rows", "put_all", "row_digest", "row_digests")

# Of a sample that is not read back yet. A null would leave a tombstone in every row.
_OPEN = b""


class TableSample(NamedTuple):
    """A sample to be put into a table.

    Attributes:
        name: name of the sample, unique in its data set.
        data: the encoded image.
        label: label of the sample; -1 where there is none.
        class_name: the name of its class; None where there is none.
        origin: name of what it is made from, for its digest.
        mask: the mask, encoded; None where it has none.
        about: the metadata, in the order of the columns that it is put with.
    """

    name: str
    data: Buffer
    label: int
    class_name: str | None
    origin: bytes = b""
    mask: Buffer | None = None
    about: tuple[object, ...] = ()


class _Step(Enum):
    PUT = auto()
    READ = auto()
    READ_EVERYWHERE = auto()
    DIGEST = auto()


class _UnderWay(NamedTuple):
    sample: TableSample
    key: object
    step: _Step


def row_digest(data: Buffer, mask: Buffer | None, origin: bytes) -> bytes:
    """What the row of a sample that was put and read back is marked with: the SHA-256 of its data, and its origin."""
    digest = hashlib.sha256(data)
    if mask is not None:
        digest.update(b"\0mask\0")
        digest.update(mask)
    return digest.digest() + origin


def put_all(
    link: "CqlSession", place: CqlLocation, samples: Iterable[TableSample], *, columns: Sequence[str], maximum: int
) -> None:
    """Put samples, each of them read back and compared before its row gets its digest.

    A row is written at once, so what has a digest is whole.

    Args:
        link: the link to the servers of the table.
        place: place of the table.
        samples: the samples, taken while earlier ones are under way.
        columns: columns of their metadata.
        maximum: the largest number of them under way at once; each takes its bytes twice.

    Raises:
        DataError: keys cannot be made of names, or a sample came back otherwise than it was put.

    What the driver raises comes out as it is.
    """
    flight: PendingStatements[_UnderWay] = link.flight()
    put = link.put_statement(columns)
    for sample in samples:
        while len(flight) >= maximum:
            _go_on(link, place, flight)
        key = key_from(link.shape.key_type, sample.name)
        flight.send(_UnderWay(sample, key, _Step.PUT), put.bind(_row(link.shape, key, sample)))
    while len(flight):
        _go_on(link, place, flight)


def row_digests(link: "CqlSession", names: Sequence[str], *, maximum: int) -> list[bytes]:
    """The digest of each sample of these names; empty where there is none, or where data was written after it.

    Args:
        link: the link to the servers of the table.
        names: names of samples.
        maximum: rows asked for at once.

    What the driver raises comes out as it is.
    """
    found = [b""] * len(names)
    if link.read_digest is None:
        return found
    asked = [(link.read_digest, key_from(link.shape.key_type, name)) for name in names]
    for index, rows in link.answers(asked, maximum):
        if isinstance(rows, Exception):
            raise rows
        if rows and rows[0][0] and rows[0][2] is not None:
            digest, marked, *written = rows[0]
            found[index] = bytes(digest) if max(filter(None, written)) <= marked else b""
    return found


def find_damaged_rows(link: "CqlSession", names: Sequence[str], digests: Sequence[bytes], *, maximum: int) -> list[int]:
    """Numbers of the samples whose data and mask are not those that their rows have the digests of: all are read.

    Args:
        link: the link to the servers of the table.
        names: names of samples.
        digests: digests of their rows, as ``row_digests`` gives them; what has none is not looked at.
        maximum: rows read at once.

    What the driver raises comes out as it is.
    """
    marked = [place for place, digest in enumerate(digests) if digest]
    asked = ((link.check, key_from(link.shape.key_type, names[place])) for place in marked)
    found = []
    for index, rows in link.answers(asked, maximum):
        if isinstance(rows, Exception):
            raise rows
        if not rows or not _has_digest(rows[0], digests[marked[index]]):
            found.append(marked[index])
    return found


def _has_digest(row: Sequence[Any], digest: bytes) -> bool:
    data, *masks = row
    return data is not None and digest.startswith(row_digest(data, masks[0] if masks else None, b""))


def _go_on(link: "CqlSession", place: CqlLocation, flight: "PendingStatements[_UnderWay]") -> None:
    """Wait for the next answer, and do what follows on it."""
    done, answer = flight.receive()
    if isinstance(answer, Exception):
        raise answer
    match done.step:
        case _Step.PUT:
            flight.send(done._replace(step=_Step.READ), link.check.bind((done.key,)))
        case _Step.READ if not _is_same(done.sample, answer):
            # Another replica than those that took it may have been asked, which did not hear of it yet.
            flight.send(done._replace(step=_Step.READ_EVERYWHERE), link.check_everywhere(done.key))
        case _Step.READ_EVERYWHERE if not _is_same(done.sample, answer):
            raise DataError(f"{done.sample.name} came back from {place.url} otherwise than it was put: run it again")
        case _Step.READ | _Step.READ_EVERYWHERE if link.digest is not None:
            digest = row_digest(done.sample.data, done.sample.mask, done.sample.origin)
            flight.send(done._replace(step=_Step.DIGEST), link.digest.bind((done.key, digest)))
        case _:
            return


def _is_same(sample: TableSample, rows: Sequence[Any]) -> bool:
    if not rows:
        return False
    data, *masks = (None if cell is None else bytes(cell) for cell in rows[0])
    mask = None if sample.mask is None else bytes(sample.mask)
    return data == bytes(sample.data) and all(kept == mask for kept in masks)


def _row(shape: Shape, key: object, sample: TableSample) -> tuple[object, ...]:
    number = sample.label if sample.label >= 0 else None
    beside = {
        "size": len(sample.data),
        "name": sample.name,
        "label": number if shape.types.get(shape.label) in WHOLE else sample.class_name,
    }
    mask = () if not shape.read_mask else (None if sample.mask is None else bytes(sample.mask),)
    digest = (_OPEN,) if shape.digest else ()
    own = (key, bytes(sample.data), *(beside[role] for role in shape.beside), *mask, *digest)
    return (*own, *sample.about)
