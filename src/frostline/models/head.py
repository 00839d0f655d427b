"""The trainable rest of the user's network: run here from the frost line on, or as data trained by another process."""

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from frostline.core import Graph, TensorSpec
from frostline.core.errors import ModelError, NotTraceable, UnsafeArtifact
from frostline.engines.graph_runner import Runner, leaf_values, refused_call, resolve_allowed
from frostline.engines.machine import compute_slot
from frostline.models.absent import Unsteady
from frostline.models.artifact import flatten_tensors, graph_from_json, graph_to_json, integer, restore_tensors, text
from frostline.models.cuts import contiguous_copies
from frostline.models.freezing import frozen_modules
from frostline.models.frozen import (
    ALIKE,
    FrozenPart,
    equals_whole,
    features_of,
    has_alike_features,
    order_graph,
    own_paths,
)
from frostline.models.graph import after, before, guard_inputs, map_cut
from frostline.models.modules import (
    NOT_EXPORTED,
    StandIn,
    graft,
    has_same_parameters,
    is_split,
    lone_buffers,
    lone_parameters,
    module_at,
    run_lock,
    tensor_paths,
    with_buffers,
    with_modules,
    with_parameters,
)
from frostline.models.outside import NOT_PLAIN, is_other, is_same_plain, outside_values, plain_copy
from frostline.models.skipping import (
    SkipPlan,
    enclosed_modules,
    makes_same_features,
    run_behind,
    to_the_line,
    whole_plan,
)
from frostline.models.tracing import (
    UNFIT,
    Given,
    are_close,
    cast_inputs,
    device_of,
    is_origin_known,
    kept_draws,
    leaf_getters,
    modules_of,
    random_batch,
    trace,
)

__all__ = (
    "Head",
    "HeadGraph",
    "Mode",
    "PortableHead",
    "PortedHead",
    "SkippingHead",
    "TracedRest",
    "WholeHead",
    "head_from_json",
    "head_to_json",
    "make_portable",
    "skipping_head",
)


_ROWS = 3  # of a check: a BatchNorm gives two rows the same whatever they are
_ROWS_OF_A_PLAN = 2
_SEED = 1
_OTHER_NOW = "{} of the network was replaced since the job was made, and its head has the old one: call job.refreeze()"
_NOT_COMPILED = "torch.compile leaves job.head as it is: compile your trained layers, as model.classifier.compile()"
_CHANGED = "was changed since the job was made"
_TAKES_ACTIVATIONS = (
    "the head was called with {}, and takes batch.features alone: what else the network's forward takes, such as "
    "labels, has a default there, with which the network was cut; compute what needs it from what the head returns"
)
_CAST = (
    "{} to {} is on around job.head and reaches what the head computes alone: frozen layers are computed apart, "
    "in the precision of the job's accuracy=, so that losses differ by rounding from those of a loop that casts all"
)
_OF_BEFORE = (
    "job.head runs on features that no pass gave since job.refreeze(): where they are copies, kept from before, they "
    "are those of other frozen layers, and the head learns from the wrong ones: take batches from the loader anew"
)


