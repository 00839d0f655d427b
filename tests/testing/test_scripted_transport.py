"""The scripted transport keeps the promises of a transport."""

import threading
from dataclasses import replace

import numpy as np
import pytest

from frostline.core import Samples
from frostline.core.errors import BadRequest, NodeUnreachable, OverBudget
from frostline.profiles import CodecCost, Profile
from frostline.testing import Act, ScriptedTransport
from frostline.wire.messages import FeatureRequest, ProfileRequest
from frostline.wire.packing import unpack


def request(count=8, cut=3, **fields):
    ids = np.arange(count, dtype=np.int64) + 100
    zeros = np.zeros(count, np.int64)
    samples = Samples(ids=ids, objects=[f"{item}.jpg" for item in ids], offsets=zeros, lengths=zeros, labels=zeros)
    return FeatureRequest(data="memory://", samples=samples, prefix=None, cut=cut, preprocess={}, **fields)


def sizes(transport, **changes):
    return [len(batch) for batch in transport.features(request(**changes))]


def test_an_answer_comes_in_batches_in_order():
    transport = ScriptedTransport(otherwise=Act(rows_per_batch=3))
    batches = list(transport.features(request()))
    assert [batch.ids.tolist() for batch in batches] == [[100, 101, 102], [103, 104, 105], [106, 107]]
    assert transport.statistics().bytes_received == 8 * 16


def test_an_answer_breaks_after_the_rows_that_the_script_names():
    transport = ScriptedTransport([Act(error=OverBudget("too large"), error_after=5)])
    answer = transport.features(request())
    assert len(next(answer)) == 5
    with pytest.raises(OverBudget):
        next(answer)
    assert transport.statistics().failures == 1
    assert sizes(transport) == [8]


def test_an_answer_waits_at_its_gate_until_it_is_opened():
    transport = ScriptedTransport([Act(gate="a", gate_after=2)])
    answer = transport.features(request())
    assert len(next(answer)) == 2
    threading.Timer(0.01, transport.open, ["a"]).start()
    assert len(next(answer)) == 6


def test_closing_an_answer_frees_who_waits_for_it():
    answer = ScriptedTransport([Act(gate="a")]).features(request())
    threading.Timer(0.01, answer.close).start()
    assert list(answer) == []


def test_a_node_that_is_down_refuses_everything_until_it_comes_back():
    transport = ScriptedTransport()
    transport.go_down()
    for call in (transport.health, lambda: transport.put_prefix("d", b""), lambda: sizes(transport)):
        with pytest.raises(NodeUnreachable):
            call()
    transport.come_back()
    assert sizes(transport) == [8]


def test_unreadable_samples_are_among_the_skipped():
    (batch,) = ScriptedTransport(unreadable={101: "truncated"}).features(request(count=3))
    assert batch.ids.tolist() == [100, 102]
    assert [(sample.id, sample.reason) for sample in batch.skipped] == [(101, "truncated")]


def test_encoded_samples_travel_at_cut_0():
    (batch,) = ScriptedTransport().features(request(count=2, cut=0))
    assert batch.tensors == ()
    assert [int.from_bytes(item, "little") for item in batch.encoded] == [100, 101]


def test_answers_are_packed_as_the_request_asks():
    transport = ScriptedTransport()
    (plain,) = transport.features(request())
    (packed,) = transport.features(request(codec="fp16"))
    assert packed.packed[0].codec == "fp16"
    assert packed.nbytes == plain.nbytes / 2
    assert unpack(packed).tensors[0].tolist() == plain.tensors[0].tolist()
    (strict,) = transport.features(request(codec="int8+zstd", tolerance=1e-9))
    assert strict.packed[0].codec == "zstd"


def test_it_answers_with_the_profile_it_was_given():
    costs = [CodecCost(cut=3, codec=codec, bytes_per_sample=1, encode_s=0, decode_s=0) for codec in ("fp16", "int8")]
    profile = Profile(
        hardware="cpu", host="h", engine="torch", device_batch=8, read_s=0.0, cuts=(), codecs=tuple(costs)
    )
    transport = ScriptedTransport(profile=profile)
    wanted = ProfileRequest(features=request(), codecs=("int8", "fp16"))
    assert transport.profile(wanted) == profile
    assert transport.profile(replace(wanted, codecs=("int8",))).codecs == (costs[1],)
    assert transport.profile(replace(wanted, codecs=())).codecs == ()
    with pytest.raises(BadRequest, match="no profile"):
        ScriptedTransport().profile(wanted)


def test_prefixes_are_kept_by_digest():
    transport = ScriptedTransport()
    transport.put_prefix("d", b"first")
    transport.put_prefix("d", b"again")
    assert transport.prefixes == {"d": b"first"}


def test_a_closed_transport_answers_nothing():
    transport = ScriptedTransport()
    transport.close()
    with pytest.raises(NodeUnreachable):
        transport.health()
