"""Data sets that a node lists: the same samples, labels, splits and changes as where they are listed here."""

import pickle

import numpy as np
import pytest

import frostline as fl
from frostline.core.errors import (
    AccessDenied,
    BadRequest,
    DataChanged,
    DataNotFound,
    EmptyDataset,
    Forbidden,
    NodeUnreachable,
    OverBudget,
    SettingError,
    Unauthenticated,
)
from frostline.core.events import PhaseStarted, ProgressMade
from frostline.core.nouns import taken
from frostline.datasets import source as strangers
from frostline.datasets.check import check
from frostline.datasets.copy.ready import ingest
from frostline.datasets.reading import roots_of
from frostline.preprocess import Applied
from frostline.stores.open import open_store
from support.formats import put_masked_pairs, put_parquet, put_ready, put_urls, put_webdataset
from support.images import image_folder, tiny_preprocess
from support.listing_nodes import listing_node, stranger
from support.tenants import tenant, token_of

FORMATS = {"webdataset": put_webdataset, "parquet": put_parquet, "ready": put_ready, "masks": put_masked_pairs}


class Example:
    def __init__(self, number):
        self.key = f"{number:03}"
        self.label = "ab"[number % 2]
        self.data = b"P5 2 2 255 " + bytes([number, 1, 2, 3])
        self.mask = b"P5 2 2 255 " + bytes([0, 1, 2, number])


def ignore(_):
    pass


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("photos"))


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    with listing_node(tmp_path_factory.getbasetemp().as_uri()) as node:
        yield node


@pytest.fixture
def listed(node, tmp_path):
    """Has the node list a folder, for a client with a cache of its own."""

    def listed(folder, **options):
        return fl.Dataset(folder, near=node.url, **{"cache": tmp_path / "client", **options})

    return listed


def same(one, other):
    everything = np.arange(len(one))
    mine, theirs = one.samples.take(everything), other.samples.take(everything)
    assert (one.digest, one.classes, one.manifest.reading, one.columns) == (
        other.digest,
        other.classes,
        other.manifest.reading,
        other.columns,
    )
    assert (one.has_targets, one.manifest.applied, one.splits_brought) == (
        other.has_targets,
        other.manifest.applied,
        other.splits_brought,
    )
    for name in ("ids", "offsets", "lengths", "labels"):
        assert getattr(mine, name).tolist() == getattr(theirs, name).tolist()
    assert list(mine.objects) == list(theirs.objects)
    assert list(mine.versions) == list(theirs.versions)
    assert list(taken(one.names, everything)) == list(taken(other.names, everything))
    if one.has_targets:
        assert list(mine.targets.objects) == list(theirs.targets.objects)
        assert mine.targets.widths.tolist() == theirs.targets.widths.tolist()


def test_a_node_lists_a_folder_as_this_process_does(photos, listed):
    events = []
    data = listed(photos, observe=events.append)
    same(data, fl.Dataset(photos))
    assert PhaseStarted(name="listing the data") in events
    assert any(isinstance(event, ProgressMade) for event in events)
    assert data.source.near
    assert not data.split(0.25)[0].selection.count_shared(data.split(0.25)[1].selection)
    assert len(data.select("label == 'noise'")) == 12
    assert data.statistics().samples == 36


@pytest.mark.parametrize("format", FORMATS)
def test_a_node_lists_every_format_as_this_process_does(format, tmp_path, listed):
    folder = tmp_path / "data"
    folder.mkdir()
    FORMATS[format](open_store(str(folder)), [Example(number) for number in range(8)])
    same(listed(folder), fl.Dataset(folder, cache=tmp_path / "own"))


def test_a_large_manifest_is_mapped(photos, listed, monkeypatch):
    monkeypatch.setattr(strangers, "IN_MEMORY_BYTES", 0)
    data = listed(photos)
    assert data.manifest.columns.is_mapped
    same(data, fl.Dataset(photos))


def test_a_manifest_that_is_here_is_not_sent_again(photos, node, listed, tmp_path):
    kept = listed(photos).manifest.place
    [path] = (tmp_path / "client").rglob("*.parquet")
    before = path.stat().st_ino
    again = listed(photos, relist=False)
    assert again.manifest.place == kept
    assert path.stat().st_ino == before, "it was fetched again"
    path.write_bytes(b"damaged")
    assert len(listed(photos)) == 36, "a damaged one is fetched again"


def test_a_part_takes_what_made_it_along(photos, listed):
    part = pickle.loads(pickle.dumps(listed(photos).select("label == 'circle'")))
    assert len(part) == 12
    assert part.source.near == listed(photos).source.near


def test_splits_that_were_saved_beside_the_node_come_along(photos, listed, tmp_path):
    whole = fl.Dataset(photos)
    whole.save_splits(whole.split({"train": 0.75, "val": 0.25}))
    data = listed(photos)
    assert data["train"].samples.ids.tolist() == whole["train"].samples.ids.tolist()
    data.save_splits({"val": data["val"].select("label == 'noise'"), "mine": data["train"]})
    again = listed(photos)
    assert (len(again["val"]), len(again["mine"]), len(again["train"])) == (3, 27, 27)
    assert len(whole["val"]) == 9, "what is saved here stays here"


