"""Manifests: built from listings, and again where a data set changed.

What changed since a manifest was built: named and refused, or taken as it is now.

Listing a store: the same objects whether at once or folder by folder, and how far it is.
"""

import dataclasses
import json
import sys
import uuid
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import frostline as fl
from frostline.cli import main
from frostline.cli.extract_predict import extract
from frostline.cli.index import index
from frostline.cli.ingest import ingest
from frostline.cli.plan import plan
from frostline.cli.train import train
from frostline.core.errors import AccessDenied, DataChanged, DataError, DataNotFound, SettingError, StoreUnavailable
from frostline.core.events import PhaseStarted, ProgressMade
from frostline.datasets import Dataset
from frostline.datasets.copy.ready import ingest as make_ready
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats import parquet, webdataset
from frostline.datasets.formats.known import format_named
from frostline.datasets.formats.left_out import sum_left_out
from frostline.datasets.manifest import list_all, null_observer, rows_of_ids
from frostline.preprocess import Applied, imagenet
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry, Sectioned
from frostline.testing.formats import EXAMPLES
from support import formats
from support.images import image_folder
from support.web import web_server

PUT = {
    "folders": formats.put_folders,
    "masks": formats.put_masks,
    "parquet": formats.put_parquet,
    "urls": formats.put_urls,
    "webdataset": formats.put_webdataset,
}


@pytest.fixture(params=["folder", "s3"])
def store(request, tmp_path, monkeypatch):
    if request.param == "folder":
        return open_store(str(tmp_path))
    server = request.getfixturevalue("s3")
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)
    server.make_bucket("changes")
    return open_store(f"s3://changes/{uuid.uuid4()}")


def opened(store, **options):
    data = Dataset(store.url, **options)
    _ = data.samples
    return data


def refused(store, **options):
    with pytest.raises(DataChanged) as caught:
        opened(store, on_change="refuse", **options)
    sentence = str(caught.value)
    assert store.url in sentence
    assert "on_change='rebuild' (--on-change rebuild)" in sentence
    assert "\n" not in sentence
    return sentence


def test_objects_that_changed_are_named_and_refused(store):
    formats.put_folders(store, EXAMPLES)
    before = opened(store, on_change="refuse").digest
    assert opened(store, on_change="refuse").digest == before
    store.write("cat/cat-1-0.jpg", b"another cat")
    assert "cat/cat-1-0.jpg is changed" in refused(store)
    store.write("dog/dog-2-0.jpg", b"another dog")
    store.write("fish/fish-2-0.jpg", b"another fish")
    assert "3 objects are changed (cat/cat-1-0.jpg, dog/dog-2-0.jpg, fish/fish-2-0.jpg)" in refused(store)
    # Refusing builds nothing: the choice stays open until somebody takes it.
    assert "3 objects are changed" in refused(store)
    after = opened(store, on_change="rebuild").digest
    assert after != before
    assert opened(store, on_change="refuse").digest == after


def test_objects_that_came_beside_are_another_data_set_too(store):
    formats.put_folders(store, EXAMPLES)
    opened(store)
    store.write("cat/new.jpg", b"a new cat")
    assert "other objects lie beside those that it names" in refused(store)


def test_objects_that_are_gone_are_named(tmp_path):
    store = open_store(str(tmp_path))
    formats.put_folders(store, EXAMPLES)
    opened(store)
    for number in range(4):
        (tmp_path / f"cat/cat-{number}-0.jpg").unlink()
    assert "4 objects are not there any more (cat/cat-0-0.jpg, cat/cat-1-0.jpg, cat/cat-2-0.jpg, …)" in refused(store)


NAMED = {
    "folders": "cat/cat-0-0.jpg",
    "masks": "images/cat/cat-0-0.jpg",
    "parquet": "data/train-00000.parquet is changed",
    "urls": "images-0/cat/cat-0.jpg",
    "webdataset": "shards/train-000000.tar is changed",
}


@pytest.mark.parametrize("format", PUT)
def test_every_format_names_its_objects(format, tmp_path):
    store = open_store(str(tmp_path))
    PUT[format](store, EXAMPLES)
    opened(store, format=format)
    PUT[format](store, [example._replace(data=example.data + b"!") for example in EXAMPLES])
    assert NAMED[format] in refused(store, format=format)


