"""Which nodes take part: those that are listed, once they can serve; the lists are names, files or addresses."""

import json
import socket
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.client import membership as tending
from frostline.client.balanced import BalancedTransport
from frostline.client.membership import (
    Membership,
    NodeWatch,
    changes,
    connect_balanced,
    require_protocol,
    watch_membership,
)
from frostline.core.errors import NodeUnreachable, Refused, SettingError
from frostline.testing import Act, ScriptedTransport
from frostline.wire.messages import PROTOCOLS, Health, common_protocol
from frostline.wire.node_lists import NodeList, listed_nodes
from support.nodes import asked_for, until

ASKED = asked_for(1)
names = st.lists(st.sampled_from("abcdef"), unique=True)


class Fake(ScriptedTransport):
    """A node by its name; a failure is what it says to everything."""

    def __init__(self, name):
        super().__init__()
        self.name = name
        self.failure = None
        self.healthy = Health(version="0.1.0", host="here", hardware="none", memory_bytes=0, roots=())
        self.hangs = threading.Event()
        self.hangs.set()

    @property
    def asked(self):
        return len(self.requests)

    def health(self):
        self._answer()
        return self.healthy

    def put_prefix(self, digest, artifact, before_upload=None):
        self._answer()
        super().put_prefix(digest, artifact, before_upload)

    def features(self, request):
        self._otherwise = Act(error=self.failure)
        return super().features(request)

    def close(self):
        """A probe shares it with the job."""

    def _answer(self):
        if not self.hangs.wait(1.0):
            raise NodeUnreachable("said nothing for too long")
        if self.failure is not None:
            raise self.failure


class Fleet:
    """Fake nodes, a file that lists them, and what was told."""

    def __init__(self, folder, *listed):
        self.file = folder / "nodes.json"
        self.nodes = {}
        self.told = []
        self.list(*listed)
        self.transport = BalancedTransport([self.node(name) for name in listed], names=listed)
        watch = NodeWatch(
            joined=lambda url: self.told.append(("joined", url)),
            left=lambda url, _: self.told.append(("left", url)),
            refused=lambda url, why: self.told.append(("refused", url, why)),
            lost=lambda url, why: self.told.append(("lost", url, why)),
            back=lambda url: self.told.append(("back", url)),
        )
        self.watch = watch
        self.membership = Membership([self.file.as_uri()], self.transport, make=self.node, probe=self.node, watch=watch)

    def node(self, name):
        return self.nodes.setdefault(name, Fake(name))

    def list(self, *names):
        self.file.write_text(json.dumps(names))

    def look(self):
        self.membership.follow(self.membership.list_nodes())
        self.membership.settle()

    def tend(self):
        self.membership.tend()
        self.membership.settle()
        self.membership.tend()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    """Lost nodes are asked again at each look."""
    monkeypatch.setattr(tending, "_LOST_EVERY_S", 0.0)


A, B, C = (f"http://{name}:7070" for name in "abc")


@given(names, names)
def test_changes_make_the_members_those_that_are_listed(members, listed):
    joining, leaving = changes(members, listed)
    found = (set(members) | set(joining)) - set(leaving)
    assert found == set(listed or members)
    assert not set(joining) & set(members)
    assert set(leaving) <= set(members)


def test_a_newcomer_has_the_prefixes_before_it_is_asked_for_samples(tmp_path):
    fleet = Fleet(tmp_path, A, B)
    fleet.transport.put_prefix("digest", b"network")
    fleet.list(A, B, C)
    fleet.nodes[C] = newcomer = Fake(C)
    newcomer.failure = NodeUnreachable("starting")
    fleet.look()
    assert fleet.transport.members == (A, B)
    newcomer.failure = None
    fleet.look()
    assert newcomer.prefixes == {"digest": b"network"}
    assert fleet.transport.members == (A, B, C)
    assert fleet.told == [("joined", C)]
    next(fleet.transport.features(ASKED, (C,)))
    assert newcomer.asked == 1


def test_a_node_that_is_listed_no_more_is_asked_nothing_more_and_may_come_back(tmp_path):
    fleet = Fleet(tmp_path, A, B)
    fleet.list(A)
    fleet.look()
    for _ in range(3):
        list(fleet.transport.features(ASKED, (B,)))
    assert (fleet.nodes[A].asked, fleet.nodes[B].asked) == (3, 0)
    fleet.list(A, B)
    fleet.look()
    list(fleet.transport.features(ASKED, (B,)))
    assert fleet.nodes[B].asked == 1
    assert fleet.told == [("left", B), ("joined", B)]


OTHER = (PROTOCOLS[1] + 1, PROTOCOLS[1] + 3)


