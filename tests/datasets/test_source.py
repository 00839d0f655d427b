"""Manifests from elsewhere: a node that lists, the hub's cache, and strangers that send what is no manifest.

Data sets that a node lists: the same samples, labels, splits and changes as where they are listed here.

Manifests that a stranger sends in a node's name: each is refused in one sentence, and nothing of it is kept.

Data sets of the Hugging Face hub: its client's cache is read in place, and no part of it for the whole.
"""

import json
import os
import pickle
import random
import socket
import sys
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

import frostline as fl
from frostline.core.errors import (
    AccessDenied,
    BadRequest,
    DataChanged,
    DataError,
    DataNotFound,
    EmptyDataset,
    Forbidden,
    FrostlineError,
    NodeUnreachable,
    OverBudget,
    Refused,
    SettingError,
    Unauthenticated,
    Unavailable,
)
from frostline.core.events import NodeBack, NodeLost, PhaseStarted, ProgressMade
from frostline.core.files import checked_text
from frostline.core.nouns import take_texts
from frostline.datasets import source as strangers
from frostline.datasets.check import check
from frostline.datasets.copy.ready import ingest
from frostline.datasets.dataset import roots_of
from frostline.datasets.mapped import ABOUT
from frostline.datasets.source import check_manifest_file, missing_parts
from frostline.preprocess import Applied
from frostline.stores.open import open_store
from frostline.wire.listings import ManifestHead
from support.faulty import FaultyWay
from support.formats import put_masked_pairs, put_parquet, put_ready, put_urls, put_webdataset
from support.images import image_folder, tiny_preprocess
from support.listing_nodes import DIGEST, answer_of, listing_node, manifest_bytes, stranger, table_of
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
    assert list(take_texts(one.names, everything)) == list(take_texts(other.names, everything))
    if one.has_targets:
        assert list(mine.targets.objects) == list(theirs.targets.objects)
        assert mine.targets.widths.tolist() == theirs.targets.widths.tolist()


def test_a_node_lists_a_folder_as_this_process_does(photos, listed):
    events = []
    data = listed(photos, on_event=events.append)
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
    rebuilt = listed(folder, on_change="rebuild")
    part = rebuilt.select("label == 'noise'")
    (folder / "noise" / "000.jpg").write_bytes((folder / "circle" / "000.jpg").read_bytes())
    (folder / "noise" / "001.jpg").unlink()
    with pytest.raises(DataChanged, match=r"noise/00"):
        len(listed(folder, on_change="refuse"))
    assert (len(part), len(part.refresh())) == (2, 1)
    assert part.refresh().source.near == part.source.near
    assert len(listed(folder)) == 5


def test_explains_that_this_process_cannot_reach_the_store(photos, listed, tmp_path):
    data = listed(photos)
    for reads in (
        lambda: check(data, ignore),
        lambda: ingest(data, tmp_path / "out", Applied.to(tiny_preprocess(), "uint8"), on_event=ignore),
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
    assert len(fl.Dataset(folder, manifest_location="data", format="urls")) == 2
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


def test_a_node_that_hangs_does_not_keep_others_from_listing(photos, node, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        silent = f"http://127.0.0.1:{hanging.getsockname()[1]}"
        started = time.monotonic()
        assert len(fl.Dataset(photos, near=(silent, node.url), cache=tmp_path)) == 36
        assert time.monotonic() - started < 20


def connections_to(listening):
    """How many came to a socket that takes none."""
    listening.setblocking(False)
    count = 0
    with suppress(BlockingIOError):
        while True:
            listening.accept()[0].close()
            count += 1
    return count


def test_a_list_of_nodes_that_all_hang_ends_within_one_bound_with_a_sentence(photos, tmp_path, monkeypatch):
    for name, seconds in {"_READY_S": 0.05, "_QUIET_S": 0.1, "_SILENCE_S": 0.5, "_ALL_SILENT_S": 0.9}.items():
        monkeypatch.setattr(strangers, name, seconds)
    with ExitStack() as stack:
        hanging = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(6)]
        urls = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in hanging]
        listed = tmp_path / "nodes.json"
        listed.write_text(json.dumps(urls))
        with pytest.raises(NodeUnreachable, match=r"none of 6 nodes lists the data: .*did not answer within"):
            len(fl.Dataset(photos, near=listed.as_uri(), cache=tmp_path))
        asked = sum(map(connections_to, hanging))
    assert 6 + 5 <= asked <= 6 + 5 + 2, "whether each is ready, all but the last for a moment, and so many for long"


