"""Decides labels and classes from what samples say of themselves: numbers as they are, names in their order."""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from frostline.errors import DataError

__all__ = ("LABEL_FIELDS", "URL_FIELDS", "classified", "numbered", "said_by")

LABEL_FIELDS = ("label", "cls", "class", "class_name")
"""Fields and columns that say a sample's label, the first that is there."""

URL_FIELDS = ("url", "uri", "image_url", "file_name", "path", "image")
"""Columns of lists that say where a sample is, the first that is there."""

# More would not be classes but something else that was taken for them.
_MOST_CLASSES = 1 << 24
_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,17})")


def classified(said: Sequence[str | None], names: Sequence[str] = ()) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels and the classes' names.

    Where every sample that says anything gives a whole number, numbers are labels and their texts are the names of the
    classes, from 0 to the greatest; a negative one says that there is none. Else the texts are names, in their order.

    Args:
        said: of each sample; None where it says nothing.
        names: of all classes, by label, where the data itself tells them; they count where every label is one of them.

    Raises:
        DataError: a number is too large to be that of a class.
    """
    texts = sorted({text for text in said if text is not None})
    if names and set(texts) <= set(names):
        return _placed(said, names)
    if all(_NUMBER.fullmatch(text) for text in texts):
        labels = np.array([-1 if text is None else max(-1, int(text)) for text in said], np.int64)
        return numbered(labels)
    return _placed(said, texts)


def numbered(labels: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels that are numbers already, and names for them.

    Raises:
        DataError: a number is too large to be that of a class.
    """
    greatest = int(labels.max(initial=-1))
    if greatest >= _MOST_CLASSES:
        raise DataError(f"{greatest} is no number of a class: labels are names, or numbers below {_MOST_CLASSES}")
    return labels, tuple(str(number) for number in range(greatest + 1))


def said_by(label: object) -> str | None:
    """A label found in JSON or in a table, as text; None where it says nothing."""
    match label:
        case None | "":
            return None
        case bool() | int() | str():
            return str(label).strip() or None
        case float() if label.is_integer():
            return str(int(label))
        case _:
            raise DataError(f"a label must be a name or a whole number, not {str(label)[:50]!r}")


def _placed(said: Sequence[str | None], names: Sequence[str]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    place: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    return np.array([place.get(text, -1) for text in said], np.int64), tuple(names)
