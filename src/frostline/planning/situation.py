"""What a plan is made from: the cuts, both sides' measurements, the link and what the job allows, as one value."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from frostline.core import EXACT, FLOAT32, LOSSY, Cut
from frostline.core.errors import SettingError
from frostline.core.hints import suggest_names
from frostline.profiles import Profile

__all__ = ("ACCURACIES", "Link", "Situation")

ACCURACIES = (EXACT, FLOAT32, *LOSSY)
"""What a job may allow by name; a number allows any codec whose measured error is at most that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The way from the store side to the trainer, as measured.

    Attributes:
        bytes_per_s: payload bytes a second with several requests under way; infinite within a process.
        round_trip_s: seconds of a small request. It costs no samples while the window keeps enough requests under way,
            so the plan shows it and does not reckon with it.
    """

    bytes_per_s: float
    round_trip_s: float

    def __post_init__(self) -> None:
        if not self.bytes_per_s > 0:
            raise SettingError(f"a link's bytes_per_s must be above 0, not {self.bytes_per_s}")

    def to_json(self) -> dict[str, float | None]:
        """A dictionary of plain values; a link without bound has ``bytes_per_s`` None."""
        bytes_per_s = None if math.isinf(self.bytes_per_s) else self.bytes_per_s
        return {"bytes_per_s": bytes_per_s, "round_trip_s": self.round_trip_s}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Link":
        """The inverse of ``to_json``; raises ``TypeError`` or ``KeyError`` on another shape."""
        bytes_per_s = value["bytes_per_s"]
        return cls(bytes_per_s=math.inf if bytes_per_s is None else bytes_per_s, round_trip_s=value["round_trip_s"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What a plan is made from.

    Attributes:
        cuts: every cut of the job, by number from 0; the last is the frost line.
        encoded_bytes: bytes of one encoded sample, the mean; what cut 0 ships.
        store: the store, measured at the node.
        trainer: the trainer, measured at the trainer.
        link: the link between them.
        same_host: both sides share one machine's cores.
        memory_bytes: the node's budget.
        trainer_memory_bytes: memory that the frozen layers left to the trainer may take there; None where nobody said.
        trainer_batch: samples in one run of those layers.
        refused: the reason why the node would not run the network at all, in its words; None where it does. Then only
            cut 0 is left.
        nodes: number of nodes that work beside the store, each as fast as the measured one; they share the link.
        epochs: number of epochs that the job takes.
        keeps_features: features at the frost line are kept at the trainer between epochs, so that only the
            first epoch needs the store.
        head_s: seconds a sample that training the head takes, on the trainer's accelerator where it has one.
        accuracy: accuracy that the job demands on the wire: ``exact`` and ``float32`` allow lossless codecs alone,
            ``fp16`` and ``bf16`` those that are as fine too, ``int8`` all; a number allows any codec whose measured
            relative error is at most that.
    """

    cuts: Sequence[Cut]
    encoded_bytes: float
    store: Profile
    trainer: Profile
    link: Link
    same_host: bool
    memory_bytes: int
    trainer_memory_bytes: int | None = None
    trainer_batch: int = 32
    refused: str | None = None
    nodes: int = 1
    epochs: int = 1
    keeps_features: bool = False
    head_s: float = 0.0
    accuracy: str | float = FLOAT32

    def __post_init__(self) -> None:
        numbers = [cut.number for cut in self.cuts]
        assert numbers == list(range(max(1, len(numbers)))), "cuts are numbered from 0, and cut 0 is always there"
        for profile in (self.store, self.trainer):
            missing = set(numbers) - {cost.number for cost in profile.cuts}
            assert not missing, f"the profile of {profile.hardware} does not have the cuts {sorted(missing)}"
        for name in ("nodes", "epochs", "trainer_batch"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.head_s >= 0:
            raise SettingError(f"head_s must be at least 0, not {self.head_s}")
        _check_accuracy(self.accuracy)

    @property
    def frost_line(self) -> Cut:
        """The last cut."""
        return self.cuts[-1]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, whole: a plan can be made from it later, elsewhere."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        return {
            **plain,
            "cuts": [asdict(cut) for cut in self.cuts],
            "store": self.store.to_json(),
            "trainer": self.trainer.to_json(),
            "link": self.link.to_json(),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Situation":
        """The inverse of ``to_json``; raises ``TypeError`` or ``KeyError`` on another shape."""
        return cls(
            **{
                **value,
                "cuts": tuple(_cut_from_json(cut) for cut in value["cuts"]),
                "store": Profile.from_json(value["store"]),
                "trainer": Profile.from_json(value["trainer"]),
                "link": Link.from_json(value["link"]),
            }
        )


_PLAIN = tuple(field.name for field in fields(Situation) if field.name not in ("cuts", "store", "trainer", "link"))


def _check_accuracy(accuracy: str | float) -> None:
    if isinstance(accuracy, str):
        if accuracy not in ACCURACIES:
            known = ", ".join(ACCURACIES)
            raise SettingError(
                f"accuracy is one of {known} or a relative error such as 0.01, not {accuracy!r}"
                f"{suggest_names(accuracy, ACCURACIES)}"
            )
    elif not 0 <= accuracy < math.inf:
        raise SettingError(f"accuracy as a relative error must be at least 0 and finite, not {accuracy}")


def _cut_from_json(value: dict[str, Any]) -> Cut:
    return Cut(
        **{
            **value,
            "tensors": tuple(value["tensors"]),
            "shapes": tuple(tuple(shape) for shape in value["shapes"]),
            "dtypes": tuple(value["dtypes"]),
        }
    )