def test_a_ready_node_that_withholds_its_listing_stops_no_other(photos, node, tmp_path):
    with FaultyWay(node.url, random.Random(0)) as way:
        way.switch_scope("keeps posts back")
        started = time.monotonic()
        assert len(fl.Dataset(photos, near=(way.url, node.url), cache=tmp_path)) == 36
        assert time.monotonic() - started < 20


@contextmanager
def served_until(ended, serve):
    """A socket from which a function takes connections, in a thread, until an event that is set at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, args=(listening,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            ended.set()
            listening.shutdown(socket.SHUT_RDWR)


@contextmanager
def node_that_begins_to_list(beats):
    """A node that says that it lists, shows so often that it is there, and then nothing; its connections stay."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    line = b'{"event":"phase","name":"listing the data"}\n'
    ended, held = threading.Event(), []

    def serve(listening):
        with suppress(OSError):
            while True:
                peer, _ = listening.accept()
                held.append(peer)
                peer.recv(1 << 16)
                peer.sendall(head + b"%x\r\n%s\r\n" % (len(line), line))
                for _ in range(beats):
                    ended.wait(0.1)
                    peer.sendall(b"1\r\n\n\r\n")

    with served_until(ended, serve) as url:
        yield url
    for peer in held:
        peer.close()


@pytest.mark.parametrize("beats", [0, 5])
def test_a_node_that_stops_while_it_lists_is_named_and_left_for_another(
    photos, node, tmp_path, monkeypatch, caplog, beats
):
    monkeypatch.setattr(strangers, "_is_ready", lambda _: True)
    monkeypatch.setattr(strangers, "_QUIET_S", 0.5)
    events = []
    for options in ({}, {"on_event": lambda event: events.append((time.monotonic(), event))}):
        with node_that_begins_to_list(beats) as silent:
            began = time.monotonic()
            assert len(fl.Dataset(photos, near=(silent, node.url), cache=tmp_path, **options)) == 36
    [(at, lost)] = [(at, event) for at, event in events if isinstance(event, NodeLost | NodeBack)]
    assert at - began < 10, "not the thirty seconds for which an only node is waited for"
    assert (lost.url, "said nothing for too long" in lost.reason) == (silent, True)
    [line] = [record.getMessage() for record in caplog.records if "asked nothing for now" in record.getMessage()]
    assert "said nothing for too long" in line


@contextmanager
def node_that_drips(answer):
    """A node that sends the last bytes of its answer one by one, ten in a second."""
    ended = threading.Event()

    def serve(listening):
        with suppress(OSError):
            while True:
                peer, _ = listening.accept()
                head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(answer)}\r\n\r\n".encode()
                with peer, suppress(OSError):  # whom it answers has gone
                    peer.recv(1 << 16)
                    peer.sendall(head + answer[:-600])
                    for place in range(len(answer) - 600, len(answer)):
                        if ended.wait(0.1):
                            break
                        peer.sendall(answer[place : place + 1])

    with served_until(ended, serve) as url:
        yield url


def test_a_node_that_drips_its_manifest_is_named_and_left_for_another(photos, node, tmp_path, monkeypatch):
    """It sends a byte before it counts as silent, and would have been waited for as long as there are bytes."""
    monkeypatch.setattr(strangers, "_is_ready", lambda _: True)
    events = []
    with node_that_drips(answer_of(manifest_bytes(table_of()))) as dripping:
        data = fl.Dataset(photos, near=(dripping, node.url), cache=tmp_path, on_event=events.append)
        began = time.monotonic()
        assert len(data) == 36
    assert time.monotonic() - began < 30, "not the minute that its bytes take"
    [lost] = [event for event in events if isinstance(event, NodeLost)]
    assert (lost.url, "did not answer within" in lost.reason) == (dripping, True)


def test_a_node_that_lists_where_no_other_does_is_back(photos, node, tmp_path, monkeypatch):
    monkeypatch.setattr(strangers, "_is_ready", lambda _: True)
    monkeypatch.setattr(strangers, "_QUIET_S", 1e-3)  # so that the first one is given up before it can list
    events = []
    data = fl.Dataset(photos, near=(node.url, "http://127.0.0.1:9"), cache=tmp_path, on_event=events.append)
    assert len(data) == 36
    said = [(type(event), event.url) for event in events if isinstance(event, NodeLost | NodeBack)]
    assert said == [(NodeLost, node.url), (NodeLost, "http://127.0.0.1:9"), (NodeBack, node.url)]


