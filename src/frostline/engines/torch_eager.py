"""The reference engine: a prefix in eager torch, fp32, bit for bit what the user's own network computes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Cut, Graph, Ref
from frostline.engines.footprint import Footprint, dry_run
from frostline.engines.operators import resolve_allowed
from frostline.engines.runner import Runner, leaf_values
from frostline.errors import UnsafeArtifact

__all__ = ("TorchEngine",)


class TorchEngine:
    """A prefix ready to run up to any of its cuts. Immutable, so that threads may share it.

    Args:
        graph: the frozen part, from pixels to the frost line.
        cuts: every place where a run may stop, cut 1 (pixels) first.
        tensors: weights by the names in ``graph.leaves``.
        device: in torch's words.
        most_rows: the largest batch that will be run, a multiple of 8.

    Raises:
        UnsafeArtifact: The graph names what is not allowed, or does not give what its cuts declare.
    """

    name = "torch-eager"

    def __init__(
        self,
        graph: Graph,
        cuts: Sequence[Cut],
        tensors: Mapping[str, torch.Tensor],
        *,
        device: str = "cpu",
        most_rows: int = 32,
    ) -> None:
        self._device = torch.device(device)
        self._leaves = [leaf.to(self._device) for leaf in leaf_values(graph, tensors)]
        self._runners = {cut.number: _runner(graph, cut, self._device) for cut in cuts}
        self._footprints = dry_run(graph, self._leaves, cuts, most_rows=most_rows)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the resident weights."""
        return sum({leaf.data_ptr(): leaf.nbytes for leaf in self._leaves}.values())

    def footprint(self, cut: int) -> Footprint:
        """Memory of one run up to this cut, at its peak, without the weights."""
        return self._footprints[cut]

    def run(self, pixels: npt.NDArray[np.float32], cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Compute what crosses a cut.

        Args:
            pixels: ``float32[n, C, H, W]``; not changed. Keep ``n`` the same from run to run: a sample's features
                do not depend on the others beside it, but for another ``n`` kernels may round otherwise.
            cut: number of the cut, 1 or higher.

        Returns:
            One C-contiguous array ``[n, ...]`` for each tensor that crosses.

        Raises:
            UnsafeArtifact: The prefix fails on these values, which no dry run can see.
        """
        batch = torch.from_numpy(pixels).to(self._device)
        try:
            with torch.inference_mode():
                tensors = self._runners[cut].run([batch], self._leaves)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise UnsafeArtifact(f"the prefix does not run on these samples: {why}") from error
        return tuple(tensor.contiguous().cpu().numpy() for tensor in tensors)


def _runner(graph: Graph, cut: Cut, device: torch.device) -> Runner:
    nodes = graph.nodes[: cut.after + 1]
    part = replace(graph, nodes=nodes, outputs=tuple(Ref(name) for name in cut.tensors))
    return Runner(part, device=device, resolve_op=resolve_allowed)
