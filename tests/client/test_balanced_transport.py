"""Several nodes as one: work goes to the least busy, another takes over where one dies, nothing is lost or doubled."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.client.balanced import BalancedTransport
from frostline.client.http import HttpTransport
from frostline.client.load_balancer import LoadBalancer
from frostline.core import REFERENCE, FeatureBatch, Skipped
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import (
    AccessDenied,
    BadRequest,
    EngineNotReady,
    EngineUnsupported,
    Forbidden,
    FrostlineError,
    NodeUnreachable,
    ObjectNotFound,
    OverBudget,
    Overloaded,
    Refused,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    Unauthenticated,
    Unavailable,
    UnknownName,
    UnknownPrefix,
    UnsafeArtifact,
)
from frostline.node import Node
from frostline.testing import Act, ScriptedTransport
from frostline.transport import Cancellation
from frostline.wire.messages import ProfileRequest
from support.nodes import artifact_of, asked_for, joined, make_images, request, samples_of, served, small_network, until
from support.situations import profile


class Scripted:
    """A node whose answers are given: batches, and errors among them."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.asked = 0

    def features(self, request):
        self.asked += 1
        return self.play(self.answers.pop(0))

    def play(self, script):
        for item in script:
            if isinstance(item, BaseException):
                raise item
            yield item

    def break_off(self):
        """Nobody waits for it."""


GONE = NodeUnreachable("gone")


def rows(*ids):
    return FeatureBatch(ids=np.array(ids, np.int64))


def ids(answer):
    return [int(id) for batch in answer for id in batch.ids]


def test_a_request_that_a_dead_node_did_not_begin_goes_to_another():
    dead, alive = Scripted([GONE]), Scripted([rows(1), rows(2)], [rows(3)])
    spread = BalancedTransport([dead, alive], clock=lambda: 0.0)
    assert ids(spread.features(asked_for(1, 2))) == [1, 2]
    assert ids(spread.features(asked_for(3))) == [3]
    assert (dead.asked, alive.asked) == (1, 2)


def test_an_answer_that_breaks_half_way_is_not_begun_again():
    one, other = Scripted([rows(1), GONE]), Scripted([rows(1), rows(2)])
    answer = BalancedTransport([one, other], clock=lambda: 0.0).features(asked_for(1, 2))
    assert next(answer).ids.tolist() == [1]
    with pytest.raises(NodeUnreachable):
        next(answer)
    assert other.asked == 0


@pytest.mark.parametrize("engine", [REFERENCE, "another"])
def test_an_abandoned_profile_is_asked_of_no_other_node(engine):
    cancellation, profiled = Cancellation(), []

    class Profiled(Scripted):
        def profile(self, wanted, cancelled):
            profiled.append(wanted)
            cancelled.cancel()
            raise GONE

    one, other = Profiled([rows(1)]), Profiled()
    spread = BalancedTransport([one, other], clock=lambda: 0.0)
    wanted = SimpleNamespace(features=SimpleNamespace(engine=engine))
    with pytest.raises(Unavailable, match="given up"):
        spread.profile(wanted, cancellation)
    assert profiled == ([wanted] if engine == REFERENCE else [wanted, wanted])
    assert not spread.out
    assert ids(spread.features(asked_for(1))) == [1]


def test_reports_that_no_node_answers():
    spread = BalancedTransport([Scripted([GONE]), Scripted([GONE])], clock=lambda: 0.0)
    with pytest.raises(NodeUnreachable):
        next(spread.features(asked_for(1)))


@pytest.mark.parametrize("refusal", [UnknownPrefix("none"), StoreThrottled("slow down", retry_after_s=1.0)])
def test_a_request_to_be_repeated_at_its_node_goes_to_no_other(refusal):
    one, other = Scripted([refusal]), Scripted()
    with pytest.raises(type(refusal)):
        next(BalancedTransport([one, other], clock=lambda: 0.0).features(asked_for(1)))
    assert other.asked == 0


def test_a_node_whose_store_is_throttled_is_in_trouble_until_it_answers():
    throttled = StoreThrottled("slow down", retry_after_s=1.0)
    one, other = Scripted([throttled], [throttled], [throttled], [rows(7)]), Scripted()
    spread = BalancedTransport([one, other], clock=lambda: 0.0, names=["one", "other"])
    for failures in (1, 2, 3):
        with pytest.raises(StoreThrottled):
            next(spread.features(asked_for(7), first=("one",)))
        assert spread.uses()[0].failures == failures
        assert spread.uses()[0].trouble == ("slow down" if failures == 3 else "")
    assert spread.out == {}
    assert [len(batch) for batch in spread.features(asked_for(7), first=("one",))] == [1]
    assert spread.uses()[0].trouble == ""
    assert other.asked == 0


