"""A node computes on the device that it is given, and what it gives is what the network gives."""

import pytest
import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.models import freeze
from frostline.node.process import start_node
from support.images import image_folder, tiny_preprocess
from support.networks import Small

CUDA = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),  # tuning of kernels
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA here"),
]


@pytest.mark.parametrize(
    ("device", "accuracy", "tolerance"),
    [
        ("cpu", "exact", 1e-6),
        pytest.param("cuda", "exact", 5e-3, marks=CUDA),  # TensorFloat-32
        pytest.param("cuda", "fp16", 5e-2, marks=CUDA),
    ],
)
def test_a_node_process_gives_the_networks_features(tmp_path, device, accuracy, tolerance):
    folder = image_folder(tmp_path / "images", per_class=8)
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    settings = LoaderSettings(samples_per_request=8, device_batch=8)
    engines = ("torch-channels-last", "torch-bf16")
    common = {"preprocess": tiny_preprocess(), "settings": settings}
    with (
        start_node((str(folder),), NodeSettings(device=device, device_batch=8, engines=engines)) as node,
        fl.offload(model, fl.Dataset(folder), near=node.url, accuracy=accuracy, **common) as job,
        fl.offload(None, fl.Dataset(folder), near=node.url, **common) as plain,
    ):
        given = torch.cat([batch.features for batch in job.loader(8, shuffle=False)])
        pixels = torch.cat([batch.features for batch in plain.loader(8, shuffle=False)])
    with torch.no_grad():
        expected = model.stem(pixels).reshape(given.shape)
    assert torch.linalg.vector_norm(given - expected) <= tolerance * torch.linalg.vector_norm(expected)
