"""Decides which samples a run trains on and which it scores: what was asked for, the data's own splits, or a share."""

import re
from dataclasses import dataclass

from frostline.datasets import Dataset
from frostline.datasets.formats.split_names import scored_among, trained_among
from frostline.errors import SettingError
from frostline.events import SplitsChosen
from frostline.training.settings import TrainSettings
from frostline.training.setup import Setup
from frostline.training.start import chosen_of

__all__ = ("Sides", "in_words", "is_test", "sides_of")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sides:
    """What a run trains on and what it scores.

    Attributes:
        train: the samples to train on.
        held_out: the samples to score; it may be empty.
        train_split: name of the split that is trained on; None where it is none.
        val_split: name of the split that is scored; None where it is none.
    """

    train: Dataset
    held_out: Dataset
    train_split: str | None = None
    val_split: str | None = None

    @property
    def taken(self) -> SplitsChosen:
        """Both of them as an event."""
        return SplitsChosen(
            train=self.train_split,
            train_samples=len(self.train),
            held_out=self.val_split,
            held_out_samples=len(self.held_out),
        )


def sides_of(settings: TrainSettings, setup: Setup) -> Sides:
    """The samples to train on and those to score.

    Splits that were asked for go first. Where none was, and the data brings splits, the one that is called so is
    trained on, and the first one for validation that has labels is scored, or else one for the last test. Where
    nothing says what to score, it is a share of the samples to train on.

    Raises:
        SettingError: both sides would have samples in common, or the data brings several splits of which none is
            called as one to train on.
    """
    asked, brought = settings.job.split, setup.whole.splits_brought
    name = asked or trained_among(brought)
    if name is None and len(brought) > 1 and settings.val_split is None:
        raise SettingError(
            f"{setup.data.url} has the splits {', '.join(brought)}, and none that is called train: name the one to "
            "train on (--split)"
        )
    train = setup.data if name == asked else setup.data[str(name)]
    if settings.val_split is not None:
        held_out = chosen_of(setup.whole, settings.job, settings.val_split)
        _check_apart(train, held_out, settings.val_split)
        return Sides(train=train, held_out=held_out, train_split=name, val_split=settings.val_split)
    if asked is None and name is not None and settings.val_share is None:
        for scored in scored_among(brought):
            held_out = setup.data[scored]
            if held_out.targets is not None or bool((held_out.samples.labels >= 0).any()):
                return Sides(train=train, held_out=held_out, train_split=name, val_split=scored)
    train, held_out = train.split(settings.held_out_share, settings.job.seed)
    return Sides(train=train, held_out=held_out, train_split=name)


def _check_apart(train: Dataset, held_out: Dataset, split: str) -> None:
    both = train.selection.count_shared(held_out.selection)
    if both:
        raise SettingError(
            f"{both} samples of split {split!r} are among those to train on too: name the split to train on (--split)"
        )


_TESTS = {"test", "tests", "testing"}
_NO_WORD = re.compile(r"[^a-z]+")


def is_test(split: str | None) -> bool:
    """Whether a split is called as one that is scored at the very end, and chooses nothing."""
    return split is not None and not _TESTS.isdisjoint(_NO_WORD.split(split.lower()))


def in_words(split: str | None, share: float, *, is_empty: bool, decided: bool) -> str:
    """What was held out, and what its accuracy therefore says.

    Args:
        split: its name; None for a share of each class.
        share: share of the samples that was held out, where it is no split.
        is_empty: nothing was.
        decided: it chose which head is kept.
    """
    if is_empty:
        return "nothing"
    what = f"{share * 100:g} % of each class" if split is None else f"split {split!r}"
    if decided:
        return f"{what}, which also chose the epoch: a little optimistic"
    return f"{what}; nothing was chosen by it"
