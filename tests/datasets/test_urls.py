"""Lists of URLs, and single files named as data sets.

Lists of URLs: what they may name, where it is looked for, and that nothing leads out of what is served.

A file that is a data set by its name, on disk and in a bucket; and images that lie in no folder.
"""

import gzip
import json
import os
import shutil
import uuid

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import frostline as fl
from frostline.core import errors
from frostline.core.config import NodeSettings
from frostline.core.errors import AccessDenied, BadRequest, DataError, DataNotFound, EmptyDataset, ObjectNotFound
from frostline.datasets import Dataset
from frostline.datasets.dataset import roots_of
from frostline.datasets.formats.urls import UrlLists, UrlReader
from frostline.node import Node
from frostline.stores.cloud import DriverStore
from frostline.stores.open import open_store
from frostline.testing.formats import EXAMPLES
from frostline.wire.messages import FeatureRequest
from support.bucket_peer import bucket_peer
from support.formats import put_urls, tar_of
from support.images import image_folder, tiny_preprocess
from support.listing_nodes import listing_node
from support.nodes import jpeg
from support.web import ETAG, web_server

FORMAT = UrlLists()


@pytest.fixture
def store():
    return open_store(f"memory://{uuid.uuid4()}")


def read(store, text):
    store.write("labels.csv", text.encode())
    return FORMAT.read(store, list(store.list()))


def refused(store, text):
    with pytest.raises(DataError) as caught:
        read(store, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_samples_lie_wherever_their_urls_lead(store, tmp_path):
    other, folder = open_store(f"memory://{uuid.uuid4()}/deep"), open_store(str(tmp_path))
    put_urls(store, EXAMPLES[:4], 0, away=other)
    put_urls(store, EXAMPLES[4:8], 1, away=folder)
    put_urls(store, EXAMPLES[8:], 2)
    listed = FORMAT.read(store, list(store.list()))
    reader = UrlReader([store.url, other.url, "file:///"])
    rows = listed.table.to_pylist()
    assert [bytes(reader.read(row["object"], 0, row["length"])) for row in rows] == [
        example.data for example in EXAMPLES
    ]
    assert [listed.classes[row["label"]] for row in rows] == [example.label for example in EXAMPLES]
    assert [row["key"] for row in rows] == [example.key for example in EXAMPLES]


def test_labels_stay_as_they_are_written_and_may_be_missing(store):
    store.write("a b.jpg", b"a")
    store.write("c.jpg", b"c")
    listed = read(store, 'url,label,score\n"./a b.jpg",007,1\nc.jpg,,2.5\n')
    assert listed.classes == ("007",)
    assert listed.table["label"].to_pylist() == [0, None]
    assert listed.table["score"].to_pylist() == [1.0, 2.5]


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("file_name,label,place\n{a},NA,Orléans\n{b},null,Köln\n{c},nan,NA\n", "latin-1"),
        ("filename;Label;Place\n{a};NA;Orléans\n{b};null;Köln\n{c};nan;NA\n", "utf-8"),
        ("File_Name\t Class Name \tplace\r\n{a}\tNA\tOrléans\r\n{b}\tnull\tKöln\r\n{c}\tnan\tNA\r\n", "utf-16"),
        ('"Image Path"|"label"|"place"\n"{a}"|"NA"|"Orléans"\n"{b}"|"null"|"Köln"\n"{c}"|"nan"|"NA"\n', "utf-8-sig"),
        ("IMAGE, label, place\n {a}, NA, Orléans\n{b} ,null,Köln\n{c},nan ,NA\n", "cp1252"),
    ],
    ids=["latin-1", "semicolons", "tabs in UTF-16", "quoted bars", "spaces"],
)
@pytest.mark.parametrize("names", [("a.jpg", "b.jpg", "d/c.jpg"), ("a", "b", "c"), ("./a.jpg", "b.jpg", "c.jpg")])
def test_csv_is_read_as_people_write_it(store, text, encoding, names):
    for name in ("a.jpg", "b.jpg", "d/c.jpg"):
        store.write(name, name.encode())
    store.write("labels.csv", text.format(**dict(zip("abc", names, strict=True))).encode(encoding))
    data = Dataset(store.url, format="urls")
    assert [name.removeprefix(f"{store.url}/") for name in data.names] == ["a.jpg", "b.jpg", "d/c.jpg"]
    assert [data.classes[label] for label in data.samples.labels.tolist()] == ["NA", "null", "nan"]
    [place] = data.columns[7:]
    assert [value.strip() for value in data.column(place).to_pylist()] == ["Orléans", "Köln", "NA"]
    assert place.lower() == "place"


