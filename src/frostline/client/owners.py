"""Which node owns which block of a manifest, by rendezvous hashing, and the tables made anew as nodes come and go.

Every job that sees the same nodes finds the same owners, whoever came first, so that jobs and epochs find what a node
keeps. A block goes to the node that draws the lowest cost for it, and each node's costs are divided by its speed
(Schindelhauer and Schomaker, Weighted Distributed Hash Tables, 2005). A node that is full leaves its worst blocks to
those who come next for them (Mirrokni, Thorup and Zadimoghaddam, Consistent Hashing with Bounded Loads, 2018).
"""

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Self

import numpy as np
import numpy.typing as npt

__all__ = ("MAX_SLOTS", "BlockOwners", "Blocks", "OwnerTables", "as_steps", "max_excess")


# Blocks of a large data set share so many slots. At a thousand nodes each has 1,048, which the draw alone spreads
# within a few percent: few are full, and hardly any block moves because others did (benchmarks/owners_simulated.py).
MAX_SLOTS = 1 << 20
# A first epoch lasts until the node that owns most is done. Few nodes are bound closely, which moves few blocks more;
# among many, each newcomer would move blocks of all others (benchmarks/owners_simulated.py).
_MIN_SLACK, _MAX_SLACK = 0.01, 0.08
_FEW = 16
_MIN_ROWS, _MAX_ROWS = 16, 64
_MANY_BLOCKS = 4096
# Speeds are told apart by steps of a fifth, so that jobs that measure nearly the same agree on owners.
_STEPS = 4

_AT_ONCE = 1 << 15

_Ints = npt.NDArray[np.int64]
_Costs = npt.NDArray[np.float32]
_Words = npt.NDArray[np.uint32]
_Numbers = npt.NDArray[np.int32]


