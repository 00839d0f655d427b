"""Trials as they are kept, changed by hand, and the reference to compare with, whose speed is given.

Which engine is the fastest is then no matter of a machine's moment.
"""

import json
from contextlib import contextmanager
from unittest import mock

from frostline.engines.torch import TorchEngine
from frostline.engines.trials import features

INSTRUCTIONS = frozenset({"avx512_bf16", "avx512_vnni"})


@contextmanager
def every_instruction():
    """Let engines be tried that the processor is slow at: where it has no bfloat16, they give the same numbers."""
    with mock.patch("frostline.node.trials.selection.abilities", return_value=INSTRUCTIONS):
        yield


def make_fastest(folder, engine):
    """Let what is kept of an engine say that it takes next to no time; the number of trials that say so."""
    changed = 0
    for path in folder.rglob("*.json"):
        kept = json.loads(path.read_bytes())
        if isinstance(kept, dict) and kept.get("trial", {}).get("engine", "").startswith(engine):
            kept["trial"]["seconds"] = 1e-9
            path.write_text(json.dumps(kept))
            changed += 1
    return changed


class Reference:
    """What ``workshop.Reference`` says; ``asked`` counts the times that features were asked for."""

    def __init__(self, prefix, sample_s=0.01):
        self._engine = TorchEngine(prefix.graph, prefix.cuts, prefix.tensors)
        self._sample_s = sample_s
        self.asked = 0

    def seconds(self, cut):
        return self._sample_s

    def footprint(self, cut):
        return self._engine.footprint(cut)

    def features(self, samples, cut):
        self.asked += 1
        return features(self._engine, samples, cut)

    def run_exclusive(self, call):
        return call()