@pytest.mark.parametrize(
    ("words", "encoding"),
    [
        ("貓,狗", "big5"),
        ("猫,狗", "gbk"),
        ("ねこ,いぬ", "shift_jis"),
        ("고양이,개", "euc-kr"),
        ("кошка,пёс", "cp1251"),
        ("γάτα,σκύλος", "cp1253"),
    ],
)
def test_a_list_in_an_encoding_that_cannot_be_told_is_refused_with_what_to_do(store, words, encoding):
    """It was read as if its bytes were western letters, and classes had names such as ¿ß."""
    for name in ("a.jpg", "b.jpg"):
        store.write(name, b"x")
    first, second = words.split(",")
    text = f"file_name,label\na.jpg,{first}\nb.jpg,{second}\n"
    store.write("labels.csv", text.encode(encoding))
    with pytest.raises(DataError, match="save it as UTF-8"):
        len(Dataset(store.url, format="urls"))
    store.write("labels.csv", text.encode())
    assert set(Dataset(store.url, format="urls").classes) == {first, second}


ODD_CSV = {
    "commas at the ends": "file_name,label,,\na.jpg,x,,\nb.jpg,y,,\n",
    "a separator said": "sep=;\r\nfile_name;label\r\na.jpg;x\r\nb.jpg;y\r\n",
    "commas within names": "label;file_name;notes (a, b, c, d)\nx;a.jpg;1\ny;b.jpg;2\n",
    "a comma for a point": "file_name;label;price\na.jpg;x;1,5\nb.jpg;y;2,5\n",
    "a line break in a name": '"file\nname",label\na.jpg,x\nb.jpg,y\n',
    "quotes behind spaces": '"file_name", "label"\n"a.jpg", "x"\n"b.jpg", "y"\n',
    "carriage returns": "file_name,label\ra.jpg,x\rb.jpg,y\r",
    "empty lines first": "\n\nfile_name,label\na.jpg,x\nb.jpg,y\n",
    "paths of Windows": "file_name,label\nC:\\data\\set\\a.jpg,x\nC:\\data\\set\\b.jpg,y\n",
    "names as pandas' index": ",label,n\na.jpg,x,1\nb.jpg,y,2\n",
    "names without suffix as pandas' index": ",label,n\na,x,1\nb,y,2\n",
    "quotes within values": 'file_name,label,size\na.jpg,x,5" by 3\nb.jpg,y,"5"" by\n3"\n',
    "a name of its own": "index,Image Index,label\n1,a.jpg,x\n2,b.jpg,y\n",
    "a long field": "file_name,label,words\na.jpg,x," + "q" * 200_000 + "\nb.jpg,y,\n",
    "numbers with a point": "id,label\n1.0,x\n2.0,y\n,z\n",
}


@pytest.mark.parametrize("kind", [*ODD_CSV, "no mark of UTF-16"])
def test_odd_csv_says_what_it_would_to_a_person(store, kind):
    for name in ("a.jpg", "b.jpg"):
        store.write(name.translate({97: "1", 98: "2"}) if "point" in kind and "numbers" in kind else name, b"x")
    text = ODD_CSV.get(kind, "file_name,label\na.jpg,x\nb.jpg,y\n")
    store.write("l.csv", text.encode("utf-16-le" if kind not in ODD_CSV else "utf-8"))
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("x", "y"), [0, 1])
    assert "" not in data.columns


