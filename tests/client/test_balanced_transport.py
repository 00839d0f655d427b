"""Several nodes as one: work goes to the least busy, another takes over where one dies, nothing is lost or doubled."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.client.balanced import BalancedTransport, LoadBalancer
from frostline.client.http import HttpTransport
from frostline.core import REFERENCE, FeatureBatch
from frostline.core.config import LoaderSettings, NodeSettings
from frostline.core.errors import BadRequest, NodeUnreachable, Overloaded, Unavailable, UnknownPrefix
from frostline.node import Node
from frostline.testing import ScriptedTransport
from frostline.transport import Cancellation
from frostline.wire.messages import ProfileRequest
from support.nodes import artifact_of, joined, make_images, request, samples_of, served, small_network
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


GONE = NodeUnreachable("gone")
ASKED = SimpleNamespace(engine=REFERENCE)


def rows(*ids):
    return FeatureBatch(ids=np.array(ids, np.int64))


def ids(answer):
    return [int(id) for batch in answer for id in batch.ids]


def test_a_request_that_a_dead_node_did_not_begin_goes_to_another():
    dead, alive = Scripted([GONE]), Scripted([rows(1), rows(2)], [rows(3)])
    spread = BalancedTransport([dead, alive], clock=lambda: 0.0)
    assert ids(spread.features(ASKED)) == [1, 2]
    assert ids(spread.features(ASKED)) == [3]
    assert (dead.asked, alive.asked) == (1, 2)


def test_an_answer_that_breaks_half_way_is_not_begun_again():
    one, other = Scripted([rows(1), GONE]), Scripted([rows(1), rows(2)])
    answer = BalancedTransport([one, other], clock=lambda: 0.0).features(ASKED)
    assert next(answer).ids.tolist() == [1]
    with pytest.raises(NodeUnreachable):
        next(answer)
    assert other.asked == 0


@pytest.mark.parametrize("engine", [REFERENCE, "another"])
def test_a_profile_that_is_given_up_is_asked_of_no_other_node_and_none_counts_as_away(engine):
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
    assert profiled == [wanted]
    assert ids(spread.features(ASKED)) == [1]


def test_reports_that_no_node_answers():
    spread = BalancedTransport([Scripted([GONE]), Scripted([GONE])], clock=lambda: 0.0)
    with pytest.raises(NodeUnreachable):
        next(spread.features(ASKED))


@pytest.mark.parametrize("refusal", [BadRequest("no"), UnknownPrefix("none")])
def test_does_not_send_a_refused_request_to_another_node(refusal):
    one, other = Scripted([refusal]), Scripted()
    with pytest.raises(type(refusal)):
        next(BalancedTransport([one, other], clock=lambda: 0.0).features(ASKED))
    assert other.asked == 0


def test_tries_a_lost_node_again_and_a_busy_one_after_the_time_it_named():
    now = [0.0]
    back = Scripted([GONE], [rows(5)])
    busy = Scripted([rows(1)], [Overloaded("busy", retry_after_s=60.0)])
    spread = BalancedTransport([back, busy], clock=lambda: now[0])
    assert ids(spread.features(ASKED)) == [1]
    now[0] = 10.0
    assert ids(spread.features(ASKED)) == [5]
    assert (back.asked, busy.asked) == (2, 1)


def test_a_closed_answer_gives_nothing_more_and_frees_its_node():
    spread = BalancedTransport([Scripted([rows(1), rows(2)], [rows(3)])], clock=lambda: 0.0)
    answer = spread.features(ASKED)
    next(answer)
    answer.close()
    assert next(answer, None) is None
    assert ids(spread.features(ASKED)) == [3]


def test_what_a_job_measures_on_a_node_does_not_count_for_its_speed():
    turns = LoadBalancer(2)
    for node in (0, 1):
        turns.began(node, 0.0)
        turns.ended(node, 20.0, rows=2048)
    turns.began(0, 20.0, is_timed=False)
    turns.ended(0, 21.0, rows=2048, is_timed=False)
    turns.began(1, 20.0, is_timed=False)
    assert turns.samples_per_s(60.0) == {0: 102.4, 1: 102.4}
    assert turns.order(60.0)[0] == 0, "it is busy all the same"


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=60))
def test_turns_never_favour_a_busier_node_among_those_that_answer(happened):
    turns, flying = LoadBalancer(4), [0] * 4
    for node, is_end in happened:
        if is_end and flying[node]:
            turns.ended(node)
            flying[node] -= 1
        first = turns.order(0.0)[0]
        assert flying[first] == min(flying)
        turns.began(first)
        flying[first] += 1
    turns.failed(2, 0.0, away_s=5.0)
    assert turns.order(1.0)[-1] == 2
    assert 2 not in turns.present(4.9)
    assert 2 in turns.present(5.0)


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
