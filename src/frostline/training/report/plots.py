"""Draws how a run learned: loss at every step, accuracy after every epoch."""

from collections.abc import Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from frostline.core.units import in_percent
from frostline.training.report.drawing import INK, SOFT, STORE, STYLE, TRAINER, WIRE, canvas, quiet, svg

__all__ = ("accuracy_plot", "loss_plot")

# More points than a figure of this width shows only make the page larger; more marks run into each other.
_MAX_POINTS = 1000
_MAX_MARKS = 30


def loss_plot(losses: Sequence[float], epoch_losses: Sequence[float], val_losses: Sequence[float]) -> str:
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
        quiet(axes)
        return svg(figure, name="loss", title="Loss at each optimisation step, with epoch means and held-out loss")


def accuracy_plot(accuracies: Sequence[float], kept_epoch: int) -> str:
    """Share of the held-out samples that were right, after each epoch; that of the head that was kept in figures."""
    with mpl.rc_context(STYLE):
        figure, axes = canvas(width=5.2, height=2.9)
        _epoch_line(axes, accuracies, steps=1, color=STORE, name="")
        for epoch in sorted({0, min(max(kept_epoch, 1), len(accuracies)) - 1}) if accuracies else ():
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
        quiet(axes)
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