def test_rows_and_columns_of_csv_that_fit_no_name_are_named(store):
    store.write("a.jpg", b"x")
    store.write("l.csv", b",file_name,label,\n0,a.jpg,x,\n1,b.jpg\n2,c.jpg,y,z,more\n")
    data = Dataset(store.url)
    assert len(data) == 1
    assert [(one.what, one.reason, one.names) for one in data.manifest.left_out] == [
        ("row", "with more or fewer fields than the row of names", ("l.csv/1", "l.csv/2")),
        ("column", "without a name", ("l.csv/1",)),
    ]


def test_columns_keep_what_no_number_says_and_labels_that_are_numbers_may_be_missing(store):
    for name in "abc":
        store.write(f"{name}.jpg", b"x")
    many = "123456789012345678901"
    store.write(
        "l.csv",
        f"file_name,label,zip,tweet,region,n\na.jpg,1.0,01099,{many},NA,1\nb.jpg,NaN,10115,1,,2\nc.jpg,0,,,NA,\n".encode(),
    )
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("0", "1"), [1, -1, 0])
    columns = {name: data.column(name).to_pylist() for name in data.columns[7:]}
    assert columns == {
        "zip": ["01099", "10115", None], "tweet": [many, "1", None], "region": ["NA", None, "NA"], "n": [1, 2, None],
    }  # fmt: skip


def test_columns_of_numbers_take_what_stands_for_none_and_texts_keep_it(store):
    for name in "abc":
        store.write(f"{name}.jpg", b"x")
    store.write("l.csv", b"file_name,label,width,region\na.jpg,x,3,NA\nb.jpg,y,NA,\nc.jpg,,4,EU\n")
    data = Dataset(store.url)
    assert data.column("width").to_pylist() == [3, None, 4]
    assert data.column("region").to_pylist() == ["NA", None, "EU"]
    assert data.column("label").to_pylist() == [0, 1, None]