class Head(StandIn, ABC):
    """Takes the activations at the frost line and returns what the whole network would.

    Its parameters and buffers are those of the user's own network, under the same names: an optimiser over
    ``head.parameters()``, ``model.load_state_dict`` and ``model.state_dict`` see the same tensors. Outputs,
    gradients and BatchNorm statistics equal the whole network's bit for bit on one machine.

    ``train()`` and ``eval()`` of the head, or of the network, choose how its layers behave; layers that are frozen
    whole keep the mode that they have.

    Args:
        model: the user's network.
        paths: paths of the tensors that become the head's, as in ``model.state_dict()``.
        modules: modules of the network, by path, whose mode (train or eval) may matter to the head.

    Attributes:
        expects_autocast: autocast around it is meant for the head alone, so that nobody has to be told.
        awaits_pass: features from before ``refreeze`` look like its own, and no pass has given any since.
    """

    def __init__(self, model: nn.Module, paths: Iterable[str], modules: Mapping[str, nn.Module]) -> None:
        super().__init__(model)
        self.expects_autocast = self.awaits_pass = self._knows_it_is_not_compiled = False
        self._modules_run = dict(modules)
        self._frozen = tuple(inner for _, module in frozen_modules(model) for inner in module.modules())
        self._in_eval: tuple[nn.Module, ...] = ()
        self._put: dict[int, nn.Module] = {}  # into eval mode, by this head
        self._shared: tuple[Any, ...] = ()  # what copies have in common
        graft(self, [*paths], modules)
        # What lies in a module that is the network's own is the network's too.
        self._places = {
            path: (own, model.get_submodule(path))
            for path, own in self.named_modules(remove_duplicate=False)
            if path and isinstance(self.get_submodule(path.rpartition(".")[0]), StandIn)
        }
        self._look: Callable[[], object] | None = None
        self._alone = dict(lone_parameters(self, model))
        self._lone_buffers = list(lone_buffers(self, model))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_look": None}  # which is at this network

    def look_before_runs(self, look: Callable[[], object]) -> None:
        """Have a function look, each time before the head runs, whether the network is what its features are of."""
        self._look = look

    def __deepcopy__(self, memo: dict[int, Any]) -> "Head":
        """A head of its own, with the frozen weights of this one, which nothing changes."""
        own = {id(tensor) for tensor in (*self.parameters(), *self.buffers())}
        model = self._model[0]
        shared = (*model.parameters(), *model.buffers(), *self._shared)
        memo.update((id(value), value) for value in shared if id(value) not in own)
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def keep_in_eval(self, modules: Iterable[nn.Module]) -> None:
        """From the next run on put modules of the network into eval mode, whoever puts them into train mode again."""
        self._in_eval = tuple(modules)

    def forward(self, *features: torch.Tensor | Sequence[torch.Tensor], **others: Any) -> Any:
        """What the network returns for these activations; autocast around it reaches what is computed here alone.

        Args:
            features: the features as a loader's batch gives them: one tensor ``[batch, ...]``, or several as arguments
                or as one sequence. They are not changed.
            others: arguments that are refused: what else the network's ``forward`` may take was not there at the cut.

        Raises:
            ModelError: More is given than what crosses the frost line, or less; or the head is to be exported.
        """
        is_traced = not torch.compiler.is_compiling() and torch._C._is_tracing()  # noqa: SLF001 (as torch.jit asks)
        if is_traced or torch.compiler.is_exporting() or type(others) is not dict:
            raise ModelError(NOT_EXPORTED)
        if others:
            raise ModelError(_TAKES_ACTIVATIONS.format(f"{', '.join(others)} by name"))
        if len(features) == 1 and hasattr(features[0], "features"):
            raise ModelError("the head was called with a batch: write job.head(batch.features)")
        given = [tensor for item in features for tensor in ((item,) if isinstance(item, torch.Tensor) else item)]
        return self._run_uncompiled(given) if torch.compiler.is_compiling() else self._run_as_it_is(given)

    def _run_uncompiled(self, tensors: list[torch.Tensor]) -> Any:
        """What ``_run`` gives, of which torch.compile cannot follow the tensors that are not there."""
        torch._dynamo.graph_break(msg=_NOT_COMPILED)  # noqa: SLF001 -- an error of fullgraph=True says it
        return torch.compiler.disable(self._run_and_warn)(tensors)  # type: ignore[no-untyped-call]

    def _run_and_warn(self, tensors: list[torch.Tensor]) -> Any:
        if not self._knows_it_is_not_compiled:
            self._knows_it_is_not_compiled = True
            warnings.warn(_NOT_COMPILED, stacklevel=2)
        return self._run_as_it_is(tensors)

    def _run_as_it_is(self, tensors: list[torch.Tensor]) -> Any:
        """What ``_run`` gives with the modules and the tensors that are the head's now."""
        self._put_into_eval()
        with (
            run_lock(self._model[0]),
            with_modules(self._model[0], self.replaced_modules()),
            with_parameters(self._model[0], self),
            with_buffers(self._lone_buffers),
        ):
            if self._look is not None:
                self._look()
            return self._run(tensors)

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the network's layers that the head runs, by its own ``train``; frozen layers keep theirs.

        Raises:
            ModelError: The head was sharded in a way in which it cannot run.
        """
        self._refuse_shards()
        model, run = self._model[0], {id(module) for module in (*self._modules_run.values(), *self.modules())}
        kept = [(module, module.training) for module in model.modules() if id(module) not in run]
        kept += [(module, module.training) for module in self._frozen]
        super().train(mode)
        model.train(mode)
        for module, own in kept:
            module.training = own
        self._put_into_eval()
        return self

    def _put_into_eval(self) -> None:
        for module in self._in_eval:
            if module.training:
                module.training = False
                self._put[id(module)] = module

    def give_modes_back(self, other: "Head") -> None:
        """Have what this head put into eval mode, and another one does not, behave as this head does."""
        theirs = vars(other)
        kept = {id(module) for module in theirs["_in_eval"]}
        for module in self._put.values():
            if id(module) in kept:
                theirs["_put"][id(module)] = module
            else:
                module.training = self.training

    def replaced_modules(self) -> dict[str, nn.Module]:
        """Modules that somebody has put into the head in place of its own, by path; outermost ones alone.

        Raises:
            ModelError: Modules or tensors of the network that the head runs were replaced.
        """
        found: dict[str, nn.Module] = {}
        for path, (own, theirs) in self._places.items():
            if any(path.startswith(f"{outer}.") for outer in found):
                continue
            ours, there = module_at(self, path), module_at(self._model[0], path)
            if ours is not None and ours is not own:
                found[path] = ours
            elif there is not theirs and not has_same_parameters(there, theirs):
                raise ModelError(_OTHER_NOW.format(f"module {path!r}"))
        for path, tensor in self._alone.items():
            owner, _, name = path.rpartition(".")
            if getattr(module_at(self._model[0], owner), name, None) is not tensor:
                raise ModelError(_OTHER_NOW.format(f"parameter {path!r}"))
        return found

    def _refuse_shards(self) -> None:
        if any(map(is_split, self.children())):
            raise ModelError(
                "the head runs within the network's own code, so that its layers cannot be sharded one by one: shard "
                "it whole, by fully_shard(job.head)"
            )

    @abstractmethod
    def _run(self, tensors: list[torch.Tensor]) -> Any:
        """What the network returns for the activations at the frost line."""


class WholeHead(Head):
    """The user's network itself, for a frost line that is its input.

    Args:
        model: the user's network.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, tensor_paths(model), dict(model.named_modules(remove_duplicate=False)))
        self.finish()

    def _refuse_shards(self) -> None:
        if is_split(self):
            raise ModelError(
                "the whole network runs at the trainer, since it was not cut, and such a head cannot be sharded: wrap "
                "job.head in DistributedDataParallel, or mend what the job says about the cut"
            )

    def _run(self, tensors: list[torch.Tensor]) -> Any:
        with compute_slot():
            return self._model[0](*cast_inputs(self._model[0], tensors))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadGraph:
    """What a traced head computes in one combination of modes.

    Attributes:
        graph: the graph from the frost line to the network's outputs.
        places: the places, which of the tensors that cross the frost line it takes, in the order of its inputs.
        runner: runner of the graph.
        leaves: the function, for each leaf of the graph, that gives the network's own tensor: ``.to()`` replaces
            buffers.
    """

    graph: Graph
    places: tuple[int, ...]
    runner: Runner
    leaves: tuple[Callable[[], torch.Tensor], ...]

    @property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The network's own parameters, buffers and constants, by the names in ``graph.leaves``."""
        return {path: leaf() for (_, path), leaf in zip(self.graph.leaves, self.leaves, strict=True)}

    def run(self, tensors: Sequence[torch.Tensor]) -> Any:
        """What the network returns."""
        [output] = self.runner.run([tensors[place] for place in self.places], [leaf() for leaf in self.leaves])
        return output


