"""Says a run's recipe in words, from the settings in its report."""

from collections.abc import Callable, Mapping
from typing import Any

from frostline.core.units import in_percent
from frostline.wire.recipes import LOSSES, SCHEDULES

__all__ = ("recipe_in_words",)

# In words where a setting differs from what it is by default.
_WORDS: dict[str, tuple[Any, Callable[[Any], str]]] = {
    "loss": (LOSSES[0], "loss {}".format),
    "label_smoothing": (0.0, lambda share: f"label smoothing of {in_percent(share)}"),
    "lora": (None, "adapters {}".format),
    "unfreeze": (None, "later trained too: {}".format),
    "weight_decay": (None, "weight decay {:g}".format),
    "warm_up": (0.0, lambda some: f"warm-up of {in_percent(some) if some < 1 else f'{some:.0f} steps'}"),
    "schedule": (SCHEDULES[0], "{} learning rate".format),
    "patience": (None, "patience of {} epochs".format),
    "bf16": (False, lambda _: "computed in bfloat16"),
}


def recipe_in_words(settings: Mapping[str, Any]) -> str:
    """The optimiser and its steps, and whatever is not as it is by default; empty where nothing is known.

    Args:
        settings: settings of the run, by name, as in its report.
    """
    if "optimizer" not in settings:
        return ""
    said = [f"{settings['optimizer']} at {settings['learning_rate']:g}", f"batches of {settings['batch_size']}"]
    for name, (default, words) in _WORDS.items():
        value = settings.get(name, default)
        said += [] if value == default else [words(value)]
    return ", ".join(said)
