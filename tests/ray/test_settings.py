"""Settings of a cluster say what is wrong with them, and what makes a node outdated."""

from dataclasses import replace

import pytest

from frostline.core.config import NodeSettings
from frostline.core.errors import SettingError
from frostline.ray.scaling import ClusterSettings, name_of, number_of
from frostline.ray.supervisor import is_ours

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
