"""Builds reports that look like a real run's."""

import math

from frostline.core import Skipped
from frostline.training.report import CutReport, PlanReport, Report, Whereabouts


def a_cut(number, *, of, name=None, **changes):
    depth = number / max(of, 1)
    figures = {
        "cut": number,
        "name": name or ("encoded image" if number == 0 else "pixels" if number == 1 else f"blocks.{number}.bn2"),
        "wire_bytes_per_sample": 118_000 if number == 0 else 1_605_632 * (1 - depth) ** 2 + 5_120,
        "store_s": 0.0004 + 0.009 * depth,
        "trainer_s": 0.009 * (1 - depth),
        "memory_bytes": int(3e6 + 2e8 * depth),
        "samples_per_s": 40 + 70 * depth,
        "rejected": None if number == of else "fewer samples/s: the link is full",
    }
    return CutReport(**{**figures, **changes})


def a_plan(cuts=24, **changes):
    return PlanReport(cut=cuts, candidates=tuple(a_cut(number, of=cuts, **changes) for number in range(cuts + 1)))


def a_report(**changes):
    steps, epochs = 65, 5
    losses = tuple(1.8 * math.exp(-step / 22) + 0.42 + 0.06 * math.sin(step * 2.1) for step in range(steps))
    per_epoch = steps // epochs
    figures = {
        "model": "demo:efficientnet_lite0",
        "data": "s3://photos/waste",
        "started": "2026-11-21 09:30 UTC",
        "seconds": 41.7,
        "epochs": epochs,
        "samples": 833 * epochs,
        "train_samples": 833,
        "val_samples": 208,
        "classes": ("cardboard", "glass", "metal", "paper", "plastic", "trash"),
        "losses": losses,
        "epoch_losses": tuple(sum(losses[i : i + per_epoch]) / per_epoch for i in range(0, steps, per_epoch)),
        "val_losses": (0.97, 0.71, 0.6, 0.55, 0.53),
        "val_accuracies": (0.697, 0.779, 0.813, 0.822, 0.837),
        "val_accuracy": 0.837,
        "wire_bytes": 5_480_211,
        "baseline_wire_bytes": 611_202_300,
        "plan": a_plan(),
        "stalls_s": 12.4,
        "stages": {
            "store: read": 0.9,
            "store: decode": 7.3,
            "store: compute": 9.8,
            "wire": 0.11,
            "trainer: frozen rest": 0.0,
            "trainer: head": 3.2,
            "waiting for batches": 12.4,
        },
        "where": (
            Whereabouts(part="read, decode", where="node 127.0.0.1:7070"),
            Whereabouts(part="features → avgpool", where="node 127.0.0.1:7070, CPU"),
            Whereabouts(part="classifier", where="trainer, CPU"),
        ),
        "skipped": (Skipped(id=1234567890123, object="glass/broken 7.jpg", reason="the image ends too early"),),
        "settings": {"batch size": 64, "seed": 0, "until": "features", "val share": 0.2, "near": None},
        "versions": {"frostline": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "pillow": "13.0.0"},
    }
    return Report(**{**figures, **changes})
