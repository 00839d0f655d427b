"""Renders a report as one page that needs nothing else, with the confused classes and small pictures of samples."""

import base64
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter
from PIL import Image

from frostline.core import EXACT
from frostline.core.errors import FrostlineError, SampleError
from frostline.core.nouns import take_texts
from frostline.core.units import METRICS, in_bytes, in_percent, in_samples_per_s, in_score, in_seconds
from frostline.datasets import Dataset
from frostline.datasets.dataset import roots_of
from frostline.datasets.reading import open_samples
from frostline.preprocess.images import decode_image
from frostline.preprocess.steps import Decode
from frostline.training.recipe import Confusion, Mistake
from frostline.training.report.drawing import (
    INK,
    SOFT,
    STORE,
    STYLE,
    TRAINER,
    WIRE,
    PlanView,
    canvas,
    light_axes,
    render,
    svg,
)
from frostline.training.report.plan_page import last_part
from frostline.training.report.report import Report, recipe_in_words

__all__ = (
    "ConfusionView",
    "names_of",
    "render_page",
    "thumbnails",
)


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
            report: the report to show.
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


# More points than a figure of this width shows only make the page larger; more marks run into each other.
_MAX_POINTS = 1000
_MAX_MARKS = 30


def _loss_plot(losses: Sequence[float], epoch_losses: Sequence[float], val_losses: Sequence[float]) -> str:
    """Loss over optimisation steps, with each epoch's mean and held-out loss at the epoch's end.

    Of very many steps it draws the means of as many neighbours as make a thousand points.
    """
    with mpl.rc_context(STYLE):
        figure, axes = canvas(width=5.2, height=2.9)
        if losses:
            places, means, width = _thinned(losses)
            axes.plot(
                places, means, color=WIRE, linewidth=1, label="each step" if width == 1 else f"mean of {width} steps"
            )
        steps = len(losses) / len(epoch_losses) if losses and epoch_losses else 1.0
        # A mean belongs to the middle of its epoch; a validation comes at the end.
        _epoch_line(axes, epoch_losses, steps=steps, shift=0.5, color=TRAINER, name="mean of an epoch")
        _epoch_line(axes, val_losses, steps=steps, color=STORE, name="held out")
        if losses or epoch_losses or val_losses:
            axes.legend(loc="upper right", labelcolor=SOFT, handlelength=1.4, borderaxespad=0)
        axes.set_xlabel("optimisation step")
        axes.set_ylim(bottom=0)
        light_axes(axes)
        return svg(figure, name="loss", title="Loss at each optimisation step, with epoch means and held-out loss")


