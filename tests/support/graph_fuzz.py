"""Makes graphs out of operators' schemas, sound and broken ones, and runs them where they can do no harm.

Each graph is checked as a node checks one, and run if it is taken; both in a child process with limits.
What a node could not stand is a finding: a run that ends its process, that raises what is no refusal, or that takes
more memory or ten times as long as was reckoned. ``python tests/support/graph_fuzz.py --seconds 600`` goes on for ten
minutes.
"""

import argparse
import json
import math
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import torch

from frostline.core.errors import OverBudget, UnsafeArtifact
from frostline.engines.graph_runner import ALLOWED, FACTORIES, PYTHON_OPERATORS, resolve_allowed
from frostline.engines.machine import limit_memory, look_anew, peak_bytes, resident_bytes
from frostline.engines.measure import BROKEN, GraphLimits, tensors_in
from frostline.engines.torch import TorchEngine
from frostline.models.artifact import graph_from_json, header_of, inspect_prefix, read_prefix
from support.hostile import X, after, artifact

__all__ = ("fuzzed",)

OPERATORS = sorted(ALLOWED)
VIEWING = ("view", "reshape", "expand", "split", "unbind", "slice")
VIEWS = [op for op in OPERATORS if any(word in op for word in VIEWING)]
EQUATIONS = ["ij,jk->ik", "bchw,c->bhw", "...i,...j->...", "ii->i"]
NUMBERS = [0, 1, 0.5, -1.0, 2, 1e30, -1e-30, {"float": "inf"}, {"float": "nan"}, 7]
DTYPES = ["float32", "float16", "bfloat16", "float64", "int64", "int32", "uint8", "bool"]
CONSTANTS = {
    "bool": [False, True],
    "float": NUMBERS,
    "number": NUMBERS,
    "str": [*EQUATIONS, "same", "valid", "none", "tanh", "reflect", "replicate", "circular", "constant"],
    "ScalarType": [{"dtype": name} for name in DTYPES],
    "MemoryFormat": [{"memory_format": name} for name in ("channels_last", "contiguous_format", "preserve_format")],
    "Layout": [{"layout": "strided"}],
    "Device": [{"device": ""}],
}
SIZES = [0, 1, 1, 1, 2, 2, 3, 3, 4, 7, 8, 8, 16, 24, 192]
EXTREME = [-1, -2, -3, 0, 5, 63, 64, 1000, 2**31, 2**31 - 1, -(2**31), 2**40, 2**47, 2**48, 2**62, 2**63 - 1, -(2**63)]
WRONG = [None, True, 1.5, "sum", [], [[]], [X], {"dtype": "int64"}, {"device": ""}, {"ref": "nowhere"}, 2**70, -1, 8]
LEAVES = {
    "weight": (4, 3, 3, 3),
    "line": (2, 3, 8),
    "weight1": (4, 3, 3),
    "row": (8,),
    "square": (8, 8),
    "pile": (2, 8, 8),
    "one": (),
    "channels": (3,),
    "places": (5,),
    "mask": (8, 8),
}
# Weights that go with their operators.
WEIGHTS = {"aten.conv1d.default": "weight1", "aten.conv2d.default": "weight", "aten.embedding.default": "square"}
MEMORY = 1 << 30
MAX_RUN_BYTES = 64 << 20
# Beside what was reckoned: what torch's libraries make ready at their first call, and the allocator keeps.
SLACK_BYTES = 96 << 20
# A run that takes longer than this, and so many times its estimate, holds others up.
LONG_S, TOO_LONG = 1.0, 10
LIMITS = GraphLimits(max_nodes=400, max_values=2000, max_run_s=4.0, max_operation_s=1.0, operations_per_s=5e10)


def leaves():
    made = {name: torch.linspace(-1, 1, math.prod(shape)).reshape(shape) for name, shape in LEAVES.items()}
    return {**made, "places": torch.tensor([0, 1, 2, 7, -1]), "mask": made["mask"] > 0}


