"""Which format a listing has."""

import json
import uuid

import pytest

from frostline.cli import main
from frostline.cli.index import index
from frostline.core.errors import EmptyDataset, SettingError
from frostline.datasets import Dataset
from frostline.datasets.formats.known import FORMATS, format_named, format_of
from frostline.datasets.formats.ready import LAYOUT
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry
from support.images import image_folder


def format_in(*names):
    return format_of([Entry(name, 1, "e") for name in names]).name


def test_the_first_format_that_claims_a_listing_has_it():
    assert format_in("cat/1.jpg") == "folders"
    assert format_in("cat/1.jpg", LAYOUT) == "ready"


def test_of_a_listing_that_no_format_claims_class_folders_say_what_is_missing():
    assert format_in("notes.txt") == "folders"
    assert format_in() == "folders"


def code_of(*argv):
    with pytest.raises(SystemExit) as ended:
        main([*map(str, argv)])
    return ended.value.code


def test_the_command_line_names_every_format_and_takes_it(tmp_path, capsys):
    words = next(param.help for param in index.params if param.name == "format")
    assert all(format.name in words for format in FORMATS)
    image_folder(tmp_path, per_class=2)
    rows = [f"{path.relative_to(tmp_path)},{path.stem}" for path in sorted(tmp_path.rglob("*.jpg"))]
    (tmp_path / "labels.csv").write_text("\n".join(["file_name,label", *rows]))
    for format, classes in (("folders", ["circle", "noise", "stripe"]), ("urls", ["000", "001"])):
        assert code_of("index", "--data", tmp_path, "--format", format, "--json") == 0
        assert list(json.loads(capsys.readouterr().out)["per_class"]) == classes
    assert code_of("index", "--data", tmp_path, "--format", "nothing") == 2


def test_a_format_is_found_by_its_name():
    assert [format_named(format.name) for format in FORMATS] == list(FORMATS)
    with pytest.raises(SettingError, match=r"there is no 'folder', only ready, .*folders, .*; did you mean folders"):
        Dataset("memory://x", format="folder")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("train/index.json", "train/shard.00000.mds"), "train/shard.00000.mds is one of the MDS shards"),
        (("index.json", "shard.00003.mds.zstd"), "MDS shards of MosaicML"),
        (("index.json", "chunk-0-0.bin"), "chunk-0-0.bin is one of the chunks of LitData"),
        (("index.json", "chunk-0-12.zstd.bin"), "chunks of LitData"),
        (("x.lance/_versions/1.manifest", "x.lance/data/0f.lance"), "0f.lance is one of the files of a Lance data set"),
    ],
)
def test_shards_of_other_libraries_are_named_with_what_to_do(names, words):
    store = open_store(f"memory://{uuid.uuid4()}")
    for name in names:
        store.write(name, b"{}")
    with pytest.raises(EmptyDataset) as caught:
        _ = Dataset(store.url).samples
    assert words in str(caught.value)
    assert "WebDataset shards or Parquet" in str(caught.value)
