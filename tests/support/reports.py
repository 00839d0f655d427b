"""Builds reports that look like a real run's."""

import math

from frostline.core import Skipped
from frostline.core.events import Replanned
from frostline.training.report.report import Report, RouteUsage, WorkLocation
from support.plans import a_plan


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
        "head_epoch": epochs,
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
        "ways": (
            RouteUsage(cut=0, codec="exact", name="encoded image", samples=620),
            RouteUsage(cut=24, codec="sparse", name="blocks.24.bn2", samples=421),
        ),
        "accuracy": "int8",
        "codec_error": 0.0062,
        "replans": (
            Replanned(
                at_s=12.3,
                samples=448,
                before="100 % cut 24 (blocks.24.bn2)",
                after="56 % cut 0 (encoded image), 44 % cut 24 (blocks.24.bn2) as sparse",
                reason="the link carries 5.00 MB/s, planned were 1.10 MB/s: 74 % more samples a second",
            ),
        ),
        "predicted_samples_per_s": 73.8,
        "measured_samples_per_s": 70.1,
        "stall_s": 12.4,
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
            WorkLocation(part="read, decode", where="node 127.0.0.1:7070"),
            WorkLocation(part="features → avgpool", where="node 127.0.0.1:7070, CPU"),
            WorkLocation(part="classifier", where="trainer, CPU"),
        ),
        "skipped": (Skipped(id=1234567890123, object="glass/broken 7.jpg", reason="the image ends too early"),),
        "settings": {"batch size": 64, "seed": 0, "until": "features", "val share": 0.2, "near": None},
        "versions": {"frostline": "0.1.0", "python": "3.11.7", "torch": "2.13.0", "pillow": "13.0.0"},
    }
    return Report(**{**figures, **changes})