def test_a_node_of_another_protocol_is_left_out_with_a_sentence_once(tmp_path):
    fleet = Fleet(tmp_path, A)
    fleet.nodes[B] = other = Fake(B)
    here = other.healthy
    other.healthy = replace(here, version="7.3.1", protocol=OTHER)
    fleet.list(A, B)
    for _ in range(3):
        fleet.look()
    ((kind, url, why),) = fleet.told
    assert (kind, url) == ("refused", B)
    assert "runs Frostline 7.3.1, which speaks protocols 2 to 4, and" in why
    assert "here speaks protocol 1: install a release between the two" in why
    other.healthy = here  # it was updated
    fleet.look()
    assert fleet.transport.members == (A, B)


def test_a_node_of_another_version_that_speaks_the_protocol_takes_part(tmp_path):
    fleet = Fleet(tmp_path, A, B)
    fleet.nodes[B].healthy = replace(fleet.nodes[B].healthy, version="7.3.1", protocol=(1, 9))
    fleet.membership.check()
    assert fleet.transport.members == (A, B)
    assert not fleet.told


spans = st.tuples(st.integers(1, 9), st.integers(0, 4)).map(lambda pair: (pair[0], sum(pair)))


@given(spans, spans)
def test_two_sides_speak_the_greatest_protocol_that_both_have(theirs, ours):
    both = set(range(theirs[0], theirs[1] + 1)).intersection(range(ours[0], ours[1] + 1))
    assert common_protocol(theirs, ours) == max(both, default=None)
    health = Health(version="1", host="", hardware="", memory_bytes=0, roots=(), protocol=theirs)
    if both:
        require_protocol(health, A, ours)
    else:
        with pytest.raises(Refused, match="install a release between the two"):
            require_protocol(health, A, ours)


def test_silent_first_nodes_are_lost_until_they_answer(tmp_path):
    fleet = Fleet(tmp_path, A, B, C)
    here = fleet.nodes[B].healthy
    fleet.nodes[B].healthy = replace(here, protocol=OTHER)
    fleet.nodes[C].failure = NodeUnreachable("starting")
    fleet.membership.check()
    assert fleet.transport.members == (A, C)
    assert fleet.transport.out == {C: "starting"}
    fleet.nodes[C].failure = None
    fleet.tend()
    assert fleet.transport.out == {}
    assert [told[:2] for told in fleet.told[1:]] == [("lost", C), ("back", C)] or fleet.told[1:] == []
    for name in (A, C):
        fleet.nodes[name].healthy = replace(here, protocol=OTHER)
    with pytest.raises(Refused, match="install a release between the two"):
        fleet.membership.check()


def test_a_job_begins_when_one_node_is_ready_though_another_hangs(tmp_path):
    fleet = Fleet(tmp_path, A, B)
    fleet.nodes[B].hangs.clear()
    started = time.monotonic()
    fleet.membership.check()
    assert time.monotonic() - started < 1.5
    fleet.membership.tend()
    assert [told[:2] for told in fleet.told] == [("lost", B)]
    fleet.nodes[B].hangs.set()
    fleet.tend()
    assert [told[:2] for told in fleet.told] == [("lost", B), ("back", B)]


def test_where_no_node_answers_at_the_start_all_stay(tmp_path):
    fleet = Fleet(tmp_path, A, B)
    for name in (A, B):
        fleet.nodes[name].failure = NodeUnreachable("starting")
    fleet.membership.check()
    assert fleet.transport.members == (A, B)
    assert fleet.transport.out == {}


def test_a_node_in_trouble_is_not_asked_until_it_says_that_it_is_ready(tmp_path):
    fleet = Fleet(tmp_path, A, B)
    here = fleet.nodes[B].healthy
    fleet.nodes[B].healthy = replace(here, trouble="draining")
    fleet.membership.check()
    assert "draining" in fleet.transport.out[B]
    fleet.nodes[B].healthy = here
    fleet.tend()
    assert fleet.transport.out == {}


@pytest.mark.parametrize("body", ["[]", "no json", '{"a": 1}', '["ftp://a"]', "[1]", None])
def test_a_list_that_is_empty_broken_or_away_changes_nothing(tmp_path, body):
    fleet = Fleet(tmp_path, A, B)
    fleet.file.unlink() if body is None else fleet.file.write_text(body)
    fleet.look()
    assert fleet.transport.members == (A, B)
    assert fleet.told == []


def test_the_last_node_stays_until_another_one_takes_its_place(tmp_path):
    fleet = Fleet(tmp_path, A)
    fleet.nodes[B] = Fake(B)
    fleet.nodes[B].failure = NodeUnreachable("starting")
    fleet.list(B)
    fleet.look()
    assert fleet.transport.members == (A,)
    fleet.nodes[B].failure = None
    fleet.look()
    fleet.look()
    assert fleet.transport.members == (B,)


