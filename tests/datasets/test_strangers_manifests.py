"""Manifests that a stranger sends in a node's name: each is refused in one sentence, and nothing of it is kept."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import frostline as fl
from frostline.core.errors import DataChanged, FrostlineError, NodeUnreachable, Refused, Unavailable
from frostline.datasets.mapped import ABOUT
from frostline.datasets.source import checked
from frostline.wire.listings import ManifestHead
from support.listing_nodes import DIGEST, answer_of, manifest_bytes, stranger, table_of

GOOD = manifest_bytes(table_of())
ABOUT_GOOD = b'{"digest": "%s", "classes": ["a"], "reading": "objects", "splits": []}' % DIGEST.encode()


def listed(answer, folder, status=200):
    with stranger(answer, status) as url:
        data = fl.Dataset("s3://bucket/photos", near=url, cache=folder)
        assert len(data) >= 0
        return data


def refusal(answer, folder, kind=Refused, status=200):
    with pytest.raises(kind) as error:
        listed(answer, folder, status)
    assert not [path for path in folder.rglob("*") if path.is_file()], "something of it was kept"
    assert "\n" not in str(error.value)
    return str(error.value)


def test_takes_a_manifest_that_is_what_the_node_says(tmp_path):
    data = listed(answer_of(GOOD), tmp_path)
    assert (len(data), data.classes, data.digest) == (3, ("a",), DIGEST)
    assert list(data.samples.objects) == ["a/0.jpg", "a/1.jpg", "a/2.jpg"]


def test_refuses_a_manifest_with_another_digest_than_announced(tmp_path):
    assert "SHA-256" in refusal(answer_of(GOOD, sha256="0" * 64), tmp_path)
    assert "says of itself" in refusal(answer_of(GOOD, digest="0" * 64), tmp_path)


def test_refuses_more_bytes_than_any_manifest_has(tmp_path):
    assert "up to" in refusal(answer_of(GOOD, nbytes=1 << 40), tmp_path)
    assert "up to" in refusal(answer_of(GOOD, samples=1 << 50, splits=["train"]), tmp_path)


def test_tells_of_a_node_that_breaks_off(tmp_path):
    refusal(answer_of(GOOD)[:-10], tmp_path, NodeUnreachable)
    refusal(b'{"event":"phase","name":"listing the data"}\n', tmp_path, NodeUnreachable)


def test_refuses_a_file_that_is_not_parquet(tmp_path):
    for garbage in (b"", b"garbage" * 100, GOOD[:-4] + b"XXXX", b"PAR1" + GOOD[4:200] + b"PAR1"):
        refusal(answer_of(garbage), tmp_path)


@given(place=st.integers(0, len(GOOD) - 1), value=st.integers(0, 255))
def test_a_changed_byte_of_a_manifest_is_refused_or_harmless(tmp_path_factory, place, value):
    body = GOOD[:place] + bytes([value]) + GOOD[place + 1 :]
    path = tmp_path_factory.mktemp("manifest") / "one.parquet"
    path.write_bytes(body)
    head = ManifestHead(
        digest=DIGEST,
        samples=3,
        nbytes=len(body),
        sha256="0" * 64,
        is_known=False,
        splits=(),
        splits_sha256="0" * 64,
        applied=None,
        found=True,
    )
    try:
        checked(path, head)
    except Refused:
        return


@pytest.mark.parametrize(
    "columns",
    [
        {"id": pa.array([1, 1, 2], pa.int64())},
        {"id": pa.array([-1, 1, 2], pa.int64())},
        {"id": pa.array([1, None, 2], pa.int64())},
        {"id": pa.array([1, 2, 3], pa.int32())},
        {"label": pa.array([0, 1, 0], pa.int64())},
        {"label": pa.array([0, -2, 0], pa.int64())},
        {"offset": pa.array([0, -5, 0], pa.int64())},
        {"object": pa.array(["a", None, "b"])},
        {"object": pa.array([b"a", b"\xff", b"b"])},
        {"more": pa.array([[1], [2], [3]])},
        {"more": pa.array([{"a": 1}] * 3)},
        {"target_object": pa.array([1, 2, 3])},
    ],
)
def test_refuses_invalid_samples(tmp_path, columns):
    refusal(answer_of(manifest_bytes(table_of(**columns))), tmp_path)


@pytest.mark.parametrize(
    "about",
    [
        {"reading": "urls"},
        {"reading": 3},
        {"classes": "abc"},
        {"classes": [1]},
        {"classes": []},
        {"splits": {"a": 1}},
        {"digest": None},
    ],
)
def test_refuses_a_manifest_that_says_of_itself_what_makes_no_sense(tmp_path, about):
    refusal(answer_of(manifest_bytes(table_of(), **about)), tmp_path)


def test_refuses_another_count_of_samples(tmp_path):
    assert "samples" in refusal(answer_of(GOOD, samples=4), tmp_path)


def test_refuses_texts_that_a_few_bytes_say_a_million_times(tmp_path):
    """A dictionary with one long text, and a million rows that are it: a terabyte, were it written out."""
    count = 1_000_000
    long = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array(["x" * 1_000_000]))
    ids = pa.array(np.random.default_rng(0).integers(0, 1 << 62, count))
    table = table_of(count, id=ids, more=long)
    sink, few = pa.BufferOutputStream(), ["more", "label", "etag"]
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False, use_dictionary=few) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({ABOUT: ABOUT_GOOD})
    body = sink.getvalue().to_pybytes()
    assert "texts" in refusal(answer_of(body, samples=count), tmp_path)


def test_refuses_rows_that_its_bytes_cannot_hold(tmp_path):
    count = 3_000_000
    same = pa.array([7] * count, pa.int64())
    texts = pa.array([""] * count)
    table = pa.table(
        {"id": same, "name": texts, "object": texts, "offset": same, "length": same, "label": same, "etag": texts},
        metadata={ABOUT: ABOUT_GOOD},
    )
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd")
    assert "hold" in refusal(answer_of(sink.getvalue().to_pybytes(), samples=count), tmp_path)


@pytest.mark.parametrize(
    "head",
    [
        {"samples": -1},
        {"samples": True},
        {"nbytes": "1"},
        {"sha256": "../../etc/passwd"},
        {"splits": "train"},
        {"splits": ["a", "a"]},
        {"splits": [1]},
        {"applied": []},
        {"is_known": 1},
        {"is_known": True},
    ],
)
def test_refuses_an_invalid_head(tmp_path, head):
    refusal(answer_of(GOOD, **head), tmp_path)


def test_refuses_splits_with_another_digest(tmp_path):
    with pytest.raises(Refused, match="splits"):
        listed(answer_of(GOOD, b"\xff", splits=["train"], splits_sha256="0" * 64), tmp_path)


def test_takes_no_rows_beyond_the_last_from_a_split(tmp_path):
    data = listed(answer_of(GOOD, b"\xff", splits=["train"]), tmp_path)
    assert len(data["train"]) == 3


@pytest.mark.parametrize("applied", [{}, {"steps": 3}, {"steps": [{"kind": "Decode"}], "dtype": [], "decoder": "x"}])
def test_refuses_a_ready_format_that_makes_no_sense(tmp_path, applied):
    with pytest.raises(FrostlineError):
        listed(answer_of(GOOD, applied=applied), tmp_path)


@pytest.mark.parametrize("line", [b"[1]\n", b"no json\n", b"[" * 100_000 + b"\n", b'{"event":"listed"}\n', b"\xff\n"])
def test_refuses_invalid_lines(tmp_path, line):
    refusal(line, tmp_path)


def test_a_failure_of_the_data_is_the_same_error_as_here(tmp_path):
    line = b'{"event":"failed","error":"DataChanged","message":"it changed"}\n'
    assert refusal(line, tmp_path, DataChanged) == "it changed"
    assert "does not say why" in refusal(b'{"event":"failed","error":"KeyboardInterrupt"}\n', tmp_path)


def test_a_node_that_does_not_list_says_so(tmp_path):
    said = b'{"error":"Refused","message":"Not Found"}'
    assert "version" in refusal(said, tmp_path, status=404)
    refusal(b"<html>", tmp_path, Unavailable, status=502)
