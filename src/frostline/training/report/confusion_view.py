"""What a page shows of the classes that were taken for others: a matrix or pairs, and the samples themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from frostline.core.units import in_percent
from frostline.training.recipe.confusion import Confusion, Mistake
from frostline.training.report.report import Report

__all__ = ("ConfusionView",)

# A matrix of more classes is wider than a page.
_MAX_CLASSES = 20
# Counts stay readable on the colour.
_STRONGEST = 0.55


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cell:
    samples: int
    kind: str
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    name: str
    cells: tuple[_Cell, ...]
    right: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pair:
    true: str
    said: str
    samples: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shown:
    name: str
    true: str
    said: str
    confidence: float
    picture: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfusionView:
    """A report's confusion, as a template takes it.

    Attributes:
        names: names of the classes.
        matrix: rows of the matrix; empty where there are more than 20 classes.
        pairs: pairs of classes that were confused, the most frequent first.
        mistakes: samples that were got wrong, with their pictures where there are some.
        samples: number of held-out samples.
        wrong: number of those that were got wrong.
    """

    names: Sequence[str]
    matrix: tuple[_Line, ...]
    pairs: tuple[_Pair, ...]
    mistakes: tuple[_Shown, ...]
    samples: int
    wrong: int

    @classmethod
    def of(cls, report: Report, pictures: Mapping[int, str]) -> "ConfusionView | None":
        """Gather what is shown; None where the report has nothing of the kind.

        Args:
            report: to show.
            pictures: ``data:`` URIs by the ids of samples.
        """
        said = report.confusion
        if said is None or not said.samples:
            return None
        names, most = _names(report, said), max((pair.samples for pair in said.pairs), default=1)
        return cls(
            names=names,
            matrix=_matrix(said, names) if said.matrix and len(names) <= _MAX_CLASSES else (),
            pairs=tuple(
                _Pair(
                    true=names[pair.true],
                    said=names[pair.said],
                    samples=pair.samples,
                    share=pair.samples / most,
                )
                for pair in said.pairs
            ),
            mistakes=tuple(_shown(mistake, names, pictures) for mistake in said.mistakes),
            samples=said.samples,
            wrong=said.wrong,
        )


def _names(report: Report, said: Confusion) -> Sequence[str]:
    """Names of all classes that occur; those of whole numbers as targets are the numbers."""
    named = [index for pair in said.pairs for index in (pair.true, pair.said)]
    named += [index for mistake in said.mistakes for index in (mistake.true, mistake.said)]
    count = max([len(said.matrix), len(report.classes), *(index + 1 for index in named)])
    return (*report.classes, *(f"class {index}" for index in range(len(report.classes), count)))


def _matrix(said: Confusion, names: Sequence[str]) -> tuple[_Line, ...]:
    return tuple(_line(place, row, name) for place, (row, name) in enumerate(zip(said.matrix, names, strict=True)))


def _line(place: int, row: Sequence[int], name: str) -> _Line:
    """One true class: colours are shares of its samples, so that rare classes show as well as frequent ones."""
    samples = sum(row) or 1
    cells = tuple(
        _Cell(samples=count, kind="right" if column == place else "wrong", share=_STRONGEST * count / samples)
        for column, count in enumerate(row)
    )
    return _Line(name=name, cells=cells, right=in_percent(row[place] / samples) if any(row) else "–")


def _shown(mistake: Mistake, names: Sequence[str], pictures: Mapping[int, str]) -> _Shown:
    return _Shown(
        name=mistake.name,
        true=names[mistake.true],
        said=names[mistake.said],
        confidence=mistake.confidence,
        picture=pictures.get(mistake.id, ""),
    )
