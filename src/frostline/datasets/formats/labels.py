"""Decides labels and classes from what samples say of themselves: numbers as they are, names in their order."""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from frostline.errors import DataError

__all__ = ("LABEL_FIELDS", "NO_CLASSES", "URL_FIELDS", "classified", "no_class", "numbered", "said_by")

LABEL_FIELDS = ("label", "cls", "class", "class_name")
"""Fields and columns that say a sample's label, the first that is there."""

URL_FIELDS = ("url", "uri", "image_url", "file_name", "path", "image")
"""Columns of lists that say where a sample is, the first that is there."""

NO_CLASSES = (
    "a label says a class, by its name or by a whole number from 0, and is empty or null where a sample has none: "
    "targets of other kinds are not taken"
)
"""What is said of labels that are none of a class."""

# More would not be classes but something else that was taken for them.
_MAX_CLASSES = 1 << 24
_NUMBER = re.compile(r"0|[1-9][0-9]{0,17}")
# Targets of another kind: with a sign, a point or an exponent, and lists.
_ANY_NUMBER = re.compile(r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?")
_LIST = re.compile(r"\[.*\]", re.DOTALL)


def classified(said: Sequence[str | None], names: Sequence[str] = ()) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels and the classes' names.

    Where every sample that says anything gives a whole number, numbers are labels and their texts are the names of the
    classes, from 0 to the greatest. Else the texts are names, in their order.

    Args:
        said: label that each sample states; None where it states none.
        names: names of all classes, by label, where the data has them; they count where every label is one of them.

    Raises:
        DataError: a number is too large to be that of a class, or the labels are targets of another kind: negative
            numbers, numbers with a fraction, lists.
    """
    texts = sorted({text for text in said if text is not None})
    if names and set(texts) <= set(names):
        return _placed(said, names)
    if all(_NUMBER.fullmatch(text) for text in texts):
        return numbered(np.array([-1 if text is None else int(text) for text in said], np.int64))
    _check_classes(texts)
    return _placed(said, texts)


def numbered(labels: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    """Labels that are numbers already, and names for them.

    Raises:
        DataError: a number is too large to be that of a class.
    """
    greatest = int(labels.max(initial=-1))
    if greatest >= _MAX_CLASSES:
        raise DataError(f"{greatest} is no number of a class: labels are names, or numbers below {_MAX_CLASSES}")
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
            raise DataError(no_class(str(label)))


def no_class(label: str) -> str:
    """What is said of a label that is none of a class."""
    return f"a label is {label[:50]!r}, and {NO_CLASSES}"


def _check_classes(texts: Sequence[str]) -> None:
    """Make sure that texts which are not all numbers of classes are names, and not targets of another kind."""
    others = [text for text in texts if _LIST.fullmatch(text)]
    if all(map(_ANY_NUMBER.fullmatch, texts)):  # among names a number is a name, such as that of a version
        others += [text for text in texts if not text.isdigit()]
    if others:
        raise DataError(no_class(others[0]))


def _placed(said: Sequence[str | None], names: Sequence[str]) -> tuple[npt.NDArray[np.int64], tuple[str, ...]]:
    place: dict[str | None, int] = {name: number for number, name in enumerate(names)}
    return np.array([place.get(text, -1) for text in said], np.int64), tuple(names)