def max_excess(nodes: int) -> float:
    """How much more than its share each of so many nodes may own, as a part of its share."""
    return min(_MAX_SLACK, _MIN_SLACK * max(1.0, nodes / _FEW))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Neighbouring rows of a manifest that have one owner.

    Attributes:
        data: URL of the data set, so that two of them spread differently.
        samples: number of rows of the whole manifest.
    """

    data: str
    samples: int

    @property
    def rows(self) -> int:
        """Rows in a block: 16 where there are few, so that the blocks still divide well, and up to 64."""
        wanted = self.samples // _MANY_BLOCKS
        return min(_MAX_ROWS, max(_MIN_ROWS, 1 << max(0, wanted.bit_length() - 1)))

    @property
    def slots(self) -> int:
        """Slots of the owners' table; a small data set has one for each block."""
        return max(1, min(MAX_SLOTS, -(-self.samples // self.rows)))

    def slots_of(self, rows: _Ints) -> _Ints:
        """The slot of each row of the whole manifest."""
        return np.asarray(rows // self.rows % self.slots, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockOwners:
    """Who owns each slot of a data set's blocks. Immutable; safe for threads.

    Attributes:
        blocks: blocks of the data set.
        nodes: names of the nodes, ascending.
        weights: speed of each node, in any unit.
        owners: ``int32[slots]``, number of the node that owns each slot.
        nearest: ``int32[2, slots]``, the two nodes that draw the lowest costs, whether they are full or not.
        costs: ``float32[2, slots]``, what these draw.
    """

    blocks: Blocks
    nodes: tuple[str, ...]
    weights: tuple[float, ...]
    owners: _Numbers
    nearest: _Numbers
    costs: _Costs

    @staticmethod
    def of(blocks: Blocks, speeds: Mapping[str, float]) -> "BlockOwners":
        """The owners among some nodes.

        Args:
            blocks: blocks of the data set.
            speeds: speed of each node by its name, in any unit, above 0.
        """
        assert speeds, "blocks without nodes have no owner"
        nodes = tuple(sorted(speeds))
        weights = tuple(speeds[node] for node in nodes)
        seeds = _seeds(blocks)
        nearest, costs = _all_draw(seeds, nodes, weights)
        found = BlockOwners(
            blocks=blocks, nodes=nodes, weights=weights, owners=nearest[0], nearest=nearest, costs=costs
        )
        return _within_bounds(found, seeds)

    def redistribute(self, speeds: Mapping[str, float]) -> "BlockOwners":
        """The owners among other nodes; the same as ``of`` finds, in less time where few came or went."""
        nodes = tuple(sorted(speeds))
        known = dict(zip(self.nodes, self.weights, strict=True))
        left = [node for node in self.nodes if speeds.get(node) != known[node]]
        if len(left) > len(self.nodes) // 2:
            return BlockOwners.of(self.blocks, speeds)
        new = [node for node in nodes if speeds[node] != known.get(node)]
        weights = tuple(speeds[node] for node in nodes)
        seeds = _seeds(self.blocks)
        nearest, costs = self._without(left, nodes)
        lost = np.flatnonzero((nearest < 0).any(axis=0))
        if len(lost):
            nearest[:, lost], costs[:, lost] = _all_draw(seeds[lost], nodes, weights)
        kept = np.flatnonzero(~np.isin(np.arange(self.blocks.slots), lost)) if len(lost) else np.arange(len(seeds))
        for node in new:
            drawn = _drawn(_mixed(seeds[kept] ^ np.uint32(_number(node))), speeds[node])
            _let_draw(nearest, costs, nodes.index(node), kept, drawn)
        found = replace(self, nodes=nodes, weights=weights, owners=nearest[0], nearest=nearest, costs=costs)
        return _within_bounds(found, seeds)

    def of_rows(self, rows: _Ints) -> _Numbers:
        """The number of the node that owns each row of the whole manifest."""
        return np.asarray(self.owners[self.blocks.slots_of(rows)], np.int32)

    def second(self, row: int) -> int | None:
        """The node to ask for a row where its owner does not answer; None where there is no other one."""
        if len(self.nodes) < 2:
            return None
        slot = int(self.blocks.slots_of(np.array([row], np.int64))[0])
        first, other = self.nearest[:, slot].tolist()
        return int(other if first == self.owners[slot] else first)

    @property
    def bounds(self) -> _Ints:
        """``int64[nodes]``, most slots that each node may own.

        What is left of a whole slot is drawn by each node for itself, so that the bounds of few nodes change at once.
        Where nodes are few, the drawn slot counts as a part of the excess: of few slots it may be several percent.
        """
        weights = np.array(self.weights, np.float64)
        shares = self.blocks.slots * weights / weights.sum()
        draws = np.array([_number(f"bound {node}") / 2**32 for node in self.nodes])
        above = np.maximum(0, max_excess(len(self.nodes)) * shares - (len(self.nodes) <= _FEW))
        found = np.floor(shares + above + draws).astype(np.int64)
        enough = int(found.sum()) >= self.blocks.slots
        return np.asarray(found if enough else np.ceil(shares), np.int64)

    def _without(self, left: Sequence[str], nodes: Sequence[str]) -> tuple[_Numbers, _Costs]:
        """The nearest nodes under their new numbers; -1 at those that left."""
        gone, places = set(left), {node: number for number, node in enumerate(nodes)}
        numbers = [-1 if node in gone else places[node] for node in self.nodes]
        # The last entry stands for nobody, whose number is -1.
        nearest = np.array([*numbers, -1], np.int32)[self.nearest]
        if len(self.nodes) == 1:
            nearest[1] = -1
        return nearest, self.costs.copy()


@dataclass(slots=True, kw_only=True, eq=False)
class _Waiting:
    """A slot that was refused, and whom it asks next."""

    order: _Ints
    costs: _Costs
    refused: int = 0

    @classmethod
    def of(cls, costs: _Costs) -> Self:
        return cls(order=np.argsort(costs, kind="stable"), costs=costs)

    def next(self) -> tuple[int, float]:
        self.refused += 1
        number = int(self.order[self.refused])
        return number, float(self.costs[number])


def _within_bounds(found: BlockOwners, seeds: _Words) -> BlockOwners:
    """The same with no node above its bound: full ones keep the slots for which they draw the lowest costs.

    Slots ask in the order of their costs and nodes keep the best: deferred acceptance (Gale and Shapley, 1962), whose
    outcome does not depend on who asks first.
    """
    owners, bounds = found.owners.copy(), found.bounds
    paid: _Costs = found.costs[0].copy()
    asked: dict[int, _Waiting] = {}
    hashes = np.array([_number(node) for node in found.nodes], np.uint32)
    weights = np.array(found.weights, np.float32)
    while len(full := np.flatnonzero(np.bincount(owners, minlength=len(bounds)) > bounds)):
        for number in full.tolist():
            mine = np.flatnonzero(owners == number)
            ranked = mine[np.lexsort((mine, paid[mine]))]
            for slot in ranked[bounds[number] :].tolist():
                if slot not in asked:
                    asked[slot] = _Waiting.of(_drawn(_mixed(seeds[slot] ^ hashes), weights))
                owners[slot], paid[slot] = asked[slot].next()
    return replace(found, owners=owners)


def as_steps(samples_per_s: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    """Speeds to reckon with: in steps, against the middle of all, and as before where they are nearly so.

    Args:
        samples_per_s: the measured speed of each node; 0 where none was measured.
        before: speeds that were reckoned with until now.
    """
    known = sorted(speed for speed in samples_per_s.values() if speed > 0)
    middle = known[len(known) // 2] if known else 1.0
    return {node: _step(speed / middle, before.get(node, 1.0)) for node, speed in samples_per_s.items()}


def _step(ratio: float, before: float) -> float:
    if ratio <= 0 or abs(math.log2(ratio / before)) * _STEPS < 1:
        return before
    return float(2.0 ** (round(math.log2(ratio) * _STEPS) / _STEPS))


def _nobody(slots: int) -> tuple[_Numbers, _Costs]:
    return np.full((2, slots), -1, np.int32), np.full((2, slots), np.inf, np.float32)


def _number(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")


def _seeds(blocks: Blocks) -> _Words:
    """``uint32[slots]``, a number for each slot."""
    return _mixed(np.arange(blocks.slots, dtype=np.uint32) ^ np.uint32(_number(blocks.data)))


def _drawn(words: _Words, weight: "float | _Costs") -> _Costs:
    """Exponential variates of mixed words, divided by a weight."""
    uniform = words.astype(np.float32)
    uniform += np.float32(0.5)
    uniform *= np.float32(2.0**-32)
    return np.asarray(-np.log(uniform) / np.asarray(weight, np.float32), np.float32)


def _mixed(words: _Words) -> _Words:
    """Bits in which each depends on all of a word's: the finaliser of MurmurHash3 with Wellons' constants."""
    mixed = words.copy()
    _mix(mixed, np.empty_like(mixed))
    return mixed


def _mix(words: _Words, spare: _Words) -> None:
    for shift, factor in ((16, 0x21F0AAAD), (15, 0xD35A2D97), (15, None)):
        np.right_shift(words, np.uint32(shift), out=spare)
        np.bitwise_xor(words, spare, out=words)
        if factor is not None:
            np.multiply(words, np.uint32(factor), out=words)


def _all_draw(seeds: _Words, nodes: Sequence[str], weights: Sequence[float]) -> tuple[_Numbers, _Costs]:
    """The two nodes that draw the lowest costs for each slot, and these costs.

    Some slots at a time, whose words stay in the processor's cache; nodes of one weight after the other.
    """
    nearest, costs = _nobody(len(seeds))
    hashes = [np.uint32(_number(node)) for node in nodes]
    order = sorted(range(len(nodes)), key=lambda number: weights[number])
    for start in range(0, len(seeds), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        _draw_some(
            seeds[some],
            [(number, hashes[number], weights[number]) for number in order],
            nearest[:, some],
            costs[:, some],
        )
    return nearest, costs


def _draw_some(seeds: _Words, nodes: Sequence[tuple[int, np.uint32, float]], nearest: _Numbers, costs: _Costs) -> None:
    words, spare = np.empty_like(seeds), np.empty_like(seeds)
    at, least = 0.0, words
    for number, hashed, weight in nodes:
        if weight != at:
            at, least = weight, _least(costs[1], weight)
        np.bitwise_xor(seeds, hashed, out=words)
        _mix(words, spare)
        places = np.flatnonzero(words >= least)
        if len(places):
            _let_draw(nearest, costs, number, places, _drawn(words[places], weight))
            least[places] = _least(costs[1, places], weight)


def _least(costs: _Costs, weight: float) -> _Words:
    """Words below which a node's cost is above these for sure, so that no logarithm is taken of most."""
    uniform = np.exp(-costs.astype(np.float64) * weight)
    return np.maximum(uniform * (1 - 1e-5) * 2.0**32 - 512, 0).astype(np.uint32)


def _let_draw(nearest: _Numbers, costs: _Costs, number: int, places: _Ints, drawn: _Costs) -> None:
    """Put a node in where it draws less than the two that are there; of equal costs the lower number comes first."""
    others, known = nearest[1, places], costs[1, places]
    better = (drawn < known) | ((drawn == known) & (number < others))
    places, drawn = places[better], drawn[better]
    others, known = nearest[0, places], costs[0, places]
    first = (drawn < known) | ((drawn == known) & (number < others))
    ahead, behind = places[first], places[~first]
    nearest[1, ahead], costs[1, ahead] = nearest[0, ahead], costs[0, ahead]
    nearest[0, ahead], costs[0, ahead] = number, drawn[first]
    nearest[1, behind], costs[1, behind] = number, drawn[~first]


class OwnerTables:
    """The owners of blocks by data set. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[Blocks, BlockOwners] = {}

    def at(self, blocks: Blocks, speeds: Mapping[str, float]) -> BlockOwners:
        """The owners of a data set's blocks."""
        with self._lock:
            found = self._tables.get(blocks)
            if found is None:
                found = BlockOwners.of(blocks, speeds)
            elif dict(zip(found.nodes, found.weights, strict=True)) != speeds:
                found = found.redistribute(speeds)
            self._tables[blocks] = found
            return found
