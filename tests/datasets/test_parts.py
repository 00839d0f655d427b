"""Parts of data sets and of copies: joined, made again, and divided without loss.

Parts of a data set joined: their rows one part after the other, and a name for exactly these.

Parts of a copy that are made again, as after the death of a process, are the same and are counted once.

Samples of several parts: a column of a Parquet file for each.
"""

import pickle
from contextlib import ExitStack

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import frostline as fl
from frostline import Dataset, NodeSettings, loader, preprocess
from frostline.cli import main
from frostline.core.errors import BadRequest, DataError, SettingError, TooManySkipped
from frostline.core.events import ProgressMade, SampleSkipped
from frostline.datasets.check import check
from frostline.datasets.copy import cql as table_writer
from frostline.datasets.copy.cql import put_into_table
from frostline.datasets.copy.layout import PACKERS
from frostline.datasets.copy.ready import ingest
from frostline.datasets.copy.repack import repack
from frostline.datasets.formats.known import format_named, format_with
from frostline.datasets.formats.parquet import Cell
from frostline.datasets.reading import open_samples
from frostline.preprocess import Applied, imagenet
from frostline.preprocess.steps import unframe_parts
from frostline.stores.protocols import Entry
from frostline.wire.listings import ListingRequest
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.images import image_folder
from support.pairs import COLUMNS, pair_inputs, write_pairs


def test_joined_parts_have_the_samples_of_each_in_its_order(tmp_path):
    data = fl.Dataset(image_folder(tmp_path, per_class=5))
    some, others = data.select("label == 'noise'"), data.take(np.array([7, 0, 7]))
    joined = some.concatenate(others, data)
    assert len(joined) == 5 + 3 + 15
    ids = [*some.samples.ids.tolist(), *others.samples.ids.tolist(), *data.samples.ids.tolist()]
    assert joined.samples.ids.tolist() == ids
    assert joined.samples.take(np.array([6, 2, 22])).ids.tolist() == [ids[6], ids[2], ids[22]]
    assert list(joined.names)[5:8] == list(others.names)
    assert joined.classes == data.classes


def test_joined_parts_are_named_by_the_parts_in_their_order(tmp_path):
    data = fl.Dataset(image_folder(tmp_path, per_class=5))
    one, other = data.split(0.4, 0)
    digests = {
        one.concatenate(other).digest,
        other.concatenate(one).digest,
        one.concatenate(other, one).digest,
        data.digest,
    }
    assert len(digests) == 4
    assert one.concatenate(other).digest == one.concatenate(other).digest


def test_parts_of_other_data_cannot_be_joined(tmp_path):
    one, other = (fl.Dataset(image_folder(tmp_path / name, per_class=2)) for name in ("one", "other"))
    with pytest.raises(SettingError, match="can be joined"):
        one.concatenate(other)


def quiet(_):
    pass


def made_twice_elsewhere(plan, parts):
    """Every part from last to first, each begun anew elsewhere because nobody heard how the first try ended."""
    for part in reversed(list(parts)):
        travelled, before = pickle.dumps((plan, part)), None
        for _ in range(2):
            with ExitStack() as stack:
                there, asked = pickle.loads(travelled)
                copier = there.open(stack)
                before = copier.look(asked) if before is None else before
                result = copier.make(asked, before).result()
        yield part, pickle.loads(pickle.dumps(result))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = image_folder(tmp_path_factory.mktemp("images"), per_class=6)
    (folder / "circle" / "broken.jpg").write_bytes(b"\xff\xd8 no image")
    return fl.Dataset(folder)


def files(folder):
    """The bytes of everything that a copy wrote; records of parts also hold the objects' versions."""
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found if "ingest/part-" not in str(path)}


