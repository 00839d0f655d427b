"""A prefix of a stranger cannot crash the node, fill its memory or delay others, whatever it contains."""

import os
import resource
import signal

import pytest
import torch

from frostline.core.config import NodeSettings
from frostline.core.errors import OverBudget, UnsafeArtifact
from frostline.core.files import FileCache
from frostline.engines.graph_runner import leaf_values
from frostline.engines.measure import GraphLimits, dry_run
from frostline.models.artifact import header_of, read_prefix, write_prefix
from frostline.node import inspection as inspections
from frostline.node.inspection import Inspector
from frostline.node.process import start_node
from support.hostile import X, after, artifact, attacks, chain, node, peak_bytes, put
from support.prefixes import small_prefix

ATTACKS = attacks()
# Enough for the longest graph to be read at all, so that what it names is what is looked at.
MEMORY = 4 << 30
GROWTH = 256 << 20


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """A node in a process of its own, which may not take this machine's memory whatever happens."""
    with start_node((str(tmp_path_factory.mktemp("data")),), NodeSettings(memory_bytes=MEMORY)) as process:
        resource.prlimit(process.pid, resource.RLIMIT_DATA, (6 << 30, 6 << 30))
        yield process


@pytest.mark.parametrize("name", ATTACKS)
def test_a_hostile_prefix_is_refused_in_one_sentence_and_the_node_goes_on(stranger, name):
    pid, before = stranger.pid, peak_bytes(stranger.pid)
    status, said = put(stranger.url, ATTACKS[name])
    assert 400 <= status < 500
    assert said["message"]
    assert "\n" not in said["message"]
    assert stranger.pid == pid
    assert peak_bytes(pid) - before < GROWTH
    status, _ = put(stranger.url, artifact(after(node(name, "aten.relu.default", X))))
    assert status == 201


def limits(**changes):
    usual = {"max_nodes": 4000, "max_values": 20_000, "max_run_s": 120.0, "max_operation_s": 2.0}
    return GraphLimits(**{**usual, "operations_per_s": 1e11, **changes})


def inspected(inspector, body, *, max_check_s=60.0, **changes):
    return inspector.inspect(header_of(body), max_rows=32, max_check_s=max_check_s, limits=limits(**changes))


@pytest.fixture(scope="module")
def inspector():
    with Inspector() as made:
        yield made


def test_the_inspection_process_finds_what_a_dry_run_in_this_process_finds(inspector):
    prefix = small_prefix()
    found = inspected(inspector, write_prefix(prefix))
    leaves = leaf_values(prefix.graph, prefix.tensors)
    assert found.memory == dry_run(prefix.graph, leaves, prefix.cuts, max_rows=32)
    totals = [found.operations[cut.number].total for cut in prefix.cuts]
    assert totals == sorted(totals)
    assert totals[-1] > 0


def test_a_check_that_takes_too_long_is_ended_and_the_next_is_not(inspector):
    body = artifact(chain("aten.relu.default", 4000))
    with pytest.raises(UnsafeArtifact, match="1 s of a core"):
        inspected(inspector, body, max_check_s=1.0)
    assert inspected(inspector, artifact(after())).memory


def test_restarts_an_inspection_process_that_died():
    with Inspector() as inspector:
        assert inspected(inspector, artifact(after())).memory
        first = inspector.pid
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert inspected(inspector, artifact(after())).memory
        assert inspector.pid != first


def test_does_not_inspect_the_same_prefix_again(tmp_path, monkeypatch):
    kept, body = FileCache(tmp_path, ".json"), write_prefix(small_prefix())
    looks, exchange = [], vars(inspections)["_exchange"]
    monkeypatch.setattr(inspections, "_exchange", lambda *said: looks.append(1) or exchange(*said))
    with Inspector(kept=kept) as inspector:
        found = inspected(inspector, body)
        assert inspected(inspector, body) == found
        assert len(looks) == 1
        assert inspected(inspector, body, max_values=10_000) == found  # other bounds: it might have been refused
        assert len(looks) == 2
        (first, _) = sorted(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime)
        for damage in (b"", b"[]", b'{"1": [1]}', b"\xff"):
            first.write_bytes(damage)
            assert inspected(inspector, body) == found
        assert len(looks) == 6
        for _ in range(2):
            with pytest.raises(OverBudget):
                inspected(inspector, products(10, 256), max_run_s=3e-3)
        assert len(looks) == 8  # what is refused is kept nowhere
    with Inspector(fork=False, kept=FileCache(tmp_path, ".json")) as another:
        assert inspected(another, body) == found
    assert len(looks) == 8


