"""The list of nodes under Ray is asked where Ray is joined, else beside; what is not there is told in a sentence."""

import os
import sys
from types import SimpleNamespace

import pytest

from frostline.core.errors import NodeUnreachable
from frostline.wire.node_lists import listed_nodes, said_by_supervisor

NODES = ["http://10.0.0.1:7070", "http://10.0.0.2:7070"]


class Lost(Exception):
    pass


class FakeRay:
    """A package that has joined a Ray with one namespace."""

    exceptions = SimpleNamespace(RayError=Lost)

    def __init__(self, namespace="frostline", failure=None):
        self.namespace, self.failure, self.asked = namespace, failure, 0

    def is_initialized(self):
        return True

    def get_actor(self, name, namespace):
        if namespace != self.namespace:
            raise ValueError("no such actor. This could because of three things")
        return SimpleNamespace(node_urls=SimpleNamespace(remote=lambda: NODES))

    def get(self, answer, timeout):
        self.asked += 1
        if self.failure is not None:
            raise self.failure
        return answer


def test_a_process_that_has_joined_ray_asks_there(monkeypatch):
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert listed_nodes(("ray://frostline", "http://10.0.0.1:7070")) == tuple(NODES)
    assert ray.asked == 1


def test_a_process_that_was_forked_from_one_that_has_joined_does_not_ask_there(monkeypatch):
    """Ray's connections do not survive a fork."""
    ray = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setenv("RAY_ADDRESS", "nowhere")  # which the process beside it refuses at once
    child = os.fork()
    if not child:
        try:
            listed_nodes(("ray://frostline",))
        except NodeUnreachable:
            os._exit(0 if ray.asked == 0 else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_namespace_without_a_supervisor_is_told_in_one_sentence():
    assert said_by_supervisor(FakeRay(), "other") == {"error": "nobody keeps nodes in that namespace"}


def test_a_supervisor_that_is_away_is_told_by_the_first_line():
    said = said_by_supervisor(FakeRay(failure=Lost("the actor is restarted\nwith a trace")), "frostline")
    assert said == {"error": "the actor is restarted"}
    assert said_by_supervisor(FakeRay(failure=Lost()), "frostline") == {"error": "Lost"}


def test_what_ray_does_not_know_is_told_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", FakeRay())
    with pytest.raises(NodeUnreachable, match=r"ray://other says no nodes: nobody keeps .*frostline cluster up"):
        listed_nodes(("ray://other",))
