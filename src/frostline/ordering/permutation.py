"""Decides permutations of any size: a position's place is computed from keys, never stored."""

from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.errors import SettingError

__all__ = (
    "check_epoch",
    "check_number",
    "draw_of_stretches",
    "permute",
    "permute_at",
    "permute_each",
    "round_keys",
    "width_of",
    "words_at",
)

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_ROUNDS = 8
# Values computed at once: as many as stay in a core's own cache with what is computed on the way (13 ns each
# rather than 40 ns for arrays beyond it). Those that are still to be walked on are gathered from many such runs.
_RUN = 1 << 15
_AT_ONCE = 1 << 20

_Words = npt.NDArray[np.uint64]
_Rows = npt.NDArray[np.int64]


def permute(start: int, stop: int, size: int, keys: tuple[int, ...]) -> _Rows:
    """Where the positions from ``start`` up to ``stop`` of ``size`` go.

    A balanced Feistel network (Luby and Rackoff, "How to Construct Pseudorandom Permutations from
    Pseudorandom Functions", SIAM J. Comput. 17(2), 1988) permutes the next even power of two; positions
    that land outside are walked on until they land inside (Black and Rogaway, "Ciphers with Arbitrary
    Finite Domains", CT-RSA 2002, section 3). The round function is the finaliser of SplitMix64 (Steele,
    Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, figure 17). It shuffles;
    it keeps no secret. The permutation is part of the format: it never changes between versions.
    """
    out = np.empty(stop - start, np.int64)
    for first in range(start, stop, _AT_ONCE):
        last = min(first + _AT_ONCE, stop)
        out[first - start : last - start] = _permuted(np.arange(first, last, dtype=np.uint64), size, keys)
    return out


def permute_at(positions: _Rows, size: int, keys: tuple[int, ...]) -> _Rows:
    """Where these positions of ``size`` go, in any order: for each what ``permute`` gives."""
    out = np.empty(len(positions), np.int64)
    for first in range(0, len(positions), _AT_ONCE):
        some = slice(first, first + _AT_ONCE)
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


def words_at(positions: _Rows, key: int) -> _Words:
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
        words = words_at(np.arange(start, start + len(edges) - 1), key)
        share = (words >> np.uint64(32)).astype(np.int64)
        out[start : start + len(words)] = edges[:-1] + (share * np.diff(edges) >> 32)
    return out


def check_number(name: str, value: int, maximum: int) -> None:
    """Make sure that a number lies from 0 to ``maximum``.

    Raises:
        SettingError: the number is out of range.
    """
    if not 0 <= value <= maximum:
        raise SettingError(f"{name} must lie from 0 to {maximum}, not {value}")


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
