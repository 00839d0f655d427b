"""Nodes under a real Ray: they come back, are upgraded and scaled, and jobs lose and double nothing."""

import itertools
import os
import signal
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import frostline as fl
from frostline.client import membership
from frostline.core.config import LoaderSettings
from frostline.core.errors import NodeUnreachable, SettingError
from frostline.core.events import BatchDelivered, NodeJoined, NodeLost
from frostline.wire.node_lists import NodeList, listed_nodes
from support import plain
from support.images import image_folder, tiny_preprocess
from support.many_nodes import epoch, frozen, job, same
from support.nodes import until
from support.ray_here import NODE, parent_of, ray_here

pytest.importorskip("ray", reason="nodes under Ray need the extra frostline[ray]")
# Ray starts a process of Python with torch for each of its workers.
pytestmark = [pytest.mark.timeout(900), pytest.mark.promise("survives")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return image_folder(tmp_path_factory.mktemp("images"), per_class=96, size=(40, 36))


@pytest.fixture(scope="module")
def here(folder):
    with ray_here() as here:
        said = here.cluster("up", "--data-root", folder, "--nodes", 2, *NODE)
        assert said["is_settled"]
        assert said["ray"] == here.address
        yield here
        ended = here.cluster("down")
        assert ended["ray"], "no nodes are left in it"
        assert not here.is_running()


@pytest.fixture
def joined(here, monkeypatch):
    """This process finds the Ray of the tests, and looks at its list often."""
    monkeypatch.setenv("RAY_ADDRESS", here.address)
    monkeypatch.setattr(membership, "_EVERY_S", 0.2)
    return here


@pytest.mark.promise("secret")
@pytest.mark.skipif(sys.platform != "linux", reason="this system does not say which processes listen where")
def test_what_is_started_listens_on_the_loopback_alone(here):
    """Whoever reaches a port of Ray runs programs."""
    inodes, found = listening_inodes(), []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            said = (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
            if str(here.state.parent).encode() in said:
                links = [str(descriptor.readlink()) for descriptor in (process / "fd").iterdir()]
                found += [inodes[link] for link in links if link in inodes]
    assert len(found) >= 3
    assert set(found) <= {"127.0.0.1", "::1"}


def listening_inodes():
    """The addresses at which sockets listen, by what a descriptor of theirs is called."""
    found = {}
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path("/proc/net", name).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A":
                raw = bytes.fromhex(words[1].partition(":")[0])
                raw = b"".join(raw[start : start + 4][::-1] for start in range(0, len(raw), 4))
                address = socket.inet_ntop(family, raw).removeprefix("::ffff:")
                found[f"socket:[{words[9]}]"] = address
    return found


def test_killed_actors_come_back_elsewhere_with_the_same_losses(folder, joined):
    expected = plain.losses(frozen(), folder, fl.Dataset(folder), tiny_preprocess(), batch_size=16, epochs=3)
    before = listed_nodes(("ray://frostline",))
    came, taken = [], []

    def kill(event):
        if isinstance(event, NodeJoined):
            came.append(event.url)
        if not isinstance(event, BatchDelivered):
            return
        taken.append(event)
        if len(taken) == 5:  # the actor's own process: its node ends with it
            os.kill(parent_of(joined.node(0)["pid"]), signal.SIGKILL)
        if len(taken) == 24:
            until(lambda: len(came) == 1)
            os.kill(joined.node(1)["pid"], signal.SIGKILL)  # the node, with which its actor ends
        if len(taken) == 42:
            until(lambda: len(came) == 2)

    with job(folder, "ray://frostline", on_event=kill, retry_for_s=60) as running:
        losses = plain.through(running, batch_size=16, epochs=3)
    assert losses == expected
    assert len(taken) == 3 * 18
    assert not set(came) & set(before), "they are at other ports"


def test_a_node_that_hangs_is_named_and_the_job_goes_on_at_the_other(folder, joined):
    """It keeps its place under Ray, and connections to it stay: nothing but its silence tells."""
    expected = plain.losses(frozen(), folder, fl.Dataset(folder), tiny_preprocess(), batch_size=16, epochs=1)
    hung, told, came_s = joined.node(0), [], []

    def hang(event):
        told.append(event)
        if isinstance(event, BatchDelivered):
            came_s.append(time.monotonic())
            if len(came_s) == 3:
                os.kill(hung["pid"], signal.SIGSTOP)

    try:
        with job(folder, "ray://frostline", on_event=hang, retry_for_s=60) as running:
            assert plain.through(running, batch_size=16, epochs=1) == expected
            uses = {use.url: use for use in running.statistics().nodes}
            lost = [event for event in told if isinstance(event, NodeLost)]
            assert [event.url for event in lost] == [hung["url"]]
            assert uses[hung["url"]].trouble == lost[0].reason
            assert hung["url"] in str(running.explain())
    finally:
        os.kill(hung["pid"], signal.SIGCONT)
    assert len(came_s) == 18
    longest_s = max(after - before for before, after in itertools.pairwise(came_s))
    assert longest_s < LoaderSettings().deadline_s / 4, "not until its requests are over their time"


@pytest.mark.long
def test_nodes_are_upgraded_one_after_another_while_a_job_runs_and_then_scaled(folder, joined):
    with job(folder, list(listed_nodes(("ray://frostline",)))) as running:
        expected = epoch(running, 0)
    old = joined.cluster("status")
    with ThreadPoolExecutor(1) as pool, job(folder, "ray://frostline", retry_for_s=60) as running:
        upgrade = pool.submit(joined.cluster, "up", "--data-root", folder, "--nodes", 2, *NODE, "--max-requests", 48)
        epochs = 0
        while not upgrade.done() or not epochs:
            assert same(epoch(running, 0), expected)
            epochs += 1
    new = upgrade.result()
    assert new["is_settled"]
    assert new["digest"] != old["digest"]
    assert not {node["pid"] for node in new["nodes"].values()} & {node["pid"] for node in old["nodes"].values()}
    scaled = joined.cluster("scale", 1)
    assert list(scaled["nodes"]) == ["0"]
    assert scaled["nodes"]["0"]["pid"] == new["nodes"]["0"]["pid"], "what is as it should be is left alone"
    assert len(listed_nodes(("ray://frostline",))) == 1


def test_worker_processes_that_are_forked_ask_for_themselves(folder, joined):
    with job(folder, "ray://frostline") as running:
        loader = torch.utils.data.DataLoader(
            running.loader(16, shuffle=True, seed=3), batch_size=None, num_workers=2, multiprocessing_context="fork"
        )
        ids = torch.cat([batch.ids for batch in loader]).tolist()
    assert len(ids) == len(set(ids)) == 3 * 96


def test_a_namespace_without_nodes_is_told(joined):
    with pytest.raises(NodeUnreachable, match=r"ray://nowhere says no nodes: .*frostline cluster up"):
        listed_nodes(("ray://nowhere",))


@pytest.mark.parametrize("url", ["ray://", "ray://host:10001", "ray://a/b", "ray://a?b"])
def test_refuses_addresses_that_name_no_namespace(url):
    with pytest.raises(SettingError, match="namespace of Ray"):
        NodeList(url=url)
