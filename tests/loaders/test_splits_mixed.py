"""A loop over all of a data set that brings splits is told that it trains on what should score it."""

import warnings

import frostline as fl
from support.images import image_folder, tiny_preprocess


def job_over(folder, observe=None):
    return fl.offload(None, fl.Dataset(folder), preprocess=tiny_preprocess(), observe=observe)


def folder_with(tmp_path, *splits):
    for split in splits:
        image_folder(tmp_path / split, per_class=2)
    return tmp_path


def test_warns_where_splits_to_train_on_and_to_score_are_read_together(tmp_path):
    with job_over(folder_with(tmp_path, "train", "val")) as job, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        job.loader(2)
        job.loader(2, data=job.data["train"])
    assert len(caught) == 1
    assert "splits train, val mixed" in str(caught[0].message)
    assert "data=job.data['train']" in str(caught[0].message)


def test_says_nothing_where_there_is_nothing_to_score(tmp_path):
    happened = []
    with job_over(image_folder(tmp_path / "images", per_class=2), happened.append) as job:
        job.loader(2)
    assert not [event for event in happened if type(event).__name__ == "SetupWarning"]
