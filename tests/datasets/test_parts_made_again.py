"""Parts of a copy that are made again, as after the death of a process, are the same and are counted once."""

import pickle
from contextlib import ExitStack

import pytest

import frostline as fl
from frostline.cli import main
from frostline.core.errors import TooManySkipped
from frostline.core.events import ProgressMade, SampleSkipped
from frostline.datasets.copy import cql as table_writer
from frostline.datasets.copy.cql import put_into_table
from frostline.datasets.copy.layout import PACKERS
from frostline.datasets.copy.ready import ingest
from frostline.datasets.copy.repack import repack
from frostline.preprocess import Applied, imagenet
from support.cassandra import KEYSPACE, PASSWORD, USER
from support.images import image_folder


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
        done = run(source, folder / name, skip_allowance=0.1, observe=events.append, **more)
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
        images, tmp_path / "again", format, shorter_side=24, part_bytes=8_000, skip_allowance=0.1, observe=quiet
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
            skip_allowance=0,
            observe=quiet,
            runner=made_twice_elsewhere,
        )


def test_rows_put_again_are_the_same_rows_and_counted_once(images, cql, monkeypatch):
    monkeypatch.setenv("FROSTLINE_CQL_PASSWORD", PASSWORD)
    monkeypatch.setattr(table_writer, "_ROWS_A_PART", 10)
    url = f"cql://{USER}@{cql.place}/{KEYSPACE}/put_twice?protocol=3"
    assert put_into_table(images.take(range(4)), url, observe=quiet).made == 4
    done = put_into_table(images, url, observe=quiet, runner=made_twice_elsewhere)
    assert (done.samples, done.made) == (19, 15), "what was there before the run was not made by it"
    with cql.session() as session:
        names = [row.name for row in session.execute(f"SELECT name FROM {KEYSPACE}.put_twice")]
    assert sorted(names) == sorted(images.names)
    assert put_into_table(images, url, observe=quiet).made == 0


def test_tasks_elsewhere_cannot_write_into_the_memory_of_this_process(images, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        main(["ingest", images.url, "memory://copy", "--format", "parquet", "--on", "ray"])
    assert "memory:// is that of one process" in capsys.readouterr().err
