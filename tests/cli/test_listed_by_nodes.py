"""Verbs near a node: the node lists, but for a folder that is on this machine as the node is."""

import pytest

from frostline.cli import main
from frostline.core.config import LoaderSettings
from frostline.training.settings import JobSettings
from support.images import image_folder

NEAR = "http://127.0.0.1:7070"
AWAY = "http://store-1:7070"


def job(data, *near, **asked):
    first, further = (near[0], near[1:]) if near else (None, ())
    return JobSettings(data=str(data), model="x:y", until="z", near=first, also_near=further, **asked)


def test_the_node_lists_what_it_is_near_to(tmp_path):
    for data in ("s3://bucket/photos", "cql://user@host/k/t", "/not/on/this/machine"):
        assert job(data, NEAR).listed_by == (NEAR,)
        assert job(data, AWAY, NEAR).listed_by == (AWAY, NEAR)
        assert job(data).listed_by == ()


def test_a_folder_of_this_machine_is_listed_here_beside_a_node_of_this_machine(tmp_path):
    for near in (NEAR, "http://localhost:7070", "http://[::1]:7070"):
        assert job(tmp_path, near).listed_by == ()
    assert job(tmp_path, AWAY).listed_by == (AWAY,)
    assert job(tmp_path, NEAR, AWAY).listed_by == (NEAR, AWAY)


def test_lists_of_urls_and_what_is_asked_for_are_listed_here():
    assert job("s3://bucket", NEAR, format="urls").listed_by == ()
    assert job("s3://bucket", NEAR, list_locally=True).listed_by == ()
    assert job("s3://bucket", "unix:///run/io.sock").listed_by == ()
    assert job("s3://bucket", loader=LoaderSettings(io="unix:///run/io.sock")).listed_by == ()


def test_index_has_a_node_list_and_says_what_it_cannot_do(tmp_path, capsys, shared_node):
    folder = image_folder(tmp_path / "photos", per_class=2)
    for more, code, said in (
        (["--split", "train=0.5,val=0.5"], 0, "splits: train 3, val 3"),
        (["--check"], 2, "was listed by the node at"),
        (["--manifest-location", "data"], 2, "manifest_location"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["index", "--data", str(folder), "--near", shared_node.url, *more])
        captured = capsys.readouterr()
        assert (ended.value.code, said in captured.out + captured.err) == (code, True), captured
