"""Every format: found by its files, held to the shipped suite, and copied to every other one.

Every format passes the shipped tests, on a folder, in memory and on S3; tables do on a real Cassandra.

Which format a listing has.

Copies between any two formats and stores: each sample once, with its class, pixels, mask and metadata.
"""

import io
import json
import uuid
from itertools import product

import numpy as np
import pytest
from PIL import Image

import frostline as fl
from frostline.cli import main
from frostline.cli.index import index
from frostline.core.errors import EmptyDataset, SettingError
from frostline.datasets import Dataset
from frostline.datasets.copy.cql import put_into_table
from frostline.datasets.copy.layout import metadata_in
from frostline.datasets.copy.ready import ingest
from frostline.datasets.copy.repack import repack
from frostline.datasets.dataset import roots_of
from frostline.datasets.formats.arrow import ArrowFiles
from frostline.datasets.formats.cql import CqlTables
from frostline.datasets.formats.folders import ClassFolderFormat, MaskPairs
from frostline.datasets.formats.known import FORMATS, format_named, format_of
from frostline.datasets.formats.labels import SOURCE
from frostline.datasets.formats.parquet import Parquet
from frostline.datasets.formats.ready import LAYOUT, ReadyFormat
from frostline.datasets.formats.urls import UrlLists
from frostline.datasets.formats.webdataset import CompressedTars, WebDataset
from frostline.datasets.reading import open_samples
from frostline.preprocess import Applied, CenterCrop, Decode, Normalize, Preprocess, Resize
from frostline.preprocess.apply import ALIGNMENT, open_mask, pixels_into, steps_left
from frostline.stores.open import open_store
from frostline.stores.protocols import Entry
from frostline.stores.urls import object_url
from frostline.testing.formats import ODD_EXAMPLES, FormatTests, MaskTests
from support import formats
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.images import image_folder, tiny_preprocess

pytestmark = pytest.mark.promise("labels", mended="a copy named classes in another order than its source")


class Stores:
    """On three stores."""

    @pytest.fixture(params=["folder", "memory", "s3"])
    def store(self, request, tmp_path, monkeypatch):
        if request.param == "folder":
            return open_store(str(tmp_path))
        if request.param == "memory":
            return open_store(f"memory://{uuid.uuid4()}/a b%20")
        server = request.getfixturevalue("s3")
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        server.make_bucket("formats")
        return open_store(f"s3://formats/{uuid.uuid4()}")


class TestClassFolders(Stores, FormatTests):
    format = ClassFolderFormat()

    def put(self, store, examples, part=0):
        formats.put_folders(store, examples, part)


