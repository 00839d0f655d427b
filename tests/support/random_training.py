"""Makes small networks at random, written as people write them, and trains each beside a plain loop on the same rows.

What a network is made of is drawn from a seed: frozen and trained blocks, some of which mix rows, draw, count, have a
backward or hooks of their own; how they are joined; which modes they are in. Either it is cut and trains as the plain
loop does, or it runs whole at the trainer and does, or it is refused in a sentence. Whatever else comes is a finding.
``python tests/support/random_training.py --seconds 3600`` goes on for an hour, from a seed that it says.
"""

import argparse
import copy
import random
import sys
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from frostline.core import TensorSpec
from frostline.core.errors import FrostlineError
from frostline.engines.graph_runner import Runner, leaf_values
from frostline.models import cut_network

__all__ = ("outcome_of",)

WIDTH, TOKENS, CLASSES = 12, 3, 3
STEPS, ROWS = 4, 6
INPUT = (TensorSpec(dtype="float32", shape=(WIDTH,)),)
CLOSE = 1e-6
"""Relative difference of losses and weights that two runs may have."""
TOGETHER = 1e-4
"""The same of features, which other rows of a batch may change by the order of sums alone."""


class Backward(torch.autograd.Function):
    """A function whose backward is not its derivative."""

    @staticmethod
    def forward(context, x, kind):
        context.kind = kind
        return (x * 8).round() / 8 if kind == "rounded" else x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        return {"reversed": -0.5, "rounded": 1.0, "scaled": 0.1}[context.kind] * gradient, None