class TracedRest:
    """A network's graphs from the frost line on, one for each combination of modes, traced when it is first needed.

    Args:
        model: the user's network.
        part: the frozen part.
        inputs: specifications of the network's inputs.
    """

    def __init__(self, model: nn.Module, part: FrozenPart, inputs: Sequence[TensorSpec]) -> None:
        self._model = model
        self._part = part
        self._inputs = tuple(inputs)
        self._modules = modules_of(after(part.traced.graph, part.frost_line), model)
        self._graphs: dict[tuple[bool, ...], HeadGraph] = {}

    def __call__(self, features: Sequence[torch.Tensor]) -> Any:
        """What the network returns for these activations, in the modes that its layers are in."""
        return self.graph().run(features)

    def graph(self) -> HeadGraph:
        """What is computed in the modes that the layers are in.

        Raises:
            ModelError: The network gives something else than one tensor.
            NotTraceable: The head cannot be traced in these modes.
        """
        now = {path: module.training for path, module in self._modules.items()}
        kind = tuple(now.values())
        if kind not in self._graphs:
            self._graphs[kind] = self._traced({**self._part.traced.training, **now})
        return self._graphs[kind]

    def _traced(self, flags: Mapping[str, bool]) -> HeadGraph:
        model, part = self._model, self._part
        with torch.enable_grad():  # as the part was traced: elsewhere transformers asks other things of sizes
            traced = trace(model, self._inputs, training=flags)
        graph = contiguous_copies(order_graph(model, traced.graph, self._inputs, part.mixing)[0], part.turned)
        cut = map_cut(part.frost_line, part.traced.graph, graph)
        if cut is None:
            raise NotTraceable(_OTHERWISE)
        places = tuple(part.frost_line.tensors.index(name) for name in cut.tensors)
        device, frozen, rest = device_of(model), guard_inputs(before(graph, cut)), after(graph, cut)
        batch = random_batch(model, self._inputs, _ROWS, torch.Generator().manual_seed(0))
        with torch.no_grad():
            made = Runner(frozen, device=device).run(batch, [leaf() for leaf in leaf_getters(model, traced, frozen)])
            meant = features_of(part, batch, device)
        if not are_close(made, [meant[place] for place in places]):
            raise NotTraceable(_OTHERWISE)
        runner, leaves = Runner(rest, device=device), leaf_getters(model, traced, rest)
        if not traced.structure.is_leaf():
            raise ModelError("the network gives something else than one tensor")
        return HeadGraph(graph=rest, places=places, runner=runner, leaves=leaves)


