"""The trainable rest of the user's network: run here from the frost line on, or as data trained by another process."""

import copy
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from frostline.core import Graph, TensorSpec
from frostline.core.config import describe_value
from frostline.core.errors import ModelError
from frostline.engines.machine import compute_slot
from frostline.models.absent import Unsteady
from frostline.models.freezing import frozen_modules
from frostline.models.frozen import (
    ALIKE,
    FrozenPart,
    equals_whole,
    features_of,
    has_alike_features,
    own_paths,
)
from frostline.models.modules import (
    NOT_EXPORTED,
    StandIn,
    graft,
    has_same_parameters,
    is_split,
    module_at,
    run_lock,
    tensor_paths,
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
    cast_inputs,
    device_of,
    is_origin_known,
    kept_draws,
    random_batch,
)

__all__ = ("Head", "SkippingHead", "TracedParts", "WholeHead", "skipping_head")


_ROWS_OF_A_PLAN = 2
# Whoever called the head, from ``_run_`` on: there is ``forward``, and what PyTorch does around it.
_CALLER = 6
_SEED = 1
_OTHER_NOW = "{} of the network was replaced since the job was made, and its head has the old one: call job.refreeze()"
_NOT_COMPILED = "torch.compile leaves job.head as it is: compile your trained layers, as model.classifier.compile()"
_CHANGED = "was changed since the job was made"
_TAKES_ACTIVATIONS = (
    "the head was called with {}, and takes batch.features alone: what else the network's forward takes, such as "
    "labels, has a default there, with which the network was cut; compute what needs it from what the head returns"
)
_TAKES_TENSORS = (
    "the head was called with {}, and takes tensors: write job.head(batch.features), or torch.from_numpy(...) of arrays"
)
_TAKES_DENSE = "the head was called with {}, and takes dense ones, as batch.features are: give it features.to_dense()"
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
        expects_autocast_: autocast around it is meant for the head alone, so that nobody has to be told.
        awaits_pass_: features from before ``refreeze`` look like its own, and no pass has given any since.
    """

    def __init__(self, model: nn.Module, paths: Iterable[str], modules: Mapping[str, nn.Module]) -> None:
        super().__init__(model)
        self.expects_autocast_ = self.awaits_pass_ = self._knows_it_is_not_compiled_ = False
        self._modules_run_ = dict(modules)
        self._frozen_ = tuple(inner for _, module in frozen_modules(model) for inner in module.modules())
        self._in_eval_: tuple[nn.Module, ...] = ()
        self._put_: dict[int, nn.Module] = {}  # into eval mode, by this head
        self._shared_: tuple[Any, ...] = ()  # what copies have in common
        graft(self, [*paths], modules)
        # What lies in a module that is the network's own is the network's too.
        self._places_ = {
            path: (own, model.get_submodule(path))
            for path, own in self.named_modules(remove_duplicate=False)
            if path and isinstance(self.get_submodule(path.rpartition(".")[0]), StandIn)
        }
        self._look_: Callable[[], object] | None = None
        self._alone_ = dict(_lone_parameters(self, model))
        self._lone_buffers_ = list(_lone_buffers(self, model))
        self._known_ = list(_known(self))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_look_": None}  # which is at this network

    def look_before_runs_(self, look: Callable[[], object]) -> None:
        """Have a function look, each time before the head runs, whether the network is what its features are of."""
        self._look_ = look

    def __deepcopy__(self, memo: dict[int, Any]) -> "Head":
        """A head of its own, with the frozen weights of this one, which nothing changes."""
        own = {id(tensor) for tensor in (*self.parameters(), *self.buffers())}
        model = self._model_[0]
        shared = (*model.parameters(), *model.buffers(), *self._shared_)
        memo.update((id(value), value) for value in shared if id(value) not in own)
        copied = memo[id(self)] = self.__class__.__new__(self.__class__)
        vars(copied).update(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def keep_in_eval_(self, modules: Iterable[nn.Module]) -> None:
        """Put modules of the network into eval mode from the next run on, whoever puts them into train mode again."""
        self._in_eval_ = tuple(modules)

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
        if "features" in others or (len(features) == 1 and hasattr(features[0], "features")):
            raise ModelError("the head was called with a batch: write job.head(batch.features)")
        if others:
            raise ModelError(_TAKES_ACTIVATIONS.format(f"{', '.join(others)} by name"))
        given = [tensor for item in features for tensor in (item if isinstance(item, list | tuple) else (item,))]
        if strange := [describe_value(value) for value in given if not isinstance(value, torch.Tensor)]:
            raise ModelError(_TAKES_TENSORS.format(strange[0]))
        if other := [tensor for tensor in given if tensor.layout is not torch.strided or tensor.is_nested]:
            kind = "a nested tensor" if other[0].is_nested else f"a tensor of the layout {other[0].layout}"
            raise ModelError(_TAKES_DENSE.format(kind))
        return self._run_uncompiled_(given) if torch.compiler.is_compiling() else self._run_as_it_is_(given)

    def _run_uncompiled_(self, tensors: list[torch.Tensor]) -> Any:
        """What ``_run_`` gives, of which torch.compile cannot follow the tensors that are not there."""
        torch._dynamo.graph_break(msg=_NOT_COMPILED)  # noqa: SLF001 -- an error of fullgraph=True says it
        return torch.compiler.disable(self._run_and_warn_)(tensors)  # type: ignore[no-untyped-call]

    def _run_and_warn_(self, tensors: list[torch.Tensor]) -> Any:
        if not self._knows_it_is_not_compiled_:
            self._knows_it_is_not_compiled_ = True
            warnings.warn(_NOT_COMPILED, stacklevel=2)
        return self._run_as_it_is_(tensors)

    def _run_as_it_is_(self, tensors: list[torch.Tensor]) -> Any:
        """What ``_run_`` gives with the modules and the tensors that are the head's now."""
        self._put_into_eval_()
        with (
            run_lock(self._model_[0]),
            with_modules(self._model_[0], self.replaced_modules_()),
            with_parameters(self._model_[0], self),
            _with_buffers(self._lone_buffers_),
        ):
            if self._look_ is not None:
                self._look_()
            returned = self._run_(tensors)
        for known in self._known_:
            if names := known.new_names():
                self._adopt_(known, names)
        return returned

    def _adopt_(self, known: "_Known", names: Iterable[str]) -> None:
        """Have what the network's code has made as it ran, so that it is trained, kept and moved with the rest."""
        for name in names:
            value, path = known.table[name], f"{known.path}.{name}".lstrip(".")
            vars(known.part)[known.kind][name] = value
            if known.kind == "_modules":
                self._places_[path] = value, value
            elif known.kind == "_parameters":
                self._alone_[path] = value
        if known.kind == "_buffers":
            theirs = vars(self._model_[0].get_submodule(known.path))["_non_persistent_buffers_set"]
            vars(known.part)["_non_persistent_buffers_set"] |= theirs & {*names}
            self._lone_buffers_ = list(_lone_buffers(self, self._model_[0]))
        known.names |= {*names}

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the network's layers that the head runs, by its own ``train``; frozen layers keep theirs.

        Raises:
            ModelError: The head was sharded in a way in which it cannot run.
        """
        self._refuse_shards_()
        model, run = self._model_[0], {id(module) for module in (*self._modules_run_.values(), *self.modules())}
        kept = [(module, module.training) for module in model.modules() if id(module) not in run]
        kept += [(module, module.training) for module in self._frozen_]
        super().train(mode)
        model.train(mode)
        for module, own in kept:
            module.training = own
        self._put_into_eval_()
        return self

    def _put_into_eval_(self) -> None:
        for module in self._in_eval_:
            if module.training:
                module.training = False
                self._put_[id(module)] = module

    def give_modes_back_(self, other: "Head") -> None:
        """Have what this head put into eval mode, and another one does not, behave as this head does."""
        theirs = vars(other)
        kept = {id(module) for module in theirs["_in_eval_"]}
        for module in self._put_.values():
            if id(module) in kept:
                theirs["_put_"][id(module)] = module
            else:
                module.training = self.training

    def replaced_modules_(self) -> dict[str, nn.Module]:
        """Modules that somebody has put into the head in place of its own, by path; outermost ones alone.

        Raises:
            ModelError: Modules or tensors of the network that the head runs were replaced.
        """
        found: dict[str, nn.Module] = {}
        for path, (own, theirs) in self._places_.items():
            if any(path.startswith(f"{outer}.") for outer in found):
                continue
            ours, there = module_at(self, path), module_at(self._model_[0], path)
            if ours is not None and ours is not own:
                found[path] = ours
            elif there is not theirs and not has_same_parameters(there, theirs):
                raise ModelError(_OTHER_NOW.format(f"module {path!r}"))
        for path, tensor in self._alone_.items():
            owner, _, name = path.rpartition(".")
            if getattr(module_at(self._model_[0], owner), name, None) is not tensor:
                raise ModelError(_OTHER_NOW.format(f"parameter {path!r}"))
        return found

    def _refuse_shards_(self) -> None:
        if any(map(is_split, self.children())):
            raise ModelError(
                "the head runs within the network's own code, so that its layers cannot be sharded one by one: shard "
                "it whole, by fully_shard(job.head)"
            )

    @abstractmethod
    def _run_(self, tensors: list[torch.Tensor]) -> Any:
        """What the network returns for the activations at the frost line."""


_TABLES = ("_modules", "_parameters", "_buffers")


@dataclass(slots=True, kw_only=True, eq=False)
class _Known:
    """What the network had, of modules, parameters or buffers, in a module of which the head has a part.

    Attributes:
        path: path of the module.
        part: stand-in for it in the head.
        kind: name of the network's table.
        table: the network's table now.
        names: names that stood for something in it.
    """

    path: str
    part: StandIn
    kind: str
    table: Mapping[str, Any]
    names: frozenset[str]

    def new_names(self) -> list[str]:
        """Names in the table that stand for something since then."""
        if len(self.table) == len(self.names):  # as ever: this is asked in each run
            return []
        return [name for name, value in self.table.items() if value is not None and name not in self.names]


def _known(head: nn.Module) -> Iterator[_Known]:
    for path, part in head.named_modules(remove_duplicate=False):
        if isinstance(part, StandIn):
            for kind in _TABLES:
                table = vars(part._model_[0])[kind]
                names = frozenset(name for name, value in table.items() if value is not None)
                yield _Known(path=path, part=part, kind=kind, table=table, names=names)


def _lone_parameters(head: nn.Module, model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Paths and parameters of a head whose owner in the network is another module, which holds other modules too."""
    for path, parameter in head.named_parameters(remove_duplicate=False):
        owner = path.rpartition(".")[0]
        if head.get_submodule(owner) is not model.get_submodule(owner):
            yield path, parameter