def test_a_mask_that_changed_is_named(tmp_path):
    store = open_store(str(tmp_path))
    formats.put_masks(store, EXAMPLES)
    opened(store)
    store.write("masks/cat/cat-0-0.png", b"another")
    assert "masks/cat/cat-0-0.png is changed" in refused(store)


@contextmanager
def elsewhere(kind, tmp_path):
    """A place for images, what writes one there, and what removes one."""
    if kind == "web":
        with web_server() as web:

            def write(name, data, version):
                web.objects[name] = data
                web.versions[name] = version

            yield web.url, write, lambda name: web.objects.pop(name)
        return
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    yield (
        folder.as_uri(),
        lambda name, data, _: open_store(str(folder)).write(name, data),
        lambda name: (folder / name).unlink(),
    )


def times(number):
    """What a web server without etags says of an object that was changed so many seconds after another."""
    return {"Last-Modified": f"Sat, 21 Nov 2026 12:00:{number:02} GMT"}


@pytest.mark.parametrize(
    ("kind", "versions"),
    [
        ("files", (None, None)),
        ("web", ({"ETag": '"a"'}, {"ETag": '"b"'})),
        ("web", (times(0), times(1))),
        ("web", ({}, {})),  # which leaves their sizes
    ],
)
def test_objects_elsewhere_that_changed_are_named_and_refused_or_listed_anew(kind, versions, tmp_path):
    data = {"a.jpg": b"a", "b.jpg": b"bb", "c.jpg": b"ccc"}
    lists = open_store(f"memory://{uuid.uuid4()}")
    with elsewhere(kind, tmp_path) as (url, write, remove):
        for name, contents in data.items():
            write(name, contents, versions[0])
        lists.write("labels.csv", "\n".join(["url,label", *(f"{url}/{name},x" for name in (*data, "d.jpg"))]).encode())
        options = {"cache": tmp_path / "cache"}
        first = opened(lists, **options)
        assert first.samples.lengths.tolist() == [1, 2, 3, 1]  # one that is not there counts as a byte
        for changed in ("refuse", "rebuild"):
            again = opened(lists, on_change=changed, **options)
            assert (again.digest, again.manifest.found) == (first.digest, True)

        write("b.jpg", b"bbbb", versions[1])
        assert f"{url}/b.jpg is changed" in refused(lists, **options)
        remove("c.jpg")
        said = refused(lists, **options)
        assert f"{url}/b.jpg is changed, {url}/c.jpg is not there any more" in said
        assert opened(lists, **options).digest == first.digest  # where changes are skipped, nobody is asked

        now = opened(lists, on_change="rebuild", **options)
        assert not now.manifest.found
        assert now.samples.lengths.tolist() == [1, 4, 1, 1]
        assert now.samples.ids.tolist() == first.samples.ids.tolist()
        assert now.digest != first.digest
        for changed in ("refuse", "rebuild", "skip"):
            again = opened(lists, on_change=changed, **options)
            assert (again.digest, again.manifest.found) == (now.digest, True)
        write("d.jpg", b"ddddd", versions[1])
        assert f"{url}/d.jpg is changed" in refused(lists, **options)
        assert opened(lists, on_change="rebuild", **options).samples.lengths.tolist() == [1, 4, 1, 5]


def test_refuses_changes_where_another_format_was_listed_last(tmp_path):
    away, lists = open_store(f"memory://{uuid.uuid4()}"), open_store(f"memory://{uuid.uuid4()}")
    away.write("a.jpg", b"a")
    formats.put_folders(lists, EXAMPLES)
    lists.write("labels.csv", f"url,label\n{away.url}/a.jpg,x".encode())
    opened(lists, format="urls")
    opened(lists, format="folders")
    away.write("a.jpg", b"b")
    assert f"{away.url}/a.jpg is changed" in refused(lists, format="urls")


def test_a_mask_elsewhere_that_changed_is_named(tmp_path):
    away, lists = open_store(f"memory://{uuid.uuid4()}"), open_store(f"memory://{uuid.uuid4()}")
    away.write("a.jpg", b"a")
    away.write("a.png", b"mask")
    lists.write("labels.csv", f"url,mask\n{away.url}/a.jpg,{away.url}/a.png".encode())
    opened(lists)
    away.write("a.png", b"ksam")
    assert f"{away.url}/a.png is changed" in refused(lists)