def test_what_one_node_has_lost_another_one_lists(node, tmp_path, photos, monkeypatch):
    monkeypatch.setattr(strangers, "_is_ready", lambda _: True)  # it does not know it
    failed = b'{"event":"failed","error":"DataNotFound","message":"there is nothing at that place"}\n'
    with stranger(failed) as lost:
        assert len(fl.Dataset(photos, near=(lost, node.url), cache=tmp_path)) == 36
        with pytest.raises(DataNotFound, match="nothing at that place"):
            len(fl.Dataset(photos, near=lost, cache=tmp_path / "other"))


def test_what_one_node_finds_damaged_another_one_is_asked_for(node, tmp_path, photos, monkeypatch):
    monkeypatch.setattr(strangers, "_is_ready", lambda _: True)
    damaged = b'{"event":"failed","error":"DataError","message":"a.tar is cut off"}\n'
    changed = b'{"event":"failed","error":"DataChanged","message":"it is another"}\n'
    with stranger(damaged) as one, stranger(damaged) as other, stranger(changed) as third:
        assert len(fl.Dataset(photos, near=(one, node.url), cache=tmp_path)) == 36
        with pytest.raises(DataError, match=r"a\.tar is cut off"):
            len(fl.Dataset(photos, near=(one, other, node.url), cache=tmp_path / "two"))
        with pytest.raises(DataChanged, match="it is another"):
            len(fl.Dataset(photos, near=(third, node.url), cache=tmp_path / "three"))


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
    for near in ("unix:///run/io.sock", "store:7070", "ftp://store", ["http://store:1", 3]):
        with pytest.raises(SettingError):
            fl.Dataset("s3://bucket", near=near)
    with pytest.raises(SettingError, match="manifest_location"):
        fl.Dataset("s3://bucket", near="http://store:1", manifest_location="data")


def test_an_empty_place_is_the_same_error_as_here(tmp_path, listed):
    (tmp_path / "empty").mkdir()
    with pytest.raises(EmptyDataset):
        len(listed(tmp_path / "empty"))


def test_a_node_in_a_process_of_its_own_lists_too(photos, shared_node, tmp_path):
    same(fl.Dataset(photos, near=shared_node.url, cache=tmp_path), fl.Dataset(photos))


GOOD = manifest_bytes(table_of())
ABOUT_GOOD = checked_text(
    {"digest": DIGEST, "classes": ["a"], "reading": "objects", "splits": [], "left_out": [], "is_turned": False}
    | {"named": {}}
)


def listed_of_strangers_manifests(answer, folder, status=200):
    with stranger(answer, status) as url:
        data = fl.Dataset("s3://bucket/photos", near=url, cache=folder)
        assert len(data) >= 0
        return data


def refusal(answer, folder, kind=Refused, status=200):
    with pytest.raises(kind) as error:
        listed_of_strangers_manifests(answer, folder, status)
    assert not [path for path in folder.rglob("*") if path.is_file()], "something of it was kept"
    assert "\n" not in str(error.value)
    return str(error.value)


def test_takes_a_manifest_that_is_what_the_node_says(tmp_path):
    data = listed_of_strangers_manifests(answer_of(GOOD), tmp_path)
    assert (len(data), data.classes, data.digest) == (3, ("a",), DIGEST)
    assert list(data.samples.objects) == ["a/0.jpg", "a/1.jpg", "a/2.jpg"]


def test_refuses_a_manifest_with_another_digest_than_announced(tmp_path):
    assert "SHA-256" in refusal(answer_of(GOOD, sha256="0" * 64), tmp_path)
    assert "whose description is damaged" in refusal(answer_of(GOOD, digest="0" * 64), tmp_path)


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
        check_manifest_file(path, head)
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
        {"is_turned": 1},
        {"is_turned": None},
        {"named": ["a"]},
        {"named": {"a": "b"}},
        {"named": {"a": [1]}},
        {"left_out": None},
        {"left_out": [["object", "odd", 0, [], ""]]},
        {"left_out": [["object", "odd", 9, ["a", "b", "c", "d"], ""]]},
        {"left_out": [1]},
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
    assert "do not fit" in refusal(answer_of(sink.getvalue().to_pybytes(), samples=count), tmp_path)


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
        listed_of_strangers_manifests(answer_of(GOOD, b"\xff", splits=["train"], splits_sha256="0" * 64), tmp_path)


def test_takes_no_rows_beyond_the_last_from_a_split(tmp_path):
    data = listed_of_strangers_manifests(answer_of(GOOD, b"\xff", splits=["train"]), tmp_path)
    assert len(data["train"]) == 3