def _accuracy_plot(accuracies: Sequence[float], head_epoch: int) -> str:
    """Share of the held-out samples that were right, after each epoch; that of the head that was kept in figures."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(width=5.2, height=2.9)
        _epoch_line(axes, accuracies, steps=1, color=STORE, name="")
        for epoch in sorted({0, min(max(head_epoch, 1), len(accuracies)) - 1}) if accuracies else ():
            value = accuracies[epoch]
            # Of many epochs the first stands so near the axis that its figure would run into the ticks'.
            beside = "left" if epoch == 0 and len(accuracies) > _MAX_MARKS else "center"
            axes.annotate(
                in_percent(value), (epoch + 1, value), (0, 8), textcoords="offset points", ha=beside, color=INK
            )
            axes.plot([epoch + 1], [value], color=STORE, marker="o", markersize=5)
        axes.set_xlabel("epoch")
        axes.set_xlim(0.5, max(len(accuracies), 1) + 0.5)
        axes.set_ylim(0, 1.1)
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=" %"))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        light_axes(axes)
        return svg(figure, name="accuracy", title="Validation accuracy after each epoch")


def _epoch_line(axes: Axes, values: Sequence[float], *, steps: float, shift: float = 1, color: str, name: str) -> None:
    if values:
        places = [steps * (epoch + shift) for epoch in range(len(values))]
        marker = "o" if len(values) <= _MAX_MARKS else ""
        axes.plot(places, values, color=color, linewidth=2, marker=marker, markersize=4, label=name)


def _thinned(losses: Sequence[float]) -> tuple[list[float], list[float], int]:
    """Means of neighbours, so many that few points are left: their places, themselves, and how many make one."""
    width = -(-len(losses) // _MAX_POINTS)
    starts = range(0, len(losses), width)
    groups = [losses[start : start + width] for start in starts]
    return (
        [start + (len(group) + 1) / 2 for start, group in zip(starts, groups, strict=True)],
        [sum(group) / len(group) for group in groups],
        width,
    )


_MAX_ROWS = 12


def render_page(report: Report, pictures: Mapping[int, str] = MappingProxyType({})) -> str:
    """The whole page as HTML. Whatever stands in the report's texts is shown as text, never as markup.

    Args:
        report: the report to show.
        pictures: small pictures as ``data:`` URIs, by the ids of the samples.
    """
    return render(
        "report",
        {
            "report": report,
            "title": f"{report.model} on {last_part(report.data)}",
            "stages": _stage_bars(report.stages),
            "times": _times(report),
            "confusion": ConfusionView.of(report, pictures),
            "crossings": _crossing_bars(report),
            "ways": _way_bars(report),
            "rates": _rate_bars(report),
            "epochs": _epoch_rows(report),
            "scores": _scores(report),
            "metrics": [METRICS[name] for name in _metrics(report)],
            "recipe": recipe_in_words(report.settings),
            "view": None if report.plan is None else PlanView.of(report.plan),
            "plots": {
                "loss": _loss_plot(report.losses, report.epoch_losses, report.val_losses),
                "accuracy": _accuracy_plot(report.val_accuracies, report.head_epoch) if report.val_accuracies else "",
            },
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bar:
    """A table's row with a bar: its share of the longest one, and which side of the wire it belongs to."""

    name: str
    words: str
    share: float
    side: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Epoch:
    number: int
    loss: float | None
    val_loss: float | None
    scores: tuple[str, ...]
    is_kept: bool


def _stage_bars(stages: Mapping[str, float]) -> list[_Bar]:
    longest = max(stages.values(), default=0) or 1
    return [
        _Bar(name=name, words=in_seconds(seconds), share=seconds / longest, side=_side(name))
        for name, seconds in stages.items()
    ]


def _times(report: Report) -> list[_Bar]:
    """The parts of the whole time, one after another: they sum to it."""
    setup_s = min(report.setup_s, report.seconds)
    waiting_s = min(report.stall_s, report.seconds - setup_s)
    parts = (
        ("set-up", setup_s, "idle"),
        ("waiting for batches", waiting_s, "wire"),
        ("training, scoring and saving", report.seconds - setup_s - waiting_s, "trainer"),
    )
    return [
        _Bar(name=name, words=in_seconds(seconds), share=seconds / (report.seconds or 1.0), side=side)
        for name, seconds, side in parts
    ]


def _side(stage: str) -> str:
    return next((side for side in ("store", "trainer", "wire") if stage.startswith(side)), "idle")


def _crossing_bars(report: Report) -> list[_Bar]:
    sizes = (
        ("encoded samples", report.baseline_wire_bytes, "wire"),
        ("with Frostline", report.wire_bytes, "store"),
    )
    maximum = max(size for _, size, _ in sizes) or 1
    return [_Bar(name=name, words=in_bytes(size), share=size / maximum, side=side) for name, size, side in sizes]


def _way_bars(report: Report) -> list[_Bar]:
    maximum = max((way.samples for way in report.ways), default=0) or 1
    return [
        _Bar(
            name=f"{way.name} (cut {way.cut}{'' if way.codec == EXACT else f', {way.codec}'})",
            words=f"{way.samples:,}",
            share=way.samples / maximum,
            side="wire" if way.cut == 0 else "store",
        )
        for way in report.ways
    ]


def _rate_bars(report: Report) -> list[_Bar]:
    rates = (
        ("predicted", report.predicted_samples_per_s, "idle"),
        ("measured", report.measured_samples_per_s, "store"),
    )
    maximum = max((rate for _, rate, _ in rates if rate is not None), default=0) or 1
    return [
        _Bar(name=name, words=in_samples_per_s(rate), share=rate / maximum, side=side)
        for name, rate, side in rates
        if rate is not None
    ]