def test_a_job_on_a_list_has_the_objects_elsewhere_as_they_are_when_it_begins(tmp_path):
    folder = image_folder(tmp_path / "images", per_class=2)
    paths = sorted(folder.rglob("*.jpg"))
    lists = open_store(f"memory://{uuid.uuid4()}")
    lists.write(
        "labels.csv", "\n".join(["url,label", *(f"{path.as_uri()},{path.parent.name}" for path in paths)]).encode()
    )
    data = opened(lists, on_change="rebuild", cache=tmp_path / "cache")
    paths[0].write_bytes(paths[1].read_bytes())
    with fl.offload(None, data, preprocess=imagenet(32)) as job:
        batches = list(job.loader(2))
    assert sum(len(batch.ids) for batch in batches) == len(paths)
    assert not job.statistics().skipped


def test_a_first_listing_has_nothing_to_be_compared_with(tmp_path):
    store = open_store(str(tmp_path))
    formats.put_folders(store, EXAMPLES)
    assert len(opened(store, on_change="refuse")) == len(EXAMPLES)


def test_refuses_an_unknown_policy_for_changes():
    with pytest.raises(
        SettingError, match="on_change is one of skip, rebuild, refuse, not 'rebuilt'; did you mean rebuild"
    ):
        Dataset("memory://x", on_change="rebuilt")


def test_a_part_is_found_again_in_a_later_listing(tmp_path):
    store = open_store(str(tmp_path))
    formats.put_folders(store, EXAMPLES)
    data = opened(store, on_change="rebuild")
    part = data.take(np.array([5, 0, 7]))
    names = list(part.names)
    assert data.refresh().digest == data.digest
    store.write("ape/first.jpg", b"which moves every row")
    (tmp_path / names[1]).unlink()
    assert list(part.refresh().names) == [names[0], names[2]]
    assert len(data.refresh()) == len(EXAMPLES)
    assert part.refresh().selection.listing == data.refresh().selection.listing != data.selection.listing
    assert opened(store, on_change="skip").refresh().source.on_change == "skip"
    assert len(part.whole) == len(EXAMPLES)


def test_lists_again_where_a_fresh_listing_is_needed(tmp_path):
    store = open_store(str(tmp_path))
    formats.put_folders(store, EXAMPLES)
    opened(store)
    store.write("cat/new.jpg", b"a new cat")
    last = opened(store, relist=False, on_change="rebuild")
    assert len(last) == len(EXAMPLES)
    assert len(last.refresh()) == len(EXAMPLES) + 1


@given(st.lists(st.integers(0, 50), unique=True), st.lists(st.integers(0, 50), unique=True))
def test_rows_are_found_by_their_ids(ids, wanted):
    rows = rows_of_ids(np.array(ids, np.int64), np.array(wanted, np.int64))
    assert [ids[row] for row in rows.tolist()] == [item for item in wanted if item in ids]


SMALL = Applied.to(imagenet(16), "uint8")
COPIES = {
    "another format": lambda data, to, **options: repack(data, to, "webdataset", on_event=null_observer, **options),
    "ready": lambda data, to, **options: make_ready(data, to, SMALL, on_event=null_observer, **options),
}


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("how", ["written anew", "removed"])
def test_a_copy_stops_where_changes_are_refused_and_leaves_them_out_where_not(copied, how, tmp_path):
    folder = image_folder(tmp_path / "data", per_class=4)
    kinds = {changed: opened(open_store(str(folder)), on_change=changed) for changed in ("refuse", "skip")}
    one = folder / "noise" / "001.jpg"
    one.unlink()
    if how == "written anew":
        one.write_bytes((folder / "noise" / "002.jpg").read_bytes())
    with pytest.raises(DataChanged, match=r"noise/001\.jpg is not what it was"):
        COPIES[copied](kinds["refuse"], str(tmp_path / "refused"))
    done = COPIES[copied](kinds["skip"], str(tmp_path / "copy"), max_skipped_fraction=0.1)
    assert done.samples == 11
    assert [(sample.object, sample.changed) for sample in done.skipped] == [("noise/001.jpg", True)]


def test_copies_the_data_as_it_is_when_the_copy_begins(tmp_path):
    folder = image_folder(tmp_path / "data", per_class=4)
    data = opened(open_store(str(folder)), on_change="rebuild")
    (folder / "noise" / "001.jpg").unlink()
    done = COPIES["another format"](data, str(tmp_path / "copy"))
    assert done.samples == 11
    assert not done.skipped