def test_lists_of_json_lines_are_read_and_rows_without_a_sample_are_counted(store):
    for name in ("a.jpg", "b.jpg"):
        store.write(name, b"x")
    rows = [
        {"file_name": "a.jpg", "label": "x", "boxes": [[1, 2]]},
        {"file_name": "b.jpg", "label": None},
        {"label": "y"},
    ]
    store.write("metadata.jsonl", "\n".join(map(json.dumps, rows)).encode())
    data = Dataset(store.url)
    assert (data.classes, data.samples.labels.tolist()) == (("x",), [0, -1])
    assert data.column("boxes").to_pylist() == ["[[1, 2]]", None]
    assert [(one.what, one.total) for one in data.manifest.left_out] == [("row", 1)]
    rows = [
        {"image": {"path": "a.jpg"}, "label": {"name": "p\u2028p"}, "at": {"site": "north", "deep": {"n": 1}}},
        {"image": {"path": "b.jpg"}, "label": {"name": "q"}},
        [1], "text", 5,
    ]  # fmt: skip
    store.write("metadata.jsonl", "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode())
    data = Dataset(store.url)
    assert (len(data), data.classes) == (2, ())
    columns = {name: data.column(name).to_pylist() for name in data.columns[7:]}
    assert columns == {"at.deep": ['{"n": 1}', None], "at.site": ["north", None], "label.name": ["p\u2028p", "q"]}
    assert Dataset(store.url, label="label.name").classes == ("p\u2028p", "q")
    [lost] = data.manifest.left_out
    assert (lost.reason, lost.names[0]) == ("that are no objects of JSON", "metadata.jsonl/2")
    store.write("metadata.jsonl", b'{"file_name": "a.jpg"}\n{')
    with pytest.raises(DataError, match=r"line 2 of metadata\.jsonl is no JSON"):
        _ = Dataset(store.url).samples
    store.write("metadata.jsonl", json.dumps(rows[:2]).encode())
    with pytest.raises(DataError, match=r"metadata\.jsonl has no object of JSON in any line: write each row as one"):
        _ = Dataset(store.url).samples


def test_lists_that_make_no_sense_get_a_sentence(store):
    store.write("a.jpg", b"a")
    assert "its columns are kind, place" in refused(store, "kind,place\na,1\n")
    assert "its first line must name the columns, so write file_name,label" in refused(store, "a.jpg,1\nb.jpg,2\n")
    assert "two columns called 'x'" in refused(store, "url,x,x\na.jpg,1,2\n")
    assert "labels.csv has no column that says where each sample is" in refused(store, "name,label\na,1\n")
    assert "labels.csv is no CSV file" in refused(store, "url,label\na.jpg\nb,c,d\n")
    assert "labels.csv is no CSV file" in refused(store, "")
    swallowed = '"5 inches,x\nc.jpg,1\n' + "d.jpg,1\n" * 40_000
    for text in ('url,label,size\na.jpg,1,x\nb.jpg,1,"5 inches', f"url,size,label\r\na.jpg,x,1\r\nb.jpg,{swallowed}"):
        assert "labels.csv has a quote that nothing closes" in (said := refused(store, text))
        assert "close the one in 'b.jpg," in said
    said = "b.jpg is listed and missing{}: mend the list"
    assert said.format(", and so is the other") in refused(store, "url,label\nb.jpg,1\nc.jpg,1\n")
    assert said.format("") in refused(store, "url,label\nb.jpg,1\n")
    assert "a.jpg 2 times" in refused(store, "url,label\na.jpg,1\na.jpg,2\n")
    assert "gopher://" in refused(store, "url,label\ngopher://a/b.jpg,1\n")
    assert "name no samples" in refused(store, "url,label\n")


def test_urls_of_a_plain_web_server_are_asked_for_one_by_one(store):
    with web_server() as web:
        names = [f"{number % 3}/{number} ä.jpg" for number in range(50)]
        web.objects = {f"photos/{name}": bytes(number + 1) for number, name in enumerate(names)}
        listed = read(store, "\n".join(["url,label", *(f"{web.url}/photos/{name},1" for name in names)]))
        assert listed.table["length"].to_pylist() == list(range(1, 51))
        assert set(listed.table["etag"].to_pylist()) == {ETAG.strip('"')}
        assert {method for method, _ in web.seen} == {"HEAD"}
        assert len(web.seen) == 50
        reader = UrlReader([web.url])
        row = listed.table.slice(7, 1).to_pylist()[0]
        assert bytes(reader.read(row["object"], 0, row["length"])) == bytes(8)


def test_samples_of_a_list_that_are_not_there_are_counted_and_named(tmp_path):
    images = image_folder(tmp_path / "images", per_class=1)
    with web_server() as web:
        web.objects = {path.name: path.read_bytes() for path in images.rglob("*.jpg")}
        rows = [f"{web.url}/{name},1" for name in [*web.objects, "gone.jpg"]]
        lists = tmp_path / "lists"
        lists.mkdir()
        (lists / "labels.csv").write_text("\n".join(["url,label", *rows]))
        settings = fl.LoaderSettings(max_skipped_fraction=1.0)
        with fl.offload(None, fl.Dataset(lists), preprocess=tiny_preprocess(), settings=settings) as job:
            read = sum(len(batch.labels) for batch in job.loader(4))
            (skipped,) = job.statistics().skipped
    assert read == len(rows) - 1
    assert skipped.object == f"{web.url}/gone.jpg"
    assert "there is no object" in skipped.reason


def test_few_objects_of_a_large_folder_are_not_listed(s3, monkeypatch, tmp_path):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("wanted")
    away = open_store(f"s3://wanted/{uuid.uuid4()}")
    for number in range(40):
        away.write(f"{number}.jpg", bytes(number + 1))
    monkeypatch.setattr(DriverStore, "list", None)
    listed = read(open_store(str(tmp_path)), f"url,label\n{away.url}/7.jpg,1\n{away.url}/9.jpg,1\n{away.url}/x.jpg,1\n")
    assert listed.table["length"].to_pylist() == [8, 10, 1]


def test_many_objects_of_a_folder_are_listed_as_far_as_that_takes_less(store):
    away = open_store(f"memory://{uuid.uuid4()}")
    for number in range(40):
        away.write(f"{number:04}.jpg", bytes(number + 1))
    for number in range(3000):
        away.write(f"0/{number}.jpg", b"not wanted")
    listed = read(store, "\n".join(["url,label", *(f"{away.url}/{number:04}.jpg,1" for number in range(40))]))
    assert listed.table["length"].to_pylist() == list(range(1, 41))


def test_reads_absolute_paths_as_given_and_relative_ones_beside_the_list(tmp_path):
    (tmp_path / "here").mkdir()
    (tmp_path / "far.jpg").write_bytes(b"far")
    (tmp_path / "here" / "near.jpg").write_bytes(b"near!")
    listed = read(open_store(str(tmp_path / "here")), f"path,label\n{tmp_path}/far.jpg,1\nnear.jpg,2\n")
    assert listed.table["length"].to_pylist() == [3, 5]
    assert listed.table["object"].to_pylist()[0] == (tmp_path / "far.jpg").as_uri()


def test_a_question_mark_in_a_list_is_refused_and_what_follows_is_not_repeated(store):
    said = refused(store, "url,label\nhttps://photos.example/a.jpg?sig=hunter2,1\n")
    assert "'https://photos.example/a.jpg' with a question mark behind it" in said
    assert "hunter2" not in said
    assert "no URL can name such an object of a bucket" in refused(store, "url,label\na?b.jpg,1\n")


def test_no_url_leads_out_of_the_roots(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "in" / "a b.jpg").write_bytes(b"inside")
    root = (tmp_path / "in").as_uri()
    reader = UrlReader([root])
    assert bytes(reader.read(f"{root}/a%20b.jpg", 0, 6)) == b"inside"
    outside = (tmp_path / "secret").as_uri()
    for url in (
        outside,
        f"{root}/../secret",
        f"{root}/%2e%2e/secret",
        root,
        "a b.jpg",
        "memory://x/y",
        "",
        f"{root}x/y",
    ):
        with pytest.raises(BadRequest):
            reader.read(url, 0, 6)


def test_a_node_reads_no_url_outside_of_what_it_serves(tmp_path):
    here, away = tmp_path / "here", open_store(f"memory://{uuid.uuid4()}")
    here.mkdir()
    put_urls(open_store(str(here)), EXAMPLES, away=away)
    data = fl.Dataset(here)
    assert set(roots_of(data)) == {here.as_uri(), away.url}
    samples = data.samples.take(np.arange(2))
    asked = FeatureRequest(
        data=data.url, samples=samples, prefix=None, cut=0, preprocess=tiny_preprocess().to_json(), reading="urls"
    )
    with Node(NodeSettings(), (data.url,)) as node, pytest.raises(BadRequest, match="does not lie within"):
        node.features(asked)
    with Node(NodeSettings(), (data.url, away.url)) as node:
        assert [bytes(item) for batch in node.features(asked) for item in batch.encoded] == [
            example.data for example in EXAMPLES[:2]
        ]


def test_reports_a_list_without_labels(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"a")
    (tmp_path / "labels.csv").write_text("url,label,kind\na.jpg,,1\n")
    sentence = r"not one of the 1 samples of .* has a label: .*label or cls.* one of its columns, such as --label kind "
    with pytest.raises(DataError, match=sentence):
        fl.Dataset(tmp_path).selection.require_classes(2, "the list")


def test_a_job_finds_its_samples_elsewhere(tmp_path):
    images = image_folder(tmp_path / "images", per_class=2)
    lists = tmp_path / "lists"
    lists.mkdir()
    rows = [f"{path.as_uri()},{path.parent.name}" for path in sorted(images.rglob("*.jpg"))]
    (lists / "labels.csv").write_text("\n".join(["url,label", *rows]))
    with fl.offload(None, fl.Dataset(lists), preprocess=tiny_preprocess()) as job:
        labels = np.concatenate([batch.labels for batch in job.loader(4)])
    assert sorted(labels.tolist()) == [0, 0, 1, 1, 2, 2]


IMAGES = {f"{number}.jpg": jpeg(number) for number in range(6)}


def _files():
    """Three data sets of the same images, each as one file, and the images of the list."""
    names = list(IMAGES)
    tar = tar_of([(f"{'ab'[row % 2]}/{name}", IMAGES[name]) for row, name in enumerate(names)])
    sink = pa.BufferOutputStream()
    table = {"image": list(IMAGES.values()), "label": [row % 2 for row in range(len(names))]}
    pq.write_table(pa.table(table), sink)
    lines = ["path,label", *(f"images/{name},{'ab'[row % 2]}" for row, name in enumerate(names))]
    rows = [json.dumps({"path": f"images/{name}", "label": "ab"[row % 2]}) for row, name in enumerate(names)]
    files = {
        "x.tar": tar,
        "x.tar.gz": gzip.compress(tar),
        "x.tgz": gzip.compress(tar),
        "x.parquet": sink.getvalue().to_pybytes(),
        "x.csv": "\n".join(lines).encode(),
        "x.tsv": "\n".join(lines).replace(",", "\t").encode(),
        "x.jsonl": "\n".join(rows).encode(),
    }
    return {**files, **{f"images/{name}": data for name, data in IMAGES.items()}}


FILES = _files()
NAMES = ("x.tar", "x.tar.gz", "x.tgz", "x.parquet", "x.csv", "x.tsv", "x.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("data")
    for name, data in FILES.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_bytes(data)
    return path


def encoded(data, **options):
    """Every sample's bytes, as a plain loader gives them."""
    with fl.offload(None, data, preprocess=fl.preprocess.imagenet(32), **options) as job:
        return {
            int(id): features for batch in job.loader(4) for id, features in zip(batch.ids, batch.features, strict=True)
        }


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_a_data_set_by_its_name(folder, name):
    data = fl.Dataset(folder / name)
    assert len(data) == len(IMAGES)
    assert sorted(np.unique(data.samples.labels)) == [0, 1]
    assert len(encoded(data)) == len(IMAGES)
    assert data.manifest.found is False
    assert fl.Dataset(folder / name).manifest.found is True
    assert len(fl.Dataset(folder / name, relist=False)) == len(IMAGES)
    assert not [path for path in folder.rglob("*") if ".frostline" in path.parts]


@pytest.mark.parametrize("name", NAMES)
def test_it_is_one_in_a_bucket_too_which_need_not_list(name, monkeypatch):
    with bucket_peer() as peer:
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        peer.objects |= {f"deep/{key}": data for key, data in FILES.items()}
        data = fl.Dataset(f"s3://photos/deep/{name}?endpoint={peer.url}")
        assert len(data) == len(encoded(data)) == len(IMAGES)
        assert not [target for method, target in peer.seen if method == "GET" and "prefix=" in target]
        assert set(peer.objects) == {f"deep/{key}" for key in FILES}, "nothing is written beside it"


def test_a_change_of_the_file_is_a_change_of_the_data(tmp_path):
    (tmp_path / "x.tar").write_bytes(FILES["x.tar"])
    before = fl.Dataset(tmp_path / "x.tar")
    assert len(before) == len(IMAGES)
    (tmp_path / "x.tar").write_bytes(tar_of([("a/1.jpg", IMAGES["1.jpg"]), ("b/2.jpg", IMAGES["2.jpg"])]))
    after = fl.Dataset(tmp_path / "x.tar")
    assert len(after) == 2
    assert after.digest != before.digest


def test_a_folder_called_like_a_table_is_a_folder(tmp_path):
    (tmp_path / "x.parquet").mkdir()
    (tmp_path / "x.parquet" / "part-0.parquet").write_bytes(FILES["x.parquet"])
    assert len(fl.Dataset(tmp_path / "x.parquet")) == len(IMAGES)
    store = open_store(f"memory://{uuid.uuid4()}/x.parquet")
    store.write("part-0.parquet", FILES["x.parquet"])
    assert len(fl.Dataset(store.url)) == len(IMAGES)


def test_what_lies_beside_the_file_is_not_there(folder):
    place = f"memory://{uuid.uuid4()}"
    for name in ("x.tar", "secret.txt"):
        open_store(place).write(name, b"0123456789")
    (folder / "secret.txt").write_bytes(b"0123456789")
    for url in (f"{place}/x.tar", str(folder / "x.tar")):
        store = open_store(url)
        assert [entry.object for entry in store.list()] == ["x.tar"]
        for use in (
            lambda store=store: store.read("secret.txt", 0, 1),
            lambda store=store: store.describe("secret.txt"),
        ):
            with pytest.raises(ObjectNotFound, match=r"no object .secret.txt. in x\.tar"):
                use()
        with pytest.raises(AccessDenied, match="is a single file"):
            store.write("other", b"")


def test_a_node_serves_the_file_alone(folder):
    with listing_node(folder / "x.tar") as node:
        url = node.url
        data = fl.Dataset(folder / "x.tar", near=url)
        assert len(encoded(data, near=url)) == len(IMAGES)
        with pytest.raises(errors.BadRequest, match="does not serve"):
            len(fl.Dataset(folder / "x.parquet", near=url))


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("nothing.tar", "there is no file"),
        ("x.tar.xz", "compressed as a whole"),
        (
            "x.txt",
            r"those that end in \.arrow, \.feather, \.ipc, \.csv, \.jsonl, .* \.tgz are",
        ),
    ],
)
def test_a_file_that_is_none_is_refused_with_one_sentence(tmp_path, name, sentence):
    if name != "nothing.tar":
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataNotFound, match=sentence) as caught:
        len(fl.Dataset(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_pipe_of_that_name_is_refused(tmp_path):
    os.mkfifo(tmp_path / "x.tar")
    with pytest.raises(DataNotFound, match="is no regular file"):
        len(fl.Dataset(tmp_path / "x.tar"))


def test_images_in_no_folder_are_samples_without_classes(tmp_path):
    for name, data in IMAGES.items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "notes.txt").write_text("-")
    (tmp_path / ".hidden.jpg").write_bytes(b"-")
    data = fl.Dataset(tmp_path)
    assert list(data.names) == sorted(IMAGES)
    assert data.classes == ()
    assert len(encoded(data)) == len(IMAGES)
    with pytest.raises(errors.DataError, match=r"has a label: put files into class folders such as cats/1.jpg"):
        data.selection.require_classes(2, data.url)


def test_images_in_no_folder_beside_those_in_class_folders_are_passed_over_as_before(tmp_path):
    for folder in ("cat", "dog"):
        (tmp_path / folder).mkdir()
        shutil.copy(__file__, tmp_path / folder / "1.jpg")
    (tmp_path / "loose.jpg").write_bytes(b"-")
    assert list(fl.Dataset(tmp_path).names) == ["cat/1.jpg", "dog/1.jpg"]


def test_an_empty_folder_is_refused_with_one_sentence(tmp_path):
    with pytest.raises(
        EmptyDataset, match=r"holds no images or sounds, in class folders \(such as cats/1.jpg\) or in none"
    ):
        len(fl.Dataset(tmp_path))