@dataclass(slots=True, kw_only=True, eq=False)
class _LoneBuffer:
    """A buffer that stands in a head and in its network under one name, where either may put another tensor.

    Attributes:
        head: table of buffers in the head.
        network: the network's.
        name: name of the buffer in both.
        known: the tensor that stood in both last.
    """

    head: dict[str, torch.Tensor | None]
    network: dict[str, torch.Tensor | None]
    name: str
    known: torch.Tensor | None


def _lone_buffers(head: nn.Module, model: nn.Module) -> Iterator[_LoneBuffer]:
    """The buffers of a head whose owner in the network is another module, which holds other modules too."""
    for path, buffer in head.named_buffers(remove_duplicate=False):
        owner, _, name = path.rpartition(".")
        own, theirs = head.get_submodule(owner), model.get_submodule(owner)
        if own is not theirs:
            yield _LoneBuffer(head=own._buffers, network=theirs._buffers, name=name, known=buffer)  # noqa: SLF001


@contextmanager
def _with_buffers(buffers: Sequence[_LoneBuffer]) -> Iterator[None]:
    """Let a network run with the buffers that its head was given, as by ``.to()``, and the head have what it leaves."""
    for buffer in buffers:
        if buffer.head.get(buffer.name) is not buffer.known:
            buffer.network[buffer.name] = buffer.head[buffer.name]
    try:
        yield
    finally:
        for buffer in buffers:
            buffer.head[buffer.name] = buffer.known = buffer.network.get(buffer.name)