def test_every_verb_that_opens_data_takes_the_choice():
    assert all(
        any(param.name == "on_change" for param in verb.params) for verb in (extract, index, ingest, plan, train)
    )


def test_the_command_line_refuses_with_the_sentence(tmp_path, capsys):
    store = open_store(str(tmp_path))
    formats.put_folders(store, EXAMPLES)
    for changed, code in ((False, 0), (True, 2)):
        if changed:
            store.write("cat/cat-1-0.jpg", b"another cat")
        with pytest.raises(SystemExit) as ended:
            main(["index", "--data", str(tmp_path), "--on-change", "refuse", "--json"])
        assert ended.value.code == code
    assert "cat/cat-1-0.jpg is changed" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["index", "--data", str(tmp_path), "--json"])
    assert json.loads(capsys.readouterr().out)["samples"] == len(EXAMPLES)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("webdataset", webdataset.WebDataset), ("parquet", parquet.Parquet)],
)
def test_rows_of_an_older_rule_are_read_again_and_those_of_this_one_are_taken_over(tmp_path, monkeypatch, name, kind):
    store, taken, plain = open_store(str(tmp_path)), [], kind.read
    PUT[name](store, EXAMPLES)

    def noted(self, store, entries, before=None):
        taken.append(None if before is None else before.table.num_rows)
        return plain(self, store, entries, before)

    monkeypatch.setattr(kind, "read", noted)
    rows = len(opened(store).samples)
    PUT[name](store, EXAMPLES[:-1])
    fewer = len(opened(store).samples)
    monkeypatch.setattr(sys.modules[kind.__module__], "_RULE", "frostline another rule")
    assert len(opened(store).samples) == fewer
    PUT[name](store, EXAMPLES)
    opened(store)
    assert taken == [None, rows, None, fewer]


NAMES = ("top.txt", "a/1.jpg", "a/deep/er/2.jpg", "b c/ü✓.jpg", "b c/x.jpg", ".frostline/y", "a.b/1.jpg", "a-/z.png")


def filled(url):
    store = open_store(url)
    for name in NAMES:
        store.write(name, name.encode())
    return store


@pytest.mark.parametrize("root", ["memory://listing-one", "memory://listing-two/deep/er"])
def test_folder_by_folder_gives_what_a_listing_gives(root):
    store = filled(root)
    assert isinstance(store, Sectioned)
    assert sorted(list_all(store, lambda event: None)) == sorted(store.list())
    assert {entry.object for entry in list_all(store, lambda event: None)} == set(NAMES)


def test_a_bucket_is_listed_folder_by_folder(s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("sections")
    for name in NAMES:
        s3.put(f"sections/under/{name}", name.encode())
    for root in ("s3://sections", "s3://sections/under"):
        store = open_store(root)
        assert isinstance(store, Sectioned)
        assert sorted(list_all(store, lambda event: None)) == sorted(store.list())
    with pytest.raises(DataNotFound):
        list_all(open_store("s3://no-such-bucket"), lambda event: None)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(AccessDenied):
        list_all(open_store("s3://sections"), lambda event: None)


class Sections:
    """A store of two folders, one of which cannot be listed."""

    def sections(self):
        return [Entry("x", 1, "")], ("good/", "bad/")

    def list_section(self, folder):
        if folder == "bad/":
            raise StoreUnavailable("the store did not give bad/")
        return [Entry(f"{folder}1", 1, "")]


def test_a_folder_that_cannot_be_listed_fails_the_whole_listing():
    with pytest.raises(StoreUnavailable, match="did not give bad/"):
        list_all(Sections(), lambda event: None)


class Many:
    """A store that lists at once."""

    def list(self):
        return (Entry(f"a/{number}", 1, "") for number in range(25_000))


def test_a_listing_says_how_far_it_is(tmp_path):
    happened = []
    assert len(list_all(Many(), happened.append)) == 25_000
    assert happened == [
        PhaseStarted(name="listing the data"),
        ProgressMade(done=10_000, total=0),
        ProgressMade(done=20_000, total=0),
    ]
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"x")
    phases = []
    assert len(Dataset(tmp_path, on_event=phases.append)) == 1
    assert phases == [
        PhaseStarted(name="listing the data"),
        ProgressMade(done=1, total=0),
        PhaseStarted(name="building the manifest"),
    ]