def copies(source, folder, run):
    """The result and the files of a copy made here, and of one whose parts are made twice elsewhere."""
    found = []
    for name, more in (("here", {}), ("again", {"runner": made_twice_elsewhere})):
        events = []
        done = run(source, folder / name, max_skipped_fraction=0.1, on_event=events.append, **more)
        assert [event.id for event in events if isinstance(event, SampleSkipped)] == [lost.id for lost in done.skipped]
        assert [event for event in events if isinstance(event, ProgressMade)][-1].done == len(source)
        found.append(({**done.to_json(), "url": "", "seconds": 0}, files(folder / name)))
    return found


@pytest.mark.parametrize("format", PACKERS)
def test_a_copy_is_the_same_whoever_makes_its_parts(images, tmp_path, format):
    def run(source, to, **more):
        return repack(source, to, format, shorter_side=24, part_bytes=8_000, **more)

    here, again = copies(images, tmp_path, run)
    assert again == here
    assert here[0]["made"] == here[0]["parts"] > 2
    done = repack(
        images, tmp_path / "again", format, shorter_side=24, part_bytes=8_000, max_skipped_fraction=0.1, on_event=quiet
    )
    assert (done.made, done.samples) == (0, 18)


def test_a_ready_format_is_the_same_whoever_makes_its_objects(images, tmp_path):
    def run(source, to, **more):
        return ingest(source, to, Applied.to(imagenet(16), "uint8"), object_bytes=4_000, **more)

    here, again = copies(images, tmp_path, run)
    assert again == here
    assert here[0]["made"] == here[0]["objects"] > 2
    assert len(fl.Dataset(tmp_path / "again")) == 18


def test_a_part_with_too_many_unreadable_samples_ends_a_copy_wherever_it_was_made(images, tmp_path):
    with pytest.raises(TooManySkipped):
        repack(
            images,
            tmp_path,
            "webdataset",
            shorter_side=24,
            max_skipped_fraction=0,
            on_event=quiet,
            runner=made_twice_elsewhere,
        )


def test_rows_put_again_are_the_same_rows_and_counted_once(images, cql, monkeypatch):
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
    monkeypatch.setattr(table_writer, "_ROWS_A_PART", 10)
    url = f"cql://{USER}@{cql.place}/{KEYSPACE}/put_twice?protocol=3"
    assert put_into_table(images.take(range(4)), url, on_event=quiet).made == 4
    done = put_into_table(images, url, on_event=quiet, runner=made_twice_elsewhere)
    assert (done.samples, done.made) == (19, 15), "what was there before the run was not made by it"
    with cql.session() as session:
        names = [row.name for row in session.execute(f"SELECT name FROM {KEYSPACE}.put_twice")]
    assert sorted(names) == sorted(images.names)
    assert put_into_table(images, url, on_event=quiet).made == 0


def test_tasks_elsewhere_cannot_write_into_the_memory_of_this_process(images, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["ingest", images.url, "memory://copy", "--format", "parquet", "--executor", "ray"])
    assert "memory:// is that of one process" in capsys.readouterr().err


SMALL = NodeSettings(memory_bytes=1 << 29, device_batch=8)


def records(data, parts=2):
    """The parts of every sample."""
    samples = data.samples
    store = open_samples(data.url, data.manifest.reading)
    cells = zip(samples.objects, samples.offsets.tolist(), samples.lengths.tolist(), strict=True)
    return [[bytes(part) for part in unframe_parts(store.read(*cell), parts)] for cell in cells]


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "data"
    path.mkdir()
    return path


def pairs(folder, tmp_path, column=COLUMNS, **options):
    return Dataset(folder, cache=tmp_path / "cache", column=column, **options)


def test_a_sample_is_a_record_of_its_cells_with_the_label_beside_it(folder, tmp_path):
    captions = write_pairs(folder / "train.parquet")
    data = pairs(folder, tmp_path)
    images = pq.read_table(folder / "train.parquet")["image"].to_pylist()
    meant = [[image["bytes"], caption.encode()] for image, caption in zip(images, captions, strict=True)]
    assert records(data) == meant
    assert data.samples.labels.tolist() == [row % 3 for row in range(len(captions))]
    assert "source" in data.columns
    assert "caption" not in data.columns  # the manifest holds no part of a sample