def test_a_node_owns_nothing_after_long_failure_and_all_after_a_single_one(tmp_path):
    fleet = Fleet(tmp_path, A, B)
    fleet.nodes[B].failure = NodeUnreachable("gone")
    for failures in range(1, 4):
        fleet.transport.note_failure(1, fleet.nodes[B].failure)
        assert fleet.transport.owners("s3://a", 1000).nodes == ((A, B) if failures < 3 else (A,))
    fleet.tend()
    assert fleet.transport.to_join == (B,)
    fleet.nodes[B].failure = None
    fleet.tend()
    assert fleet.transport.owners("s3://a", 1000).nodes == (A, B)
    assert fleet.told == [("lost", B, "gone"), ("back", B)]


def test_a_node_that_is_gone_is_named_after_its_first_failure(tmp_path):
    fleet = Fleet(tmp_path, A, B)
    fleet.nodes[B].failure = NodeUnreachable("gone")
    list(fleet.transport.features(ASKED, (B,)))
    fleet.membership.tend()
    assert fleet.told == [("lost", B, "gone")]
    assert fleet.transport.owners("s3://a", 1000).nodes == (A,)


def test_a_node_that_broke_a_single_connection_is_asked_once_and_stays(tmp_path):
    fleet, probed = Fleet(tmp_path, A, B), []
    health = fleet.nodes[B].health
    fleet.nodes[B].health = lambda: (probed.append(B), health())[1]
    fleet.transport.note_failure(1, NodeUnreachable("gone"))
    for _ in range(4):
        fleet.membership.tend()
    assert probed == [B]
    assert fleet.told == []
    assert fleet.transport.owners("s3://a", 1000).nodes == (A, B)


def test_a_request_goes_to_its_owner_then_to_the_second_and_then_to_others(tmp_path):
    fleet = Fleet(tmp_path, A, B, C)
    for name in (C, B):
        fleet.nodes[name].failure = NodeUnreachable("gone")
    answer = fleet.transport.at((C, B)).features(ASKED)
    assert len(list(answer)) == 1
    assert [fleet.nodes[name].asked for name in (A, B, C)] == [1, 1, 1]


def test_a_file_is_watched_while_a_transport_is_open(tmp_path):
    fleet = Fleet(tmp_path, A)
    near = [fleet.file.as_uri()]
    with connect_balanced(
        near, make=fleet.node, probe=fleet.node, left_out=lambda *_: None, watch=fleet.watch
    ) as transport:
        assert transport.members == (A,)
        fleet.list(A, B)
        until(lambda: transport.members == (A, B))
    fleet.list(A)
    assert transport.members == (A, B), "nobody looks any more"


def test_watching_ends_with_its_thread(tmp_path):
    fleet = Fleet(tmp_path, A)
    with watch_membership(fleet.membership):
        pass
    fleet.list(B)
    assert fleet.transport.members == (A,)


def test_a_hanging_list_hides_no_lost_node_and_holds_no_job_at_its_end(tmp_path, monkeypatch):
    fleet = Fleet(tmp_path, A, B)
    fleet.node(A).failure = NodeUnreachable("gone")
    asked, answers = threading.Event(), threading.Event()

    def listed(_):
        asked.set()
        answers.wait(30)
        return (A, B)

    monkeypatch.setattr(tending, "listed_nodes", listed)
    for name in ("_EVERY_S", "_FILE_EVERY_S", "_TEND_EVERY_S", "_GRACE_S"):
        monkeypatch.setattr(tending, name, 0.01)
    with watch_membership(fleet.membership):
        assert asked.wait(10)
        fleet.transport.lose(A, NodeUnreachable("gone"))
        until(lambda: fleet.told)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 10, "the end waits for no list"
    answers.set()
    assert fleet.told == [("lost", A, "gone")]


def test_a_name_stands_for_all_its_addresses(monkeypatch):
    def found(host, port, **_):
        assert (host, port) == ("store", 7070)
        return [(0, 0, 0, "", (address, port)) for address in ("10.0.0.2", "10.0.0.1", "10.0.0.2", "fd00::1")]

    monkeypatch.setattr(socket, "getaddrinfo", found)
    every = ("http://10.0.0.1:7070", "http://10.0.0.2:7070", "http://[fd00::1]:7070")
    assert NodeList(url="dns://store:7070").nodes() == every
    assert listed_nodes(("http://10.0.0.2:7070/", "dns://store:7070")) == (every[1], every[0], every[2])


def test_a_name_without_addresses_and_a_file_that_is_not_there_are_told(monkeypatch, tmp_path):
    def found(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", found)
    with pytest.raises(NodeUnreachable, match="store has no address"):
        listed_nodes(("dns://store:7070",))
    with pytest.raises(NodeUnreachable, match="cannot be read"):
        listed_nodes(((tmp_path / "none.json").as_uri(),))


@pytest.mark.parametrize(
    "url", ["dns://store", "dns://:7070", "dns://store:7070/path", "dns://store:x", "file://host/nodes.json"]
)
def test_refuses_addresses_of_lists_that_make_no_sense(url):
    with pytest.raises(SettingError, match=r"file:///|service"):
        NodeList(url=url)
