"""Decides which steps a ready format has behind it, and which are left of a preprocessing that is declared for it."""

import hashlib
import json
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, Self

from frostline.errors import DataError, FrostlineError, SettingError
from frostline.preprocess.spec import Preprocess, decoder_name, step_from_json, step_to_json
from frostline.preprocess.steps import CHANNELS, CenterCrop, Decode, Normalize, RandomStep, Resize, Step, Stored

__all__ = ("Applied", "steps_left")


@dataclass(frozen=True, slots=True, kw_only=True)
class Applied:
    """What was done to the images of a ready format before they were kept.

    Attributes:
        steps: from ``Decode`` on; none of them random. The last one is ``Normalize`` where ``dtype`` is ``fp16``.
        dtype: ``uint8``, pixels; or ``fp16``, what a network takes, rounded to 16 bits.
        decoder: decoder that was used, with its versions.
    """

    steps: tuple[Step, ...]
    dtype: Literal["uint8", "fp16"]
    decoder: str

    def __post_init__(self) -> None:
        if len(self.steps) < 2:
            raise SettingError("a ready format needs images of one size: CenterCrop before any random step")
        if self.whole.is_random:
            raise SettingError("a ready format is the same in every epoch, so that no step of it is random")

    @classmethod
    def to(cls, preprocess: Preprocess, dtype: Literal["uint8", "fp16"]) -> Self:
        """What can be done once and for all of a preprocessing.

        Args:
            preprocess: preprocessing that jobs will declare.
            dtype: ``uint8`` keeps pixels: all steps before the first random one, without ``Normalize``. ``fp16``
                keeps what the network takes.

        Raises:
            SettingError: Images would have several sizes, or a step is random where all are to be applied.
        """
        if preprocess.stored is not None or not preprocess.are_images:
            raise SettingError("a ready format is made of images: the preprocessing starts with Decode")
        if dtype == "fp16":
            return cls(steps=preprocess.steps, dtype=dtype, decoder=decoder_name())
        steps = tuple(takewhile(lambda step: not isinstance(step, RandomStep), preprocess.steps[:-1]))
        return cls(steps=steps, dtype=dtype, decoder=decoder_name())

    @property
    def whole(self) -> Preprocess:
        """The steps with a ``Normalize`` behind them that changes nothing, where they have none of their own."""
        if self.dtype == "fp16":
            return Preprocess(steps=self.steps)
        first = self.steps[0]
        channels = CHANNELS[first.mode if isinstance(first, Decode) else "RGB"]
        return Preprocess(steps=(*self.steps, Normalize(mean=(0.0,) * channels, std=(1.0,) * channels)))

    @property
    def digest(self) -> str:
        """SHA-256 of all of it."""
        return hashlib.sha256(json.dumps(self.to_json(), sort_keys=True).encode()).hexdigest()

    @property
    def stored(self) -> Stored:
        """The step that stands for these in a job's preprocessing."""
        whole = self.whole
        mode: Literal["RGB", "L"] = "RGB" if whole.mode == "RGB" else "L"
        return Stored(side=whole.shape[1], mode=mode, dtype=self.dtype, applied=self.digest)

    def rest(self, declared: Preprocess) -> Preprocess:
        """What is left to do of a preprocessing, so that its pixels are the same to the bit.

        It has to start with the applied steps. Its crop may be smaller than the one that was applied, where the
        middle of the middle is the middle of the whole: the sizes differ by a multiple of four, and the image was
        scaled to be as large as either.

        Raises:
            SettingError: It does not start with them; the message names them.
        """
        if declared.steps[0] == self.stored:
            return declared
        count = len(self.steps)
        if declared.steps[:count] == self.steps:
            return Preprocess(steps=(self.stored, *declared.steps[count:]))
        if declared.steps[: count - 1] == self.steps[:-1] and self._crops_alike(declared.steps[count - 1]):
            return Preprocess(steps=(self.stored, *declared.steps[count - 1 :]))
        raise SettingError(
            f"this ready format was made with {self}, and the declared preprocessing does not start with that: it is "
            f"{', '.join(map(str, declared.steps))}; declare one that does, or make another ready format"
        )

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {"steps": [step_to_json(step) for step in self.steps], "dtype": self.dtype, "decoder": self.decoder}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """The inverse of ``to_json``.

        Raises:
            DataError: The value is not of this version's making.
        """
        try:
            steps = tuple(step_from_json(step) for step in value["steps"])
            return cls(steps=steps, dtype=value["dtype"], decoder=str(value["decoder"]))
        except (FrostlineError, KeyError, TypeError) as error:
            raise DataError(f"a ready format of another version, or a damaged one: {error}") from error

    def __str__(self) -> str:
        return ", ".join(map(str, self.steps))

    def _crops_alike(self, step: Step) -> bool:
        *before, last = self.steps
        if not isinstance(last, CenterCrop) or not isinstance(step, CenterCrop):
            return False
        scaled = before[-1].shorter if isinstance(before[-1], Resize) else 0
        return scaled >= last.size >= step.size and (last.size - step.size) % 4 == 0


def steps_left(declared: Preprocess, applied: Applied | None) -> Preprocess:
    """What is left to do of a declared preprocessing: all of it, unless the data is a ready format.

    Raises:
        SettingError: the ready format was made with other steps.
    """
    return declared if applied is None else applied.rest(declared)