class Growing:
    """A graph that grows by calls that mostly work, since they are tried on shapes first."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.leaves = leaves()
        self.nodes = []
        self.values = {"x": torch.empty(8, 3, 8, 8, device="meta")}
        self.values |= {name: torch.empty_like(leaf, device="meta") for name, leaf in self.leaves.items()}

    def grown(self):
        for _ in range(self.random.choice([1, 2, 4, 8, 16])):
            self.grow()
        if self.random.random() < 0.1:
            self.deepen()
        return artifact(after(*self.nodes), self.leaves)

    def grow(self):
        for _ in range(60):
            call = self.call(self.random.choice(VIEWS if self.random.random() < 0.2 else OPERATORS))
            made = self.tried(call)
            if made is not None or self.random.random() < 0.005:
                self.nodes.append(call)
                self.values[call["name"]] = made
                return

    def deepen(self):
        """A long chain of what worked once."""
        op = self.random.choice(["aten.relu.default", "aten.add.Tensor", "aten.mul.Tensor", "aten.matmul.default"])
        last = {"ref": self.random.choice(self.tensors())}
        for _ in range(self.random.choice([20, 100, 500])):
            args = [last] if op == "aten.relu.default" else [last, last]
            self.nodes.append({"name": f"n{len(self.nodes)}", "op": op, "args": args, "kwargs": {}})
            last = {"ref": self.nodes[-1]["name"]}

    def tensors(self):
        return [name for name, value in self.values.items() if isinstance(value, torch.Tensor)]

    def tried(self, call):
        """What a call gives on shapes, where it is allowed at all."""
        try:
            [node] = graph_from_json({"inputs": [], "leaves": [], "nodes": [call], "outputs": []}).nodes
            args = [self.value(arg) for arg in node.args]
            kwargs = {name: self.value(kwarg) for name, kwarg in node.kwargs}
            if node.op in FACTORIES:
                kwargs["device"] = "meta"
            with torch.no_grad():
                made = resolve_allowed(node.op)(*args, **kwargs)
        except (*BROKEN, UnsafeArtifact, OverBudget):
            return None
        total = sum(item.numel() * item.itemsize for item in tensors_in(made))
        return made if total < MAX_RUN_BYTES or self.random.random() < 0.02 else None

    def value(self, argument):
        match type(argument).__name__:
            case "Ref":
                return self.values[argument.name]
            case "Token":
                return torch.device("meta") if argument.kind == "device" else getattr(torch, argument.value)
            case "tuple":
                return [self.value(item) for item in argument]
            case _:
                return argument

    def call(self, op):
        name = f"n{len(self.nodes)}"
        if op in PYTHON_OPERATORS:
            left = self.reference(list) if op == "operator.getitem" else self.integer()
            return {"name": name, "op": op, "args": [left, self.integer()], "kwargs": {}}
        args, kwargs = [], {}
        _, packet, overload = op.split(".")
        for argument in getattr(getattr(torch.ops.aten, packet), overload)._schema.arguments:  # noqa: SLF001 (torch has no public word for it)
            if argument.has_default_value() and self.random.random() < 0.5:
                if not argument.kwarg_only:
                    break  # the rest have their defaults
                continue
            value = self.argument(str(argument.real_type), argument.name)
            if argument.name == "weight" and self.random.random() < 0.5:
                value = {"ref": WEIGHTS.get(op, "row")}
            value = self.random.choice(WRONG) if self.random.random() < 0.01 else value
            if argument.kwarg_only:
                kwargs[argument.name] = value
            else:
                args.append(value)
        return {"name": name, "op": op, "args": args, "kwargs": kwargs}

    def argument(self, kind, name):
        if kind.startswith("Optional["):
            return None if self.random.random() < 0.4 else self.argument(kind[9:-1], name)
        if kind.startswith("List["):
            return [self.argument(kind[5:-1], name) for _ in range(self.random.choice([0, 1, 1, 2, 2, 3, 4, 4]))]
        if kind in CONSTANTS:
            return self.random.choice(CONSTANTS[kind])
        if kind == "Tensor":
            return self.random.random() if self.random.random() < 0.05 else self.reference(torch.Tensor)
        is_dimension = "dim" in name or "axis" in name
        return self.random.choice([0, 1, 2, 3, -1, -2]) if is_dimension else self.integer()

    def reference(self, kind):
        found = [name for name, value in self.values.items() if isinstance(value, kind)]
        return {"ref": self.random.choice(found[-6:] + found)} if found else X

    def integer(self):
        sizes = [name for name, value in self.values.items() if isinstance(value, int) and not isinstance(value, bool)]
        if sizes and self.random.random() < 0.2:
            return {"ref": self.random.choice(sizes)}
        return self.random.choice(EXTREME) if self.random.random() < 0.1 else self.random.choice(SIZES)


def batch_of(seed):
    """Numbers that are not all tame."""
    values = np.random.default_rng(seed).normal(0, 10 ** float(seed % 5), (8, 3, 8, 8)).astype(np.float32)
    values.reshape(-1)[:6] = [np.nan, np.inf, -np.inf, 1e38, -1e38, 0]
    return values


def looked_at(seed, phase):
    """What becomes of one graph."""
    phase("making")
    body = Growing(seed).grown()
    phase("checking")
    try:
        found = inspect_prefix(header_of(body), max_rows=16, limits=LIMITS)
    except (UnsafeArtifact, OverBudget) as error:
        return f"refused: {type(error).__name__}"
    if found.memory[2].to_here.at(8) > MAX_RUN_BYTES:
        return "too large to be run here"
    phase("running")
    prefix = read_prefix(body)
    engine = TorchEngine(prefix.graph, prefix.cuts, prefix.tensors, memory=found.memory)
    look_anew()
    before, began = resident_bytes(), time.process_time()
    try:
        engine.run(batch_of(seed), 2)
        became = "ran"
    except UnsafeArtifact:
        became = "failed on its values"
    took_s, estimated_s = time.process_time() - began, found.operations[2].total / LIMITS.operations_per_s
    if took_s > max(LONG_S, TOO_LONG * estimated_s):
        return f"TOOK {took_s:.1f} s where {estimated_s:.3f} s was reckoned"
    more = peak_bytes() - before - int(1.25 * found.memory[2].to_here.at(8))
    return became if more < SLACK_BYTES else f"TOOK {more >> 20} MiB more than was reckoned"


def child(begin, end):
    """Look at some graphs, and say before each step what comes."""
    limit_memory(MEMORY)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    torch.set_num_threads(1)
    for seed in range(begin, end):
        began = time.process_time()
        became = looked_at(seed, lambda step, seed=seed: say({"seed": seed, "step": step}))
        say({"seed": seed, "became": became, "seconds": round(time.process_time() - began, 1)})


def say(value):
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def fuzzed(begin, end, *, longest_s=math.inf):
    """Look at the graphs of some seeds.

    Returns:
        How often each thing became of one, and findings: sentences about those that a node could not stand.
    """
    became, findings = Counter(), []
    until = time.monotonic() + longest_s
    while begin < end and time.monotonic() < until:
        command = [sys.executable, __file__, "--child", str(begin), str(end)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            last = {"seed": begin, "step": "starting"}
            for line in process.stdout:
                last = json.loads(line)
                if "became" in last:
                    became["TOOK more" if "TOOK" in last["became"] else last["became"]] += 1
                    if "TOOK" in last["became"]:
                        findings.append(f"seed {last['seed']}: {last['became']}")
                    if time.monotonic() > until:
                        process.kill()
                        break
            words = process.stderr.read().strip().splitlines()
        if process.returncode and "step" in last:
            # A check that ends its process is a refusal: that is why it has one of its own.
            if last["step"] in ("making", "checking") and process.returncode < 0:
                became["ended its check"] += 1
            else:
                why = words[-1] if words else "nothing said"
                findings.append(f"seed {last['seed']}, {last['step']}: ended with {process.returncode}: {why[:300]}")
        begin = last["seed"] + 1
    return became, findings


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--child", nargs=2, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**9))
    asked = parser.parse_args()
    if asked.child:
        child(*asked.child)
        return 0
    print(f"graphs from seed {asked.seed} on, for {asked.seconds:g} s")
    became, findings = fuzzed(asked.seed, asked.seed + 10**9, longest_s=asked.seconds)
    print(*(f"{count:8} {what}" for what, count in became.most_common()), sep="\n")
    print(*findings, sep="\n")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
