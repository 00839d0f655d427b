"""Prefixes that an untrusted client makes by hand, and a way to upload them as anybody could."""

import hashlib
import http.client
import json
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import torch
from safetensors.torch import save

__all__ = ("SHAPE", "X", "after", "artifact", "attacks", "chain", "node", "peak_bytes", "put")

SHAPE = (3, 8, 8)
X = {"ref": "x"}


def node(name, op, *args, **kwargs):
    """One operation."""
    return {"name": name, "op": op, "args": list(args), "kwargs": kwargs}


def artifact(nodes, leaves=None, *, crosses="", shape=SHAPE, dtype="float32", inputs=SHAPE):
    """The file of a prefix with two cuts: its input, and one value (the last) behind all nodes."""
    leaves = leaves or {}
    ends = [{"number": 2, "after": len(nodes) - 1, "tensors": [crosses or nodes[-1]["name"]]}]
    cuts = [{"number": 1, "after": -1, "tensors": ["x"], "shapes": [list(inputs)], "dtypes": ["float32"]}]
    cuts += [{**end, "shapes": [list(shape)], "dtypes": [dtype]} for end in ends]
    graph = {
        "format": 2,
        "orders": {},
        "inputs": ["x"],
        "leaves": [[name, name] for name in leaves],
        "nodes": nodes,
        "outputs": [{"ref": nodes[-1]["name"]}],
        "cuts": [{"name": "here", "bytes_per_sample": 1, "is_relu": False, **cut} for cut in cuts],
    }
    return save(leaves or {"none": torch.zeros(1)}, metadata={"frostline.prefix": json.dumps(graph)})


def chain(op, count, *args, begin=X):
    """One operation on what the one before gave, so many times."""
    names = [f"n{number}" for number in range(count)]
    before = [begin, *({"ref": name} for name in names)]
    return [node(name, op, item, *args) for name, item in zip(names, before, strict=False)]


def after(*nodes):
    """Some nodes, and one behind them that leaves the input as it is."""
    return [*nodes, node("end", "aten.relu.default", X)]


def attacks():
    """Prefixes that once ended a node, filled its memory or held it up, by name."""
    many = node("many", "aten.zeros.default", [200_000_000])
    weight = {"ref": "w"}
    places = node("i", "aten.to.dtype", X, {"dtype": "int64"})
    products = chain("aten.mm.default", 2000, weight, begin=weight)
    return {
        "a dtype of -1": artifact([node("a", "aten.to.dtype", X, -1)]),
        "a dtype of -2": artifact([node("a", "aten.to.dtype", X, -2)]),
        "a complex dtype": artifact([node("a", "aten.to.dtype", X, 8)]),
        "a dtype by its name": artifact([node("a", "aten.to.dtype", X, dtype=8)]),
        "an unknown dtype": artifact([node("a", "aten.to.dtype", X, {"dtype": "complex32"})]),
        "a memory format of 77": artifact([node("a", "aten.clone.default", X, memory_format=77)]),
        "a layout of 1": artifact(after(node("a", "aten.ones.default", [2], layout=1))),
        "all elements of a tensor": artifact(after(many, node("all", "aten.unbind.int", {"ref": "many"}))),
        "a split into ones": artifact(after(many, node("all", "aten.split.Tensor", {"ref": "many"}, 1))),
        "chunks": artifact(after(many, node("all", "aten.chunk.default", {"ref": "many"}, 10**8))),
        "many products": artifact(
            [*products, node("s", "aten.sum.default", {"ref": "n1999"}), node("e", "aten.add.Tensor", X, {"ref": "s"})],
            {"w": torch.zeros(1536, 1536)},
        ),
        "one huge product": artifact(
            after(node("h", "aten.ones.default", [20_000, 20_000]), node("m", "aten.mm.default", *[{"ref": "h"}] * 2))
        ),
        "a product of long integers": artifact(
            after(
                node("h", "aten.ones.default", [1600, 1600], dtype={"dtype": "int64"}),
                node("m", "aten.mm.default", *[{"ref": "h"}] * 2),
            )
        ),
        "a long list": artifact([node("c", "aten.cat.default", [X] * 100_000, 1)]),
        "many nodes": artifact(chain("aten.relu.default", 5000)),
        "a weight of four dimensions": artifact(
            [places, node("e", "aten.embedding.default", weight, {"ref": "i"})],
            {"w": torch.zeros(2, 2, 2, 2)},
        ),
    }


def put(url, body, timeout_s=120.0):
    """Upload a prefix; gives the status and what the answer says."""
    address = urlsplit(url)
    with closing(http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)) as connection:
        connection.request("PUT", f"/v1/prefixes/{hashlib.sha256(body).hexdigest()}", body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def peak_bytes(pid):
    """The most memory that a process had."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:"))
