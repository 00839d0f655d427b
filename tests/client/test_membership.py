"""Which nodes take part: those that are listed, once they can serve; the lists are names, files or addresses."""

import json
import socket
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from frostline.client.balanced import BalancedTransport
from frostline.client.membership import Membership, NodeWatch, balanced, can_talk, changes, watching
from frostline.core import REFERENCE, FeatureBatch
from frostline.core.errors import NodeUnreachable, Refused, SettingError
from frostline.core.system import __version__
from frostline.wire.node_lists import NodeList, listed_nodes
from support.nodes import until

ASKED = SimpleNamespace(engine=REFERENCE)
names = st.lists(st.sampled_from("abcdef"), unique=True)


class Fake:
    """A node by its name; what it was given, and what it is asked."""

    def __init__(self, name):
        self.name = name
        self.version = __version__
        self.failure = None
        self.prefixes = {}
        self.asked = 0
        self.closed = 0

    def health(self):
        self._answer()
        return SimpleNamespace(version=self.version)

    def put_prefix(self, digest, artifact):
        self._answer()
        self.prefixes[digest] = artifact

    def features(self, _):
        self.asked += 1
        self._answer()
        yield FeatureBatch(ids=np.array([1]))

    def close(self):
        self.closed += 1

    def _answer(self):
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
        )
        self.watch = watch
        self.membership = Membership([self.file.as_uri()], self.transport, make=self.node, probe=self.node, watch=watch)

    def node(self, name):
        return self.nodes.setdefault(name, Fake(name))

    def list(self, *names):
        self.file.write_text(json.dumps(names))


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
    fleet.membership.look()
    assert fleet.transport.members == (A, B)
    newcomer.failure = None
    fleet.membership.look()
    assert newcomer.prefixes == {"digest": b"network"}
    assert fleet.transport.members == (A, B, C)
    assert fleet.told == [("joined", C)]
    next(fleet.transport.features(ASKED, (C,)))
    assert newcomer.asked == 1


def test_a_node_that_is_listed_no_more_is_asked_nothing_more_and_may_come_back(tmp_path):
    fleet = Fleet(tmp_path, A, B)
    fleet.list(A)
    fleet.membership.look()
    for _ in range(3):
        list(fleet.transport.features(ASKED, (B,)))
    assert (fleet.nodes[A].asked, fleet.nodes[B].asked) == (3, 0)
    fleet.list(A, B)
    fleet.membership.look()
    list(fleet.transport.features(ASKED, (B,)))
    assert fleet.nodes[B].asked == 1
    assert fleet.told == [("left", B), ("joined", B)]


def test_a_node_of_another_version_is_left_out_with_a_sentence_once(tmp_path):
    fleet = Fleet(tmp_path, A)
    fleet.nodes[B] = other = Fake(B)
    other.version = "7.3.1"
    fleet.list(A, B)
    for _ in range(3):
        fleet.membership.look()
    ((kind, url, why),) = fleet.told
    assert (kind, url) == ("refused", B)
    assert "7.3.1" in why
    assert "bring both to one version" in why
    other.version = __version__  # it was updated
    fleet.membership.look()
    assert fleet.transport.members == (A, B)


def test_first_nodes_that_cannot_talk_are_left_out_and_those_that_do_not_answer_yet_stay(tmp_path):
    fleet = Fleet(tmp_path, A, B, C)
    fleet.nodes[B].version = "7.3.1"
    fleet.nodes[C].failure = NodeUnreachable("starting")
    fleet.membership.check()
    assert fleet.transport.members == (A, C)
    fleet.nodes[A].version = fleet.nodes[C].version = "7.3.1"
    fleet.nodes[C].failure = None
    with pytest.raises(Refused, match="bring both"):
        fleet.membership.check()


@pytest.mark.parametrize("body", ["[]", "no json", '{"a": 1}', '["ftp://a"]', "[1]", None])
def test_a_list_that_is_empty_broken_or_away_changes_nothing(tmp_path, body):
    fleet = Fleet(tmp_path, A, B)
    fleet.file.unlink() if body is None else fleet.file.write_text(body)
    fleet.membership.look()
    assert fleet.transport.members == (A, B)
    assert fleet.told == []


def test_the_last_node_stays_until_another_one_takes_its_place(tmp_path):
    fleet = Fleet(tmp_path, A)
    fleet.nodes[B] = Fake(B)
    fleet.nodes[B].failure = NodeUnreachable("starting")
    fleet.list(B)
    fleet.membership.look()
    assert fleet.transport.members == (A,)
    fleet.nodes[B].failure = None
    fleet.membership.look()
    assert fleet.transport.members == (B,)


def test_a_node_that_failed_for_long_owns_nothing_until_it_answers_and_one_failure_moves_no_block(tmp_path):
    fleet = Fleet(tmp_path, A, B)
    fleet.nodes[B].failure = NodeUnreachable("gone")
    for failures in range(1, 4):
        fleet.transport.failed(1, fleet.nodes[B].failure)
        assert fleet.transport.owners("s3://a", 1000).nodes == ((A, B) if failures < 3 else (A,))
    fleet.membership.look()
    assert fleet.transport.lost == (B,)
    fleet.nodes[B].failure = None
    fleet.membership.look()
    assert fleet.transport.owners("s3://a", 1000).nodes == (A, B)
    assert fleet.told == []


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
    with balanced(near, make=fleet.node, probe=fleet.node, left_out=lambda *_: None, watch=fleet.watch) as transport:
        assert transport.members == (A,)
        fleet.list(A, B)
        until(lambda: transport.members == (A, B))
    fleet.list(A)
    assert transport.members == (A, B), "nobody looks any more"


def test_watching_ends_with_its_thread(tmp_path):
    fleet = Fleet(tmp_path, A)
    with watching(fleet.membership):
        pass
    fleet.list(B)
    assert fleet.transport.members == (A,)


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


def test_versions_talk_where_their_first_two_numbers_agree():
    assert can_talk("0.1.0", "0.1.7")
    assert not can_talk("0.1.0", "0.2.0")
    assert not can_talk("1.1.0", "0.1.0")
