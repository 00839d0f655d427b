"""Which classes were taken for which, as values: counts, pairs, and the samples that were got wrong."""

from dataclasses import dataclass

__all__ = ("ConfusedPair", "Confusion", "Mistake")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistake:
    """A held-out sample that was taken for another class.

    Attributes:
        id: id of the sample.
        name: name of the sample in its data set; empty where nobody looked it up.
        true: index of its class.
        said: index of the class that it was taken for.
        confidence: probability that the network gave that class.
    """

    id: int
    name: str = ""
    true: int
    said: int
    confidence: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfusedPair:
    """How many held-out samples of the class ``true`` were taken for ``said``, both as indices."""

    true: int
    said: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Confusion:
    """What a head said of the held-out samples.

    Attributes:
        samples: number of samples that were scored.
        wrong: number of those that were taken for another class.
        matrix: samples by true class (rows) and by the class that was said (columns); empty for more than 100 classes.
        pairs: at most 20 pairs of classes that were confused, the most frequent first; empty for more than 1000.
        mistakes: at most 24 samples that were got wrong, those said with most confidence first.
    """

    samples: int = 0
    wrong: int = 0
    matrix: tuple[tuple[int, ...], ...] = ()
    pairs: tuple[ConfusedPair, ...] = ()
    mistakes: tuple[Mistake, ...] = ()
