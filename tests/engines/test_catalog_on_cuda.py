"""On CUDA too, every engine that is there gives the reference's features."""

import pytest
import torch

from frostline.core import REFERENCE
from frostline.engines.catalog import OFFERS, absence, build
from support.prefixes import pixels, relative_error, small_prefix

# Convolutions in fp32 may use TensorFloat-32 there, of 10 bits, and each engine rounds to it in places of its own.
TOLERANCES = {"fp32": 5e-3, "fp16": 2e-2, "bf16": 2e-2, "int8": 2e-1}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # tuning of kernels
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here"),
]


@pytest.mark.parametrize("offer", OFFERS, ids=lambda offer: offer.name)
def test_an_engine_gives_the_features_of_the_reference(offer, tmp_path):
    why_not = absence(offer.name, "cuda")
    if why_not is not None:
        pytest.skip(why_not)
    prefix, batch = small_prefix(), pixels(16)
    cut = prefix.cuts[-1].number

    def run(name, folder):
        options = {"cut": cut, "device": "cuda", "max_rows": 16, "folder": folder}
        return build(name, prefix.graph, prefix.cuts, prefix.tensors, **options).run(batch, cut)[0]

    expected = run(REFERENCE, None)
    for _ in ("converted", "loaded"):
        assert relative_error(run(offer.name, tmp_path), expected) <= TOLERANCES[offer.precision]
