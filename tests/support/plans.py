"""Builds a measured situation that looks like a real network's, and plans for it."""

import math
from dataclasses import replace

from frostline.core import Cut
from frostline.planning import Link, Situation, make_plan
from frostline.profiles import CodecCost, CutCost, Profile

ENCODED = 118_000


def a_cut(number, *, of, name=None):
    named = "encoded image" if number == 0 else "pixels" if number == 1 else f"blocks.{number}.bn2"
    depth = number / max(of, 1)
    numbers = 0 if number == 0 else round(401_408 * (1 - depth) ** 2) + 1280
    return Cut(
        number=number, name=name or named, after=number - 2, tensors=("x",), shapes=((numbers,),), dtypes=("float32",),
        bytes_per_sample=4 * numbers, is_relu=number > 1 and number % 3 == 0,
    )  # fmt: skip


def a_profile(cuts, *, slowness=1.0, read_s=0.0, **changes):
    """Decoding takes 2.5 ms, the network 8 ms; codecs cost little, and lose what their names say."""
    last = max(len(cuts) - 1, 1)
    costs = [
        CutCost(
            number=cut.number,
            seconds=slowness * (0.0 if cut.number == 0 else 0.0025 + 0.008 * (cut.number - 1) / last),
            spread_s=0.0002,
            fixed_bytes=3_000_000 + 600_000 * cut.number,
            bytes_per_sample=6_000_000,
            remaining_fixed_bytes=18_000_000 - 600_000 * cut.number,
            remaining_bytes_per_sample=6_000_000,
        )
        for cut in cuts
    ]
    figures = {
        "hardware": "2 cores", "host": "h", "engine": "torch-eager", "device_batch": 32, "read_s": read_s,
        "cuts": tuple(costs), "cores": (0, 1), "codecs": tuple(_codecs(cuts)),
    }  # fmt: skip
    return Profile(**{**figures, **changes})


def _codecs(cuts):
    kinds = {"zstd": (0.9, 0.0), "fp16": (0.5, 0.0002), "int8": (0.26, 0.006)}
    for cut in cuts[1:]:
        for codec, (share, error) in {**kinds, **({"sparse": (0.6, 0.0)} if cut.is_relu else {})}.items():
            yield CodecCost(
                cut=cut.number, codec=codec, bytes_per_sample=share * cut.bytes_per_sample,
                encode_s=1e-9 * cut.bytes_per_sample, decode_s=5e-10 * cut.bytes_per_sample, error=error,
            )  # fmt: skip


def a_situation(cuts=24, *, names=None, slowness=3.0, **changes):
    """A node three times as slow as the trainer, and 40 Mbit/s between them: the best plan mixes two ways."""
    found = tuple(a_cut(number, of=cuts, name=(names or {}).get(number)) for number in range(cuts + 1))
    figures = {
        "cuts": found, "encoded_bytes": ENCODED, "store": a_profile(found, slowness=slowness, read_s=0.0002),
        "trainer": a_profile(found, hardware="8 cores", cores=()), "link": Link(bytes_per_s=5e6, round_trip_s=0.003),
        "same_host": False, "memory_bytes": 2 << 30,
    }  # fmt: skip
    return Situation(**{**figures, **changes})


def a_plan(cuts=24, *, policy="best", **changes):
    return make_plan(a_situation(cuts, **changes), policy)


def a_free_situation():
    """Nothing costs anything, so no rate has a bound."""
    free = a_situation(2)
    idle = replace(free.store, read_s=0.0, codecs=(), cuts=tuple(replace(cut, seconds=0.0) for cut in free.store.cuts))
    return replace(free, store=idle, trainer=idle, link=Link(bytes_per_s=math.inf, round_trip_s=0.0))


def a_costless_plan():
    return make_plan(a_free_situation())