def test_changed_data_is_refused_or_listed_again_by_the_node(tmp_path, listed):
    folder = image_folder(tmp_path / "photos", per_class=2)
    assert len(listed(folder)) == 6
    rebuilt = listed(folder, changed="rebuild")
    part = rebuilt.select("label == 'noise'")
    (folder / "noise" / "000.jpg").write_bytes((folder / "circle" / "000.jpg").read_bytes())
    (folder / "noise" / "001.jpg").unlink()
    with pytest.raises(DataChanged, match=r"noise/00"):
        len(listed(folder, changed="refuse"))
    assert (len(part), len(part.refreshed())) == (2, 1)
    assert part.refreshed().source.near == part.source.near
    assert len(listed(folder)) == 5


def test_explains_that_this_process_cannot_reach_the_store(photos, listed, tmp_path):
    data = listed(photos)
    for reads in (
        lambda: check(data, ignore),
        lambda: ingest(data, tmp_path / "out", Applied.to(tiny_preprocess(), "uint8"), observe=ignore),
        lambda: roots_of(data),
    ):
        with pytest.raises(SettingError, match="listed by the node at"):
            reads()
    assert not (tmp_path / "out").exists()


def test_a_node_refuses_data_that_it_does_not_serve(listed, tmp_path_factory):
    with pytest.raises(BadRequest, match="does not serve"):
        len(listed("/etc"))
    with pytest.raises(BadRequest, match="does not serve"):
        len(listed("s3://bucket/photos"))
    with pytest.raises(DataNotFound):
        len(listed(tmp_path_factory.getbasetemp() / "nowhere"))


def test_a_node_lists_nothing_that_names_other_hosts(tmp_path, listed):
    with stranger(b"") as url:
        folder = tmp_path / "lists"
        folder.mkdir()
        (folder / "labels.csv").write_text(f"url,label\n{url}/secret.jpg,a\n")
        for format in ("urls", None):
            with pytest.raises(Forbidden, match="other hosts"):
                len(listed(folder, format=format))


def test_sends_no_stored_manifest_of_lists(tmp_path, listed):
    folder = tmp_path / "lists"
    folder.mkdir()
    put_urls(open_store(str(folder)), [Example(0), Example(1)])
    assert len(fl.Dataset(folder, beside=True, format="urls")) == 2
    with pytest.raises(Forbidden, match="other hosts"):
        len(listed(folder, relist=False))


def test_the_first_node_that_serves_the_data_lists_it(photos, node, tmp_path):
    with listing_node((tmp_path / "other").as_uri()) as other:
        data = fl.Dataset(photos, near=("http://127.0.0.1:9", other.url, node.url), cache=tmp_path)
        assert len(data) == 36
        with pytest.raises(BadRequest, match="does not serve"):
            len(fl.Dataset(photos, near=("http://127.0.0.1:9", other.url), cache=tmp_path))
    with pytest.raises(NodeUnreachable):
        len(fl.Dataset(photos, near="http://127.0.0.1:9", cache=tmp_path))


def test_links_that_lead_out_of_the_roots_are_not_followed(tmp_path, photos):
    root = image_folder(tmp_path / "root", per_class=1)
    (root / "noise" / "linked.jpg").symlink_to(photos / "noise" / "000.jpg")
    with listing_node(root.as_uri()) as node, pytest.raises(AccessDenied, match="--follow-links"):
        len(fl.Dataset(root, near=node.url, cache=tmp_path / "client"))
    with listing_node(root.as_uri(), follow_links=True) as node:
        assert len(fl.Dataset(root, near=node.url, cache=tmp_path / "client")) == 4


def test_names_the_option_that_raises_a_nodes_bound(photos, tmp_path):
    for settings, option in (
        ({"max_listed": 35}, "--max-listed"),
        ({"max_listed": 2}, "--max-listed"),
        ({"max_manifest_bytes": 1000}, "--max-manifest"),
    ):
        with listing_node(photos.as_uri(), **settings) as node, pytest.raises(OverBudget, match=option):
            len(fl.Dataset(photos, near=node.url, cache=tmp_path / "client"))


def test_sends_the_token_of_the_argument_or_the_environment(photos, tmp_path, monkeypatch):
    with listing_node(photos.as_uri(), tenants=(tenant("ann"), tenant("bob", roots=("file:///else",)))) as node:

        def data(**options):
            return fl.Dataset(photos, near=node.url, cache=tmp_path / "client", **options)

        with pytest.raises(Unauthenticated):
            len(data())
        assert len(data(token=token_of("ann"))) == 36
        monkeypatch.setenv("FROSTLINE_TOKEN", token_of("ann"))
        assert len(data()) == 36
        assert token_of("ann") not in repr(data(token=token_of("ann")).source)
        assert token_of("ann").encode() not in pickle.dumps(data())
        with pytest.raises(BadRequest, match="does not serve"):
            len(data(token=token_of("bob")))


def test_refuses_addresses_that_are_not_of_nodes():
    for near in ("unix:///run/io.sock", "store:7070", "https://store", ["http://store:1", 3]):
        with pytest.raises(SettingError):
            fl.Dataset("s3://bucket", near=near)
    with pytest.raises(SettingError, match="beside"):
        fl.Dataset("s3://bucket", near="http://store:1", beside=True)


def test_an_empty_place_is_the_same_error_as_here(tmp_path, listed):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmptyDataset):
        len(listed(tmp_path / "empty"))


def test_a_node_in_a_process_of_its_own_lists_too(photos, shared_node, tmp_path):
    same(fl.Dataset(photos, near=shared_node.url, cache=tmp_path), fl.Dataset(photos))
