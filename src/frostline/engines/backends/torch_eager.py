"""The reference engine: a prefix in eager torch, in its own precision, bit for bit what the user's network computes."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Cut, Graph
from frostline.core.token_lengths import Lengths
from frostline.engines.base.length_runner import LengthRunner
from frostline.engines.base.operators import resolve_allowed
from frostline.engines.base.protocols import Arrays, Between, Footprint
from frostline.engines.base.runner import Runner, as_array, input_tensors, leaf_values
from frostline.engines.measure.footprint import CutMemory, dry_run
from frostline.engines.measure.profile import cut_seconds, cut_values
from frostline.errors import BadRequest, UnsafeArtifact

__all__ = ("TorchEngine",)

# Operations that an accelerator is given before it is waited for those before: enough that it never runs dry.
_QUEUED = 8


class TorchEngine:
    """A prefix ready to run up to any of its cuts. Immutable, so that threads may share it.

    Args:
        graph: the frozen part, from the network's input to the frost line.
        cuts: every place where a run may stop, in order, cut 1 (the input) first.
        tensors: weights by the names in ``graph.leaves``.
        device: in torch's words.
        max_rows: the largest batch that will be run, a multiple of 8.
        memory: memory found by a dry run elsewhere, by the number of the cut; None makes a dry run here.
        lengths: how the graph runs on fewer tokens, which it does on a CPU; None where all samples are as long.

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
        max_rows: int = 32,
        memory: Mapping[int, CutMemory] | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._graph = graph
        self._leaves = [leaf.to(self._device) for leaf in leaf_values(graph, tensors)]
        self._cuts = {cut.number: cut for cut in cuts}
        self._inputs = (cuts[0].shapes, cuts[0].dtypes)
        self._runner = Runner(graph, cuts=cuts, device=self._device, resolve_op=resolve_allowed)
        self._bucketed = (
            None
            if lengths is None or self._device.type != "cpu"
            else LengthRunner(graph, cuts, self._leaves, lengths, device=self._device, resolve_op=resolve_allowed)
        )
        self._memory = dry_run(graph, self._leaves, cuts, max_rows=max_rows) if memory is None else memory

    @property
    def weight_bytes(self) -> int:
        """Bytes of the resident weights."""
        return sum({leaf.data_ptr(): leaf.nbytes for leaf in self._leaves}.values())

    def footprint(self, cut: int) -> Footprint:
        """Memory of one run up to this cut, at its peak, without the weights."""
        whole = self._memory[cut].to_here
        if not self._is_bucketed(cut):
            return whole
        # What crosses is put together beside a run that is no larger than one of the whole length.
        more = self._cuts[cut].bytes_per_sample
        return replace(whole, bytes_per_sample=whole.bytes_per_sample + more)

    def remaining_footprint(self, cut: int) -> Footprint:
        """Memory of one run from this cut to the frost line, at its peak, without the weights."""
        return self._memory[cut].rest

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Compute what crosses a cut.

        Args:
            inputs: an array ``[n, ...]`` for each input of the network, as cut 1 declares them, or the one; not
                changed. Keep ``n`` the same from run to run: a sample's features do not depend on the others beside
                it, but for another ``n`` kernels may round otherwise.
            cut: number of the cut, 1 or higher.

        Returns:
            One C-contiguous array ``[n, ...]`` for each tensor that crosses.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that cut 1 declares.
            UnsafeArtifact: The prefix fails on these values, which no dry run can see.
        """
        return self._run(inputs, cut, None)

    def run_divided(self, inputs: Arrays, cut: int, between: Between) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``engines.base.protocols.Dividing``."""
        return self._run(inputs, cut, _Paced(between, self._device) if self._device.type == "cuda" else between)

    def _run(self, inputs: Arrays, cut: int, between: Between | None) -> tuple[npt.NDArray[np.generic], ...]:
        batch = input_tensors(inputs, self._device)
        self._check(batch)
        try:
            with torch.inference_mode():
                tensors = self._tensors(batch, cut, between)
        except (LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise UnsafeArtifact(f"the prefix does not run on these samples: {why}") from error
        return tuple(as_array(tensor.contiguous()) for tensor in tensors)

    def _is_bucketed(self, cut: int) -> bool:
        return self._bucketed is not None and self._bucketed.takes(cut)

    def _tensors(self, batch: Sequence[torch.Tensor], cut: int, between: Between | None) -> tuple[torch.Tensor, ...]:
        if self._bucketed is not None and self._bucketed.takes(cut):
            return self._bucketed.run(batch[0], cut, between)
        return self._runner.run(batch, self._leaves, upto=self._cuts[cut], between=between)

    def cut_seconds(
        self, inputs: Arrays, *, repeats: int, clock: Callable[[], float], between: Between | None = None
    ) -> npt.NDArray[np.float64]:
        """Seconds a sample up to each cut; see ``engines.measure.profile.cut_seconds``."""
        cuts = tuple(self._cuts.values())
        return cut_seconds(self._graph, self._leaves, cuts, inputs, repeats=repeats, clock=clock, between=between)

    def cut_values(
        self, cuts: Sequence[Cut], inputs: Arrays, between: Between | None = None
    ) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
        """What crosses some cuts; see ``engines.measure.profile.cut_values``."""
        return cut_values(self._graph, self._leaves, cuts, inputs, between)

    def _check(self, batch: Sequence[torch.Tensor]) -> None:
        wanted = [(shape, f"torch.{dtype}") for shape, dtype in zip(*self._inputs, strict=True)]
        given = [(tuple(array.shape[1:]), str(array.dtype)) for array in batch]
        if given != wanted or len({len(array) for array in batch}) != 1:
            raise BadRequest(f"the prefix takes inputs {wanted} of one batch, not {given}")


class _Paced:
    """Calls something between operations that an accelerator has done, which are otherwise queued far ahead."""

    def __init__(self, between: Between, device: torch.device) -> None:
        self._between = between
        self._device = device
        self._count = 0
        self._marks: deque[torch.cuda.Event] = deque()

    def __call__(self) -> None:
        self._count += 1
        if self._count % _QUEUED == 0:
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(self._device))
            self._marks.append(mark)
            if len(self._marks) > 1:
                self._marks.popleft().synchronize()
        self._between()