class Wrapped(nn.Module):
    """A layer, and a function of it and its input."""

    def __init__(self, layer, function):
        super().__init__()
        self.layer, self.function = layer, function
        self.steps, self.temperature = 0, 1.0

    def forward(self, x):
        return self.function(self, x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH // TOKENS, 2, batch_first=True)

    def forward(self, x):
        tokens = x.view(-1, TOKENS, WIDTH // TOKENS)
        return (tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]).flatten(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH // TOKENS, WIDTH // TOKENS, batch_first=True)

    def forward(self, x):
        return self.lstm(x.view(-1, TOKENS, WIDTH // TOKENS))[0].flatten(1)


def linear():
    return nn.Linear(WIDTH, WIDTH)


def of_layer(function):
    return lambda: Wrapped(linear(), function)


def counted(self, x):
    self.steps += 1
    return self.layer(x) * (1 + 0.1 * self.steps)


def hooked():
    layer = linear()
    layer.register_forward_hook(lambda _, __, output: output * 1.5)
    return nn.Sequential(layer, nn.Tanh())


def watched():
    layer = linear()
    layer.register_full_backward_hook(lambda _, given, __: tuple(each if each is None else each * 2 for each in given))
    return layer


def branches(self, x):
    first, second = self.layer(x).chunk(2, 1)
    first = first.clone().relu_()
    return torch.cat([first, second.sigmoid() * first], 1)


class Steps:
    """Counts in an object of the user's."""

    def __init__(self):
        self.steps = 0


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.counter = linear(), Steps()

    def forward(self, x):
        self.counter.steps += 1
        return self.layer(x) * (1 + 0.1 * self.counter.steps)


class Queue(nn.Module):
    """Adds the mean of what came last, which it writes into a buffer in place."""

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.register_buffer("rows", torch.zeros(4, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        given = self.layer(x) + self.rows.mean(0)
        self.rows[int(self.place) % 4] = x[0].detach()
        self.place += 1
        return given


def less_the_distinct(self, x):
    distinct, places = torch.unique(self.layer(x), dim=0, return_inverse=True)
    return distinct[places] - distinct.mean(0)


MIXING = {
    "mean over rows": lambda self, x: self.layer(x - x.mean(0)),
    "softmax over rows": lambda self, x: self.layer(x).softmax(0) * 3,
    "cumsum over rows": lambda self, x: self.layer(x).cumsum(0).tanh(),
    "flip of rows": lambda self, x: 0.7 * self.layer(x) + 0.3 * x.flip(0),
    "roll of rows": lambda self, x: self.layer(x.roll(1, 0)),
    "similarity of rows": lambda self, x: self.layer(x @ x.t() @ x / WIDTH),
    "first row": lambda self, x: self.layer(x) - x[:1],
    "largest of rows": lambda self, x: self.layer(x) / (1 + x.abs().amax()),
    "rows merged": lambda self, x: self.layer(x.reshape(-1).view(WIDTH, -1).t().contiguous()),
    "sorted rows": lambda self, x: self.layer(x.sort(0)[0]),
    "distinct rows": less_the_distinct,
    "norm of batch": lambda self, x: functional.batch_norm(self.layer(x), None, None, training=True),
}
EITHER = {
    "linear": linear,
    "norm": lambda: nn.LayerNorm(WIDTH),
    "activation": lambda: nn.Sequential(linear(), nn.GELU()),
    "in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True)),
    "residual": of_layer(lambda self, x: x + self.layer(x).tanh()),
    "branches": of_layer(branches),
    "tokens": of_layer(lambda self, x: self.layer(x.view(-1, TOKENS, WIDTH // TOKENS).transpose(1, 2).flatten(1))),
    "attention": Attention,
    "recurrent": Recurrent,
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "hooked": hooked,
    "counted": of_layer(counted),
    "counted in an object": Counting,
    "queue": Queue,
    "twice": of_layer(lambda self, x: self.layer(self.layer(x).relu())),
    "rounded": of_layer(lambda self, x: Backward.apply(self.layer(x), "rounded")),
    "read": of_layer(lambda self, x: self.layer(x) / self.temperature),
    "looked at": of_layer(lambda self, x: self.layer(x) * 2 if x.sum() > 0 else self.layer(x)),
    "detached": of_layer(lambda self, x: self.layer(x.detach()) + x),
    "buffered": of_layer(lambda self, x: self.layer(x) * torch.arange(WIDTH, dtype=x.dtype, device=x.device)),
}
FROZEN = {
    **EITHER,
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.3)),
    "dropout by function": of_layer(lambda self, x: functional.dropout(self.layer(x), 0.3, self.training)),
    "drawn by torch": of_layer(lambda self, x: self.layer(x) + 0.1 * torch.rand_like(x)),
    "drawn by Python": of_layer(lambda self, x: self.layer(x) * (1 + random.random())),
    **{name: of_layer(function) for name, function in MIXING.items()},
}
TRAINED = {
    **EITHER,
    "dropout": lambda: nn.Sequential(linear(), nn.Dropout(0.3)),
    "drawn by Python": FROZEN["drawn by Python"],
    "drawn by torch": FROZEN["drawn by torch"],
    "reversed": of_layer(lambda self, x: Backward.apply(self.layer(x), "reversed")),
    "scaled": of_layer(lambda self, x: Backward.apply(self.layer(x), "scaled")),
    "checkpointed": of_layer(lambda self, x: checkpoint(self.layer, x, use_reentrant=False)),
    "watched": watched,
    "mean over rows": of_layer(MIXING["mean over rows"]),
    "frozen behind": lambda: nn.Sequential(linear(), linear().requires_grad_(False)),
}
JOINED = ("chain", "chain", "chain", "weighted", "concatenated", "between", "beside", "input again")


def _drawn(draw, kinds, count, share, else_):
    return [draw.choice(sorted(kinds)) if draw.random() < share else else_ for _ in range(count)]


class Network(nn.Module):
    """A network of blocks; ``made_of`` says what was drawn.

    Its code names no table of kinds: what a network's code reaches is kept whenever it is run or traced, which is what
    most of its time would go into.
    """

    def __init__(self, frozen, trained, joined, mode, made_of):
        super().__init__()
        self.joined, self.mode, self.made_of = joined, mode, made_of
        self.frozen, self.trained = nn.ModuleList(frozen), nn.ModuleList(trained)
        self.weights = nn.Parameter(torch.randn(len(frozen)))
        self.inner = linear()
        self.fc = nn.Linear(2 * WIDTH if self.joined == "concatenated" else WIDTH, CLASSES)
        self.frozen.requires_grad_(False)
        self.train(self.mode != "eval")
        if self.mode == "frozen in eval":
            self.frozen.eval()

    def forward(self, x):
        return self.fc(self._behind(self._joined(x)))

    def _joined(self, x):
        if self.joined == "between":
            return self._run(self.frozen[1:], self.inner(self.frozen[0](x)))
        outputs = []
        for block in self.frozen:
            outputs.append(block(outputs[-1] if outputs else x))
        match self.joined:
            case "weighted":
                return (torch.stack(outputs, 1) * self.weights.softmax(0)[:, None]).sum(1)
            case "concatenated":
                return torch.cat([outputs[0], self.inner(outputs[-1])], 1)
            case "beside":
                return outputs[-1] + self.inner(x)
            case "input again":
                return outputs[-1] * self.inner(x).sigmoid() + x
        return outputs[-1]

    def _behind(self, x):
        first, second = (x[:, :WIDTH], [x[:, WIDTH:]]) if self.joined == "concatenated" else (x, [])
        return torch.cat([self._run(self.trained, first), *second], 1)

    @staticmethod
    def _run(blocks, x):
        for block in blocks:
            x = block(x)
        return x


def network_of(seed):
    """The network of a seed."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    frozen = [draw.choice(sorted(FROZEN)) if draw.random() < 0.6 else "activation" for _ in range(draw.randint(1, 4))]
    trained = [draw.choice(sorted(TRAINED)) if draw.random() < 0.7 else "linear" for _ in range(draw.randint(0, 2))]
    joined, mode = draw.choice(JOINED), draw.choice(("frozen in eval", "frozen in eval", "train", "eval"))
    made_of = {"frozen": frozen, "trained": trained, "joined": joined, "mode": mode}
    return Network([FROZEN[name]() for name in frozen], [TRAINED[name]() for name in trained], joined, mode, made_of)


def batches(seed):
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(ROWS, WIDTH, generator=draw), torch.randint(0, CLASSES, (ROWS,), generator=draw))
        for _ in range(STEPS)
    ]


def trained(network, run, given):
    """Losses of a few steps, and what was learned; what the loop changes in Python it changes in each step."""
    optimizer = torch.optim.SGD([parameter for parameter in network.parameters() if parameter.requires_grad], 0.1)
    torch.manual_seed(1)
    random.seed(1)
    losses = []
    for step, (rows, labels) in enumerate(given):
        for block in network.trained:
            if isinstance(block, Wrapped):
                block.temperature = 1 + 0.5 * step
        loss = functional.cross_entropy(run(rows), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    return torch.tensor(losses, dtype=torch.float64), state


def outcome_of(seed):
    """What became of the network of a seed, and what it is made of.

    Raises:
        AssertionError: It is cut and learns something else than the plain loop, or its features depend on other rows.
    """
    network = network_of(seed)
    plain, given = copy.deepcopy(network), batches(seed)
    try:
        cut = cut_network(network, INPUT)
    except FrostlineError as error:
        return f"refused: {type(error).__name__}", network.made_of
    if cut.prefix is None:
        run, outcome = cut.head, "all at the trainer"
    else:
        crossing = partial(_crossing, cut.prefix)
        _alone(crossing, torch.cat([rows for rows, _ in given]), seed)
        run, outcome = lambda rows: cut.head(*crossing(rows)), f"cut, {type(cut.head).__name__}"
        if cut.fallback:
            outcome += ", told"
    try:
        meant = trained(plain, plain, given)
    except NotImplementedError:  # of an operator without a derivative
        return "the loop fails itself", network.made_of
    _same(trained(network, run, given), meant)
    return outcome, network.made_of


def _crossing(prefix, rows):
    with torch.no_grad():
        features = Runner(prefix.graph).run([rows.clone()], leaf_values(prefix.graph, prefix.tensors))
    return [feature.clone() for feature in features]


def _alone(crossing, rows, seed):
    """Features are the same whatever samples a request has."""
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    together, apart = crossing(rows), [crossing(rows[some]) for some in order.split(5)]
    for number, features in enumerate(together):
        regrouped = torch.cat([some[number] for some in apart])
        off = (regrouped - features[order]).norm() / features.norm().clamp(min=1e-6)
        assert off <= TOGETHER, f"features depend on the other rows of a request: {off:.1e} off"


def _same(ours, plain):
    losses, expected = ours[0], plain[0]
    assert torch.allclose(losses, expected, rtol=CLOSE, atol=CLOSE), (
        f"losses {losses.tolist()}, not {expected.tolist()}"
    )
    assert ours[1].keys() == plain[1].keys()
    for name, tensor in ours[1].items():
        other = plain[1][name]
        off = (tensor.double() - other.double()).norm() / other.double().norm().clamp(min=1e-3)
        assert off <= 10 * CLOSE, f"{name} is {off:.1e} off after {STEPS} steps"


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30), help="the first seed")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"from seed {asked.seed}")
    counts, findings, until = Counter(), 0, time.monotonic() + asked.seconds
    for seed in range(asked.seed, asked.seed + (1 << 30)):
        if time.monotonic() > until:
            break
        try:
            outcome, _ = outcome_of(seed)
        except Exception as error:  # noqa: BLE001 (whatever comes is a finding)
            outcome, findings = "FINDING", findings + 1
            print(f"seed {seed}: {type(error).__name__}: {error}\n  {network_of(seed).made_of}", flush=True)
        counts[outcome] += 1
    for outcome, count in counts.most_common():
        print(f"{count:6} {outcome}")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
