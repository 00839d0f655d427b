"""Options that say how a head is trained: what it learns, with which loss, by which steps, and how it is scored."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from frostline.wire.recipes import LOSSES, METRICS_OF, OPTIMIZERS, SCHEDULES, TASKS

__all__ = ("recipe_options",)

Verb = Callable[..., int | None]


_RECIPE = (
    click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adam", show_default=True),
    click.option("--learning-rate", "--lr", default=2e-3, show_default=True, help="Learning rate of the optimiser."),
    click.option(
        "--weight-decay",
        type=float,
        metavar="RATE",
        help="Weight decay of the optimiser; by default its own: 0.01 of adamw, none of the others.",
    ),
    click.option(
        "--schedule",
        type=click.Choice(SCHEDULES),
        default=SCHEDULES[0],
        show_default=True,
        help="Learning rate behind the warm-up: as it is, or falling to nothing by the last step of --epochs.",
    ),
    click.option(
        "--warm-up",
        default=0.0,
        metavar="SHARE|STEPS",
        help="Steps in which the learning rate rises, or below 1 their share of all steps.",
    ),
    click.option(
        "--patience",
        type=click.IntRange(min=1),
        metavar="EPOCHS",
        help="End when the held-out loss has not fallen for so many epochs, and keep the best head; 5 where --epochs "
        "is not given.",
    ),
    click.option(
        "--targets", metavar="COLUMN", help="Learn this column of the data in place of its classes; --loss says how."
    ),
    click.option(
        "--loss",
        default=LOSSES[0],
        show_default=True,
        metavar="|".join((*LOSSES, "FILE.py:FUNCTION")),
        help="Loss over classes (cross-entropy), over a column of lists of classes (bce), of numbers or vectors (mse); "
        "or a function of yours, which takes scores and targets and gives a batch's mean loss.",
    ),
    click.option(
        "--task",
        type=click.Choice(tuple(TASKS.values())),
        help="What a function of yours is the loss of; by default numbers with --targets, and else classes.",
    ),
    click.option(
        "--label-smoothing",
        default=0.0,
        metavar="SHARE",
        help="Share of each sample's class that cross-entropy spreads over all classes in training.",
    ),
    click.option(
        "--metrics",
        metavar="NAME,...",
        help="Metrics of held-out samples, the main one first: "
        + "; ".join(f"of {task} {', '.join(names)}" for task, names in METRICS_OF.items())
        + ". By default accuracy of classes, and of others all.",
    ),
    click.option(
        "--lora",
        metavar="PLACE:r=RANK",
        help="Train low-rank adapters of these layers, such as layers.10-11:r=8, and the classifier, in place of all "
        "weights behind --until; alpha= and dropout= may follow.",
    ),
    click.option(
        "--unfreeze",
        metavar="EPOCH:LAYER,...",
        help="Train further layers from later epochs on, such as 3:layer4,6:layer3; layers joined by + begin together.",
    ),
    click.option(
        "--bf16",
        is_flag=True,
        help="Compute the trained part in bfloat16 (autocast); parameters, loss and optimiser stay in 32 bits, and the "
        "frozen part goes by --accuracy.",
    ),
)


def recipe_options(verb: Verb) -> Verb:
    """How a head is trained. The verb gets each option by its name, and names of metrics as a tuple."""

    @wraps(verb)
    def with_names(*, metrics: str | None, **options: Any) -> int | None:
        names = tuple(name.strip() for name in (metrics or "").split(",") if name.strip())
        return verb(metrics=names, **options)

    for option in reversed(_RECIPE):
        with_names = option(with_names)
    return with_names