_DOES_MORE = "it does more than its trace says, such as a backward or hooks of its own or what it reads of Python"
_OTHERWISE = "the frozen part of the network computes something else when its head changes mode"


# An attribute that has had so many values without an effect before the frost line is none that the frozen part minds.
_MANY_VALUES = 3


class SkippingHead(Head):
    """The user's own forward, with what lies before the frost line skipped.

    So custom backwards, hooks, what the code reads of Python, copies and the refusals of PyTorch are the user's own.
    What is not computed is only a shape; where the code asks such a tensor for more, it is told that there is nothing.

    Args:
        model: the user's network.
        part: the frozen part.
        inputs: specifications of the network's inputs.
        plan: calls that are skipped (see ``models.skipping.plan_of``).
        flags: the modes in which it is trained.
        rest: graph from the frost line on; None where the network was not traced as a whole.
        meant: activations that the frozen part gives for ``_batch_of_a_plan``; later runs are compared with them.
    """

    def __init__(
        self,
        model: nn.Module,
        part: FrozenPart,
        inputs: Sequence[TensorSpec],
        plan: SkipPlan,
        flags: Mapping[str, bool],
        rest: Graph | None,
        meant: Sequence[torch.Tensor],
    ) -> None:
        inside, idle = tuple(f"{path}." for path in plan.idle), {id(model.get_submodule(path)) for path in plan.idle}
        modules = {
            path: module
            for path, module in model.named_modules(remove_duplicate=False)
            if not f"{path}.".startswith(inside) and id(module) not in idle
        }
        super().__init__(model, own_paths(model, part, rest, inside), modules)
        self._part = part
        self._shared = (part, plan)
        self._inputs = tuple(inputs)
        self._plan = plan
        self._flags = dict(flags)
        self._is_traced = rest is not None
        self._meant = list(meant)
        self._harmless: dict[tuple[str, str | int], tuple[Any, ...]] = {}
        self._attributes: list[tuple[Mapping[str, Any], bool]] | None = None
        self._outside: list[tuple[str, Callable[[], Any], Any]] | None = outside_values(model)
        self.finish()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_attributes": None, "_outside": None}  # which are this network's own

    @property
    def reads(self) -> tuple[tuple[str, str, Any], ...]:
        """What of its modules' attributes is read before the frost line; see ``SkipPlan``."""
        return self._plan.reads

    @property
    def taken(self) -> frozenset[int]:
        """Numbers of the tensors at the frost line that its code takes; it makes the others again, of these."""
        return self._plan.taken

    def changed_read(self, *, theirs_alone: bool = False) -> str | None:
        """What changes the layers before the frost line by its value now, in words; None where nothing does.

        A value that differs from that of the cut is tried once: the network runs on two rows. So one that only the head
        minds, as an adapter that is switched off there, is the user's own.

        Args:
            theirs_alone: leave out PyTorch's own modules, which have more attributes than all others.
        """
        if self._attributes is None:
            modules = [self._model[0].get_submodule(path) for path, _, _ in self._plan.reads]
            self._attributes = [(vars(item), type(item).__module__.startswith("torch.nn.")) for item in modules]
        for (path, name, value), (attributes, is_of_torch) in zip(self._plan.reads, self._attributes, strict=True):
            now = attributes.get(name)
            if not (theirs_alone and is_of_torch) and now is not value and self._minds((path, name), now, value):
                whose = f"module {path!r}" if path else "the network"
                return f"attribute {name!r} of {whose}, which its frozen layers read, {_CHANGED}"
        if self._outside is None:
            self._outside = outside_values(self._model[0])
        for place, (name, get, value) in enumerate(self._outside):
            if (now := get()) is not value and self._minds(("", place), now, value):
                others = dict.fromkeys(repr(name) for name, get, value in self._outside if is_other(get(), value))
                names = " or ".join([*others][:_MANY_VALUES]) or repr(name)
                return f"variable {names}, which code of the frozen layers reads, {_CHANGED}"
        return None

    def _minds(self, key: tuple[str, str | int], now: Any, value: Any) -> bool:
        """Whether the frozen part minds that a value is another one now; what it did not mind a few times it never."""
        if is_same_plain(now, value):
            return False
        copied, harmless = plain_copy(now), self._harmless.get(key, ())
        now = ("the object", id(now)) if copied is NOT_PLAIN else copied
        is_same = plain_copy(value) is not NOT_PLAIN and now == value
        if is_same or now in harmless or len(harmless) >= _MANY_VALUES:
            return False
        if not self.makes_the_same():
            return True
        self._harmless[key] = (*harmless, now)
        return False

    def makes_the_same(self, *, is_moved: bool = False, is_cast: bool = False) -> bool:
        """Whether the network still makes what the frozen part makes, in the modes in which it is trained.

        Args:
            is_moved: allow for other kernels, since its tensors are elsewhere or lie otherwise than when it was cut.
            is_cast: leave the caller's autocast on.
        """
        model = self._model[0]
        batch = _batch_of_a_plan(model, self._inputs)
        flags = {path: self._flags.get(path, module.training) for path, module in model.named_modules()}
        try:
            with kept_draws(), to_the_line(model, flags, is_cast=is_cast):
                meant = [tensor.to(device_of(model)) for tensor in self._meant]
                return makes_same_features(model, self._plan, cast_inputs(model, batch), meant, is_moved=is_moved)
        except UNFIT:
            return False

    def _tell_cast(self, given: torch.Tensor) -> None:
        """Warn once where the caller's casts would change what is frozen in a loop without a job."""
        kind = given.device.type
        is_automatic = torch.is_autocast_enabled(kind)
        if not is_automatic and given.dtype.itemsize >= self._meant[0].dtype.itemsize:
            return
        dtype = torch.get_autocast_dtype(kind) if is_automatic else given.dtype
        self.expects_autocast, how = True, "autocast" if is_automatic else "a cast of features"
        if not (is_automatic and self.makes_the_same(is_cast=True)):
            warnings.warn(_CAST.format(how, str(dtype).removeprefix("torch.")), stacklevel=5)  # who called the head

    @property
    def given(self) -> Given:
        """What its features are known by."""
        return self._inputs, self._meant

    def traced_graphs(self) -> tuple[HeadGraph, HeadGraph] | None:
        """What it computes in train and in eval mode, as graphs, with its modes kept; None where it was not traced.

        Raises:
            ModelError: The graphs are not what the user's own code does, gradients included; or it gives something else
                than one tensor.
            NotTraceable: The head cannot be traced in one of the modes.
        """
        if not self._is_traced:
            return None
        model, rest = self._model[0], TracedRest(self._model[0], self._part, self._inputs)
        kept = [(module, module.training) for module in model.modules()]
        graphs = []
        try:
            for training in (True, False):
                self.train(training)
                graphs.append(rest.graph())
        finally:
            for module, own in kept:
                module.training = own
        with kept_draws():
            if not equals_whole(model, self._part, rest, self._inputs, self._flags, is_own_code=False):
                raise ModelError(_DOES_MORE)
        return graphs[0], graphs[1]

    def _run(self, tensors: list[torch.Tensor]) -> Any:
        if len(tensors) != len(self._part.frost_line.tensors):
            raise ModelError(_TAKES_ACTIVATIONS.format(f"{len(tensors)} tensors"))
        if not is_origin_known(tensors, self.given) and self.awaits_pass:
            self.awaits_pass = False
            warnings.warn(_OF_BEFORE, stacklevel=5)
        if (changed := self.changed_read(theirs_alone=True)) is not None:
            raise ModelError(f"{changed}: run the whole network for this, or call job.refreeze()")
        if not self.expects_autocast:
            self._tell_cast(tensors[0])
        return run_behind(self._model[0], self._plan, self._inputs, tensors)


