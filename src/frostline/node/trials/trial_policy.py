"""Says how a node tries engines, and what of them it has room for."""

import math
from dataclasses import dataclass

from frostline.batching import ROWS
from frostline.config import NodeSettings
from frostline.core.units import in_bytes
from frostline.engines.machine.allocator import keeps_freed_memory
from frostline.profiles import Trial

__all__ = ("EngineMemory", "TrialPolicy", "terms_of")

# A trial takes about a gigabyte beside the engine that it tries. A node can have no engine that takes more than five
# sixteenths of its memory (``node.scheduling.memory_pool.Shares``): half is enough for a trial where there is much.
_TRIAL_BYTES = 2 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialPolicy:
    """How engines are tried, which is how the node would run them.

    Attributes:
        device: in torch's words.
        rows: batches to try.
        threads: numbers of threads to try, the node's own first.
        keeps_freed: whether the node's process keeps the memory that it frees.
        max_bytes: that one trial may take.
        niceness: by which a trial steps back behind what the node serves.
        here: engines that are ready in a moment are tried in the node's own process.
    """

    device: str
    rows: tuple[int, ...]
    threads: tuple[int, ...]
    keeps_freed: bool
    max_bytes: int
    niceness: int = 0
    here: bool = False


def terms_of(settings: NodeSettings) -> TrialPolicy:
    """How a node of these settings tries them."""
    return TrialPolicy(
        device=settings.device,
        # Each run costs the node something beside the engine, so that few large ones are better than many small ones
        # that are as fast: ResNet-18 in 8 bits streams 1.3 times as many images a second by 32 as by 8.
        rows=tuple(dict.fromkeys((settings.device_batch, ROWS))),
        threads=_threads(settings),
        keeps_freed=keeps_freed_memory(),
        max_bytes=max(settings.memory_bytes // 2, min(settings.memory_bytes, _TRIAL_BYTES)),
        niceness=settings.trial_niceness,
        here=settings.trials_here,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """The node's memory for engines.

    Attributes:
        weights_bytes: for all that is resident.
        run_bytes: for one run.
    """

    weights_bytes: int
    run_bytes: int

    def lacks(self, one: Trial, tenant_bytes: float = math.inf) -> str | None:
        """Why the node cannot have an engine; None where it can.

        Args:
            one: the trial of the engine, with the memory that it took.
            tenant_bytes: of weights that its tenant may have beside the prefix.
        """
        run_bytes = one.fixed_bytes + ROWS * one.bytes_per_sample
        if one.load_bytes > self.weights_bytes:
            needs = f"{in_bytes(one.load_bytes)} to be made ready, and the node has {in_bytes(self.weights_bytes)}"
        elif run_bytes > self.run_bytes:
            needs = f"{in_bytes(run_bytes)} for {ROWS} samples, and the node has {in_bytes(self.run_bytes)}"
        elif one.weight_bytes > tenant_bytes:
            return (
                f"takes {in_bytes(one.weight_bytes)}, and its tenant may have {in_bytes(max(0.0, tenant_bytes))} "
                "beside the prefix: give it more weight_bytes"
            )
        else:
            return None
        return f"needs {needs} for that: start it with more --memory"


def _threads(settings: NodeSettings) -> tuple[int, ...]:
    """As many as there are cores, and half: threads that share a core add little, or take from each other."""
    threads = settings.compute_threads
    is_worth_it = threads > 1 and settings.device.partition(":")[0] == "cpu"
    return (threads, threads // 2) if is_worth_it else (threads,)
