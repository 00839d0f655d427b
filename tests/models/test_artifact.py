"""A prefix is data: it reads back as it was, and nothing that is planted in it runs or takes memory."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from frostline.core.errors import ModelError, UnsafeArtifact
from frostline.engines.graph_runner import ALLOWED, resolve_allowed
from frostline.engines.torch import TorchEngine
from frostline.models import cut_network, freeze
from frostline.models.artifact import digest_of, read_prefix, write_prefix
from support.networks import Small

pytestmark = pytest.mark.promise("data")

SHAPE = (3, 32, 32)


def small_prefix():
    torch.manual_seed(0)
    return cut_network(freeze(Small(), "body", input_shape=SHAPE), SHAPE).prefix


BODY = write_prefix(small_prefix())


def tampered(change) -> bytes:
    length = int.from_bytes(BODY[:8], "little")
    graph = json.loads(json.loads(BODY[8 : 8 + length])["__metadata__"]["frostline.prefix"])
    change(graph)
    return save(load(BODY), metadata={"frostline.prefix": json.dumps(graph)})


def engine_of(body: bytes) -> TorchEngine:
    prefix = read_prefix(body)
    return TorchEngine(prefix.graph, prefix.cuts, prefix.tensors)


def set_op(name):
    return lambda graph: graph["nodes"][0].update(op=name)


def test_a_prefix_survives_writing_and_reading():
    written, read = small_prefix(), read_prefix(BODY)
    assert [node.op for node in read.graph.nodes] == [node.op for node in written.graph.nodes]
    assert read.cuts == written.cuts
    batch = torch.rand(8, *SHAPE).numpy()
    last = written.cuts[-1].number
    before = TorchEngine(written.graph, written.cuts, written.tensors).run(batch, last)
    assert (engine_of(BODY).run(batch, last)[0] == before[0]).all()


def test_the_same_prefix_has_the_same_digest():
    assert digest_of(write_prefix(small_prefix())) == digest_of(BODY)


@pytest.mark.parametrize(
    "op",
    ["os.system", "aten.__class__.default", "operator.attrgetter", "aten.rand.default", "aten.from_file.default", ""],
)
def test_an_operator_that_is_not_on_the_list_is_refused(op):
    with pytest.raises(UnsafeArtifact):
        engine_of(tampered(set_op(op)))


@pytest.mark.parametrize(
    "change",
    [
        lambda graph: graph["nodes"][0]["args"].__setitem__(0, {"ref": "nowhere"}),
        lambda graph: graph["nodes"][0]["args"].__setitem__(0, {"code": "1+1"}),
        lambda graph: graph["nodes"][0]["args"].__setitem__(0, {"dtype": "__class__"}),
        lambda graph: graph["nodes"].append(dict(graph["nodes"][0])),
        lambda graph: graph["cuts"][1].update(shapes=[[1]]),
        lambda graph: graph["cuts"][1].update(after=10**6),
        lambda graph: graph["cuts"][1].update(dtypes=["float64"]),
        lambda graph: graph["cuts"].clear(),
        lambda graph: graph["cuts"].__setitem__(2, {**graph["cuts"][2], "after": graph["cuts"][1]["after"]}),
        lambda graph: graph["cuts"][1].update(tensors=[graph["leaves"][0][0]]),
        lambda graph: graph["cuts"][1].update(tensors=[graph["nodes"][-1]["name"]]),
        lambda graph: graph["cuts"][0].update(after=0),
        lambda graph: graph["cuts"][0].update(tensors=["y"]),
        lambda graph: graph["cuts"][0].update(shapes=[[3, 1 << 39, 1 << 39]]),
        lambda graph: graph["inputs"].append("y"),
        lambda graph: graph["inputs"].clear(),
        lambda graph: graph.update(format=99),
        lambda graph: graph.pop("nodes"),
        lambda graph: graph["leaves"].__setitem__(0, ["p_stem_0_weight", "missing"]),
    ],
)
def test_a_graph_that_does_not_hold_together_is_refused(change):
    with pytest.raises(UnsafeArtifact):
        engine_of(tampered(change))


def test_a_graph_that_asks_for_more_memory_than_there_is_can_be_seen_before_it_runs():
    def blow_up(graph):
        last = graph["nodes"][-1]["name"]
        graph["nodes"].append(
            {"name": "huge", "op": "aten.repeat.default", "args": [{"ref": last}, [1, 10**9]], "kwargs": {}}
        )
        graph["nodes"].append(
            {"name": "small", "op": "aten.sum.dim_IntList", "args": [{"ref": "huge"}, [1]], "kwargs": {}}
        )

    def at_the_end(graph):
        blow_up(graph)
        graph["cuts"][-1].update(after=len(graph["nodes"]) - 1, tensors=["small"], shapes=[[]])

    engine = engine_of(tampered(at_the_end))
    assert engine.footprint(len(read_prefix(BODY).cuts)).bytes_per_sample > 10**9


def node(name, op, *args, **kwargs):
    return {"name": name, "op": op, "args": list(args), "kwargs": kwargs}


def with_nodes_in_front(*nodes) -> bytes:
    """The prefix with further nodes before its own, which nothing reads."""

    def change(graph):
        graph["nodes"][:0] = nodes
        for cut in graph["cuts"][1:]:
            cut["after"] += len(nodes)

    return tampered(change)


X = {"ref": "x"}


@pytest.mark.parametrize(
    "nodes",
    [
        [node("a", "operator.mul", "text", 50_000_000)],
        [node("a", "operator.mul", [0], 50_000_000)],
        [node("a", "operator.mul", 1 << 40, 1 << 40), node("b", "operator.mul", {"ref": "a"}, 2)],
        [node("a", "operator.floordiv", 1, 0)],
        [node("a", "aten.ones.default", [8], device="cpu")],
        [node("a", "aten.pixel_shuffle.default", X, 0)],
        [node("a", "aten.dropout.default", X, 0.5, True)],
        [node("a", "aten.add_.Tensor", {"ref": "p_stem_0_bias"}, 1)],
        [node("a", "aten.gt.Scalar", X, 0), node("b", "aten.index.Tensor", X, [{"ref": "a"}])],
        [node("a", "aten.batch_norm.default", X, None, None, None, None, True, 0.1, 1e-5, False)],
        [node("a", "aten.div.Tensor_mode", X, X, rounding_mode="trunc")],
        [node("a", "aten.view.dtype", X, {"dtype": "bool"})],
        [node("a", "aten.view.dtype", X, {"dtype": "int64"})],
    ],
)
def test_refuses_prefixes_that_could_harm_the_process(nodes):
    with pytest.raises(UnsafeArtifact):
        engine_of(with_nodes_in_front(*nodes))


@pytest.mark.parametrize("place", [-40, 40])
@pytest.mark.parametrize(
    "op", [("aten.index.Tensor", X, [None, {"ref": "i"}]), ("aten.gather.default", X, 1, {"ref": "k"})]
)
def test_an_index_that_is_out_of_range_is_refused_when_it_is_used(op, place):
    """Its value is not known before it runs; the process goes on."""
    body = with_nodes_in_front(
        node("i", "aten.full.default", [1], place, dtype={"dtype": "int64"}),
        node("j", "aten.to.dtype", X, {"dtype": "int64"}),
        node("k", "aten.full_like.default", {"ref": "j"}, place),
        node("a", *op),
    )
    engine = engine_of(body)
    with pytest.raises(UnsafeArtifact, match="out of bounds"):
        engine.run(np.zeros((8, *SHAPE), np.float32), 2)


def test_a_dry_run_makes_no_tensor_with_data():
    engine = engine_of(with_nodes_in_front(node("a", "aten.ones.default", [10**12])))
    assert engine.footprint(2).fixed_bytes >= 4 * 10**12


def asking_for(right):
    """A prefix that makes ``(rows - 8) * right`` billion numbers beside its own."""
    return with_nodes_in_front(
        node("rows", "aten.sym_size.int", X, 0),
        node("left", "operator.sub", {"ref": "rows"}, 8),
        right,
        node("both", "operator.mul", {"ref": "left"}, {"ref": "right"}),
        node("size", "operator.mul", {"ref": "both"}, 10**9),
        node("a", "aten.ones.default", [{"ref": "size"}]),
    )


def test_memory_that_does_not_grow_in_line_with_the_batch_is_refused():
    """Nothing at 8 and 32 rows, half a terabyte between."""
    with pytest.raises(UnsafeArtifact, match="in line with the batch"):
        engine_of(asking_for(node("right", "operator.sub", 32, {"ref": "rows"})))


def test_memory_that_grows_faster_than_the_batch_is_seen_at_the_largest():
    engine = engine_of(asking_for(node("right", "operator.sub", {"ref": "rows"}, 16)))
    assert engine.footprint(2).at(32) >= 4 * 24 * 16 * 10**9


def test_every_allowed_operator_exists():
    assert all(callable(resolve_allowed(name)) for name in ALLOWED)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_prefix_are_refused(body):
    with pytest.raises(UnsafeArtifact):
        read_prefix(body)


@given(place=st.integers(8, 400), value=st.integers(0, 255))
def test_a_flipped_byte_in_the_header_is_refused_or_harmless(place, value):
    body = bytearray(BODY)
    body[place] = value
    try:
        engine_of(bytes(body))
    except UnsafeArtifact:
        return


def test_an_operator_that_nodes_do_not_run_is_named_when_the_prefix_is_written():
    prefix = small_prefix()
    nodes = (replace(prefix.graph.nodes[0], op="aten.special_bessel_j0.default"), *prefix.graph.nodes[1:])
    with pytest.raises(ModelError, match="bessel_j0"):
        write_prefix(replace(prefix, graph=replace(prefix.graph, nodes=nodes)))


class _Planted:
    def __reduce__(self):
        return pytest.fail, ("something was unpickled",)


def test_pickles_and_archives_that_run_code_are_no_prefixes(tmp_path):
    """Neither by themselves nor in the place of weights: nothing of them is loaded."""
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),))
    torch.export.save(exported, tmp_path / "x.pt2")
    torch.save(_Planted(), tmp_path / "x.pt")
    torch.save(_Planted(), tmp_path / "y.pt", _use_new_zipfile_serialization=False)
    bodies = [pickle.dumps(_Planted()), *(path.read_bytes() for path in sorted(tmp_path.iterdir()))]
    for body in bodies:
        for sent in (body, len(body).to_bytes(8, "little") + body, BODY[:8] + body):
            with pytest.raises(UnsafeArtifact):
                read_prefix(sent)


@pytest.mark.parametrize("number", [6, 1, -1, True, "float32", {"dtype": "object"}, {"dtype": 6}, {"ref": "x"}])
def test_only_the_name_of_a_dtype_is_one(number):
    """Torch takes numbers for dtypes, of which some end the process."""
    for op, args in (("aten.to.dtype", (X, number)), ("aten.full_like.default", (X, 1))):
        more = {} if op == "aten.to.dtype" else {"dtype": number}
        with pytest.raises(UnsafeArtifact):
            engine_of(with_nodes_in_front(node("a", op, *args, **more)))