def skipping_head(
    model: nn.Module,
    part: FrozenPart,
    inputs: Sequence[TensorSpec],
    flags: Mapping[str, bool],
    rest: Graph | None = None,
) -> SkippingHead | None:
    """A head that runs the user's own forward; None where that looks at values before the frost line.

    Args:
        model: the user's network, left as it was.
        part: the frozen part.
        inputs: specifications of its inputs.
        flags: the modes in which the head is trained.
        rest: graph from the frost line on; None where the network was not traced as a whole.

    Raises:
        Unsteady: The frozen part is another one in each run, or nobody can tell its results from each other.
    """
    batch = _batch_of_a_plan(model, inputs)
    try:
        features = features_of(part, batch, device_of(model))
        if has_alike_features(part, features):
            raise Unsteady(ALIKE)
        plan = whole_plan(model, inputs, batch, features, flags)
    except UNFIT:
        return None
    if plan is None:
        return None
    head = SkippingHead(model, part, inputs, plan, flags, rest, features)
    if len(plan.taken) == len(features):
        return head
    inside = enclosed_modules(part.traced.graph, part.frost_line.after)
    with suppress(Unsteady, *UNFIT):  # of what crosses, some is made again from the first of it
        further = whole_plan(model, inputs, batch, features, flags, inside)
        if further is not None and len(further.taken) > len(plan.taken):
            other = SkippingHead(model, part, inputs, further, flags, rest, features)
            if equals_whole(model, part, other, inputs, flags):
                return other
    return head


