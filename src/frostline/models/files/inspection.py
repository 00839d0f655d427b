"""Looks at a prefix from the header of its file alone: whether it holds together, and what it takes to run it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from frostline.core import Cut, Graph
from frostline.core.token_lengths import at_length, buckets
from frostline.engines.base.protocols import Footprint
from frostline.engines.base.runner import leaf_values
from frostline.engines.measure.footprint import ROWS, CutMemory, dry_run
from frostline.engines.measure.operations import GraphLimits, Operations, count_operations, count_operations_and_peaks
from frostline.errors import OverBudget, SettingError, UnsafeArtifact
from frostline.models.files.artifact import Prefix, read_outline
from frostline.preprocess.token_bounds import why_unbounded
from frostline.preprocess.tokens import has_tokenizers, opened_tokenizer

__all__ = ("Inspection", "inspect_graph", "inspect_prefix")


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """What dry runs of a prefix have found, by the number of the cut.

    Attributes:
        memory: memory of running to a cut, and from it.
        operations: operations of running eight samples to a cut.
    """

    memory: Mapping[int, CutMemory]
    operations: Mapping[int, Operations]

    def to_json(self) -> str:
        """All numbers as JSON."""
        return json.dumps({number: self._numbers(number) for number in self.memory})

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Inspection":
        """The inverse of ``to_json``, once it is parsed."""
        found: dict[int, list[int]] = {int(number): numbers for number, numbers in value.items()}
        return cls(
            memory={number: _memory(counts) for number, counts in found.items()},
            operations={number: Operations(total=counts[4], heaviest=counts[5]) for number, counts in found.items()},
        )

    def _numbers(self, number: int) -> list[int]:
        memory, counted = self.memory[number], self.operations[number]
        sides = [(part.fixed_bytes, part.bytes_per_sample) for part in (memory.to_here, memory.rest)]
        return [*sides[0], *sides[1], counted.total, counted.heaviest]


def inspect_prefix(header: bytes, *, max_rows: int, limits: GraphLimits, tokenizer: bytes = b"") -> Inspection:
    """Check a prefix and run it on shapes alone, without its weights.

    Args:
        header: The header of its file (``artifact.header_of``).
        max_rows: The largest batch, a multiple of 8.
        limits: limits of the process.
        tokenizer: JSON of the tokenizer that came with it; empty where none did.

    Raises:
        UnsafeArtifact: It names or declares what is not allowed, or does not hold together.
        OverBudget: The graph computes more than it may, or nothing bounds the tokenizer's time.
    """
    if tokenizer:
        _try_tokenizer(tokenizer)
    prefix = read_outline(header)
    leaves = leaf_values(prefix.graph, prefix.tensors)
    found = inspect_graph(prefix.graph, leaves, prefix.cuts, max_rows=max_rows, limits=limits)
    _inspect_lengths(prefix, leaves, found, limits)
    return found


def _inspect_lengths(prefix: Prefix, leaves: Sequence[torch.Tensor], whole: Inspection, limits: GraphLimits) -> None:
    """See that a run on fewer tokens takes no more than one on all, whatever the file says of them."""
    if prefix.lengths is None:
        return
    for length in buckets(prefix.lengths.max_length)[:-1]:
        graph, cuts = at_length(prefix.graph, prefix.cuts, prefix.lengths, length)
        operations, peaks = count_operations_and_peaks(graph, leaves, cuts, limits)
        for number, peak in peaks.items():
            takes_more = operations[number].heaviest > whole.operations[number].heaviest
            if takes_more or peak > whole.memory[number].to_here.at(ROWS):
                raise UnsafeArtifact(f"a run on {length} tokens takes more than one on {prefix.lengths.max_length}")


def inspect_graph(
    graph: Graph, leaves: Sequence[torch.Tensor], cuts: Sequence[Cut], *, max_rows: int, limits: GraphLimits
) -> Inspection:
    """As ``inspect_prefix``, once the file is read."""
    operations = count_operations(graph, leaves, cuts, limits)
    return Inspection(memory=dry_run(graph, leaves, cuts, max_rows=max_rows), operations=operations)


def _try_tokenizer(content: bytes) -> None:
    """Read a tokenizer and use it once: whatever is wrong with it then happens here, and not in the node."""
    if not has_tokenizers():
        return  # the node says so when texts are asked for, and the trainer then tokenizes
    try:
        tokenizer = opened_tokenizer(content)
        why = why_unbounded(content)
        if why is not None:  # no reason to end a job: its trainer tokenizes
            raise OverBudget(f"the node does not run this tokenizer for others: {why}")
        tokenizer.encode("a")
    except SettingError as error:
        raise UnsafeArtifact(str(error)) from error


def _memory(numbers: list[Any]) -> CutMemory:
    to_here, rest = (Footprint(fixed_bytes=fixed, bytes_per_sample=each) for fixed, each in (numbers[:2], numbers[2:4]))
    return CutMemory(to_here=to_here, rest=rest)
