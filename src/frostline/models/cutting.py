"""Cuts a user's network: finds its frost line, the cuts before it, the prefix to ship and the head to train."""

import json
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from frostline.core import Cut, Graph, GraphNode, Ref, TensorSpec
from frostline.core.errors import ModelError, NothingFrozen, NotTraceable
from frostline.core.graph import Argument, Lengths, at_length, bucket_of, buckets, stretches
from frostline.engines.graph_runner import LengthRunner, Runner, leaf_values
from frostline.engines.machine import compute_slot
from frostline.engines.measure import version_of
from frostline.models.absent import Unsteady
from frostline.models.artifact import Prefix
from frostline.models.cuts import DTYPE_BYTES, input_cuts
from frostline.models.freezing import require_shapes, trained_paths, used_parameters
from frostline.models.frozen import (
    NOBODY_FROZE,
    FrozenPart,
    FrozenRest,
    equals_whole,
    features_of,
    find_frozen,
    frozen_rest,
    refuse_train_mode,
    training_flags,
)
from frostline.models.graph import after, changes, prune, reads, sources_of_change
from frostline.models.head import Head, SkippingHead, WholeHead, skipping_head
from frostline.models.modules import (
    Inputs,
    ModuleCall,
    all_in_eval,
    input_specs,
    modes,
    record,
    tensor_paths,
    unwrap,
    zeros,
)
from frostline.models.outside import kept_weights
from frostline.models.skipping import silent_threads
from frostline.models.tracing import (
    UNFIT,
    Trace,
    are_close,
    cast_inputs,
    device_of,
    kept_draws,
    observe_run,
    random_batch,
    run_whole,
    trace,
)

