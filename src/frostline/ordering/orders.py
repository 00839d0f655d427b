"""Decides which sample stands at which position of an epoch, computed from keys and never stored.

Rows chosen of a table, as a bitmap: a hundred million rows take 12.5 MB, and any of them is found at once.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from frostline.core.errors import SettingError
from frostline.core.hints import add_field_hints

__all__ = (
    "BlockOrder",
    "BlockShuffle",
    "Chosen",
    "EpochOrder",
    "Order",
    "RowIndices",
    "SeededOrder",
    "Weighted",
    "Weights",
    "check_epoch",
    "check_inside",
    "check_number",
    "draw_of_stretches",
    "permute",
    "permute_each",
    "round_keys",
    "weights_by_class",
    "width_of",
)


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_ROUNDS = 8
# Values computed at once: as many as stay in a core's own cache with what is computed on the way (13 ns each
# rather than 40 ns for arrays beyond it). Those that are still to be walked on are gathered from many such runs.
_RUN = 1 << 15
_PLACES_AT_ONCE = 1 << 20

_Words = npt.NDArray[np.uint64]
_Rows = npt.NDArray[np.int64]


def permute(start: int, stop: int, size: int, keys: tuple[int, ...]) -> _Rows:
    """The places of the positions from ``start`` up to ``stop`` under a permutation of ``size``.

    A balanced Feistel network (Luby and Rackoff, "How to Construct Pseudorandom Permutations from
    Pseudorandom Functions", SIAM J. Comput. 17(2), 1988) permutes the next even power of two; positions
    that land outside are walked on until they land inside (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", CT-RSA 2002, section 3). The round function is the finaliser of SplitMix64 (Steele,
    Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, figure 17). It shuffles;
    it keeps no secret. The permutation is part of the format: it never changes between versions.
    """
    out = np.empty(stop - start, np.int64)
    for first in range(start, stop, _PLACES_AT_ONCE):
        last = min(first + _PLACES_AT_ONCE, stop)
        out[first - start : last - start] = _permuted(np.arange(first, last, dtype=np.uint64), size, keys)
    return out


def _permute_at(positions: _Rows, size: int, keys: tuple[int, ...]) -> _Rows:
    """Where these positions of ``size`` go, in any order: for each what ``permute`` gives."""
    out = np.empty(len(positions), np.int64)
    for first in range(0, len(positions), _PLACES_AT_ONCE):
        some = slice(first, first + _PLACES_AT_ONCE)
        out[some] = _permuted(positions[some].astype(np.uint64), size, keys)
    return out


def permute_each(positions: _Rows, which: _Rows, sizes: _Rows, keys: _Words) -> _Rows:
    """Where positions of several permutations of one width go.

    Args:
        positions: ``int64[n]``, each below the size of its permutation.
        which: ``int64[n]``, number of each one's permutation.
        sizes: ``int64[k]`` of the permutations, all of one ``width_of``.
        keys: ``uint64[k, 8]``, the ``round_keys`` of each.

    Returns:
        ``int64[n]``, for each what ``permute`` gives.
    """
    values, bounds = positions.astype(np.uint64), sizes.astype(np.uint64)
    return _walked(values, bounds[which], which, keys, width_of(int(sizes[0]))).astype(np.int64)


def _words_at(positions: _Rows, key: int) -> _Words:
    """64 random bits for each position: output ``position`` of SplitMix64 from that key, whatever was drawn before."""
    words = (positions.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN) + np.uint64(key & _MASK)
    _mix_in_place(words, np.empty_like(words))
    return words


def width_of(size: int) -> int:
    """Half the bits of the power of two in which a permutation of that size works."""
    return (max(2, (size - 1).bit_length()) + 1) // 2


def round_keys(seed: int, epoch: int) -> tuple[int, ...]:
    """The keys of one permutation, from two numbers below 2^64."""
    state = _mix((_mix((seed + _GOLDEN) & _MASK) + epoch) & _MASK)
    return tuple(_mix((state + (number + 1) * _GOLDEN) & _MASK) for number in range(_ROUNDS))


def draw_of_stretches(size: int, count: int, key: int) -> _Rows:
    """One place of each of ``count`` stretches into which ``size`` places are divided, as equal as can be.

    The n-th draw is output n of SplitMix64 from that key.

    Returns:
        ``int64[count]``, ascending.
    """
    out = np.empty(count, np.int64)
    for start in range(0, count, _RUN):
        edges = np.arange(start, min(start + _RUN, count) + 1, dtype=np.int64) * size // count
        words = _words_at(np.arange(start, start + len(edges) - 1), key)
        share = (words >> np.uint64(32)).astype(np.int64)
        out[start : start + len(words)] = edges[:-1] + (share * np.diff(edges) >> 32)
    return out


_BEYOND = 1 << 62  # bounds that nobody comes near


def check_number(name: str, value: int, maximum: int, *, minimum: int = 0) -> None:
    """Make sure that a number lies from ``minimum`` to ``maximum``.

    Raises:
        SettingError: the number is out of range.
    """
    if not minimum <= value <= maximum:
        is_small = value < minimum and maximum >= _BEYOND
        within = f"be at least {minimum}" if is_small else f"lie from {minimum} to {maximum}"
        raise SettingError(f"{name} must {within}, not {value}")


def check_epoch(size: int, seed: int, epoch: int) -> None:
    """Make sure that an order of an epoch can be drawn: ``size`` up to 2^62, ``seed`` and ``epoch`` below 2^63.

    Raises:
        SettingError: a number is out of range.
    """
    check_number("size", size, 1 << 62)
    check_number("seed", seed, (1 << 63) - 1)
    check_number("epoch", epoch, (1 << 63) - 1)


def _permuted(values: _Words, size: int, keys: tuple[int, ...]) -> _Words:
    return _walked(values, np.uint64(size), None, np.array([keys], np.uint64), width_of(size))


def _walked(values: _Words, bounds: Any, which: _Rows | None, keys: _Words, half: int) -> _Words:
    _run(values, which, keys, half)
    outside = np.flatnonzero(values >= bounds)
    while len(outside):
        walked = values[outside]
        _run(walked, None if which is None else which[outside], keys, half)
        values[outside] = walked
        outside = outside[walked >= (bounds if which is None else bounds[outside])]
    return values


def _run(values: _Words, which: _Rows | None, keys: _Words, half: int) -> None:
    """Put what the network makes of the values in their place."""
    for start in range(0, len(values), _RUN):
        some = slice(start, start + _RUN)
        chosen = keys[0] if which is None else keys.T[:, which[some]]
        values[some] = _feistel(values[some], half, chosen)


def _feistel(values: _Words, half: int, keys: _Words) -> _Words:
    shift, low = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & low
    mixed, spare = np.empty_like(left), np.empty_like(left)
    for key in keys:  # a number for all values, or one for each
        np.add(right, key, out=mixed)
        _mix_in_place(mixed, spare)
        np.bitwise_and(mixed, low, out=mixed)
        np.bitwise_xor(mixed, left, out=mixed)
        left, right, mixed = right, mixed, left
    return (left << shift) | right


def _mix_in_place(values: _Words, spare: _Words) -> None:
    # Arithmetic on arrays of uint64 wraps around, as SplitMix64 wants it.
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        np.right_shift(values, np.uint64(shift), out=spare)
        np.bitwise_xor(values, spare, out=values)
        np.multiply(values, np.uint64(factor), out=values)
    np.right_shift(values, np.uint64(31), out=spare)
    np.bitwise_xor(values, spare, out=values)


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


class EpochOrder(Protocol):
    """The row of a table at each position of an epoch. Immutable, and the same in every process."""

    @property
    def name(self) -> str:
        """The kind of order, and all that it depends on beside data, seed and epoch; up to 64 ASCII characters."""

    @property
    def seed(self) -> int:
        """0 to 2^63 - 1."""

    @property
    def epoch(self) -> int:
        """0 to 2^63 - 1."""

    def __len__(self) -> int:
        """Positions in the epoch."""

    def at(self, positions: _Rows) -> _Rows:
        """``int64[n]``, the row at each position. Memory grows with the answer, not with the epoch.

        Raises:
            IndexError: a position does not lie within the epoch.
        """

    def in_epoch(self, epoch: int) -> Self:
        """The same kind of order in another epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededOrder:
    """The part that all seeded orders of an epoch have: how many samples it has, and what they are drawn by.

    Attributes:
        size: number of samples in the epoch, 0 to 2^62.
        seed: number from 0 to 2^63 - 1.
        epoch: number from 0 to 2^63 - 1.
    """

    size: int
    seed: int
    epoch: int

    def __post_init__(self) -> None:
        check_epoch(self.size, self.seed, self.epoch)

    def __len__(self) -> int:
        return self.size

    def in_epoch(self, epoch: int) -> Self:
        """See ``EpochOrder.in_epoch``."""
        return replace(self, epoch=epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order(SeededOrder):
    """The order of one epoch, a pure function of (seed, epoch, position); see ``permutation.permute``.

    Attributes:
        shuffle: False leaves the samples in the order of the manifest.
    """

    shuffle: bool = True

    @property
    def name(self) -> str:
        """See ``EpochOrder.name``."""
        return "shuffled" if self.shuffle else "listed"

    def at(self, positions: _Rows) -> _Rows:
        """See ``EpochOrder.at``."""
        check_inside(positions, self.size)
        if not self.shuffle:
            return positions.astype(np.int64)
        return _permute_at(positions, self.size, round_keys(self.seed, self.epoch))

    def indices(self, start: int, stop: int) -> _Rows:
        """The rows at the positions from ``start`` up to, not including, ``stop``.

        Returns:
            ``int64[stop - start]``, each below ``size``. Memory grows with the answer, not with ``size``.

        Raises:
            IndexError: the positions do not lie within 0 to ``size``.
        """
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"positions {start} to {stop} do not lie within 0 to {self.size}")
        if not self.shuffle:
            return np.arange(start, stop, dtype=np.int64)
        return permute(start, stop, self.size, round_keys(self.seed, self.epoch))


def check_inside(positions: _Rows, size: int) -> None:
    """Make sure that positions lie within an epoch.

    Raises:
        IndexError: a position lies outside.
    """
    if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < size:
        raise IndexError(f"positions {positions.min()} to {positions.max()} do not lie within 0 to {size}")


_BLOCKS = 0x424C4F434B53  # "BLOCKS": keeps the keys within groups apart from those of epochs
_MAX_MIXED = 1 << 30
# Of the epoch's first group: what a link of 200 Mbit/s brings in a third of a second, of photographs of 60 kB.
_FIRST_MIXED = 8


@add_field_hints
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShuffle:
    """A shuffle that reads a block of neighbouring samples with one request; see ``BlockOrder``.

    Attributes:
        samples: number of neighbouring samples in a block, which one request reads. Choose it so that a block has 1 to
            2 MB: larger blocks need more memory to be mixed as well, smaller ones need more requests.
        mixed: number of blocks that are mixed with each other; memory holds ``samples * mixed`` encoded samples. More
            blocks come nearer to a full shuffle (see the figures in ``docs/order.md``).

    Raises:
        SettingError: a figure makes no sense.
    """

    samples: int = 16
    mixed: int = 64

    def __post_init__(self) -> None:
        if self.samples < 1 or self.mixed < 1:
            raise SettingError(
                f"BlockShuffle takes 1 or more samples and mixed blocks, not {self.samples} and {self.mixed}"
            )
        check_number("samples times mixed of BlockShuffle", self.group, _MAX_MIXED)

    @property
    def group(self) -> int:
        """Samples that are mixed with each other."""
        return self.samples * self.mixed

    @property
    def edges(self) -> _Rows:
        """Where the epoch's first groups begin, which mix fewer blocks, and where those begin that mix all."""
        counts: list[int] = []
        while (count := _FIRST_MIXED << len(counts)) < self.mixed:
            counts.append(count)
        return np.cumsum([0, *counts], dtype=np.int64) * self.samples


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder(SeededOrder):
    """An ``EpochOrder`` that draws blocks of neighbours, and mixes the samples of some blocks at a time.

    The listing is a ring, cut into blocks at another place each epoch, so that a sample has other neighbours. What
    fills no block comes last. Blocks are drawn by the permutation of ``Order``; ``mixed`` of them that follow each
    other are a group, whose samples are drawn by a permutation of the group's own. So each sample stands at one
    position, computed from it alone. An epoch's first groups have 8 blocks, 16, and so on, so that its first batch need
    not wait for a whole group. The order is part of the format: it never changes between versions.

    Attributes:
        blocks: number of neighbours that stay together, and of blocks that are mixed.
    """

    blocks: BlockShuffle

    @property
    def name(self) -> str:
        """See ``EpochOrder.name``."""
        return f"blocks of {self.blocks.samples}, {self.blocks.mixed} mixed"

    def at(self, positions: _Rows) -> _Rows:
        """See ``EpochOrder.at``."""
        check_inside(positions, self.size)
        if not len(positions):
            return positions.astype(np.int64)
        samples = self.blocks.samples
        places, inside = np.divmod(self._mixed(positions.astype(np.int64)), samples)
        whole, cut = self.size // samples, round_keys(self.seed ^ _BLOCKS, self.epoch)[0] % self.size
        is_whole = places < whole
        places[is_whole] = _permute_at(places[is_whole], whole, round_keys(self.seed, self.epoch))
        rows: _Rows = (places * samples + inside + cut) % self.size
        return rows

    def groups_at(self, positions: _Rows) -> _Rows:
        """``int64[n]``, the number of the group in which each position lies."""
        edges = self.blocks.edges
        late = len(edges) - 1 + (positions - edges[-1]) // self.blocks.group
        groups: _Rows = np.where(positions < edges[-1], np.searchsorted(edges, positions, side="right") - 1, late)
        return groups

    def _mixed(self, positions: _Rows) -> _Rows:
        """Where the positions go within their groups."""
        groups, which = np.unique(self.groups_at(positions), return_inverse=True)
        starts, stops = self._starts(groups), np.minimum(self._starts(groups + 1), self.size)
        seed = round_keys(self.seed ^ _BLOCKS, self.epoch)[1]
        keys = np.array([round_keys(seed, group) for group in groups.tolist()], np.uint64)
        sizes, mixed = stops - starts, starts[which]
        for size in np.unique(sizes).tolist():
            some = sizes[which] == size
            mixed[some] += permute_each((positions - starts[which])[some], which[some], np.full(len(sizes), size), keys)
        return mixed

    def _starts(self, groups: _Rows) -> _Rows:
        edges, last = self.blocks.edges, len(self.blocks.edges) - 1
        starts: _Rows = edges[np.minimum(groups, last)] + np.maximum(groups - last, 0) * self.blocks.group
        return starts


_DRAW = 0x44524157  # "DRAW": keeps the keys of draws apart from those of permutations
_Weights = npt.NDArray[np.float64]


class Weights:
    """Probabilities of the rows as running sums, 8 bytes per row, shared by all epochs. Immutable.

    A row is found by inversion of the sums (Devroye, "Non-Uniform Random Variate Generation", 1986, section III.2):
    log n steps for a draw, where Walker's alias tables (ACM TOMS 3(3), 1977) need one. But tables are built row by
    row, and take 12 to 16 bytes each; sums are made in one pass of additions, whose order and so whose rounding is
    the same on every machine.

    Args:
        weights: ``float[n]``, not negative; what they sum to does not matter. A row of weight 0 is never drawn.

    Raises:
        SettingError: a weight is negative or not a number, or all are 0.
    """

    def __init__(self, weights: Sequence[float] | npt.NDArray[np.floating]) -> None:
        given = np.asarray(weights, np.float64)
        if given.ndim != 1 or not np.all(given >= 0):  # no comparison holds for what is no number
            raise SettingError("weights are one number a sample, none of them negative")
        self._sums: _Weights = np.cumsum(given)
        if not len(given) or not 0 < self._sums[-1] < np.inf:
            raise SettingError("the weights of all samples together must be above 0 and finite")
        self._last = int(np.searchsorted(self._sums, self._sums[-1], side="left"))
        self.digest = hashlib.sha256(self._sums.astype("<f8", copy=False).data).hexdigest()

    def __len__(self) -> int:
        return len(self._sums)

    def rows(self, words: npt.NDArray[np.uint64]) -> _Rows:
        """The row that each of these 64 random bits draws."""
        points = (words >> np.uint64(11)).astype(np.float64) * (2.0**-53 * self._sums[-1])
        found = np.searchsorted(self._sums, points, side="right")
        # The highest point may be rounded up to the sum of all.
        rows: _Rows = np.minimum(found, self._last).astype(np.int64, copy=False)
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighted(SeededOrder):
    """An ``EpochOrder`` of independent draws with replacement: a sample comes often, once or never in an epoch."""

    weights: Weights

    @property
    def name(self) -> str:
        """See ``EpochOrder.name``."""
        return f"weighted {self.weights.digest[:32]}"

    def at(self, positions: _Rows) -> _Rows:
        """See ``EpochOrder.at``."""
        check_inside(positions, self.size)
        return self.weights.rows(_words_at(positions, round_keys(self.seed ^ _DRAW, self.epoch)[0]))


def weights_by_class(labels: _Rows, weights: Mapping[int, float]) -> _Weights:
    """Weights of samples that give each class its share of the draws, however many samples it has.

    Args:
        labels: ``int64[n]``.
        weights: weight of each label that occurs, shared by the samples of that label.

    Raises:
        SettingError: a label has no weight, or a weight has no sample to go to.
    """
    present, which, counts = np.unique(labels, return_inverse=True, return_counts=True)
    missing = [label for label in present.tolist() if label not in weights]
    if missing:
        raise SettingError(f"label {missing[0]} has samples and no weight: give it one, 0 to leave it out")
    empty = [label for label, weight in weights.items() if weight and label not in set(present.tolist())]
    if empty:
        raise SettingError(f"label {empty[0]} has a weight and no samples")
    each: _Weights = np.array([weights[label] for label in present.tolist()], np.float64) / counts
    return each[which]


_Bytes = npt.NDArray[np.uint8]

_BLOCK_BYTES = 64
_BLOCK_ROWS = 8 * _BLOCK_BYTES
# Positions looked up at once, and rows of a piece: their blocks stay small beside the bitmap.
_ROWS_AT_ONCE = 1 << 12
_PIECE_ROWS = 1 << 20

# For each byte: how many bits are set, and where its first, second, ... set bit is.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_COUNT = _BITS.sum(axis=1, dtype=np.uint16)
_PLACE = np.argsort(1 - _BITS, axis=1, kind="stable").astype(np.uint8)


class Chosen:
    """Some rows of a table, in ascending order. Immutable.

    Args:
        bits: ``uint8``, a bit a row, the lowest bit of a byte first; bits beyond the last row are 0.
        size: rows of the table.
    """

    def __init__(self, bits: _Bytes, size: int) -> None:
        if len(bits) != -(-size // 8):
            raise ValueError(f"{size} rows need {-(-size // 8)} bytes of bits, not {len(bits)}")
        self._bits = np.zeros(-(-size // _BLOCK_ROWS) * _BLOCK_BYTES, np.uint8)
        self._bits[: len(bits)] = bits
        self._nbytes = len(bits)
        self.size = size
        # Rows chosen before each block of 512.
        counts = np.concatenate(
            [np.zeros(1, np.int64)]
            + [
                _COUNT[self._bits[start : start + _PIECE_ROWS]].reshape(-1, _BLOCK_BYTES).sum(axis=1, dtype=np.int64)
                for start in range(0, len(self._bits), _PIECE_ROWS)
            ]
        )
        self._before = np.cumsum(counts)

    @classmethod
    def where(cls, mask: npt.NDArray[np.bool_]) -> "Chosen":
        """The rows at which a mask of the whole table is true."""
        return cls(np.packbits(mask, bitorder="little"), len(mask))

    @classmethod
    def equal(cls, parts: _Bytes, number: int) -> "Chosen":
        """The rows that belong to the part of that number."""
        bits = np.empty(-(-len(parts) // 8), np.uint8)
        for start in range(0, len(parts), _PIECE_ROWS):
            some = np.packbits(parts[start : start + _PIECE_ROWS] == number, bitorder="little")
            bits[start // 8 : start // 8 + len(some)] = some
        return cls(bits, len(parts))

    @classmethod
    def of(cls, pieces: Iterator[_Rows], size: int) -> "Chosen":
        """The rows that come in pieces, in any order."""
        mask = np.zeros(size, np.bool_)
        for rows in pieces:
            mask[rows] = True
        return cls.where(mask)

    def __len__(self) -> int:
        return int(self._before[-1])

    @property
    def bits(self) -> _Bytes:
        """A bit a row, the lowest bit of a byte first."""
        return self._bits[: self._nbytes]

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that name exactly these rows."""
        return hashlib.sha256(b"bitmap\0%d\0" % self.size + self.bits.tobytes()).digest()

    def at(self, positions: _Rows) -> _Rows:
        """The rows at these positions of the choice; negative ones count from its end.

        Raises:
            IndexError: a position lies outside.
        """
        positions = np.where(positions < 0, positions + len(self), positions)
        if len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < len(self):
            raise IndexError(f"a position lies outside the {len(self)} rows that are chosen")
        found = [
            self._at(positions[start : start + _ROWS_AT_ONCE]) for start in range(0, len(positions), _ROWS_AT_ONCE)
        ]
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def pieces(self) -> Iterator[_Rows]:
        """All rows in order, some of them at a time."""
        step = _PIECE_ROWS // 8
        for start in range(0, self._nbytes, step):
            yield 8 * start + np.flatnonzero(np.unpackbits(self._bits[start : start + step], bitorder="little"))

    def _at(self, positions: _Rows) -> _Rows:
        # The block by bisection, the byte in it by counting, the bit in that by a table.
        blocks = np.searchsorted(self._before, positions, side="right") - 1
        left = positions - self._before[blocks]
        inside = self._bits.reshape(-1, _BLOCK_BYTES)[blocks]
        counted = np.cumsum(_COUNT[inside], axis=1, dtype=np.int64)
        byte = np.sum(counted <= left[:, None], axis=1)
        lines = np.arange(len(positions))
        left -= np.where(byte > 0, counted[lines, byte - 1], 0)
        found: _Rows = blocks * _BLOCK_ROWS + 8 * byte + _PLACE[inside[lines, byte], left]
        return found


class RowIndices:
    """Rows of a table in a given order. Immutable.

    Args:
        rows: ``int64[n]``.
    """

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def fingerprint(self) -> bytes:
        """The rows' bytes, which name exactly these rows in this order."""
        return self._rows.astype("<i8").tobytes()

    def at(self, positions: _Rows) -> _Rows:
        """The rows at these positions."""
        return self._rows[positions]

    def pieces(self) -> Iterator[_Rows]:
        """All rows in order, some of them at a time."""
        for start in range(0, len(self._rows), _PIECE_ROWS):
            yield self._rows[start : start + _PIECE_ROWS]
