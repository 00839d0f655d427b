import numpy as np
import pytest

from frostline.core import Cut
from frostline.engines.codec_costs import codec_costs, codecs_at, cuts_worth_packing
from frostline.wire.codecs import CODECS


def cut(number, shape=(8, 6, 6), *, is_relu=False, dtype="float32"):
    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return Cut(
        number=number,
        name=f"layer{number}",
        after=number,
        tensors=("x",),
        shapes=(shape,),
        dtypes=(dtype,),
        bytes_per_sample=nbytes,
        is_relu=is_relu,
    )


def values(*cuts, rows=4):
    random = np.random.default_rng(0)
    return {cut.number: (np.maximum(random.normal(size=(rows, *cut.shapes[0])), 0).astype("f4"),) for cut in cuts}


class Clock:
    """Each look is a second later than the one before."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def test_cuts_far_larger_than_the_sample_are_not_worth_packing():
    cuts = [cut(1, (1000,)), cut(2, (250,)), cut(3, (251,)), cut(4, (20,))]
    assert [item.number for item in cuts_worth_packing(cuts, 250)] == [2, 4]
    assert [item.number for item in cuts_worth_packing(cuts, 1000)] == [1, 2, 3, 4]
    assert [item.number for item in cuts_worth_packing(cuts[:1], 1)] == [1]
    assert [item.number for item in cuts_worth_packing(cuts, 0)] == [4]
    assert cuts_worth_packing([], 100) == ()


def test_a_cut_gets_the_codecs_that_may_be_worth_it_there():
    assert codecs_at(cut(2), CODECS) == ("lz4", "zstd", "fp16", "fp16+zstd", "bf16", "bf16+zstd", "int8", "int8+zstd")
    assert "sparse+zstd" in codecs_at(cut(2, is_relu=True), CODECS)
    assert codecs_at(cut(2, dtype="int64"), ["exact", "fp16", "zstd"]) == ("zstd",)


def test_each_codec_is_measured_both_ways_with_its_bytes_and_error():
    relu, dense = cut(3, is_relu=True), cut(5)
    costs = codec_costs(values(relu, dense), [relu, dense], ["exact", "sparse", "int8"], clock=Clock())
    assert [(cost.cut, cost.codec) for cost in costs] == [(3, "sparse"), (3, "int8"), (5, "int8")]
    for cost in costs:
        assert cost.encode_s == cost.decode_s == pytest.approx(1 / 4)
        assert cost.spread_s == 0.0
        assert (cost.error > 0) == (cost.codec == "int8")
    assert costs[0].bytes_per_sample == pytest.approx(288 / 8 + 144 * 4, rel=0.2)
    assert costs[1].bytes_per_sample == 288 + 8 * 4


def test_cores_share_the_work():
    one = cut(3)
    costs = [codec_costs(values(one), [one], ["fp16"], clock=Clock(), cores=cores)[0] for cores in (1, 4)]
    assert costs[0].encode_s == 4 * costs[1].encode_s


def test_the_middle_of_the_repeats_counts():
    class Slowing(Clock):
        def __call__(self):
            self.now = self.now * 2 + 1
            return self.now

    one = cut(3)
    (cost,) = codec_costs(values(one, rows=1), [one], ["fp16"], clock=Slowing(), repeats=3)
    # Looks at 1, 3, 7 | 15, 31, 63 | 127, 255, 511.
    assert (cost.encode_s, cost.decode_s) == (16, 32)
    assert cost.spread_s == (384 - 6) / 2