@pytest.mark.parametrize("applied", [{}, {"steps": 3}, {"steps": [{"kind": "Decode"}], "dtype": [], "decoder": "x"}])
def test_refuses_a_ready_format_that_makes_no_sense(tmp_path, applied):
    with pytest.raises(FrostlineError):
        listed_of_strangers_manifests(answer_of(GOOD, applied=applied), tmp_path)


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


REVISION = "a" * 40


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of the hub's client, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(cache, name, files):
    """What the client leaves behind: blobs, and a snapshot of links to them."""
    root = cache / f"datasets--{name.replace('/', '--')}"
    for folder in ("refs", "blobs"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "refs" / "main").write_text(REVISION)
    for number, (file, write) in enumerate(files.items()):
        write(root / "blobs" / str(number))
        link = root / "snapshots" / REVISION / file
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(root / "blobs" / str(number), link.parent))


def photographs(folder):
    """A data set of images as the hub has it, with the names of its classes."""
    image_folder(folder, per_class=4)
    paths = sorted(folder.rglob("*.jpg"))
    names = sorted({path.parent.name for path in paths}, reverse=True)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    rows = [{"bytes": path.read_bytes(), "path": path.name} for path in paths]
    labels = [names.index(path.parent.name) for path in paths]
    return datasets.Dataset.from_dict({"image": rows, "label": labels}, features=features)


def test_the_cache_of_the_hub_is_read_in_place_with_its_splits_and_classes(tmp_path, cache):
    whole = photographs(tmp_path / "photos")
    files = {
        "data/train-00000-of-00002.parquet": lambda path: whole.select(range(5)).to_parquet(path),
        "data/train-00001-of-00002.parquet": lambda path: whole.select(range(5, 8)).to_parquet(path),
        "data/test-00000-of-00001.parquet": lambda path: whole.select(range(8, 12)).to_parquet(path),
        "README.md": lambda path: path.write_text("# Photographs"),
    }
    cached(cache, "some/photos", files)
    data = fl.Dataset("hf:some/photos")
    assert data.url.endswith(f"datasets--some--photos/snapshots/{REVISION}")
    assert {name: len(data[name]) for name in data.splits} == {"train": 8, "test": 4}
    assert data.classes == tuple(whole.features["label"].names)
    assert sorted(data.samples.labels.tolist()) == sorted(whole["label"][:])
    assert fl.Dataset(f"hf:some/photos@{REVISION}").url == data.url
    with fl.offload(None, data["train"], preprocess=tiny_preprocess()) as job:
        assert sum(len(batch.labels) for batch in job.loader(batch_size=3)) == 8


def test_names_the_files_to_bring_where_weights_cannot_be_fetched(cache):
    with pytest.raises(DataNotFound, match="some/photos is not in"):
        fl.Dataset("hf:some/photos", near=())
    with pytest.raises(DataNotFound, match=r"some/photos is not in .* cache .* Parquet files .*hf download") as caught:
        fl.Dataset("hf:some/photos")
    assert "\n" not in str(caught.value)


def test_a_split_of_which_a_part_is_missing_is_not_taken_for_the_whole(tmp_path, cache):
    whole = photographs(tmp_path / "photos")
    cached(cache, "some/photos", {"data/train-00001-of-00002.parquet": whole.to_parquet})
    with pytest.raises(DataNotFound, match=r"lacks data/train-00000-of-00002\.parquet"):
        fl.Dataset("hf:some/photos")


def test_a_data_set_without_parquet_files_is_refused(cache):
    cached(cache, "some/text", {"README.md": lambda path: path.write_text("x")})
    with pytest.raises(DataNotFound, match="has no Parquet files"):
        fl.Dataset("hf:some/text")


def test_parts_that_are_missing_are_named():
    assert missing_parts(["a.parquet", "train-00000-of-00001-0123456789abcdef.parquet"]) == []
    assert missing_parts(["d/t-00001-of-00003.parquet", "e/t-00000-of-00001.parquet"]) == [
        "d/t-00000-of-00003.parquet",
        "d/t-00002-of-00003.parquet",
    ]


@pytest.mark.parametrize("url", ["hf:", "hf:photos", "hf:a/b/c", "hf:a/../b", "hf:a/b@", "hf:a/b?x", "hf:a/b--c"])
def test_other_addresses_of_the_hub_are_refused(cache, url):
    with pytest.raises(SettingError, match="write hf:OWNER/DATASET"):
        fl.Dataset(url)


def test_a_node_is_not_asked_for_this_machines_cache():
    with pytest.raises(SettingError, match="leave near= out"):
        fl.Dataset("hf:some/photos", near="http://store:7070")


def test_reports_a_missing_hub_client(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SettingError, match="huggingface_hub"):
        fl.Dataset("hf:some/photos")