class WholeHead(Head):
    """The user's network itself, for a frost line that is its input.

    Args:
        model: the user's network.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, tensor_paths(model), dict(model.named_modules(remove_duplicate=False)))
        self.finish_making_()

    def _refuse_shards_(self) -> None:
        if is_split(self):
            raise ModelError(
                "the whole network runs at the trainer, since it was not cut, and such a head cannot be sharded: wrap "
                "job.head in DistributedDataParallel, or mend what the job says about the cut"
            )

    def _run_(self, tensors: list[torch.Tensor]) -> Any:
        with compute_slot():
            return self._model_[0](*cast_inputs(self._model_[0], tensors))


TracedParts = tuple[nn.Module, FrozenPart, Sequence[TensorSpec], Mapping[str, bool]]
"""A network, its frozen part, the specifications of its inputs, and the modes in which its head is trained."""

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
        self._part_ = part
        self._shared_ = (part, plan)
        self._inputs_ = tuple(inputs)
        self._plan_ = plan
        self._flags_ = dict(flags)
        self._is_traced_ = rest is not None
        self._meant_ = list(meant)
        self._harmless_: dict[tuple[str, str | int], tuple[Any, ...]] = {}
        self._attributes_: dict[bool, list[tuple[Mapping[str, Any], str, str, Any]]] | None = None
        self._outside_: list[tuple[str, Callable[[], Any], Any]] | None = outside_values(model)
        self.finish_making_()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_attributes_": None, "_outside_": None}  # which are this network's own

    @property
    def python_reads_(self) -> tuple[tuple[str, str, Any], ...]:
        """What of its modules' attributes is read before the frost line; see ``SkipPlan``."""
        return self._plan_.reads

    @property
    def asked_modes_(self) -> frozenset[str]:
        """Paths of the modules that are asked for their mode before the frost line; see ``SkipPlan``."""
        return self._plan_.asked

    @property
    def taken_tensors_(self) -> frozenset[int]:
        """Numbers of the tensors at the frost line that its code takes; it makes the others again, of these."""
        return self._plan_.taken

    def changed_read_(self, *, theirs_alone: bool = False) -> str | None:
        """What changes the layers before the frost line by its value now, in words; None where nothing does.

        A value that differs from that of the cut is tried once: the network runs on two rows. So one that only the head
        minds, as an adapter that is switched off there, is the user's own.

        Args:
            theirs_alone: leave out PyTorch's own modules, which have more attributes than all others.
        """
        if self._attributes_ is None:
            self._attributes_ = {alone: list(self._read_attributes_(alone)) for alone in (False, True)}
        for attributes, path, name, value in self._attributes_[theirs_alone]:
            if (now := attributes.get(name)) is not value and self._minds_((path, name), now, value):
                whose = f"module {path!r}" if path else "the network"
                return f"attribute {name!r} of {whose}, which its frozen layers read, {_CHANGED}"
        if self._outside_ is None:
            self._outside_ = outside_values(self._model_[0])
        for place, (name, get, value) in enumerate(self._outside_):
            if (now := get()) is not value and self._minds_(("", place), now, value):
                others = dict.fromkeys(repr(name) for name, get, value in self._outside_ if is_other(get(), value))
                names = " or ".join([*others][:_MANY_VALUES]) or repr(name)
                return f"variable {names}, which code of the frozen layers reads, {_CHANGED}"
        return None

    def _read_attributes_(self, theirs_alone: bool) -> Iterator[tuple[Mapping[str, Any], str, str, Any]]:
        for path, name, value in self._plan_.reads:
            module = self._model_[0].get_submodule(path)
            if not (theirs_alone and type(module).__module__.startswith("torch.nn.")):
                yield vars(module), path, name, value

    def _minds_(self, key: tuple[str, str | int], now: Any, value: Any) -> bool:
        """Whether the frozen part minds that a value is another one now; what it did not mind a few times it never."""
        if is_same_plain(now, value):
            return False
        copied, harmless = plain_copy(now), self._harmless_.get(key, ())
        now = ("the object", id(now)) if copied is NOT_PLAIN else copied
        is_same = plain_copy(value) is not NOT_PLAIN and now == value
        if is_same or now in harmless or len(harmless) >= _MANY_VALUES:
            return False
        if not self.makes_the_same_():
            return True
        self._harmless_[key] = (*harmless, now)
        return False

    def makes_the_same_(self, *, is_moved: bool = False, is_cast: bool = False, training: Collection[str] = ()) -> bool:
        """Whether the network still makes what the frozen part makes, in the modes in which it is trained.

        Args:
            is_moved: allow for other kernels, since its tensors are elsewhere or lie otherwise than when it was cut.
            is_cast: leave the caller's autocast on.
            training: paths of modules that are in train mode all the same.
        """
        model = self._model_[0]
        batch = _batch_of_a_plan(model, self._inputs_)
        flags = {path: self._flags_.get(path, module.training) for path, module in model.named_modules()}
        flags.update(dict.fromkeys(training, True))
        try:
            with kept_draws(), to_the_line(model, flags, is_cast=is_cast):
                meant = [tensor.to(device_of(model)) for tensor in self._meant_]
                return makes_same_features(model, self._plan_, cast_inputs(model, batch), meant, is_moved=is_moved)
        except UNFIT:
            return False

    def _tell_cast_(self, given: torch.Tensor) -> None:
        """Warn once where the caller's casts would change what is frozen in a loop without a job."""
        kind = given.device.type
        is_automatic = torch.is_autocast_enabled(kind)
        if not is_automatic and given.dtype.itemsize >= self._meant_[0].dtype.itemsize:
            return
        dtype = torch.get_autocast_dtype(kind) if is_automatic else given.dtype
        self.expects_autocast_, how = True, "autocast" if is_automatic else "a cast of features"
        if not (is_automatic and self.makes_the_same_(is_cast=True)):
            warnings.warn(_CAST.format(how, str(dtype).removeprefix("torch.")), stacklevel=_CALLER + 1)

    @property
    def known_by_(self) -> Given:
        """What its features are known by."""
        return self._inputs_, self._meant_

    @property
    def traced_parts_(self) -> "TracedParts | None":
        """What its graphs are made of; None where the network was not traced as a whole."""
        return (self._model_[0], self._part_, self._inputs_, self._flags_) if self._is_traced_ else None

    def _run_(self, tensors: list[torch.Tensor]) -> Any:
        if len(tensors) != len(self._part_.frost_line.tensors):
            raise ModelError(_TAKES_ACTIVATIONS.format(f"{len(tensors)} tensors"))
        if not is_origin_known(tensors, self.known_by_) and self.awaits_pass_:
            self.awaits_pass_ = False
            warnings.warn(_OF_BEFORE, stacklevel=_CALLER)
        if (changed := self.changed_read_(theirs_alone=True)) is not None:
            raise ModelError(f"{changed}: run the whole network for this, or call job.refreeze()")
        if not self.expects_autocast_:
            self._tell_cast_(tensors[0])
        return run_behind(self._model_[0], self._plan_, self._inputs_, tensors)


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
    # An encoder that is skipped whole gives no layer's output to who asks for them all, so its layers are tried too.
    for depth in sorted({path.count(".") for path in inside}):
        some = frozenset(path for path in inside if path.count(".") >= depth)
        with suppress(Unsteady, *UNFIT):  # of what crosses, some is made again from the first of it
            further = whole_plan(model, inputs, batch, features, flags, some)
            if further is not None and len(further.taken) > len(head.taken_tensors_):
                other = SkippingHead(model, part, inputs, further, flags, rest, features)
                head = other if equals_whole(model, part, other, inputs, flags) else head
        if len(head.taken_tensors_) == len(features):
            break
    return head


def _batch_of_a_plan(model: nn.Module, inputs: Sequence[TensorSpec]) -> list[torch.Tensor]:
    return random_batch(model, inputs, _ROWS_OF_A_PLAN, torch.Generator().manual_seed(_SEED))