class TestWebDataset(Stores, FormatTests, MaskTests):
    format = WebDataset()

    def put(self, store, examples, part=0):
        formats.put_webdataset(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_webdataset(store, examples)


class TestCompressedTars(Stores, FormatTests, MaskTests):
    format = CompressedTars()

    def put(self, store, examples, part=0):
        formats.put_compressed(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_compressed(store, examples)


class TestMaskPairs(Stores, FormatTests, MaskTests):
    format = MaskPairs()
    needs_masks = True

    def put(self, store, examples, part=0):
        formats.put_masks(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_pairs(store, examples)


class TestParquet(Stores, FormatTests, MaskTests):
    format = Parquet()
    reads_again = True

    def put(self, store, examples, part=0):
        formats.put_parquet(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_parquet(store, examples)


class TestArrowFiles(Stores, FormatTests, MaskTests):
    format = ArrowFiles()
    reads_again = True

    def put(self, store, examples, part=0):
        formats.put_arrow(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_arrow(store, examples)


class TestReadyFormat(Stores, FormatTests, MaskTests):
    format = ReadyFormat()

    def put(self, store, examples, part=0):
        formats.put_ready(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_ready(store, examples)

    def size_of(self, example):
        return tiny_preprocess().shape[1:]


class TestUrlLists(Stores, FormatTests, MaskTests):
    format = UrlLists()
    odd = tuple(
        example for example in ODD_EXAMPLES if "?" not in example.key
    )  # what follows it in a bucket's URL are options
    reads_again = True

    def put(self, store, examples, part=0):
        formats.put_urls(store, examples, part)

    def put_masked(self, store, examples):
        formats.put_masked_urls(store, examples)


@pytest.fixture(scope="module")
def table(cql):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
        store = open_store(f"cql://{USER}@{cql.place}/{KEYSPACE}/suite?protocol=3")
        store.create()
        yield store


@pytest.fixture(scope="module")
def session(cql):
    with cql.session() as session:
        yield session


class TestCqlTables(FormatTests):
    format = CqlTables()
    beside = ()

    @pytest.fixture
    def store(self, table, session):
        # Far cheaper than a new table or an empty one.
        for (key,) in session.execute(f"SELECT id FROM {KEYSPACE}.suite"):
            session.execute(f"DELETE FROM {KEYSPACE}.suite WHERE id = %s", (key,))
        return table

    def put(self, store, examples, part=0):
        formats.put_table(store, examples, part)


class TestTablesWithMasks(MaskTests):
    format = CqlTables()

    @pytest.fixture
    def store(self, table):
        store = open_store(table.url.replace("/suite", f"/m{uuid.uuid4().hex}"))
        store.create(has_masks=True)
        return store

    def put_masked(self, store, examples):
        formats.put_masked_table(store, examples)


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


SIDE = 8
SQUARE = Preprocess(steps=(Decode(), Resize(SIDE), CenterCrop(SIDE), Normalize(mean=(0.0,) * 3, std=(1.0,) * 3)))
READY = Applied.to(SQUARE, "uint8")
MADE = ("original", "webdataset", "parquet", "ready")
READ = ("folders", "urls", *MADE[1:])
STORES = ("memory", "local")


def quiet(_):
    pass


def png(pixels):
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def image(number):
    return png(np.random.default_rng(number).integers(0, 256, (SIDE, SIDE, 3), np.uint8))


def mask(number):
    classes = np.random.default_rng(100 + number).integers(0, 4 if number % 2 else 1000, (SIDE, SIDE))
    return png(classes.astype(np.uint8 if number % 2 else np.uint16))


NAMES = [f"{'ab'[number % 2]}/{number} ü.png" for number in range(6)]
"""Of two classes; without a mask is the last one, where there are masks."""


def place(kind, tmp_path):
    if kind == "memory":
        return f"memory://{uuid.uuid4()}/a b"
    folder = tmp_path / uuid.uuid4().hex
    folder.mkdir()
    return folder.as_uri()


def folders(url, *, masks):
    store = open_store(url)
    for number, name in enumerate(NAMES):
        store.write(f"images/{name}" if masks else name, image(number))
        if masks and number < len(NAMES) - 1:
            store.write(f"masks/{name}", mask(number))
    return url


def lists(url, *, masks):
    """A list of images in another store, with a column of metadata."""
    away = open_store(folders(f"memory://{uuid.uuid4()}", masks=masks))
    rows = ["url,mask,label,patient"]
    for number, name in enumerate(NAMES):
        there = object_url(away.url, f"masks/{name}") if masks and number < len(NAMES) - 1 else ""
        rows.append(f"{object_url(away.url, f'images/{name}' if masks else name)},{there},{name[0]},{number}")
    open_store(url).write("labels.csv", "\n".join(rows).encode())
    return url


def made(source, url, format):
    """A copy in several parts."""
    if format == "ready":
        ingest(source, url, READY, object_bytes=2 * ALIGNMENT, on_event=quiet)
    elif format == "cql":
        put_into_table(source, url, on_event=quiet)
    else:
        repack(source, url, format, part_bytes=600, on_event=quiet)
    return url


@pytest.fixture
def written(tmp_path):
    """Writes a data set in a format that is read, at a URL."""

    def write(format, url, *, masks):
        if format in ("folders", "urls"):
            return (folders if format == "folders" else lists)(url, masks=masks)
        return made(fl.Dataset(lists(f"memory://{uuid.uuid4()}", masks=masks), cache=tmp_path / "cache"), url, format)

    return write


def picture(data, encoded):
    """The pixels of a sample, whatever its format keeps."""
    found = np.empty((SIDE, SIDE, 3), np.uint8)
    pixels_into(steps_left(SQUARE, data.manifest.applied), encoded, found, id=0, view=None)
    return found.tobytes()


def contents(data):
    """Class, pixels, classes of the mask and metadata of every sample, in no order."""
    samples, store = (
        data.samples.take(np.arange(len(data))),
        open_samples(data.url, data.manifest.reading, roots=roots_of(data)),
    )
    rows, places = samples.masks
    masks = {int(row): piece for row, piece in zip(rows, pieces(store, places), strict=True)}
    about = {name: data.column(name).to_pylist() for name in metadata_in(data.columns) if name != SOURCE}
    found = []
    for row, encoded in enumerate(pieces(store, samples)):
        classes = (
            np.asarray(open_mask(masks[row], size=(SIDE, SIDE))).astype(np.uint16).tobytes() if row in masks else b""
        )
        values = json.dumps({name: column[row] for name, column in sorted(about.items())})
        found.append((data.classes[samples.labels[row]], picture(data, encoded), classes, values))
    return sorted(found)


def pieces(store, samples):
    places = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    return [bytes(store.read(*place)) for place in places]


def without_metadata(found):
    return sorted((*item[:3], "{}") for item in found)


def wanted(source, format):
    found = contents(source)
    assert len({item[1] for item in found}) == len(NAMES)
    return without_metadata(found) if format == "original" else found


def ways():
    """Each format into each, with masks and without, between any stores; by default each by one of the ways in turn."""
    for (row, read), (column, format), masks in product(enumerate(READ), enumerate(MADE), (False, True)):
        for number, (store, to) in enumerate(product(STORES, STORES)):
            usual = number == (row + 2 * column + masks) % len(STORES) ** 2
            yield pytest.param(read, store, format, to, masks, marks=() if usual else pytest.mark.long)


@pytest.mark.parametrize(("read", "store", "format", "to", "masks"), [*ways()])
def test_any_format_becomes_any_other_in_any_store(read, store, format, to, masks, written, tmp_path):
    source = fl.Dataset(written(read, place(store, tmp_path), masks=masks), cache=tmp_path / "cache")
    assert (source.manifest.applied is not None) == (read == "ready")
    copy = fl.Dataset(made(source, place(to, tmp_path), format), cache=tmp_path / "cache")
    assert copy.has_targets == source.has_targets == masks
    assert contents(copy) == wanted(source, format)
    if format == "ready":
        assert copy.samples.ids.tolist() == source.samples.ids.tolist()
        assert list(copy.names) == list(source.names)
    elif format != "original":
        original = source.column(SOURCE).to_pylist() if SOURCE in source.columns else list(source.names)
        assert sorted(copy.column(SOURCE).to_pylist()) == sorted(original)


@pytest.mark.parametrize("format", MADE)
def test_a_bucket_takes_every_format_and_gives_it_back(format, s3, written, tmp_path, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    s3.make_bucket("between")
    source = fl.Dataset(written("urls", place("local", tmp_path), masks=True), cache=tmp_path / "cache")
    there = fl.Dataset(made(source, f"s3://between/{uuid.uuid4()}", format), cache=tmp_path / "cache")
    assert contents(there) == wanted(source, format)
    for back in MADE:
        copy = fl.Dataset(made(there, place("local", tmp_path), back), cache=tmp_path / "cache")
        assert contents(copy) == wanted(there, back)


@pytest.fixture(scope="module")
def server(cql):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
        yield cql


def table_of_between_formats(server):
    return f"cql://{USER}@{server.place}/{KEYSPACE}/t{uuid.uuid4().hex}?protocol=3"


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("read", READ)
def test_any_format_becomes_a_table(read, masks, server, written, tmp_path):
    source = fl.Dataset(written(read, place("memory", tmp_path), masks=masks), cache=tmp_path / "cache")
    copy = fl.Dataset(made(source, table_of_between_formats(server), "cql"), cache=tmp_path / "cache")
    assert contents(copy) == wanted(source, "cql")
    assert sorted(copy.names) == sorted(source.names)
    assert set(copy.samples.ids.tolist()) == set(source.samples.ids.tolist())


@pytest.mark.parametrize("masks", [False, True])
def test_a_table_becomes_any_format(masks, server, written, tmp_path):
    url = written("cql", table_of_between_formats(server), masks=masks)
    source = fl.Dataset(url, cache=tmp_path / "cache")
    for format in (*MADE, "cql"):
        to = table_of_between_formats(server) if format == "cql" else place("local", tmp_path)
        copy = fl.Dataset(made(source, to, format), cache=tmp_path / "cache")
        assert copy.has_targets == masks
        assert contents(copy) == wanted(source, format)
