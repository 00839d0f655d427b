"""Parts that take turns by ratio may lie in different stores: here a folder and a bucket of a real S3 server."""

import csv

import numpy as np

import frostline as fl
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.datasets.reading import roots_of
from frostline.node.process import start_node
from support.images import image_folder, tiny_preprocess


def test_images_of_a_folder_and_of_a_bucket_take_turns_by_ratio(s3, tmp_path, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    folder = image_folder(tmp_path / "folder", per_class=8)
    s3.put_folder(image_folder(tmp_path / "other", per_class=4), "blended")
    lists = tmp_path / "lists"
    lists.mkdir()
    with (lists / "labels.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["url", "label", "source"])
        for place, root in (("folder", str(folder)), ("bucket", "s3://blended")):
            for object in sorted(path.relative_to(tmp_path / "other") for path in (tmp_path / "other").rglob("*.jpg")):
                rows.writerow([f"{root}/{object}", object.parts[0], place])
    data = fl.Dataset(lists)
    near, far = data.select("source == 'folder'"), data.select("source == 'bucket'")
    assert len(near) == len(far) > 0
    settings = LoaderSettings(samples_per_request=4, cache_bytes=0)
    blend = fl.Mixture(parts=[near, far], ratios=[1, 3], ends="all")
    with (
        start_node(roots_of(data), NodeSettings(memory_bytes=1 << 28, device_batch=8)) as node,
        fl.offload(None, data, preprocess=tiny_preprocess(), near=node.url, settings=settings) as job,
    ):
        batches = list(job.loader(4, data=blend, shuffle=True, seed=1))
        plain = {int(id): row for batch in job.loader(4) for id, row in zip(batch.ids, batch.features, strict=True)}
    of_bucket = [np.isin(batch.ids.numpy(), far.samples.ids).sum() for batch in batches if len(batch) == 4]
    assert set(of_bucket) == {3}
    came = [int(id) for batch in batches for id in batch.ids]
    assert set(came) == set(data.samples.ids.tolist())
    for batch in batches:
        for id, row in zip(batch.ids, batch.features, strict=True):
            assert (row == plain[int(id)]).all()