REFUSALS = [
    BadRequest("no"),
    Unauthenticated("who?"),
    Forbidden("not here"),
    OverBudget("too large"),
    AccessDenied("the store refused"),
    ObjectNotFound("no such object"),
    StoreError("broken store"),
    EngineUnsupported("no such engine"),
    EngineNotReady("not even the reference"),
    UnsafeArtifact("no"),
    UnknownName("nobody"),
    FrostlineError("what answers is no node"),
    Refused("HTTP status 404"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
def test_a_node_that_refuses_what_another_gives_is_left_out_for_a_while(refusal):
    now = [0.0]
    odd = Scripted([refusal], [refusal], [rows(7)])
    spread = BalancedTransport([odd, Scripted(*[[rows(id)] for id in range(1, 7)])], lambda: now[0], names="ab")
    assert ids(spread.features(asked_for(1), ("a",))) == [1]
    assert ids(spread.features(asked_for(2), ("a",))) == [2]
    assert odd.asked == 1
    assert spread.out == {"a": f"it refuses what other nodes give: {refusal}"}
    assert spread.owners("s3://a", 1000).nodes == ("b",)
    now[0] = 61.0
    assert ids(spread.features(asked_for(3), ("a",))) == [3]
    now[0] = 120.0
    assert ids(spread.features(asked_for(4), ("a",))) == [4]
    assert odd.asked == 2, "then it is asked after twice as long"
    now[0] = 190.0
    assert spread.owners("s3://a", 1000).nodes == ("a", "b")
    assert ids(spread.features(asked_for(7), ("a",))) == [7]
    assert spread.out == {}


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
def test_what_all_nodes_refuse_is_refused_with_their_names(refusal):
    nodes = [Scripted([type(refusal)(str(refusal))]) for _ in range(3)]
    spread = BalancedTransport(nodes, clock=lambda: 0.0, names="abc")
    with pytest.raises(type(refusal), match=r"all 3 nodes refuse: a refuses: .*; b refuses: .*; c refuses: "):
        next(spread.features(asked_for(1)))
    assert spread.out == {}, "the request was at fault, or the data"


@pytest.mark.parametrize("engine", [REFERENCE, "openvino"])
@pytest.mark.parametrize(
    ("other", "said"),
    [
        (BadRequest("nor I"), "all 2 nodes refuse: a refuses: not here; b refuses: nor I"),
        (GONE, "a refuses: not here; b cannot be reached: gone"),
    ],
)
def test_what_all_nodes_refuse_before_the_first_sample_says_so_by_their_names(engine, other, said):
    def node(error):
        return SimpleNamespace(profile=lambda *_: (_ for _ in ()).throw(error))

    spread = BalancedTransport([node(Forbidden("not here")), node(other)], clock=lambda: 0.0, names="ab")
    with pytest.raises(Forbidden) as caught:
        spread.profile(SimpleNamespace(features=asked_for(1, engine=engine), codecs=()))
    assert sorted(str(caught.value).split("; ")) == sorted(said.split("; "))


def test_a_refusal_half_way_is_asked_of_another_node_with_the_name_of_the_first():
    odd, other = Scripted([rows(1), AccessDenied("no")]), Scripted([rows(2)])
    spread = BalancedTransport([odd, other], clock=lambda: 0.0, names="ab")
    answer = spread.features(asked_for(1, 2), ("a",))
    next(answer)
    with pytest.raises(NodeUnreachable, match="a broke off its answer: no"):
        next(answer)
    assert ids(spread.features(asked_for(2), ("a",))) == [2]


def test_a_node_that_answers_other_samples_is_left_out():
    odd, other = Scripted([rows(9)]), Scripted([rows(1)])
    spread = BalancedTransport([odd, other], clock=lambda: 0.0, names="ab")
    assert ids(spread.features(asked_for(1), ("a",))) == [1]
    assert "other samples than were asked for" in spread.out["a"]


def test_where_one_refuses_and_the_others_are_away_waiting_may_help():
    spread = BalancedTransport([Scripted([BadRequest("no")]), Scripted([GONE])], clock=lambda: 0.0, names="ab")
    with pytest.raises(NodeUnreachable, match="a refuses: no; and b cannot be reached"):
        next(spread.features(asked_for(1), ("a",)))


def lost(*ids):
    return tuple(Skipped(id=id, object=f"{id}.jpg", reason="input/output error") for id in ids)


def values(*ids, skipped=()):
    tensor = np.array([[id, id / 2] for id in ids], np.float32).reshape(-1, 2)
    return FeatureBatch(ids=np.array(ids, np.int64), tensors=(tensor,), skipped=skipped)


def test_what_one_node_cannot_read_another_reads_and_the_order_stays():
    sick = Scripted([values(1, 4, skipped=lost(2, 3, 5)), values(6)])
    well = Scripted([values(2), values(5, skipped=lost(3))])
    spread = BalancedTransport([sick, well], clock=lambda: 0.0, names="ab")
    first, second = spread.features(asked_for(1, 2, 3, 4, 5, 6), ("a",))
    assert first.ids.tolist() == [1, 2, 4, 5]
    assert first.tensors[0].tolist() == [[1, 0.5], [2, 1], [4, 2], [5, 2.5]]
    assert [sample.id for sample in first.skipped] == [3], "no node can read it"
    assert second.ids.tolist() == [6]
    use = spread.uses()[0]
    assert (use.url, use.unreadable, use.trouble) == ("a", 2, "")


def test_a_node_that_cannot_read_several_in_a_row_that_another_can_is_left_out():
    sick = Scripted([values(skipped=lost(1, 2))], [values(skipped=lost(3))])
    well = Scripted([values(1, 2)], [values(3)], [values(4)])
    spread = BalancedTransport([sick, well], clock=lambda: 0.0, names="ab")
    assert ids(spread.features(asked_for(1, 2), ("a",))) == [1, 2]
    assert spread.out == {}
    assert ids(spread.features(asked_for(3), ("a",))) == [3]
    assert spread.out == {"a": "it cannot read what another node can, such as 3.jpg: input/output error"}
    assert ids(spread.features(asked_for(4), ("a",))) == [4]
    assert sick.asked == 2


@pytest.mark.promise(
    "complete", mended="a sample that one node could not read, while others were starting, was left out"
)
@pytest.mark.parametrize(
    "trouble",
    [GONE, StoreUnavailable("no store"), Overloaded("full", retry_after_s=2), FrostlineError("it is no node")],
    ids=str,
)
def test_what_one_cannot_read_is_left_out_once_the_others_have_been_away_for_long(trouble):
    clock = SimpleNamespace(now=100.0)
    sick, other = Scripted(*[[values(1, skipped=lost(2))]] * 3), Scripted([trouble], [trouble], [trouble])
    spread = BalancedTransport([sick, other], clock=lambda: clock.now, patience_s=20.0, names="ab")
    for clock.now in (100.0, 119.0):
        with pytest.raises(NodeUnreachable, match=r"a cannot read 2\.jpg \(input/output error\), and b, which may,"):
            next(spread.features(asked_for(1, 2), ("a",)))
    clock.now = 120.0
    (batch,) = spread.features(asked_for(1, 2), ("a",))
    assert batch.ids.tolist() == [1]
    assert [sample.id for sample in batch.skipped] == [2]


@pytest.mark.promise(
    "complete", mended="a sample that one node could not read was left out where others' store was busy"
)
def test_what_a_node_cannot_read_is_asked_again_of_those_whose_store_is_busy():
    busy, sick = Scripted([StoreThrottled("slow down")], [values(2)]), Scripted(*[[values(1, skipped=lost(2))]] * 2)
    spread = BalancedTransport([busy, sick], clock=lambda: 100.0, names="ab")
    with pytest.raises(NodeUnreachable, match=r"b cannot read 2\.jpg .*, and a, which may, refuses: slow down"):
        next(spread.features(asked_for(1, 2), ("b",)))
    assert ids(spread.features(asked_for(1, 2), ("b",))) == [1, 2]
    assert (busy.asked, sick.asked) == (2, 2)


@pytest.mark.promise("complete", mended="a sample was left out where what the other nodes said first came garbled")
@pytest.mark.parametrize("garbled", [[values(2, 1)], [FrostlineError("it is no node")]], ids=["rows", "nonsense"])
def test_what_a_node_cannot_read_is_asked_of_those_that_garbled_it(garbled):
    now = 100.0
    other, sick = Scripted(garbled, garbled, [values(2)]), Scripted(*[[values(1, skipped=lost(2))]] * 2)
    spread = BalancedTransport([other, sick], clock=lambda: now, names="ab")
    with pytest.raises(NodeUnreachable, match=r"b cannot read 2\.jpg \(input/output error\), and a, which may,"):
        next(spread.features(asked_for(1, 2), ("a",)))
    now = 140.0  # longer than any node is waited for, while who refused is not yet asked for anything else
    assert ids(spread.features(asked_for(1, 2), ("a",))) == [1, 2]
    assert (other.asked, sick.asked) == (3, 2)


def test_what_one_cannot_read_a_node_that_is_back_reads():
    now = 100.0
    sick, other = Scripted(*[[values(1, skipped=lost(2))]] * 2), Scripted([GONE], [values(2)])
    spread = BalancedTransport([sick, other], clock=lambda: now, names="ab")
    with pytest.raises(NodeUnreachable, match="which may, cannot be reached"):
        next(spread.features(asked_for(1, 2), ("a",)))
    now = 103.0
    assert ids(spread.features(asked_for(1, 2), ("a",))) == [1, 2]


@pytest.mark.promise(
    "complete", mended="a sample that two of three nodes could not read was left out, or ended the job"
)
def test_every_node_is_asked_for_what_none_before_it_could_read():
    sick, other = Scripted([values(1, 5, skipped=lost(2, 3, 4))]), Scripted([values(2, skipped=lost(3, 4))])
    well = Scripted([values(3, skipped=lost(4))])
    spread = BalancedTransport([sick, other, well], clock=lambda: 0.0, names="abc")
    (batch,) = spread.features(asked_for(1, 2, 3, 4, 5), ("a",))
    assert batch.ids.tolist() == [1, 2, 3, 5]
    assert batch.tensors[0].tolist() == [[1, 0.5], [2, 1], [3, 1.5], [5, 2.5]]
    assert [sample.id for sample in batch.skipped] == [4]
    assert spread.uses()[0].unreadable == 2


def test_a_left_out_node_is_asked_for_what_others_cannot_read():
    sick = Scripted([values(skipped=lost(1, 2, 3))], [values(skipped=lost(4))])
    well, third = Scripted([values(1, 2, 3)], [values(5, skipped=lost(4))]), Scripted([values(skipped=lost(4))])
    spread = BalancedTransport([sick, well, third], clock=lambda: 0.0, names="abc")
    assert ids(spread.features(asked_for(1, 2, 3), ("a",))) == [1, 2, 3]
    assert list(spread.out) == ["a"]
    (batch,) = spread.features(asked_for(4, 5), ("b",))
    assert batch.ids.tolist() == [5]
    assert [sample.id for sample in batch.skipped] == [4], "all three have said so"
    assert sick.asked == 2


class Hanging(ScriptedTransport):
    """A node that takes everything and says nothing until it is broken off."""

    def __init__(self):
        super().__init__(otherwise=Act(gate="never"))
        self.broken = threading.Event()

    def put_prefix(self, _, __, ___=None):
        self._hang()

    def profile(self, _, __=None):
        self._hang()

    def node_statistics(self):
        self._hang()

    def break_off(self):
        self.broken.set()
        super().break_off()

    def _hang(self):
        self.broken.wait(60)
        raise GONE


CALLS = {
    "features": lambda spread: ids(spread.features(asked_for(1), ("a",))),
    "a network": lambda spread: spread.put_prefix("digest", b"network"),
    "a profile": lambda spread: spread.profile(SimpleNamespace(features=asked_for(1), codecs=())),
    "an engine": lambda spread: spread.profile(SimpleNamespace(features=asked_for(1, engine="openvino"), codecs=())),
    "statistics": lambda spread: spread.node_statistics(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_silent_node_is_seen_at_every_call_and_another_takes_over_once_it_is_lost(call):
    well = ScriptedTransport(profile=profile((0.0, 1.0, 2.0)))
    spread = BalancedTransport([Hanging(), well], names="ab")
    done = threading.Event()
    thread = threading.Thread(target=lambda: (CALLS[call](spread), done.set()))
    thread.start()
    until(lambda: spread.silent_nodes(0.05) == ("a",))
    spread.lose("a", NodeUnreachable("it says nothing"))
    thread.join(20)
    assert done.is_set()
    assert spread.silent_nodes(0.0) == ()
    assert spread.out == {"a": "it says nothing"}
    spread.close()


def test_a_slow_node_is_held_against_the_others_and_not_against_itself():
    now = [0.0]
    spread = BalancedTransport([Scripted(), Scripted()], clock=lambda: now[0], names="ab")

    def wait(number, seconds):
        with spread.watch_wait(number, is_of_features=True):
            now[0] += seconds

    for _ in range(20):  # in turns, as where each owns a half of the samples
        wait(0, 5.0)
        wait(1, 0.1)
    with spread.watch_wait(0, is_of_features=True), spread.watch_wait(1, is_of_features=True):
        now[0] += 1.5
        assert spread.silent_nodes(None) == ()
        now[0] += 0.5
        assert spread.silent_nodes(None) == ("a",), "20 s in six times the middle of all waits"
        now[0] += 27.0
        assert spread.silent_nodes(None) == ("a",)
        now[0] += 2.0
        assert spread.silent_nodes(None) == ("a", "b")


def test_rows_that_came_before_a_node_fell_silent_are_no_sign_that_it_is_back():
    turns = LoadBalancer(2)
    turns.begin_request(0, 1.0)
    turns.lose(0, "it says nothing")
    turns.end_request(0, 2.0, rows=5)  # its answer was broken off
    assert turns.out == {0: "it says nothing"}
    assert turns.lost == [0]
    turns.join(0)
    assert turns.out == {}


def test_a_network_is_sent_to_all_at_once_and_a_job_goes_on_when_one_has_it():
    slow = Hanging()
    spread = BalancedTransport([slow, ScriptedTransport()], names="ab")
    started = time.monotonic()
    spread.put_prefix("a" * 64, b"network")
    assert time.monotonic() - started < 10
    assert spread.to_join == (), "it is still being sent"
    asked = replace(asked_for(1), prefix="a" * 64, cut=2)
    assert ids(spread.features(asked, ("a",))) == [1]
    assert not slow.requests
    slow.break_off()
    until(lambda: spread.to_join == ("a",))
    spread.close()


def test_tries_a_lost_node_again_and_a_busy_one_after_the_time_it_named():
    now = [0.0]
    back = Scripted([GONE], [rows(5)])
    busy = Scripted([rows(1)], [Overloaded("busy", retry_after_s=60.0)])
    spread = BalancedTransport([back, busy], clock=lambda: now[0])
    assert ids(spread.features(asked_for(1))) == [1]
    now[0] = 10.0
    assert ids(spread.features(asked_for(5))) == [5]
    assert (back.asked, busy.asked) == (2, 1)


def test_a_closed_answer_gives_nothing_more_and_frees_its_node():
    spread = BalancedTransport([Scripted([rows(1), rows(2)], [rows(3)])], clock=lambda: 0.0)
    answer = spread.features(asked_for(1, 2))
    next(answer)
    answer.close()
    assert next(answer, None) is None
    assert ids(spread.features(asked_for(3))) == [3]


def test_what_a_job_measures_on_a_node_does_not_count_for_its_speed():
    turns = LoadBalancer(2)
    for node in (0, 1):
        turns.begin_request(node, 0.0)
        turns.end_request(node, 20.0, rows=2048)
    turns.begin_request(0, 20.0, is_timed=False)
    turns.end_request(0, 21.0, rows=2048, is_timed=False)
    turns.begin_request(1, 20.0, is_timed=False)
    assert turns.samples_per_s(60.0) == {0: 102.4, 1: 102.4}
    assert turns.order(60.0)[0] == 0, "it is busy all the same"


def test_a_request_leaves_an_owner_that_is_done_with_it_long_after_another():
    turns = LoadBalancer(3)
    for node in (0, 1):
        turns.begin_request(node, 0.0)
    turns.end_request(0, 0.5, rows=32)
    assert turns.order(0.5, [1, 2])[:2] == [1, 2], "the owner has one request to do"
    for _ in range(3):
        turns.begin_request(1, 0.5)
    assert turns.order(1.0, [1, 2])[0] == 0, "it has answered nothing for a second, and four requests wait there"
    assert turns.order(1.0, [0, 2])[0] == 0, "its own"
    turns.note_failure(0, 1.0, away_s=5.0)
    assert turns.order(1.0, [1, 2])[0] == 2, "nothing is known of it, and it has nothing to do"
    turns.note_failure(2, 1.0, away_s=5.0)
    assert turns.order(1.0, [1, 2])[0] == 1, "nobody else answers"
    turns.end_request(1, 1.0, rows=0)
    assert turns.order(1.0, [0, 1])[0] == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_turns_never_favour_a_busier_node_among_those_that_answer(happened):
    turns, flying = LoadBalancer(4), [0] * 4
    for node, is_end in happened:
        if is_end and flying[node]:
            turns.end_request(node)
            flying[node] -= 1
        first = turns.order(0.0)[0]
        assert flying[first] == min(flying)
        turns.begin_request(first)
        flying[first] += 1
    turns.note_failure(2, 0.0, away_s=5.0)
    assert turns.order(1.0)[-1] == 2
    assert 2 not in turns.reachable_nodes(4.9)
    assert 2 in turns.reachable_nodes(5.0)


def test_two_nodes_share_the_work_and_either_may_stop(tmp_path):
    folder, network = make_images(tmp_path / "images", 24), small_network()
    digest, body = artifact_of(network)
    asked = request(folder, network.cuts[-1].number, digest)
    roots, settings = (folder.as_uri(),), NodeSettings(memory_bytes=256 << 20)
    with Node(settings, roots) as first, Node(settings, roots) as second, served(second) as stays:
        with served(first) as leaves:
            spread = BalancedTransport([HttpTransport(url, LoaderSettings(deadline_s=10)) for url in (leaves, stays)])
            spread.put_prefix(digest, body)
            answers = [joined(spread.features(asked)) for _ in range(4)]
        answers += [joined(spread.features(asked)) for _ in range(2)]
        spread.close()
        done = [node.statistics().totals.samples for node in (first, second)]
    assert done == [48, 96]
    assert all(answer[0] == answers[0][0] for answer in answers)
    assert all(np.array_equal(answer[1][0], answers[0][1][0]) for answer in answers)


@pytest.mark.parametrize("engine", [REFERENCE, "openvino"])
def test_sends_all_nodes_what_a_profile_is_for(tmp_path, engine):
    images = make_images(tmp_path / "images", 2)
    features = request(images, 2, "digest", samples_of(images), engine=engine)
    wanted = ProfileRequest(features=features, codecs=("int8",), accuracy="fp16", only_here=True)
    nodes = [ScriptedTransport(profile=profile((0.0, 1.0, 2.0))) for _ in range(2)]
    BalancedTransport(nodes).profile(wanted)
    # An engine that is named must be ready wherever requests may go; a choice is one node's.
    assert [node.profiled for node in nodes] == ([[wanted], []] if engine == REFERENCE else [[wanted], [wanted]])


def test_a_node_that_refused_and_gives_rows_meanwhile_stays_one_that_can_be_asked():
    turns = LoadBalancer(2)
    turns.note_refusal(0, 100.0, "it refuses what other nodes give")
    for now, refusing, reachable in ((101.0, [0], [1]), (161.0, [], [1, 0])):
        turns.begin_request(0, now)
        turns.end_request(0, now, rows=3)
        assert turns.refusing_nodes(now) == refusing
        assert turns.reachable_nodes(now) == reachable
        assert bool(turns.out) == bool(refusing)


@pytest.mark.parametrize("engine", [REFERENCE, "openvino"])
def test_a_node_that_a_network_is_still_sent_to_is_not_left_out(engine):
    lacking = ScriptedTransport()
    lacking.profile = lambda *_: (_ for _ in ()).throw(UnknownPrefix("upload it and ask again"))
    spread = BalancedTransport([lacking, ScriptedTransport(profile=profile((0.0, 1.0, 2.0)))], names="ab")
    spread.profile(SimpleNamespace(features=asked_for(1, engine=engine), codecs=()))
    assert spread.out == {}
    assert spread.owners("s3://a", 1000).nodes == ("a", "b")


def test_a_node_that_says_it_is_back_and_fails_again_is_said_once():
    turns, now, out = LoadBalancer(2), 0.0, []

    def fail(times):
        for _ in range(times):
            turns.begin_request(0, now)
            turns.note_failure(0, now, away_s=0.0, reason="cut off")
            turns.end_request(0, now)

    fail(3)
    assert turns.lost == [0]
    turns.join(0)
    for now, away_s in ((1.0, 4.0), (5.0, 8.0), (13.0, 16.0), (29.0, 32.0), (61.0, 60.0), (121.0, 60.0)):
        fail(3)
        out.append(turns.out)
        assert turns.lost == [], "nobody asks it whether it is there"
        assert turns.reachable_nodes(now + away_s - 0.1) == [1]
        assert 0 in turns.reachable_nodes(now + away_s)
    assert out == [{0: "cut off"}] * 6
    now = 181.0
    turns.begin_request(0, now)
    turns.end_request(0, now, rows=8)
    assert turns.out == {}
    fail(3)
    assert turns.lost == [0], "what it gave makes it a node as any other"
