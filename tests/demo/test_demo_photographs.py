"""The demo's set: made once, whole or not at all, the same for a seed."""

import errno

import pytest
from PIL import Image

from frostline import demo
from frostline.core.errors import OutOfSpace, SettingError
from frostline.datasets import Dataset
from frostline.demo import make

pytest.importorskip("skimage")
pytest.importorskip("sklearn")


@pytest.fixture
def few(monkeypatch):
    """The set of two photographs alone."""
    monkeypatch.setattr(demo, "_SOURCES", {name: demo._SOURCES[name] for name in ("cat", "coffee")})  # noqa: SLF001


def test_the_set_is_a_data_set_of_sixteen_classes_and_brings_its_splits(tmp_path):
    seen = []
    made = make(tmp_path / "set", per_class=4, seed=0, progress=lambda done, total: seen.append((done, total)))
    dataset = Dataset(made.directory)
    assert made.made
    assert dataset.classes == made.classes
    assert len(made.classes) == 16
    assert len(dataset) == made.images == 64
    assert dataset.samples.encoded_bytes == made.total_bytes
    assert made.mean_bytes > 10_000
    assert seen[-1] == (64, 64)
    with Image.open(made.directory / "train" / "cat" / "cat-0001.jpg") as image:
        assert (image.format, image.size, image.mode) == ("JPEG", (512, 384), "RGB")


@pytest.mark.usefixtures("few")
def test_held_out_views_show_parts_of_the_photographs_that_no_learned_view_shows(tmp_path, monkeypatch):
    # Photographs whose four quarters differ in colour, so that a view says which quarters it shows.
    colours = ["#ff0000", "#00ff00", "#0000ff", "#ffffff"]

    def quartered(_):
        found = Image.new("RGB", (800, 600))
        for number, colour in enumerate(colours):
            found.paste(colour, (400 * (number % 2), 300 * (number // 2), 400 * (number % 2) + 400, 600))
        return found

    monkeypatch.setattr(demo, "_opened", quartered)
    made = make(tmp_path / "set", per_class=8)
    data = Dataset(made.directory)
    assert {name: len(data[name]) for name in data.splits} == {"train": 12, "val": 4}
    for name in made.classes:
        shown = {
            split: {colour_of(path) for path in (made.directory / split / name).iterdir()} for split in data.splits
        }
        assert len(shown["val"]) == 1, "each view shows one quarter alone"
        assert len(shown["train"]) == 3
        assert not shown["val"] & shown["train"]


def colour_of(path):
    """The colour of all of an image, to what a JPEG keeps of it."""
    with Image.open(path) as image:
        colours = {tuple(value > 127 for value in image.getpixel(place)) for place in ((2, 2), (256, 192), (509, 381))}
    (colour,) = colours
    return colour


@pytest.mark.usefixtures("few")
def test_a_second_call_finds_it_and_the_same_seed_makes_the_same_bytes(tmp_path):
    one = make(tmp_path / "one", per_class=4, seed=3)
    two = make(tmp_path / "two", per_class=4, seed=3)
    other = make(tmp_path / "other", per_class=4, seed=4)
    names = [f"val/{name}/{name}-0000.jpg" for name in one.classes]
    read = [[(made.directory / name).read_bytes() for name in names] for made in (one, two, other)]
    assert read[0] == read[1]
    assert all(a != b for a, b in zip(read[0], read[2], strict=True))
    again = make(tmp_path / "one", per_class=4, seed=3)
    assert (again.made, again.total_bytes) == (False, one.total_bytes)


@pytest.mark.usefixtures("few")
def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(SettingError, match="holds something else"):
        make(tmp_path / "mine", per_class=4)
    make(tmp_path / "set", per_class=4)
    with pytest.raises(SettingError, match="holds something else"):
        make(tmp_path / "set", per_class=8)
    with pytest.raises(SettingError, match="per_class must be at least 4, not 3"):
        make(tmp_path / "other", per_class=3)
    [mark] = (tmp_path / "set" / ".frostline").iterdir()
    for text in ("{", "[]", "[" * 99_999, mark.read_text().replace("total_bytes", "total")):
        mark.write_text(text)
        with pytest.raises(SettingError, match="holds something else"):
            make(tmp_path / "set", per_class=4)
        assert mark.read_text() == text


@pytest.mark.usefixtures("few")
def test_an_empty_folder_may_stand_there_already(tmp_path):
    assert make(tmp_path, per_class=4).made


def test_an_interrupted_run_leaves_nothing(tmp_path):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path / "set", per_class=4, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_reports_a_full_disk_and_leaves_nothing(tmp_path, monkeypatch):
    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Image.Image, "save", full)
    with pytest.raises(OutOfSpace, match="the disk is full"):
        make(tmp_path / "set", per_class=4)
    assert list(tmp_path.iterdir()) == []
