"""What a copy keeps of a part that is whole: the names, sizes, SHA-256s and versions of its objects."""

import json
from dataclasses import asdict, dataclass
from typing import NamedTuple

from frostline.core import Skipped

__all__ = ("CopiedObject", "CopiedPart")


class CopiedObject(NamedTuple):
    """An object that was written and read back.

    Attributes:
        size: size of the object in bytes.
        sha256: SHA-256 of the object.
        etag: its version then; empty where the store tells none.
    """

    size: int
    sha256: str
    etag: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopiedPart:
    """A part that was written completely.

    Attributes:
        number: index of the part.
        samples: in it.
        objects: the written objects, by name.
        skipped: samples that could not be read.
        about: names the values of the metadata that went along; empty where none did.
    """

    number: int
    samples: int
    objects: dict[str, CopiedObject]
    skipped: tuple[Skipped, ...]
    about: str = ""

    def to_json(self) -> bytes:
        """The text of its record."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes, number: int) -> "CopiedPart | None":
        """The part of that number; None where its record is damaged."""
        try:
            value = json.loads(data)
            objects = {
                name: CopiedObject(int(fields[0]), str(fields[1]), str(fields[2]))
                for name, fields in value["objects"].items()
            }
            skipped = tuple(Skipped(**fields) for fields in value["skipped"])
            part = cls(
                number=value["number"],
                samples=int(value["samples"]),
                objects=objects,
                skipped=skipped,
                about=str(value["about"]),
            )
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            return None
        return part if part.number == number else None
