"""Run a graph node by node: no code is generated, and each value is freed after its last use."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from frostline.core import Cut, Graph, GraphNode, Ref, Token
from frostline.core.graph import Argument, references
from frostline.engines.base.operators import FACTORIES, resolve, token_value
from frostline.engines.base.protocols import Arrays, Between
from frostline.engines.machine.first_calls import settle_kernels
from frostline.engines.machine.isolation import computing
from frostline.errors import UnsafeArtifact

__all__ = ("Runner", "as_array", "as_tensor", "input_tensors", "leaf_values")

_Build = Callable[[list[Any]], Any]
_Observe = Callable[[int, Sequence[Any]], None]


class Runner:
    """A graph made ready to run, as a whole or up to a cut. Immutable, so that threads may share it.

    Args:
        graph: graph to run.
        cuts: where a run may stop; what crosses one is kept until it is passed.
        device: device that its device tokens mean.
        resolve_op: operator name to callable; the default takes every traced operator.

    Attributes:
        last_uses: for each node, the places of the values that nothing reads after it, nor crosses a cut behind
            it; they are freed then.

    Raises:
        UnsafeArtifact: An operator, constant or name that is unknown.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        cuts: Sequence[Cut] = (),
        device: torch.device | str = "cpu",
        resolve_op: Callable[[str], Callable[..., Any]] = resolve,
    ) -> None:
        settle_kernels()
        self._device = torch.device(device)
        names = [*graph.inputs, *(name for name, _ in graph.leaves), *(node.name for node in graph.nodes)]
        self._slots = {name: slot for slot, name in enumerate(names)}
        if len(self._slots) != len(names):
            raise UnsafeArtifact("two values of the graph have the same name")
        self._inputs = len(graph.inputs)
        self._first = self._inputs + len(graph.leaves)
        self._steps = [self._step(node, resolve_op) for node in graph.nodes]
        self._outputs = [self._build(output, len(names)) for output in graph.outputs]
        self._crossing = {cut.number: self._crossing_slots(cut) for cut in cuts}
        self.last_uses = self._frees(graph, cuts)

    def run(
        self,
        inputs: Sequence[Any],
        leaves: Sequence[Any],
        *,
        upto: Cut | None = None,
        observe: _Observe | None = None,
        between: Between | None = None,
    ) -> tuple[Any, ...]:
        """Run the nodes and return the outputs, in the graph's order, or what crosses a cut.

        Args:
            inputs: values for ``graph.inputs``.
            leaves: values for ``graph.leaves``, in their order.
            upto: one of the cuts, to stop there; None runs all nodes.
            observe: called after each node, before anything is freed, with the node's index and all values
                (None where one is not there yet or already freed); for profiles and footprints.
            between: called behind each node, when what is not needed any more is freed. It may run another network,
                within ``apart.resting``; what it raises ends this run.
        """
        values: list[Any] = [*inputs, *leaves, *([None] * len(self._steps))]
        assert len(values) == len(self._slots), "a graph needs all its inputs and leaves"
        with computing():
            self._run(values, len(self._steps) if upto is None else upto.after + 1, observe, between)
        return tuple(build(values) for build in self._outputs) if upto is None else self.crossing(upto, values)

    def run_traced(self, inputs: Sequence[Any], leaves: Sequence[Any], *, upto: Cut) -> tuple[Any, ...]:
        """As ``run``, for who traces it and so has the process alone already (see ``engines.machine.isolation``)."""
        values: list[Any] = [*inputs, *leaves, *([None] * len(self._steps))]
        self._run(values, upto.after + 1, None)
        return self.crossing(upto, values)

    def crossing(self, cut: Cut, values: Sequence[Any]) -> tuple[Any, ...]:
        """What crosses one of the cuts, out of the values of a run that stands there (see ``observe``)."""
        return tuple(values[slot] for slot in self._crossing[cut.number])

    def _run(self, values: list[Any], steps: int, observe: _Observe | None, between: Between | None = None) -> None:
        for index, (call, build_args, build_kwargs) in enumerate(self._steps[:steps]):
            arguments = {name: build(values) for name, build in build_kwargs}
            values[self._first + index] = call(*[build(values) for build in build_args], **arguments)
            if observe is not None:
                observe(index, values)
            for slot in self.last_uses[index]:
                values[slot] = None
            if between is not None:
                between()

    def _step(
        self, node: GraphNode, resolve_op: Callable[[str], Callable[..., Any]]
    ) -> tuple[Callable[..., Any], list[_Build], list[tuple[str, _Build]]]:
        here = self._slots[node.name]
        args = [self._build(argument, here) for argument in node.args]
        kwargs = [(name, self._build(value, here)) for name, value in self._placed(node)]
        return resolve_op(node.op), args, kwargs

    def _placed(self, node: GraphNode) -> list[tuple[str, Argument]]:
        """The keyword arguments, with every tensor made where the graph runs, also in a dry run."""
        named = dict(node.kwargs)
        if not isinstance(named.get("device"), Token | None):
            raise UnsafeArtifact(f"{node.op} names a device, and a graph runs where it is put")
        if node.op in FACTORIES or named.get("device") is not None:
            named["device"] = Token("device", "")
        return sorted(named.items())

    def _build(self, argument: Argument, here: int) -> _Build:
        """A function from the values so far to this argument."""
        if isinstance(argument, Ref):
            slot = self._slots.get(argument.name, here)
            if slot >= here:
                raise UnsafeArtifact(f"value {argument.name!r} is used before it is made")
            return lambda values: values[slot]
        if isinstance(argument, tuple):
            parts = [self._build(item, here) for item in argument]
            return lambda values: [part(values) for part in parts]
        constant = token_value(argument, self._device) if isinstance(argument, Token) else argument
        return lambda _: constant

    def _crossing_slots(self, cut: Cut) -> list[int]:
        if not -1 <= cut.after < len(self._steps):
            raise UnsafeArtifact(f"cut {cut.number} stands where the graph does not reach")
        here = self._first + cut.after + 1
        slots = [self._slots.get(name, here) for name in cut.tensors]
        if any(slot >= here or self._inputs <= slot < self._first for slot in slots):
            raise UnsafeArtifact(f"cut {cut.number} declares a tensor that the graph has not made there")
        return slots

    def _frees(self, graph: Graph, cuts: Sequence[Cut]) -> list[list[int]]:
        """For each node, the slots that nothing needs after it; leaves stay."""
        frees: list[list[int]] = [[] for _ in graph.nodes]
        # What crosses a cut counts as read by the node behind it.
        read = [{self._slots[name] for name in references((node.args, node.kwargs))} for node in graph.nodes]
        read.append({self._slots[name] for output in graph.outputs for name in references(output)})
        for cut in cuts:
            read[cut.after + 1].update(self._crossing[cut.number])
        seen = read.pop()
        for index in range(len(graph.nodes) - 1, -1, -1):
            for slot in {*read[index], self._first + index} - seen:
                if not self._inputs <= slot < self._first:
                    frees[index].append(slot)
            seen |= read[index]
        return frees


def leaf_values(graph: Graph, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a graph's leaves, in their order.

    Raises:
        UnsafeArtifact: A leaf has no tensor.
    """
    missing = [tensor for _, tensor in graph.leaves if tensor not in tensors]
    if missing:
        raise UnsafeArtifact(f"the graph's tensor {missing[0]!r} is missing")
    return [tensors[tensor] for _, tensor in graph.leaves]


def input_tensors(inputs: Arrays, device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors where they are needed; on the CPU they share their memory."""
    arrays = [inputs] if isinstance(inputs, np.ndarray) else inputs
    return [as_tensor(array).to(device) for array in arrays]


def as_array(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A tensor as an array, in the same memory where it lies in the CPU's; ``bfloat16`` lies in ``uint16``."""
    kept = tensor.detach().cpu()
    found: npt.NDArray[Any] = (kept.view(torch.uint16) if kept.dtype == torch.bfloat16 else kept).numpy()
    return found


def as_tensor(array: npt.NDArray[Any]) -> torch.Tensor:
    """An array as the tensor that it holds, in the same memory."""
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if array.dtype == np.uint16 else tensor
