"""What is persisted has a number of its schema, and one that the reader does not know is refused or passed over."""

import ast
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from safetensors.numpy import save

from frostline.cache import FeatureStore
from frostline.control.store import RecordStore
from frostline.core.errors import DataError, OrderMismatch, SettingError, UnsafeArtifact
from frostline.datasets.formats.ready import Layout
from frostline.ordering import OrderState
from support.nodes import artifact_of, small_network
from support.stored import checked, put

SOURCE = Path(__file__).resolve().parents[2] / "src" / "frostline"
SMALL = 16 << 20
NUMBERED = {
    "cache/disk.py": "_FORMAT",
    "cache/shared_layout.py": "_FORMAT",
    "control/store.py": "_SCHEMA",
    "datasets/formats/ready.py": "_FORMAT",
    "jobs/in_store.py": "_FORMAT",
    "models/artifact.py": "_FORMAT",
    "ordering/shards.py": "_SCHEMA",
    "ordering/state.py": "SCHEMA",
}
"""What has a number, and by which name: a name of one's own for it would not be found by the next reader."""


def is_statement(value):
    """Whether a text is SQL, which is a schema and has a number beside it."""
    return isinstance(value, str) and "CREATE" in value


def numbers():
    """Every schema number: the module that has it, its name, and what it is."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            name = ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""
            is_number = name in {"SCHEMA", "_SCHEMA", "_FORMAT"} and isinstance(node.value, ast.Constant)
            if is_number and not is_statement(node.value.value):
                yield path.relative_to(SOURCE).as_posix(), name, node.value.value


def number_of(module):
    return next(value for place, _, value in numbers() if place == module)


def test_every_schema_number_stands_in_the_list_and_under_one_of_two_names():
    assert {module: name for module, name, _ in numbers()} == NUMBERED


@pytest.mark.parametrize("step", [1, 99])
def test_a_loaders_state_of_a_later_schema_is_refused(step):
    state = OrderState(
        manifest="m", order="o", last="keep", seed=0, epoch=0, samples=9, batch_size=2, position=2, ahead=(4,)
    ).to_json()
    assert OrderState.from_json(state).ahead == (4,)
    schema = number_of("ordering/state.py")
    (key,) = (name for name, value in state.items() if value == schema and name not in {"batch_size", "position"})
    with pytest.raises(OrderMismatch, match="newer Frostline"):
        OrderState.from_json({**state, key: schema + step})


@pytest.mark.parametrize("step", [-1, 1])
def test_a_prefix_of_another_format_is_refused(monkeypatch, step):
    from frostline.models import artifact

    with monkeypatch.context() as patch:
        patch.setattr(artifact, "_FORMAT", number_of("models/artifact.py") + step)
        _, body = artifact_of(small_network())
    with pytest.raises(UnsafeArtifact, match="this node reads format"):
        artifact.read_prefix(body)


@pytest.mark.parametrize("step", [-1, 1])
def test_a_training_of_another_format_is_refused(step):
    from frostline.jobs import in_store

    about = json.dumps({"format": number_of("jobs/in_store.py") + step})
    with pytest.raises(UnsafeArtifact, match="this node reads format"):
        in_store.read_assignment(save({}, metadata={"frostline.assignment": about}))


@pytest.mark.parametrize("step", [-1, 1])
def test_a_ready_format_of_another_version_is_to_be_made_again(step):
    with pytest.raises(DataError, match="of another version: make it again"):
        Layout.from_json(json.dumps({"format": number_of("datasets/formats/ready.py") + step}).encode())


@pytest.mark.parametrize("step", [-1, 97])
def test_the_state_of_a_control_plane_of_another_version_is_refused(tmp_path, step):
    path = tmp_path / "state"
    RecordStore(path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {number_of('control/store.py') + step}")
    with pytest.raises(SettingError, match="of another version of Frostline"):
        RecordStore(path)


def test_a_cache_of_another_format_is_begun_anew(tmp_path):
    with FeatureStore(tmp_path, SMALL) as store:
        assert put(store, range(40)) == 40
    (file,) = tmp_path.glob("*.sqlite")
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with FeatureStore(tmp_path, SMALL) as store:
        assert checked(store, range(40)) == []
        assert put(store, range(40)) == 40
        assert checked(store, range(40)) == list(range(40))
