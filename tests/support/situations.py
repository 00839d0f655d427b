"""Situations to plan for: a small readable one, and random ones."""

from dataclasses import replace

from hypothesis import strategies as st

from frostline.core import Cut
from frostline.planning import Link, Situation
from frostline.planning.situation import ACCURACIES
from frostline.profiles import CodecCost, CutCost, Profile

MB = 1_000_000
LOSSLESS = ("sparse", "lz4", "sparse+zstd")
LOSSY = ("fp16", "bf16", "int8", "fp16+sparse", "int8+sparse+zstd")


def cut(number, wire):
    return Cut(
        number=number, name=f"layer{number}", after=number - 2, tensors=("x",), shapes=((1,),), dtypes=("float32",),
        bytes_per_sample=wire,
    )  # fmt: skip


def codec(number, name, wire, *, encode_s=0.0, decode_s=0.0, error=0.0):
    return CodecCost(
        cut=number, codec=name, bytes_per_sample=wire, encode_s=encode_s, decode_s=decode_s, error=error
    )  # fmt: skip


def profile(seconds, *, hardware="cpu", per_sample=MB, rest=0, **changes):
    """Seconds to every cut; ``rest`` is the memory a sample of what is left, by cut or the same for all."""
    rests = rest if isinstance(rest, tuple) else (rest,) * len(seconds)
    costs = tuple(
        CutCost(
            number=number,
            seconds=second,
            spread_s=0.0,
            fixed_bytes=MB,
            bytes_per_sample=per_sample,
            remaining_bytes_per_sample=rests[number],
        )
        for number, second in enumerate(seconds)
    )
    base = Profile(hardware=hardware, host="h", engine="torch", device_batch=32, read_s=0.0, cuts=costs)
    return replace(base, **changes)


def situation(wires=(0, 600_000, 5_000), seconds=(0.0, 0.002, 0.01), **changes):
    """Encoded samples of 100 kB, pixels of 600 kB and features of 5 kB, with 10 ms of work, on a link of 100 MB/s."""
    base = {
        "cuts": tuple(cut(number, wire) for number, wire in enumerate(wires)),
        "encoded_bytes": 100_000,
        "store": profile(seconds),
        "trainer": profile(seconds),
        "link": Link(bytes_per_s=100 * MB, round_trip_s=0.001),
        "same_host": False,
        "memory_bytes": 1000 * MB,
    }
    return Situation(**{**base, **changes})


@st.composite
def situations(draw, has_head=True):
    """Any job: up to six cuts, codecs on some, accelerators, one machine or two, little memory."""
    count = draw(st.integers(1, 6))

    def rising():
        steps = draw(st.lists(st.floats(1e-6, 0.1), min_size=count, max_size=count))
        return [sum(steps[:end]) for end in range(count)]

    names = draw(st.lists(st.sampled_from(LOSSLESS + LOSSY), max_size=3, unique=True)) if count > 1 else []

    def codecs():
        return tuple(
            codec(
                draw(st.integers(1, count - 1)),
                name,
                draw(st.floats(1, 1e6)),
                encode_s=draw(st.floats(0, 0.01)),
                decode_s=draw(st.floats(0, 0.01)),
                error=draw(st.floats(0, 0.1)) if name in LOSSY else 0.0,
            )
            for name in names
        )

    def side(hardware):
        device = draw(st.sampled_from(["cpu", "cuda"]))
        return profile(rising(), hardware=hardware, device=device, codecs=codecs(), read_s=draw(st.floats(0, 0.01)))

    return situation(
        wires=(0, *draw(st.lists(st.integers(1, 10**7), min_size=count - 1, max_size=count - 1))),
        seconds=(0.0,) * count,
        encoded_bytes=draw(st.floats(1, 1e7)),
        store=side("here"),
        trainer=side(draw(st.sampled_from(["here", "there"]))),
        link=Link(bytes_per_s=draw(st.floats(1e3, 1e10)), round_trip_s=0.1),
        same_host=draw(st.booleans()),
        memory_bytes=draw(st.integers(1, 100 * MB)),
        nodes=draw(st.integers(1, 4)),
        epochs=draw(st.integers(1, 20)),
        keeps_features=draw(st.booleans()),
        head_s=draw(st.floats(0, 0.1)) if has_head else 0.0,
        accuracy=draw(st.one_of(st.sampled_from(ACCURACIES), st.floats(0, 0.2))),
    )
