"""Settings of a cluster say what is wrong with them, and what makes a node outdated."""

import json
import os
import socket
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from frostline.core.config import NodeSettings
from frostline.core.errors import NodeUnreachable, SettingError
from frostline.core.files import with_schema
from frostline.ray import control
from frostline.ray.control import join, leave_if_ended, running_address, start
from frostline.ray.scaling import ClusterSettings, name_of, number_of
from frostline.ray.supervisor import is_ours
from support.servers import free_ports

SOME = ClusterSettings(roots=("file:///photos",))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"namespace": "a/b"}, "namespace"),
        ({"min_nodes": 3, "max_nodes": 2}, "--max"),
        ({"min_nodes": 0}, "at least one node"),
        ({"label": "store"}, "KEY=VALUE"),
        ({"label": "=photos"}, "KEY=VALUE"),
        ({"port": 65_535, "max_nodes": 2}, "--port 65535"),
    ],
)
def test_refuses_what_makes_no_sense_and_names_the_option(change, words):
    with pytest.raises(SettingError, match=words):
        replace(SOME, **change)


def test_a_node_is_outdated_by_what_it_is_started_with_and_not_by_how_many_there_are():
    assert replace(SOME, min_nodes=2, max_nodes=5).digest == SOME.digest
    for change in (
        {"roots": ("file:///other",)},
        {"node": NodeSettings(max_requests=9)},
        {"port": 7070},
        {"control": "http://x:1"},
    ):
        assert replace(SOME, **change).digest != SOME.digest


def test_ports_count_on_from_the_first_and_zero_takes_free_ones():
    assert [replace(SOME, port=7070).port_of(number) for number in range(3)] == [7070, 7071, 7072]
    assert SOME.port_of(3) == 0


def test_names_of_nodes_are_told_from_others():
    assert [number_of(name_of(number)) for number in (0, 12)] == [0, 12]
    assert number_of("frostline-supervisor") is None
    assert number_of("frostline-node-x") is None
    assert is_ours("frostline-supervisor")
    assert is_ours(name_of(3))
    assert not is_ours("AutoscalingCoordinator")


def test_a_label_selects_hosts():
    assert replace(SOME, label="store=photos").selector == {"store": "photos"}
    assert SOME.selector == {}
    assert not SOME.follows_demand
    assert replace(SOME, max_nodes=2).follows_demand


def test_a_ray_that_has_ended_is_refused_at_once():
    """Its own way to join tries for minutes."""
    began_s = time.monotonic()
    with pytest.raises(NodeUnreachable, match="no Ray answers at "):
        join(f"127.0.0.1:{free_ports(1)[0]}")
    assert time.monotonic() - began_s < 60


def test_a_process_leaves_a_ray_that_has_ended_and_no_other(monkeypatch):
    left = []
    with socket.create_server(("127.0.0.1", 0)) as head:
        context = SimpleNamespace(gcs_address=f"127.0.0.1:{head.getsockname()[1]}")
        ray = SimpleNamespace(
            is_initialized=lambda: not left,
            util=SimpleNamespace(client=SimpleNamespace(ray=SimpleNamespace(is_connected=lambda: False))),
            get_runtime_context=lambda: context,
            shutdown=lambda: left.append(context.gcs_address),
        )
        monkeypatch.setitem(sys.modules, "ray", ray)
        leave_if_ended()
        assert not left
    leave_if_ended()
    leave_if_ended()
    assert left == [context.gcs_address]


@pytest.mark.promise("apart", mended="a user who made the folder of another's Ray first had that one join theirs")
@pytest.mark.parametrize("how", ["another user's", "open", "a link"])
def test_a_ray_in_a_folder_that_others_may_write_to_is_not_ones_own(how, tmp_path, monkeypatch):
    at, there = tmp_path / "ray", tmp_path / "there"
    monkeypatch.setattr(control, "folder", lambda: at)
    monkeypatch.setattr(control, "_is_ray", lambda pid: True)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert running_address() is None, "there is no folder"
    there.mkdir(mode=0o700)
    said = with_schema({"address": "127.0.0.1:1", "pid": 1}, vars(control)["_FORMAT"])
    (there / "head.json").write_text(json.dumps(said))
    if how == "a link":
        at.symlink_to(there)
    else:
        there.rename(at)
        assert running_address() == "127.0.0.1:1"
    if how == "open":
        at.chmod(0o777)
    if how == "another user's":
        monkeypatch.setattr(os, "geteuid", lambda: at.stat().st_uid + 1)
    for use in (running_address, control.end, join, lambda: start(1, 1 << 26)):
        with pytest.raises(SettingError, match=r"RAY_ADDRESS|pip install"):
            use()