# What labels, a column and the split of a file's samples may be; a label of half is none of a class.
LABELS = (("a", "b"), ("b", None), (0, 2), (1.0, None), ("1", "2"), (True, False), (0.5, -1.0), ([0], [0, 1]))
COLUMNS = ((1, 2), (1.5, None), ("u", "v"), (None, None))
PLACES = ("", "train-", "val-", "train/", "site=n/", "site=1/", "label=a/", "label=q/")


@st.composite
def table_files(draw, format):
    """The name and the contents of a file of samples."""
    count = draw(st.integers(1, 3))

    def of(kinds):
        return draw(st.lists(st.sampled_from(draw(st.sampled_from(kinds))), min_size=count, max_size=count))

    columns = {"label": of(LABELS[:1] * 8 + LABELS), "x": of(COLUMNS), "split": of((("train", "val"),))}
    columns = {name: columns[name] for name in draw(st.sets(st.sampled_from(sorted(columns))))}
    name = f"{draw(st.sampled_from(PLACES))}{draw(st.integers(0, 1))}.{format}"
    if format != "tar":
        images = [draw(st.sampled_from([b"image", b"image", None])) for _ in range(count)]
        table = pa.table({"image": pa.array(images, pa.binary()), **columns})
        if draw(st.booleans()) and all(type(label) is int for label in columns.get("label", [None])):
            names = {"_type": "ClassLabel", "names": draw(st.permutations(["z", "a", "b"]))}
            about = json.dumps({"info": {"features": {"label": names}}})
            table = table.replace_schema_metadata({"huggingface": about})
        out = pa.BufferOutputStream()
        pq.write_table(table, out)
        return name, formats.arrow_of(table) if format == "arrow" else out.getvalue().to_pybytes()
    members = []
    for row in range(count):
        key, about = f"{draw(st.sampled_from(['', 'cat/', 'dog/']))}{row}", {key: columns[key][row] for key in columns}
        if draw(st.booleans()) and not isinstance(label := about.pop("label", None), list):
            members.append((f"{key}.cls", str("" if label is None else label).encode()))
        members += [(f"{key}.jpg", b"image"), (f"{key}.json", json.dumps(about).encode())]
    if (table := draw(st.sampled_from([None, None, ["z", "a", "b"], ["b", "a"], 3]))) is not None:
        members.append((webdataset.CLASS_MEMBER, json.dumps(table).encode()))
    return name, formats.tar_of(members)


def listing_of(format, store, before):
    """What a format says of a store, and the same in few words; the sentence where it refuses."""
    try:
        listed = format.read(store, sorted(store.list()), before)
    except DataError as error:
        return None, str(error)
    about = {**vars_of(listed), "table": None, "left_out": sum_left_out(listed.left_out), "read_again": None}
    return listed, (listed.table.to_pydict(), listed.table.schema.remove_metadata(), about)


def vars_of(listed):
    return {field.name: getattr(listed, field.name) for field in dataclasses.fields(listed)}


@pytest.mark.parametrize(("format", "suffix"), [("webdataset", "tar"), ("parquet", "parquet"), ("arrow", "arrow")])
@given(drawn=st.data())
def test_a_listing_after_changes_is_that_of_one_who_never_listed_before(format, suffix, drawn):
    """Labels that stood beside others of another kind came back as those, and partitions as columns of the files."""
    store, read, before = open_store(f"memory://{uuid.uuid4()}"), format_named(format), None
    for _ in range(3):
        for name, contents in drawn.draw(st.lists(table_files(suffix), min_size=1, max_size=3)):
            store.write(name, contents)
        there = sorted(entry.object for entry in store.list())
        for name in drawn.draw(st.lists(st.sampled_from(there), max_size=len(there) - 1, unique=True)):
            store.remove(name)
        listed, told = listing_of(read, store, before)
        assert told == listing_of(read, store, None)[1]
        before = listed or before


@pytest.mark.parametrize("format", ["webdataset", "parquet", "arrow"])
def test_of_files_alike_none_is_read_again_for_one_that_came(format):
    store, put = open_store(f"memory://{uuid.uuid4()}"), getattr(formats, f"put_{format}")
    for part in range(3):
        put(store, EXAMPLES[part * 2 : part * 2 + 2], part)
    assert format_named(format).read(store, sorted(store.list())).read_again == ()