__all__ = (
    "ChainedModule",
    "CutNetwork",
    "cut_network",
    "shorten_prefix",
    "uncut_network",
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ChainedModule:
    """A module in a chain, each of which takes exactly the tensor that the one before it gave.

    Attributes:
        path: path of the module.
        module: the module.
        gives: shape and dtype of what it gives, a sample.
    """

    path: str
    module: nn.Module
    gives: TensorSpec


_RECORDED_ROWS = 2


def _cut_at_a_boundary(
    model: nn.Module, inputs: Sequence[TensorSpec], flags: Mapping[str, bool]
) -> tuple[FrozenPart, SkippingHead, str] | str:
    """Find the longest leading chain of frozen modules that can be traced one behind the other.

    Each takes exactly the tensor that the one before it gave, the first the network's one input; a module that cannot
    be traced itself, or is not frozen whole, is searched inside. What is found is verified before it is trusted: on
    two random batches, in train and in eval mode, outputs, gradients and buffers of the head must be bit for bit
    those of the whole network.

    Args:
        model: the user's network; left as it was.
        inputs: specifications of its inputs.
        flags: the modes in which its head will be trained, by the paths of its modules.

    Returns:
        The frozen part, the head, and the path of the chain's last module; or why there is none.

    Raises:
        ModelError: The network does not run on such inputs at all.
    """
    whole, batch = _recorded(model, inputs)
    if len(inputs) != 1:
        return "a network of several inputs is not cut between its modules"
    chain, _ = _chained(whole.inner, batch[0], version_of(batch[0]), flags, trained_paths(model))
    for length in range(len(chain), 0, -1):
        found = _cut_behind(model, chain[:length], inputs, flags)
        if found is not None:
            return *found, chain[length - 1].path
    return "no frozen modules at its start follow one upon the other"


def _cut_behind(
    model: nn.Module, chain: Sequence[ChainedModule], inputs: Sequence[TensorSpec], flags: Mapping[str, bool]
) -> tuple[FrozenPart, SkippingHead] | None:
    """The frozen part and the head for this chain, if they hold what they must."""
    together = _Chain(chain)
    try:
        traced = trace(together, inputs, training=flags)
        part = find_frozen(together, traced, inputs)
        head = None if isinstance(part, str) else skipping_head(model, part, inputs, flags)
    except (NotTraceable, NothingFrozen, Unsteady):
        return None
    if isinstance(part, str):
        return None
    return (part, head) if head is not None and equals_whole(model, part, head, inputs, flags, batches=2) else None


class _Chain(nn.Module):
    """Modules of a network one behind the other, each at its own path."""

    def __init__(self, chain: Sequence[ChainedModule]) -> None:
        super().__init__()
        self._links = tuple(chain)
        for link in chain:
            *owners, name = link.path.split(".")
            place: nn.Module = self
            for owner in owners:
                if owner not in dict(place.named_children()):
                    place.add_module(owner, nn.Module())
                place = place.get_submodule(owner)
            place.add_module(name, link.module)

    def forward(self, value: torch.Tensor) -> torch.Tensor:
        for link in self._links:
            value = link.module(value)
        return value


def _recorded(model: nn.Module, inputs: Sequence[TensorSpec]) -> tuple[ModuleCall, list[torch.Tensor]]:
    """One run in eval mode and the batch it was on: random numbers, or zeros where the network minds those."""
    device = device_of(model)
    batches = [random_batch(model, inputs, _RECORDED_ROWS, torch.Generator().manual_seed(0))]
    batches.append(zeros(inputs, _RECORDED_ROWS, device))
    batches = [cast_inputs(model, batch) for batch in batches]
    why = ""
    for batch in batches:
        try:
            with modes(model, all_in_eval(model)), compute_slot():
                return record(model, batch), batch
        except UNFIT as error:
            why = _first_line(error)
    shapes = " and ".join(str(list(spec.shape)) for spec in inputs)
    raise ModelError(f"the network does not run on an input of shape {shapes}: {why}")


def _chained(
    calls: Sequence[ModuleCall],
    value: torch.Tensor,
    version: int,
    flags: Mapping[str, bool],
    trained: Collection[str],
) -> tuple[list[ChainedModule], torch.Tensor]:
    """The links that follow upon a value, and the value that the last of them gave."""
    chain: list[ChainedModule] = []
    for call in calls:
        if call.given is None or not call.takes(value, version):
            # What takes or gives more than one tensor may begin with modules that do not.
            inner, value = _chained(call.inner, value, version, flags, trained)
            return [*chain, *inner], value
        spec = _spec(call.given)
        if spec is not None and _is_fixed(call, flags, trained):
            chain.append(ChainedModule(path=call.path, module=call.module, gives=spec))
        else:
            inner, last = _chained(call.inner, value, version, flags, trained)
            chain.extend(inner)
            if not inner or last is not call.given:
                break
        value, version = call.given, call.given_version
    return chain, value


def _is_fixed(call: ModuleCall, flags: Mapping[str, bool], trained: Collection[str]) -> bool:
    """Whether the module can be traced, and nothing in it is trained or changes from run to run."""
    spec = None if call.taken is None else _spec(call.taken)
    if spec is None or any(f"{call.path}.{path}".lstrip(".") in trained for path in tensor_paths(call.module)):
        return False
    own = {path: flags[f"{call.path}.{path}".rstrip(".")] for path, _ in call.module.named_modules()}
    try:
        graph = prune(trace(call.module, [spec], training=own).graph)
    except NotTraceable:
        return False
    return not sources_of_change(graph, ())


def _spec(value: torch.Tensor) -> TensorSpec | None:
    dtype = str(value.dtype).removeprefix("torch.")
    is_batch = value.dim() > 0 and len(value) == _RECORDED_ROWS and dtype in DTYPE_BYTES
    return TensorSpec(tuple(value.shape[1:]), dtype) if is_batch else None


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


_MENDS = {
    "Inf or NaN": "convert the network to float32 or bfloat16",
    "by the values of a tensor": "let its code choose by torch.where, or freeze the layer that decides whole",
    "by the size of the batch": "let its code say sizes as -1 or x.shape[0]",
    "that are not torch's": "let its code draw them by torch, in the head, and start no threads",
    "by what their code keeps in Python": "let its code give the same for the same input, or train that layer too",
    "computes gradients itself": "freeze up to a layer before that",
    "makes layers as it runs": "run it once on a batch before the job is made, so that it has them",
    "as it runs": "let its code count elsewhere, or train that layer too",
    "two tensors at its frost line": "freeze up to a layer that gives the one tensor of which both are made",
    "use_reentrant": "pass use_reentrant=False, as PyTorch advises",
    "Cache, which": "set model.config.use_cache = False",
    "in output": "let it return tensors alone, as with model.config.use_cache = False",
}
_ANOTHER = "freeze up to a layer whose output is a tensor with a row for each sample"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutNetwork:
    """A network with its frost line found.

    Attributes:
        cuts: all legal cuts from 0 (the encoded sample) to the frost line, which is the last.
        prefix: the frozen part, to be shipped; None where the frost line is the network's input.
        head: the trainable rest, which shares the network's tensors.
        fallback: the reason why the network, or a part of what is frozen, is not cut as finely as a traced one would
            be, or why the frost line lies before the layer that ``freeze`` was given; None where there is nothing to
            say.
        part: part of the network that never changes, of which ``prefix`` is made; None where there is no prefix.
        rest: frozen layers that run at the trainer all the same; None where there are none, or nobody can tell.
    """

    cuts: tuple[Cut, ...]
    prefix: Prefix | None
    head: Head
    fallback: str | None = None
    part: FrozenPart | None = None
    rest: FrozenRest | None = None

    @property
    def frost_line(self) -> Cut:
        """The last cut: what comes after it is trained."""
        return self.cuts[-1]


# What is compared draws random numbers and runs modules with other forwards: another cut meanwhile would see that.
_ONE_AT_A_TIME = threading.RLock()


def _nobody_asks(_: Prefix) -> None:
    pass


def cut_network(
    model: nn.Module,
    inputs: Inputs,
    *,
    frozen_in_eval: bool = False,
    on_found: Callable[[Prefix], None] = _nobody_asks,
) -> CutNetwork:
    """Trace ``model`` as it will be while its head trains, and cut it.

    A network that cannot be traced is cut at the boundary between two of its modules, and where there is
    none either, not at all: its input is delivered. ``fallback`` says so.

    Args:
        model: parameters that are trained require gradients, the others do not. What is compiled, or wrapped for
            several devices, is cut as the network inside (see ``models.modules``).
        inputs: the per-sample shape of its one input of float32 pixels, or a ``TensorSpec`` for each of its inputs.
        frozen_in_eval: run frozen layers in eval mode even where they are in train mode now; the head puts those that
            it runs itself into eval mode.
        on_found: function that is told what the prefix will be, before whole network and parts are compared, which
            takes most of the time. They may differ, and then it is another one, or none.

    Raises:
        NothingFrozen: No operation comes before the first trainable layer.
        FrozenInTrainMode: A frozen layer is in train mode, where it would behave differently.
        ModelError: The inputs are of a kind that cannot be carried.
    """
    specs, model = input_specs(inputs), unwrap(model)
    require_shapes(model)
    _refuse_without_values(model)
    with _ONE_AT_A_TIME, kept_draws(), kept_weights(model), silent_threads():
        flags = training_flags(model, specs, frozen_in_eval=frozen_in_eval)
        found = _cut(model, specs, flags, frozen_in_eval=frozen_in_eval, on_found=on_found)
    if frozen_in_eval:  # those too that run at the trainer, as behind a trained layer
        found.head.keep_in_eval_(module for path, module in model.named_modules() if not flags[path])
    return found


def _refuse_without_values(model: nn.Module) -> None:
    for path, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ModelError(
                f"parameter {path!r} has a shape and no values, as accelerate's cpu_offload and device_map leave it: "
                "load the network whole, since a node runs its frozen layers and takes their weights"
            )


def _cut(
    model: nn.Module,
    specs: Sequence[TensorSpec],
    flags: Mapping[str, bool],
    *,
    frozen_in_eval: bool,
    on_found: Callable[[Prefix], None],
) -> CutNetwork:
    cut = partial(_cut_traced, model, specs, flags, frozen_in_eval=frozen_in_eval, on_found=on_found)
    try:
        traced = trace(model, specs, training=flags)
    except NotTraceable as error:
        why = str(error)
        for begun in _begun(model, specs, flags):
            found = cut(begun, why=why)
            if not isinstance(found, str):
                return found
    else:
        found = cut(traced)
        if not isinstance(found, str):
            return found
        why = found
    return _untraced(model, specs, flags, why, frozen_in_eval=frozen_in_eval)


def _begun(model: nn.Module, specs: Sequence[TensorSpec], flags: Mapping[str, bool]) -> Iterator[Trace]:
    """Traces of a network up to where it cannot be followed: with what is surely needed there, and with all."""
    try:
        traced = trace(model, specs, training=flags, may_end_early=True)
    except NotTraceable:
        return
    yield traced
    yield replace(traced, graph=replace(traced.graph, outputs=traced.alive))


def _cut_traced(
    model: nn.Module,
    specs: Sequence[TensorSpec],
    flags: Mapping[str, bool],
    traced: Trace,
    *,
    why: str = "",
    frozen_in_eval: bool,
    on_found: Callable[[Prefix], None],
) -> CutNetwork | str:
    """The network cut as its trace says; or why that cannot be.

    Args:
        model: the user's network.
        specs: specifications of its inputs.
        flags: the modes in which its head will be trained.
        traced: the trace of it.
        why: the reason why the trace ends early; empty where it does not.
        frozen_in_eval: see ``cut_network``.
        on_found: see ``cut_network``.
    """
    try:
        part = find_frozen(model, traced, specs)
    except NothingFrozen:
        if why:
            return why
        raise
    if isinstance(part, str):
        return why or uncut_network(model, specs, f"{part}: the whole network runs here; {_ANOTHER}")
    if not frozen_in_eval:
        refuse_train_mode(model, part.prefix.graph, specs)
    on_found(part.prefix)
    try:
        head = skipping_head(model, part, specs, flags, None if why else after(part.traced.graph, part.frost_line))
    except Unsteady as error:
        return why or str(error)
    if head is None or not equals_whole(model, part, head, specs, flags, batches=2 if why else 1):
        return why or (_OTHERWISE if _is_finite(model, part, specs) else _NOT_FINITE)
    rest = frozen_rest(model, part, specs)
    reason = _with_rest(_why_shorter(part) if part.mixing or not why else part.moved, rest)
    if why and not _holds_all_frozen(model, specs, traced.graph):
        ends = f"the frozen part ends at {part.frost_line.name!r}, before that"
        reason = "; ".join([why, ends, *(mixed.why for mixed in part.mixing[-1:]), _mend(why)])
    if _has_layers_behind(part, head.taken_tensors_):
        again = len(part.frost_line.tensors) - len(head.taken_tensors_)
        reason = "; ".join(filter(None, [reason, _MADE_AGAIN.format(again)]))
    return CutNetwork(cuts=part.cuts, prefix=part.prefix, head=head, fallback=reason or None, part=part, rest=rest)


def _has_layers_behind(part: FrozenPart, taken: frozenset[int]) -> bool:
    """Whether frozen weights are used before the frost line, behind the last tensor there that a head takes."""
    graph, names = part.traced.graph, part.frost_line.tensors
    places = {node.name: place for place, node in enumerate(graph.nodes)}
    last = max((places.get(names[number], -1) for number in taken), default=-1)
    weights = {name for name, _ in graph.leaves}
    behind = graph.nodes[last + 1 : part.frost_line.after + 1]
    return len(taken) < len(names) and any(not weights.isdisjoint(reads(node)) for node in behind)


_MADE_AGAIN = (
    "frozen layers run here too, since tensors at the frost line ({}) are made of others there by code that is in no "
    "module of its own: put it into modules, or freeze up to a layer that gives one tensor"
)


def _is_finite(model: nn.Module, part: FrozenPart, specs: Sequence[TensorSpec]) -> bool:
    """Whether the frozen part gives finite numbers for a few random samples, without which nothing can be compared."""
    batch = random_batch(model, specs, _RECORDED_ROWS, torch.Generator().manual_seed(0))
    return all(bool(feature.isfinite().all()) for feature in features_of(part, batch, device_of(model)))


def _why_shorter(part: FrozenPart) -> str:
    if part.mixing:
        return f"{part.mixing[-1].why}: the frozen layers from there on run here, as in your loop"
    stopped = (
        f"a node does not run {part.stopped_by}: the frozen layers from there on run here; compute that by other "
        "operators, or freeze up to a layer before it"
    )
    return stopped if part.stopped_by else part.moved


def _holds_all_frozen(model: nn.Module, specs: Sequence[TensorSpec], graph: Graph) -> bool:
    """Whether the graph of a trace that ends early has all the frozen weights that the network uses."""
    read = {name for node in graph.nodes for name in reads(node)}
    paths = {path for name, path in graph.leaves if name in read}
    named = model.named_parameters(remove_duplicate=False)
    followed = {id(parameter) for path, parameter in named if path in paths}
    try:
        used = [parameter for _, parameter in used_parameters(model, specs) if parameter is not None]
    except ModelError:  # on zeros
        used = [*model.parameters()]
    return all(parameter.requires_grad or id(parameter) in followed for parameter in used)


def _with_rest(reason: str, rest: FrozenRest | None) -> str:
    """Why the network is not cut as it stands, and what is lost by it."""
    if rest is None or not rest.is_lost:
        return reason
    return f"{reason}; {rest}" if reason else f"{rest}, because {rest.why}"


_NOT_FINITE = (
    "its frozen layers give Inf or NaN for random samples, as where 16 bits do not hold them, so that nothing shows if "
    "the network does the same behind these alone"
)
_OTHERWISE = (
    "behind its frozen layers alone the network does otherwise than whole, since its code looks at values before the "
    "frost line or keeps some in Python"
)


def _untraced(
    model: nn.Module, specs: Sequence[TensorSpec], flags: Mapping[str, bool], why: str, *, frozen_in_eval: bool
) -> CutNetwork:
    if all(parameter.requires_grad for parameter in model.parameters()):
        raise NothingFrozen(NOBODY_FROZE)
    found = _cut_at_a_boundary(model, specs, flags)
    if isinstance(found, str):
        return uncut_network(model, specs, f"{why}, and {found}: the whole network runs here; {_mend(why)}")
    part, head, path = found
    if not frozen_in_eval:
        refuse_train_mode(model, part.prefix.graph, specs)
    ends = f"its modules up to {path!r} can be traced one behind the other, so the frozen part ends there"
    mixed = "".join(f"; {mixed.why}" for mixed in part.mixing[-1:])
    reason = f"{why}; {ends}{mixed}; {_mend(why)}"
    return CutNetwork(cuts=part.cuts, prefix=part.prefix, head=head, fallback=reason, part=part)


def _mend(why: str) -> str:
    """What to do about a network that cannot be traced."""
    return next((mend for cause, mend in _MENDS.items() if cause in why), _ANOTHER)


def uncut_network(model: nn.Module, specs: Sequence[TensorSpec], reason: str) -> CutNetwork:
    """The network as it is: its inputs are delivered, and all of it is the head."""
    return CutNetwork(cuts=input_cuts(specs), prefix=None, head=WholeHead(model), fallback=reason)


# Relative errors by which sums of another order differ, in 32 bits and in 16.
_ERROR, _ERROR_OF_16_BITS = 1e-4, 3e-2
_TRIED = 64  # tokens of the longest text that is tried: enough for several buckets, and quick
_SLICED = 4  # arguments of a slice: the tensor, its dimension, from where and up to where


def shorten_prefix(
    model: nn.Module, prefix: Prefix, tokenizer: bytes, head: nn.Module, *, frozen_in_eval: bool
) -> Prefix:
    """The frozen part, with its lengths where it may run on fewer tokens; as it was where texts have to be padded.

    It is traced once more, at the fewest tokens. Both traces may differ in numbers that grow with the tokens alone, and
    the network has to give the same for texts with padding and without it, on a few that are made up; its head too,
    and learn the same, whatever stands in the places of what the frozen part gives for padding.

    Args:
        model: the network, which takes ids and mask as the rows of one array.
        prefix: the frozen part.
        tokenizer: JSON of the tokenizer.
        head: trainable rest of the network.
        frozen_in_eval: see ``cut_network``.
    """
    (_, max_length), padding = prefix.input_shape, json.loads(tokenizer)["padding"]
    shortest = buckets(max_length)[0]
    if shortest >= max_length or str(padding["direction"]) != "Right":
        return prefix
    if any(changes(node) for node in prefix.graph.nodes):
        return prefix
    try:
        short = cut_network(model, (TensorSpec((2, shortest), "int64"),), frozen_in_eval=frozen_in_eval).prefix
        found = None if short is None else _compared(prefix, short.graph, max_length, shortest)
        texts = _texts(bucket_of(_TRIED, buckets(max_length)), int(padding["pad_id"]), device_of(model))
        return found if found is not None and _holds(model, found, head, texts) else prefix
    except UNFIT:
        return prefix


def _compared(prefix: Prefix, short: Graph, max_length: int, shortest: int) -> Prefix | None:
    """The frozen part with its lengths, which nothing has tried yet; None where its traces differ in more."""
    if len(short.nodes) != len(prefix.graph.nodes):
        return None
    short = _named_alike(short, prefix.graph)
    graph = _sliced(prefix.graph, short, max_length)
    found = stretches(graph, short, max_length, shortest)
    if found is None:
        return None
    sizes = {node.name: node.shape for node in short.nodes}
    shapes = []
    for cut in prefix.cuts:
        grows = [
            _growth(shape, (2, shortest) if name in short.inputs else _per_sample(sizes[name]), max_length - shortest)
            for name, shape in zip(cut.tensors, cut.shapes, strict=True)
        ]
        shapes.append(tuple(grows))
    return replace(prefix, graph=graph, lengths=Lengths(max_length=max_length, stretches=found, shapes=tuple(shapes)))


def _named_alike(short: Graph, full: Graph) -> Graph:
    """The graph with the names of another one's operations, place by place."""
    pairs = list(zip(short.nodes, full.nodes, strict=True))
    names = {node.name: other.name for node, other in pairs}
    nodes = tuple(replace(_renamed_node(node, names), name=other.name) for node, other in pairs)
    return replace(short, nodes=nodes, outputs=tuple(_renamed(output, names) for output in short.outputs))


def _renamed_node(node: GraphNode, names: Mapping[str, str]) -> GraphNode:
    kwargs = tuple((name, _renamed(value, names)) for name, value in node.kwargs)
    return replace(node, args=tuple(_renamed(value, names) for value in node.args), kwargs=kwargs)


def _renamed(value: Argument, names: Mapping[str, str]) -> Argument:
    if isinstance(value, Ref):
        return Ref(names.get(value.name, value.name))
    return tuple(_renamed(item, names) for item in value) if isinstance(value, tuple) else value


def _sliced(full: Graph, short: Graph, max_length: int) -> Graph:
    """The graph with a slice of all, where a trace at as many tokens as there are positions has left it out."""
    nodes = []
    for node, other in zip(full.nodes, short.nodes, strict=True):
        is_all = (node.op, other.op) == ("aten.alias.default", "aten.slice.Tensor") and len(other.args) == _SLICED
        nodes.append(replace(node, op=other.op, args=(*node.args, *other.args[1:-1], max_length)) if is_all else node)
    return replace(full, nodes=tuple(nodes))


def _per_sample(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, tuple):
        raise ModelError("a value has no shape that grows with the batch")
    return tuple(dim.fixed for dim in shape[1:])


def _growth(shape: Sequence[int], short: Sequence[int], fewer: int) -> tuple[int, ...]:
    """Growth of each dimension with a token."""
    found = [divmod(size - less, fewer) for size, less in zip(shape, short, strict=True)]
    if any(rest for _, rest in found):
        raise ModelError("a dimension does not grow in line with the tokens")
    return tuple(grows for grows, _ in found)


def _texts(max_length: int, pad: int, device: torch.device) -> torch.Tensor:
    """One made-up text for each of a few lengths: ids and mask."""
    lengths = buckets(max_length)
    counts = [lengths[0] - 3, lengths[len(lengths) // 2] - 1, max_length]
    rows = torch.zeros((len(counts), 2, max_length), dtype=torch.int64, device=device)
    rows[:, 0] = pad
    for row, count in zip(rows, counts, strict=True):
        # Ids above and below that of padding, which every vocabulary has.
        row[0, :count] = (torch.arange(count, device=device) * 3 + count) % 4 + (pad + 1 if pad < 4 else 0)
        row[1, :count] = 1
    return rows


def _holds(model: nn.Module, prefix: Prefix, head: nn.Module, texts: torch.Tensor) -> bool:
    """Whether the network, its frozen part in buckets and its head give for some texts what they do for padded ones."""
    lengths = prefix.lengths
    assert lengths is not None, "they were compared"
    longest = int(texts.shape[2])
    graph, cuts = at_length(prefix.graph, prefix.cuts, lengths, longest)
    filled = nn.functional.pad(texts, (0, lengths.max_length - longest))
    leaves = [leaf.to(texts.device) for leaf in leaf_values(prefix.graph, prefix.tensors)]
    bucketed = LengthRunner(prefix.graph, prefix.cuts, leaves, lengths, device=texts.device)
    last = prefix.cuts[-1]
    if not bucketed.takes(last.number):
        return False
    with torch.no_grad(), modes(model, all_in_eval(model)):
        padded = run_whole(model, [texts])
        bare = [run_whole(model, [row[None, :, : int(row[1].sum())]])[0] for row in texts]
        if not all(_is_close(own, other) for own, other in zip(bare, padded, strict=True)):
            return False
        runner = Runner(graph, cuts=cuts, device=texts.device)
        full = runner.run([texts], leaves, upto=cuts[-1])
        other = _Disturbed(prefix, bucketed, runner, cuts, texts)
        disturbed = runner.run([texts], leaves, upto=cuts[-1], observe=other)
        short = bucketed.run(filled, last.number)
    for found in (disturbed, short):
        pairs = enumerate(zip(full, found, strict=True))
        if not all(_agree(last, lengths, place, *pair, texts) for place, pair in pairs):
            return False
    noisy = other.features(last, full, short)
    for training in (all_in_eval(model), dict.fromkeys(all_in_eval(model), True)):
        runs = []
        for features in (short, noisy):
            with modes(model, training):  # a head may write in place
                runs.append(observe_run(model, partial(head, [feature.clone() for feature in features]), seed=1))
        if not are_close(*runs):
            return False
    return True


class _Disturbed:
    """Puts random numbers into the places of padding at every cut of a run, which nothing that is used may mind.

    Where the frozen part has zeros there itself, as behind a product with the mask, they stay.

    Args:
        prefix: the frozen part with its lengths.
        bucketed: runner of it in buckets.
        runner: runner of it on padded texts.
        cuts: cuts of that runner.
        texts: ids and mask of these.
    """

    def __init__(
        self, prefix: Prefix, bucketed: LengthRunner, runner: Runner, cuts: Sequence[Cut], texts: torch.Tensor
    ) -> None:
        assert prefix.lengths is not None, "they were compared"
        self._lengths, self._light, self._runner = prefix.lengths, bucketed.light, runner
        self._stops = {cut.after: cut for cut in cuts[1:-1] if bucketed.takes(cut.number)}
        self._counts: list[int] = texts[:, 1].sum(1).tolist()
        self._length = int(texts.shape[2])

    def __call__(self, index: int, values: Any) -> None:
        """Change what crosses a cut behind a node of the run."""
        if (cut := self._stops.get(index)) is not None:
            slots = self._runner.crossing[cut.number]
            own = [values[slot] for slot in slots]
            made = self.features(cut, own, own)
            for slot, feature in zip(slots, made, strict=True):
                values[slot] = feature

    def features(self, cut: Cut, full: Sequence[torch.Tensor], features: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What crosses a cut, with other numbers behind the bucket of each text.

        Args:
            cut: the cut.
            full: tensors that cross it for the padded texts.
            features: the same, or tensors as long as the whole.
        """
        grown = zip(cut.tensors, full, features, self._lengths.shapes[cut.number - 1], strict=True)
        return [
            feature if name in self._light or not own.is_floating_point() else self._other(own, feature, grows)
            for name, own, feature, grows in grown
        ]

    def _other(self, own: torch.Tensor, feature: torch.Tensor, grows: Sequence[int]) -> torch.Tensor:
        if not any(behind.any() for behind in self._behind(own, grows, self._length)):
            return feature
        made, draw = feature.clone(), torch.Generator().manual_seed(0)
        scale = 3 * own[-1].std()  # of the text without padding
        length = self._length if feature.shape == own.shape else self._lengths.max_length
        for behind in self._behind(made, grows, length):
            behind.copy_(torch.randn(behind.shape, generator=draw).to(behind) * scale)
        return made

    def _behind(self, feature: torch.Tensor, grows: Sequence[int], length: int) -> Iterator[torch.Tensor]:
        """The places behind the bucket of each text, for texts of a length."""
        for row, count in zip(feature, self._counts, strict=True):
            fewer = length - bucket_of(count, buckets(self._lengths.max_length))
            for dim, per_token in enumerate(grows):
                if per_token:
                    yield row.narrow(dim, row.shape[dim] - fewer * per_token, fewer * per_token)


def _agree(
    cut: Cut, lengths: Lengths, place: int, full: torch.Tensor, short: torch.Tensor, texts: torch.Tensor
) -> bool:
    """Whether a tensor is the same where the texts have tokens."""
    grows = lengths.shapes[cut.number - 1][place]
    for row, other, text in zip(full, short, texts, strict=True):
        tokens = int(text[1].sum())
        region = tuple(
            slice(0, tokens if per_token else size) for per_token, size in zip(grows, row.shape, strict=True)
        )
        if not _is_close(other[region], row[region]):
            return False
    return True


def _is_close(value: torch.Tensor, meant: torch.Tensor) -> bool:
    if not meant.is_floating_point():
        return torch.equal(value, meant)
    error = _ERROR if meant.dtype == torch.float32 else _ERROR_OF_16_BITS
    off, size = (value - meant).float(), meant.float()
    return bool(off.square().mean().sqrt() <= error * size.square().mean().sqrt())
