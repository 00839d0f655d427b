"""Reads which layers of a network get low-rank adapters, and of which rank."""

import re
from dataclasses import dataclass

from frostline.errors import SettingError

__all__ = ("LowRank",)

_PLACE = re.compile(r"[\w.]*\w(-\d+)?")
_RANGE = re.compile(r"(.*?)(\d+)-(\d+)")
_SHAPE = "PLACE[,PLACE...]:r=RANK[,alpha=NUMBER][,dropout=SHARE], such as layers.10-11:r=8"


@dataclass(frozen=True, slots=True, kw_only=True)
class LowRank:
    """Low-rank adapters (LoRA, arXiv 2106.09685) of a network's layers.

    Attributes:
        places: paths of modules, whole or their ends: ``layers.10`` is ``vit.layers.10`` too.
        rank: rank of every adapter's two matrices.
        alpha: scale of what an adapter adds, times the rank.
        dropout: share of an adapter's input that is dropped in training.
    """

    places: tuple[str, ...]
    rank: int
    alpha: float
    dropout: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "LowRank":
        """Read ``layers.10-11:r=8``, or with ``,alpha=16,dropout=0.1`` behind it; alpha is the rank by default.

        Raises:
            SettingError: the text says something else.
        """
        named, _, how = text.partition(":")
        values = dict(pair.strip().partition("=")[::2] for pair in how.split(",") if pair.strip())
        places = tuple(place for part in named.split(",") for place in _places(part.strip(), text))
        try:
            rank = int(values.pop("r"))
            found = cls(
                places=places,
                rank=rank,
                alpha=float(values.pop("alpha", rank)),
                dropout=float(values.pop("dropout", 0.0)),
            )
        except (KeyError, ValueError):
            raise _unreadable(text) from None
        if values or found.rank < 1 or found.alpha <= 0 or not 0 <= found.dropout < 1:
            raise _unreadable(text)
        return found

    def has(self, path: str) -> bool:
        """Whether a module of that path is one of the places, or inside one."""
        return any(f".{place}." in f".{path}." for place in self.places)


def _places(part: str, text: str) -> list[str]:
    if not _PLACE.fullmatch(part):
        raise _unreadable(text)
    match = _RANGE.fullmatch(part)
    if match is None:
        return [part]
    first, last = int(match[2]), int(match[3])
    if first > last:
        raise _unreadable(text)
    return [f"{match[1]}{number}" for number in range(first, last + 1)]


def _unreadable(text: str) -> SettingError:
    return SettingError(f"lora is {_SHAPE}; it is not {text!r}")
