"""Two ranks that wrap a job's head in DistributedDataParallel train as one process on both batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import frostline as fl
from frostline.preprocess.apply import decode_into
from support.averaging_ranks import BATCH, gradients, network
from support.images import image_folder, tiny_preprocess


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """The data, and what both ranks saw."""
    place = tmp_path_factory.mktemp("averaged")
    folder = image_folder(place / "images", per_class=4)
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "support.averaging_ranks", str(rank), str(folder), str(place)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        return fl.Dataset(folder), [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_both_ranks_have_the_gradients_of_one_process_on_both_batches(seen):
    data, (first, second) = seen
    assert first["gradients"] == second["gradients"]
    assert not set(first["ids"]) & set(second["ids"])
    ids = first["ids"] + second["ids"]
    assert len(ids) == 2 * BATCH
    model, pixels = network(), torch.zeros(len(ids), *tiny_preprocess().shape)
    rows = {int(id): row for row, id in enumerate(data.samples.ids)}
    for place, id in enumerate(ids):
        path = Path(data.url.removeprefix("file://")) / data.samples.objects[rows[id]]
        decode_into(tiny_preprocess(), path.read_bytes(), pixels[place].numpy(), id=id, view=None)
    labels = torch.tensor([int(data.samples.labels[rows[id]]) for id in ids])
    torch.nn.functional.cross_entropy(model(pixels), labels).backward()
    meant = gradients(model)
    assert meant.keys() == first["gradients"].keys()
    for name, values in meant.items():
        torch.testing.assert_close(torch.tensor(first["gradients"][name]), torch.tensor(values), rtol=1e-5, atol=1e-6)