def test_a_closed_inspector_leaves_no_process():
    with Inspector() as inspector:
        pid = inspector.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    inspector.close()


def test_refuses_a_prefix_if_the_inspection_gives_no_valid_answer(inspector, monkeypatch):
    for answer in (b"", b"[]", b"{", b'{"1": [1]}', b'{"x": 1}'):
        monkeypatch.setattr(inspections, "_exchange", lambda *_, answer=answer: answer)
        with pytest.raises(UnsafeArtifact, match="it is refused"):
            inspected(inspector, artifact(after()))


def products(count, side):
    weight = {"ref": "w"}
    return artifact(after(*chain("aten.mm.default", count, weight, begin=weight)), {"w": torch.zeros(side, side)})


def test_limits_the_cost_of_a_run_of_one_operation_and_the_number_of_values(inspector):
    body = products(10, 256)
    found = inspected(inspector, body)
    assert found.operations[2].total >= 10 * 2 * 256**3
    assert found.operations[2].heaviest >= 2 * 256**3
    with pytest.raises(OverBudget, match="--max-run"):
        inspected(inspector, body, max_run_s=3e-3)
    with pytest.raises(OverBudget, match="--max-operation"):
        inspected(inspector, body, max_operation_s=1e-4)
    parts = [node(f"p{number}", "aten.unbind.int", X, 1) for number in range(5)]
    with pytest.raises(UnsafeArtifact, match="12 values"):
        inspected(inspector, artifact(after(*parts)), max_values=12)
    assert inspected(inspector, artifact(after(*parts)), max_values=16).memory


@pytest.mark.parametrize(
    "call",
    [
        node("a", "aten.relu.default"),
        node("a", "aten.relu.default", X, X),
        node("a", "aten.relu.default", 1),
        node("a", "aten.relu.default", self=X, other=X),
        node("a", "aten.relu.default", X, self=X),
        node("a", "aten.add.Tensor", X, "1"),
        node("a", "aten.add.Tensor", X, X, alpha=None),
        node("a", "aten.cat.default", X),
        node("a", "aten.cat.default", [X], 65),
        node("a", "aten.cat.default", [X], True),
        node("a", "aten.conv2d.padding", X, X, None, [1], "none"),
        node("a", "aten.einsum.default", "ij;ij", [X]),
        node("a", "aten.gelu.default", X, approximate="x"),
        node("a", "aten.max_pool2d.default", X, [0, 0]),
        node("a", "aten.ones.default", [1], pin_memory=True),
        node("a", "aten.ones.default", [1 << 60]),
        node("a", "aten.ones.default", [1], device="cuda"),
        node("a", "aten.reshape.default", X, [[1]]),
        node("a", "aten.slice.Tensor", X, 0, 0, 9, 0),
        node("a", "aten.softmax.int", X, 1, {"memory_format": "channels_last"}),
        node("a", "operator.getitem", X, "a"),
        node("a", "operator.mul", 2.0, 2),
        node("a", "operator.mul", 2),
        node("a", "operator.mul", 2, 2, other=2),
    ],
)
def test_an_argument_that_the_operator_does_not_take_is_refused_before_it_is_called(call):
    with pytest.raises(UnsafeArtifact, match=call["op"]):
        read_prefix(artifact([call]))


@pytest.mark.parametrize(
    "call",
    [
        node("a", "aten.add.Tensor", X, 1.5, alpha=2),
        node("a", "aten.avg_pool2d.default", X, 2, 2),
        node("a", "aten.clone.default", X, memory_format={"memory_format": "channels_last"}),
        node("a", "aten.max_pool2d.default", X, [2, 2], [2, 2]),
        node("a", "aten.ones.default", [2], dtype={"dtype": "int64"}, device={"device": ""}, pin_memory=False),
        node("a", "aten.slice.Tensor", X, 1, 0, (1 << 63) - 1),
        node("a", "aten.to.dtype", X, {"dtype": "float16"}),
    ],
)
def test_arguments_that_networks_use_are_taken(call):
    assert read_prefix(artifact(after(call))).graph.nodes[0].op == call["op"]
