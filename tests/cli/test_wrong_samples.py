"""The verb train shows the held-out samples that were got wrong, with pictures where they can be read from here."""

import json

import pytest
from PIL import Image

from frostline.cli import main
from frostline.training.report import page
from support.images import image_folder
from support.pages import has_inline_pictures_alone

MODEL = ("--model", "support.networks:Small", "--until", "stem", "--accuracy", "exact")
HOW = ("--epochs", 1, "--batch-size", 8, "--val-share", 0.25, "--json")


@pytest.fixture(autouse=True)
def _cache_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def folder(tmp_path):
    """Images of one colour in three classes, which nothing can tell apart: two thirds are got wrong."""
    folder = image_folder(tmp_path / "images", per_class=8)
    for path in folder.glob("*/*.jpg"):
        Image.new("RGB", (60, 48), (90, 120, 60)).save(path)
    return folder


def trained(capsys, folder, out, *arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in ("train", "--data", folder, *MODEL, *HOW, "--out", out, *arguments)])
    said = capsys.readouterr()
    assert ended.value.code == 0, said.err
    return json.loads(said.out), (out / "report.html").read_text()


def test_they_are_named_in_the_report_and_shown_on_its_page(capsys, folder, near, tmp_path):
    report, html = trained(capsys, folder, tmp_path / "run", *near)
    confusion, classes = report["confusion"], report["classes"]
    assert confusion["samples"] == report["val_samples"] == sum(map(sum, confusion["matrix"])) == 6
    assert confusion["wrong"] == len(confusion["mistakes"]) == 4
    assert 1 - confusion["wrong"] / confusion["samples"] == pytest.approx(report["val_accuracy"])
    for mistake in confusion["mistakes"]:
        assert (folder / mistake["name"]).is_file()
        assert mistake["name"].startswith(classes[mistake["true"]])
        assert mistake["name"] in html
    assert html.count("<img") == 4
    assert has_inline_pictures_alone(html)


def test_samples_too_large_to_read_again_are_named_without_pictures(capsys, folder, near, tmp_path, monkeypatch):
    monkeypatch.setattr(page, "_MAX_ENCODED_BYTES", 0)
    report, html = trained(capsys, folder, tmp_path / "run", *near)
    assert "<img" not in html
    assert all(mistake["name"] in html for mistake in report["confusion"]["mistakes"])
