"""The same training from an S3 store: a real server, the node beside it in a process of its own."""

import torch

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.models import freeze
from frostline.node.process import start_node
from support import plain
from support.images import image_folder, tiny_preprocess
from support.networks import Small


def losses(url: str) -> list[float]:
    torch.manual_seed(1)
    model = freeze(Small().train(), "stem", input_shape=(3, 32, 32))
    settings = LoaderSettings(samples_per_request=8, device_batch=8)
    with (
        start_node((url,), NodeSettings(memory_bytes=1 << 28, device_batch=8)) as node,
        fl.offload(model, fl.Dataset(url), preprocess=tiny_preprocess(), near=node.url, settings=settings) as job,
    ):
        return plain.through(job, batch_size=8, epochs=2)


def test_training_from_s3_has_the_losses_of_training_from_a_folder(s3, tmp_path, monkeypatch):
    folder = image_folder(tmp_path)
    s3.put_folder(folder, "training")
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    assert losses("s3://training") == losses(str(folder))