def _batch_of_a_plan(model: nn.Module, inputs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    return random_batch(model, inputs, _ROWS_OF_A_PLAN, torch.Generator().manual_seed(_SEED))


_ELSEWHERE = "choose another policy, with which the head is trained here"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mode:
    """What a head computes in train mode, or in eval mode.

    Attributes:
        graph: the graph from what crosses the frost line to the scores, its only output.
        places: the places among the tensors that cross it that it takes, in the order of ``graph.inputs``.
    """

    graph: Graph
    places: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PortableHead:
    """A head without a line of its network's code.

    Attributes:
        training: outputs in train mode.
        evaluation: outputs in eval mode.
        tensors: the parameters, buffers and constants; a tensor that the network has under several names is here once.
        trained: names of those that are trained.
    """

    training: Mode
    evaluation: Mode
    tensors: Mapping[str, torch.Tensor]
    trained: tuple[str, ...]

    @property
    def returning(self) -> tuple[str, ...]:
        """Names of the tensors that training may change: what is trained, and buffers."""
        return tuple(name for name in self.tensors if _changes(name))


def make_portable(head: nn.Module) -> PortableHead:
    """A head as data, which shares the network's tensors.

    Raises:
        ModelError: The head cannot be sent to another process; the sentence says why, and what to do instead.
    """
    try:
        modes = head.traced_graphs() if isinstance(head, SkippingHead) else None
    except ModelError as error:
        raise ModelError(f"the trainable rest of this network cannot travel, {error}: {_ELSEWHERE}") from error
    if modes is None:
        kind = "its own code runs" if isinstance(head, Head) else "it is no head of a job"
        raise ModelError(
            f"the trainable rest of this network was not traced ({kind}), so it cannot travel: {_ELSEWHERE}"
        )
    strange = sorted({refused_call(node) for mode in modes for node in mode.graph.nodes} - {""})
    if strange:
        raise ModelError(f"the trainable rest uses {', '.join(strange)}, which a node does not run: {_ELSEWHERE}")
    names = _Names()
    training, evaluation = (names.renamed(mode) for mode in modes)
    trained = tuple(name for name, tensor in names.tensors.items() if tensor.requires_grad)
    return PortableHead(training=training, evaluation=evaluation, tensors=names.tensors, trained=trained)


def head_to_json(head: PortableHead) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """A head as plain values, and its tensors as they are written."""
    tensors, orders = flatten_tensors(head.tensors)
    modes = {"training": head.training, "evaluation": head.evaluation}
    described = {
        name: {"graph": graph_to_json(mode.graph), "places": list(mode.places)} for name, mode in modes.items()
    }
    return {**described, "orders": orders, "trained": list(head.trained)}, tensors


def head_from_json(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> PortableHead:
    """The inverse of ``head_to_json``, from wherever the values came; may also raise any of ``graph_file.BROKEN``.

    Raises:
        UnsafeArtifact: The values name or declare something that is not allowed.
    """
    turned = restore_tensors(tensors, value["orders"])
    trained = tuple(text(name) for name in value["trained"])
    if not all(turned[name].is_floating_point() for name in trained):
        raise UnsafeArtifact("only floats can be trained")
    return PortableHead(
        training=_mode(value["training"], turned),
        evaluation=_mode(value["evaluation"], turned),
        tensors=turned,
        trained=trained,
    )


class PortedHead:
    """A head that trains away from its network; bit for bit what the network's own would do.

    Args:
        head: head whose tensors it takes over.

    Attributes:
        tensors: the tensors now, by name.

    Raises:
        UnsafeArtifact: A graph does not hold together.
    """

    def __init__(self, head: PortableHead) -> None:
        trained = set(head.trained)
        self.tensors = {name: tensor.detach().requires_grad_(name in trained) for name, tensor in head.tensors.items()}
        self._trained = head.trained
        self._modes = {
            True: _PortablePart.of(head.training, self.tensors),
            False: _PortablePart.of(head.evaluation, self.tensors),
        }
        self._now = self._modes[True]

    def train(self) -> None:
        """Behave as in training from now on."""
        self._now = self._modes[True]

    def eval(self) -> None:
        """Behave as in evaluation from now on."""
        self._now = self._modes[False]

    def parameters(self) -> Iterator[torch.Tensor]:
        """What is trained."""
        return (self.tensors[name] for name in self._trained)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What training may change: what is trained, and buffers."""
        return {name: tensor.detach() for name, tensor in self.tensors.items() if _changes(name)}

    def __call__(self, features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """The scores for these activations at the frost line.

        Raises:
            UnsafeArtifact: The graph gives no tensor.
        """
        given = [features] if isinstance(features, torch.Tensor) else list(features)
        [scores] = self._now.runner.run([given[place] for place in self._now.places], self._now.leaves)
        if not isinstance(scores, torch.Tensor):
            raise UnsafeArtifact("the head gives no tensor")
        return scores


def _changes(name: str) -> bool:
    """Whether training may change the tensor of that name."""
    return not name.startswith("constant:")


@dataclass(frozen=True, slots=True, eq=False)
class _PortablePart:
    runner: Runner
    places: tuple[int, ...]
    leaves: list[torch.Tensor]

    @classmethod
    def of(cls, mode: Mode, tensors: Mapping[str, torch.Tensor]) -> "_PortablePart":
        return cls(Runner(mode.graph, resolve_op=resolve_allowed), mode.places, leaf_values(mode.graph, tensors))


class _Names:
    """Gives every tensor one name over both graphs, however many the network has for it."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._own: dict[int, str] = {}
        self._memory: dict[int, str] = {}

    def renamed(self, mode: HeadGraph) -> Mode:
        names = {path: self._name(path, tensor) for path, tensor in mode.tensors.items()}
        leaves = tuple((leaf, names[path]) for leaf, path in mode.graph.leaves)
        return Mode(graph=replace(mode.graph, leaves=leaves), places=mode.places)

    def _name(self, path: str, tensor: torch.Tensor) -> str:
        if id(tensor) in self._own:
            return self._own[id(tensor)]
        # Two traces may have constants of one name that are not the same.
        name = path if path not in self.tensors else f"{path}#{len(self.tensors)}"
        memory = tensor.untyped_storage().data_ptr()
        other = self._memory.setdefault(memory, name) if tensor.nbytes else name
        if other != name:
            raise ModelError(f"{name!r} and {other!r} share their memory, which does not travel: {_ELSEWHERE}")
        self._own[id(tensor)] = name
        self.tensors[name] = tensor
        return name


def _mode(value: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Mode:
    graph = graph_from_json(value["graph"])
    places = tuple(integer(place) for place in value["places"])
    if len(places) != len(graph.inputs) or len(graph.outputs) != 1 or min(places) < 0:
        raise UnsafeArtifact("a head takes what crosses the frost line, and gives one tensor")
    leaf_values(graph, tensors)
    return Mode(graph=graph, places=places)