def test_the_order_of_the_columns_is_that_of_the_parts(folder, tmp_path):
    write_pairs(folder / "train.parquet")
    turned = pairs(folder, tmp_path, {"input_ids": "caption", "pixel_values": "image"})
    data = pairs(folder, tmp_path)
    assert records(turned) == [parts[::-1] for parts in records(data)]
    assert turned.digest != data.digest


def test_a_row_without_one_of_its_parts_is_no_sample(folder, tmp_path):
    table = pa.table({"a": ["x", None, "", "y"], "b": [b"1", b"2", b"", None], "label": [0, 1, 0, 1]})
    pq.write_table(table, folder / "x.parquet")
    data = pairs(folder, tmp_path, {"first": "a", "second": "b"})
    assert records(data) == [[b"x", b"1"], [b"", b""]]


def test_files_are_read_again_only_where_they_changed(folder, tmp_path):
    write_pairs(folder / "1.parquet")
    before = pairs(folder, tmp_path)
    assert len(before) == 24
    write_pairs(folder / "2.parquet", rows=8, seed=1)
    after = pairs(folder, tmp_path)
    assert len(after) == 32
    assert records(after)[:24] == records(before)


def test_a_missing_column_is_named(folder, tmp_path):
    write_pairs(folder / "train.parquet")
    with pytest.raises(DataError, match=r"no column 'words' of texts.*image, caption, label"):
        len(pairs(folder, tmp_path, {"pixel_values": "image", "input_ids": "words"}))


@pytest.mark.parametrize(
    "column", [{"a": "image"}, {}, {"a": "image", "b": "image"}, {"a b": "image", "c": "caption"}, "?a=image", "?"]
)
def test_columns_that_make_no_parts_are_refused(tmp_path, column):
    with pytest.raises(SettingError, match="column names"):
        Dataset(tmp_path, column=column)


def test_a_node_is_asked_for_the_columns_by_the_format():
    odd = {"a": "an image & more", "b": "x=y+z#1"}
    format = format_named(format_with(None, odd))
    asked = ListingRequest(data="file:///x", format=format.name)
    assert ListingRequest.from_json(asked.to_json()) == asked
    assert format.name == "parquet:?a=an+image+%26+more&b=x%3Dy%2Bz%231"


@pytest.mark.parametrize("columns", [("image.bytes", "caption"), ("a+b", "c@d#e"), ("one",)])
def test_the_place_of_several_cells_is_a_name_that_says_them_all(columns):
    cell = Cell.of(Entry("x/y.parquet", 12, "etag"), *columns)
    assert Cell.parse(str(cell)) == cell
    assert [alone.columns for alone in cell.each_column()] == [(column,) for column in columns]


def test_a_stranger_names_up_to_eight_columns():
    with pytest.raises(BadRequest, match="more than 8 columns"):
        Cell.parse(f"x.parquet#{'+'.join('abcdefghi')}@12.0")


@pytest.mark.parametrize(
    ("column", "declared", "why"),
    [
        (COLUMNS, None, "have the parts pixel_values, input_ids"),
        (COLUMNS, preprocess.imagenet(16), "have the parts pixel_values, input_ids"),
        ("caption", pair_inputs(), "pixel_values, input_ids of parts, and samples have one"),
        ({"input_ids": "caption", "pixel_values": "image"}, pair_inputs(), "in this order"),
    ],
)
def test_parts_and_preprocessing_must_agree(folder, tmp_path, column, declared, why):
    write_pairs(folder / "train.parquet")
    with pytest.raises(SettingError, match=why):
        loader(pairs(folder, tmp_path, column), 8, preprocess=declared, node=SMALL)


def test_samples_of_several_parts_are_not_copied_or_checked(folder, tmp_path):
    write_pairs(folder / "train.parquet")
    data = pairs(folder, tmp_path)
    with pytest.raises(SettingError, match="only those of one"):
        repack(data, tmp_path / "copy", format="parquet", on_event=print)
    with pytest.raises(SettingError, match="only those of one"):
        check(data, print)