def _epoch_rows(report: Report) -> list[_Epoch]:
    """The epochs, or of very many of them some at even distances, the last one, and the one whose head was kept."""
    metrics = _metrics(report)
    count = max(len(column) for column in (report.epoch_losses, report.val_losses, *metrics.values()))
    shown = {*range(0, count, -(-count // _MAX_ROWS) or 1), count - 1, report.head_epoch - 1}
    return [
        _Epoch(
            number=row + 1,
            loss=_at(report.epoch_losses, row),
            val_loss=_at(report.val_losses, row),
            scores=tuple(in_score(name, _at(values, row)) for name, values in metrics.items()),
            is_kept=row + 1 == report.head_epoch,
        )
        for row in range(count)
        if row in shown
    ]


def _metrics(report: Report) -> Mapping[str, Sequence[float]]:
    return report.val_scores or {"accuracy": report.val_accuracies}


def _scores(report: Report) -> list[tuple[str, str]]:
    """What is said of the head that was kept, and its figure."""
    scores = {name: report.val_score.get(name) for name in report.val_scores} or {"accuracy": report.val_accuracy}
    return [
        ("of the held-out samples right" if name == "accuracy" else f"{METRICS[name]}, held out", in_score(name, value))
        for name, value in scores.items()
    ]


def _at(column: Sequence[float], row: int) -> float | None:
    return column[row] if row < len(column) else None


_SIDE = 112
_MAX_PIXELS = 25_000_000
_MAX_ENCODED_BYTES = 16 << 20
_MAX_BYTES = 12_000
_MAX_S = 5.0


def names_of(data: Dataset, ids: Sequence[int]) -> Mapping[int, str]:
    """The names of some samples of a data set, by their ids."""
    rows = _rows_of(data, ids)
    return dict(zip(data.samples.ids_at(rows).tolist(), take_texts(data.names, rows), strict=True))


def thumbnails(
    data: Dataset, ids: Sequence[int], *, max_s: float = _MAX_S, clock: Callable[[], float] = time.monotonic
) -> Mapping[int, str]:
    """Small pictures of samples as ``data:`` URIs, by their ids, in the given order.

    A sample that is no image, cannot be read or is very large has none, and neither has any where a node listed the
    data. The first failure of the store ends it, and so does the time: a report is not worth a wait.

    Args:
        data: data set of the samples.
        ids: ids of the samples.
        max_s: maximum seconds after which no other sample is read.
        clock: function that returns the time in seconds.
    """
    if data.source.near:
        return {}
    rows, ends, found = _rows_of(data, ids), clock() + max_s, dict[int, str]()
    samples = data.samples.take(rows)
    # Of many bits a pixel any picture is better than none.
    step = Decode(orientation="exif" if data.manifest.is_turned else "stored", value_range=(0, 65535))
    try:
        store = open_samples(data.url, data.manifest.reading, roots=roots_of(data))
        for place in _in_order(samples.ids, ids):
            length = int(samples.lengths[place])
            if clock() >= ends:
                break
            if length <= _MAX_ENCODED_BYTES:
                encoded = store.read(samples.objects[place], int(samples.offsets[place]), length)
                picture = _picture(bytes(encoded), step)
                found |= {int(samples.ids[place]): picture} if picture else {}
    except FrostlineError:
        pass  # the store is gone, or gives nothing to this process: the page names the samples all the same
    return found


def _rows_of(data: Dataset, ids: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.isin(data.samples.ids, np.array(ids, np.int64)))


def _in_order(own: npt.NDArray[np.int64], ids: Sequence[int]) -> list[int]:
    places = {id: place for place, id in enumerate(own.tolist())}
    return [places[id] for id in ids if id in places]


def _picture(encoded: bytes, step: Decode) -> str | None:
    try:
        image = decode_image(encoded, step, max_pixels=_MAX_PIXELS, enough=_within)
    except SampleError:
        return None
    image.thumbnail((_SIDE, _SIDE), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=72)
    made = buffer.getvalue()
    return f"data:image/jpeg;base64,{base64.b64encode(made).decode()}" if len(made) <= _MAX_BYTES else None


def _within(size: tuple[int, int]) -> tuple[int, int]:
    """The least size that a JPEG may be decoded at."""
    scale = min(1.0, _SIDE / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
