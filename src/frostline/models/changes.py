"""Notices what a user changes of a network after its frozen part was cut: weights, modes, what is trained, modules.

A job's features are those of the network as it was when it was cut. Before each pass, and cheaply at each step, the
network is looked at; the first thing that is another one now is named in one sentence. Where only a version or an
object is another one, values are compared, so that the same weights loaded again are no change.
"""

import math
import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from operator import attrgetter, is_
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import nn

from frostline.core.errors import ModelError, NetworkChanged
from frostline.engines.measure import version_of
from frostline.models.frozen import FrozenPart, minds_its_mode
from frostline.models.head import Head, SkippingHead
from frostline.models.modules import is_guard, is_split, module_at
from frostline.models.outside import is_same_plain, memory_of
from frostline.models.skipping import RECORDING
from frostline.models.tracing import GIVEN_BY, are_close

__all__ = ("FrozenWatch", "checksum", "quick_sum", "require_whole", "take_over")

_REMEDY = (
    "the job's features are those of the network as it was: call job.refreeze() to go on with the network as it is "
    "now, or make another job with offload"
)
_MOVED = (
    "; where your code moves it at each step, as averages of weights are, let it require gradients before offload, and "
    "run its layers under torch.no_grad()"
)
_EVAL = "put it back into eval mode (job.head.train() leaves frozen layers as they are), or call job.refreeze()"
_TABLES = ("_parameters", "_buffers")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# A tenth of a second of one core, before each pass; of larger networks evenly spaced rows are read, of all tensors.
_READ_BYTES = 1 << 30
_SMALL_BYTES = 1 << 16  # which are read in 20 microseconds
# A prime number of words, so that what moves by a power of two falls into another column.
_ROW_WORDS = 1021
# Shares of the time since the last look that the values of all tensors, one after another, are read in, and what is
# quick enough for any time. So passes over kept features, which take milliseconds, do not read all weights each time.
_READ_SHARE, _READ_S = 0.03, 0.002
# In eval mode these change nothing; Lightning's callbacks set the second one of what they freeze.
_IDLE = ("momentum", "track_running_stats", "training")
# Shares of the time that runs on two rows may take, by when they are made, and what is quick enough for any time.
_SHARES = {"begin": 0.03, "end": 0.03, "step": 0.01}
_QUICK_S = 0.02  # a small network on a slow processor
_PLAIN = (bool, int, float, str, type(None), tuple)
# Loops over all tensors and attributes run in C where nothing has changed: they are part of every step.
_VERSION, _REQUIRES_GRAD = attrgetter("_version"), attrgetter("requires_grad")


@runtime_checkable
class Reads(Protocol):
    """A head that knows what the network's code reads of its modules before the frost line."""

    @property
    def python_reads_(self) -> tuple[tuple[str, str, Any], ...]:
        """Path of a module, name and value of each attribute."""

    @property
    def asked_modes_(self) -> frozenset[str]:
        """Paths of the modules that the network's code asks for their mode there, so that it may matter."""

    def changed_read_(self) -> str | None:
        """One of these that changes what lies before the frost line by its value now, in words."""

    def makes_the_same_(self, *, is_moved: bool = False, training: Sequence[str] = ()) -> bool:
        """Whether the network makes the same features at the frost line, but for other kernels where it was moved."""


def checksum(tensor: torch.Tensor) -> int:
    """CRC-32 of a tensor's values in the order of its dimensions, whatever its device and its strides are.

    Args:
        tensor: dense tensor.
    """
    return zlib.crc32(memory_of(tensor).data)


def quick_sum(tensor: torch.Tensor, *, every: int = 1) -> int:
    """A checksum of the same that is five times as quick, and sees any change but one made to deceive it.

    The memory is read as rows of words, which are summed column by column.

    Args:
        tensor: dense tensor.
        every: read one of so many rows, the first among them, and what fills no row.
    """
    memory = memory_of(tensor)
    if tensor.dtype == torch.float64:  # the signs of two words of a column would cancel each other
        return zlib.crc32(memory.data)
    rows = len(memory) // (8 * _ROW_WORDS)
    whole, rest = np.split(memory, [rows * 8 * _ROW_WORDS])
    sums = whole.view(np.uint64).reshape(rows, _ROW_WORDS)[::every].sum(axis=0)
    return zlib.crc32(rest.data, zlib.crc32(sums.data))


@dataclass(slots=True, kw_only=True, eq=False)
class _Seen:
    """A tensor of the frozen part, as it was seen last.

    Attributes:
        kind: parameter, buffer or tensor.
        path: path in the network.
        table: dictionary of its module in which it stands under ``name``.
        name: name in the table.
        tensor: the tensor.
        version: count of writes to it by then; 0 in inference mode, where nobody counts.
        about: dtype and shape.
        content: checksum of all values.
        sample: the quick sum of those values that are read before each pass.
    """

    kind: str
    path: str
    table: Mapping[str, Any]
    name: str
    tensor: torch.Tensor
    version: int
    about: tuple[torch.dtype, torch.Size]
    content: int
    sample: int

    @property
    def here(self) -> torch.Tensor | None:
        """The tensor that stands in its place now."""
        found = self.table.get(self.name)
        return found if isinstance(found, torch.Tensor) else None


def _laid(tensor: torch.Tensor) -> tuple[torch.device, tuple[int, ...]]:
    return tensor.device, tensor.stride()


def _about(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return tensor.dtype, tensor.shape


def _is_readable(tensor: torch.Tensor) -> bool:
    """Whether its values lie in memory as numbers; those of other layouts and wrappers are known by their version."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return is_plain and tensor.layout == torch.strided and tensor.device.type != "meta" and not tensor.is_quantized


def _is_small(tensor: torch.Tensor) -> bool:
    return _is_readable(tensor) and tensor.device.type == "cpu" and tensor.nbytes <= _SMALL_BYTES


def _read(tensor: torch.Tensor) -> int:
    return checksum(tensor) if _is_readable(tensor) else 0


def _read_quickly(tensor: torch.Tensor, every: int) -> int:
    return quick_sum(tensor, every=every) if _is_readable(tensor) else 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Module:
    """A module of the frozen part, as it was.

    Attributes:
        path: path in the network.
        module: the module.
        hooks: identities of what runs around its forward, the forward itself and its class among them.
        settings: attributes that are plain values, of modules of torch.
        minds_mode: the output depends on whether it is in train mode.
    """

    path: str
    module: nn.Module
    hooks: tuple[int, ...]
    settings: Mapping[str, Any]
    minds_mode: bool

    @classmethod
    def of(cls, path: str, module: nn.Module) -> "_Module":
        return cls(
            path=path,
            module=module,
            hooks=_hooks(module),
            settings=_settings(module),
            minds_mode=not module.training and (minds_its_mode(module) or _asks_for_its_mode(module)),
        )

    @property
    def in_train_mode(self) -> str:
        """That it is in train mode now, and what to do."""
        return f"{type(self.module).__name__} {self.path!r} is frozen and was put into train mode: {_EVAL}"

    def change(self, *, minds_modes: bool) -> str | None:
        """What is another than it was, and what to do; None where nothing is."""
        name = f"module {self.path!r}"
        if minds_modes and self.minds_mode and self.module.training:
            return self.in_train_mode
        if _hooks(self.module) != self.hooks:
            return f"{name} is frozen, and its forward or a hook of it was changed since the job was made: {_REMEDY}"
        now = _settings(self.module)
        changed = next((key for key in {**self.settings, **now} if now.get(key) != self.settings.get(key)), None)
        if changed is not None:
            return f"{name} is frozen, and its {changed} was changed since the job was made: {_REMEDY}"
        return None


def _hooks(module: nn.Module) -> tuple[int, ...]:
    own = vars(module)
    hooks = (hook for name in _HOOKS for hook in own[name].values())
    around = [id(hook) for hook in hooks if not (is_guard(hook) or getattr(hook, "__module__", "") in RECORDING)]
    return (id(type(module)), id(own.get("forward", type(module).forward)), *around)


def _settings(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of one of torch's own modules, which says by them what it computes."""
    if not type(module).__module__.startswith("torch.nn."):
        return {}
    own = vars(module).items()
    return {name: value for name, value in own if isinstance(value, _PLAIN) and name[0] != "_" and name not in _IDLE}


def _asks_for_its_mode(module: nn.Module) -> bool:
    """Whether a module that is not torch's and has no parameters, such as stochastic depth, looks at its mode."""
    if type(module).__module__.startswith("torch.nn.") or next(module.parameters(), None) is not None:
        return False
    code = getattr(type(module).forward, "__code__", None)
    return next(module.children(), None) is None and (code is None or "training" in code.co_names)


class FrozenWatch:
    """What a network's frozen part was made of, and whether the network is still that. For one thread at a time.

    Args:
        model: the network.
        part: the frozen part; None where it could not be cut, and there is nothing but its head.
        head: the trainable rest.
        minds_modes: frozen modules must stay in eval mode; else they run so whatever their mode is.
        guard: function that guards the network against a job's features, and returns what ends that.
    """

    def __init__(
        self,
        model: nn.Module,
        part: FrozenPart | None,
        head: nn.Module,
        *,
        minds_modes: bool,
        guard: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self._model = model
        self._head = head
        reads = head.python_reads_ if isinstance(head, Reads) else ()
        self._reads = _columns(((vars(model.get_submodule(path)), name, value) for path, name, value in reads), 3)
        self._minds_modes = minds_modes
        self._is_retired = False
        self._tree = _tree(model)
        inside = set() if part is None else part.modules
        self._modules = [_Module.of(path, module) for path, module in self._tree.items() if path in inside]
        tensors = [] if part is None else list(_tensors(model, part.tensors, self._modules))
        self._every = -(-sum(tensor.nbytes for *_, tensor in tensors) // _READ_BYTES) or 1
        self._seen = [self._see(*found) for found in tensors]
        self._minding = [module for module in self._modules if minds_modes and module.minds_mode]
        asked = {id(model.get_submodule(path)) for path in head.asked_modes_} if isinstance(head, Reads) else set()
        kept = [module for module in self._modules if minds_modes and not (module.minds_mode or module.module.training)]
        self._in_eval = [(module.path, module.module) for module in kept if id(module.module) in asked]
        self._harmless: set[tuple[str, ...]] = {()}  # paths of those whose mode was found to change nothing
        self._small = cycle([seen for seen in self._seen if _is_small(seen.tensor)])
        self._next_read, self._read_at = cycle(self._seen), -math.inf
        own = {id(seen.tensor) for seen in self._seen}
        self._others = [
            (path, parameter)
            for path, parameter in model.named_parameters()
            if not parameter.requires_grad and id(parameter) not in own
        ]
        self._counted = self._count()
        self._laid = [_laid(seen.tensor) for seen in self._seen]
        self._thread, self._took_s = (os.getpid(), threading.get_ident()), math.inf
        self._tried_at = dict.fromkeys(_SHARES, -math.inf)
        self._next = "begin"
        self.release: Callable[[], None] = (lambda: None) if guard is None else guard()
        self._given = head.known_by_ if isinstance(head, SkippingHead) else None
        if isinstance(head, Head):
            head.look_before_runs_(self._look_before_run)

    def retire(self) -> None:
        """Have the steps of passes that are under way end, since the frozen part is made anew."""
        self._is_retired = True
        self.release()

    def step(self) -> None:
        """Look at what costs next to nothing: objects, versions, modes, gradients; the first one runs the network.

        The first step of a pass is looked at while its rows are on their way. Of writes that nobody counts, such as
        those into ``.data``, the values of one small tensor after another tell: what averages weights writes into all.

        Raises:
            NetworkChanged: The frozen part is another one, or was made anew.
        """
        if self._is_retired:
            raise NetworkChanged("job.refreeze() was called in the middle of a pass: begin another pass behind it")
        self._look_at_reads()
        self._look_at_modes()
        if (seen := next(self._small, None)) is not None:
            self._look_at_values(seen)
        if self._glance():
            self._try(self._next)
            self._next = "step"

    def _look_at_modes(self) -> None:
        """Look at the modes of all; where one may be minded, as by ``dropout(x, p, self.training)``, that is tried."""
        for module in self._minding:
            if module.module.training:
                _refuse(module.change(minds_modes=True))
        paths = tuple(path for path, module in self._in_eval if module.training)
        if paths in self._harmless or not self._may_run():
            return
        if not self._is_same_in_train_mode(paths):
            fewest, most = 0, len(paths)  # so many are not enough, and so many are
            while most - fewest > 1:
                middle = (fewest + most) // 2
                fewest, most = (middle, most) if self._is_same_in_train_mode(paths[:middle]) else (fewest, middle)
            module = next(module for module in self._modules if module.path == paths[most - 1])
            _refuse(module.in_train_mode)
        self._harmless.add(paths)

    def _is_same_in_train_mode(self, paths: Sequence[str]) -> bool:
        return not isinstance(self._head, Reads) or self._head.makes_the_same_(training=paths)

    def _look_before_run(self) -> None:
        """Look at what costs next to nothing as the head runs, to which workers may bring the batches."""
        self._look_at_modes()
        self._glance()

    def _glance(self) -> bool:
        """Whether no tensor of the frozen part has even been written to; it costs next to nothing.

        Raises:
            NetworkChanged: Some was, or is trained now, and is another one.
        """
        tables, names, tensors, versions = self._counted
        if (
            all(map(is_, map(dict.get, tables, names), tensors))
            and tuple(map(_VERSION, tensors)) == versions
            and not any(map(_REQUIRES_GRAD, tensors))
        ):
            return True
        self._look_at_all()
        return False

    def note(self, features: Sequence[torch.Tensor]) -> None:
        """Note that features, which a loop is about to be handed, are those of this frozen part."""
        if self._given is not None and isinstance(self._head, SkippingHead):
            self._head.awaits_pass_ = False
            for tensor in features:
                GIVEN_BY[tensor] = self._given

    def end(self) -> None:
        """Look at what the features of a pass were made of, as it has come to its end; see ``begin`` for values.

        Raises:
            NetworkChanged: The frozen part is another one.
        """
        if not self._is_retired:
            self._look_at_frozen()
            self._try("end")

    def begin(self) -> None:
        """Look at everything, as before a pass; what the code computes ``step`` says.

        Values are read of all tensors, or of one after another where passes are shorter than 33 times what that takes.

        Raises:
            NetworkChanged: The frozen part is another one, or a module of the head was replaced.
        """
        self._look_at_tree()
        self._look_at_frozen()
        self._look_at_modes()
        for path, parameter in self._others:
            if parameter.requires_grad:
                raise NetworkChanged(f"parameter {path!r} is trained now: {_REMEDY}")
        self._next = "begin"

    def _look_at_frozen(self) -> None:
        for module in self._modules:
            _refuse(module.change(minds_modes=self._minds_modes))
        self._look_at_reads()
        self._look_at_all()
        self._read_on()

    def _read_on(self) -> None:
        """Look at the values of one tensor after another, from where the last look ended, for a share of the time."""
        started = time.perf_counter()
        until = started + max(_READ_S, _READ_SHARE * (started - self._read_at))
        for seen in islice(self._next_read, len(self._seen)):
            self._look_at_values(seen)
            if time.perf_counter() > until:
                break
        self._read_at = time.perf_counter()

    def _look_at_values(self, seen: _Seen) -> None:
        if _about(seen.tensor) != seen.about or _read_quickly(seen.tensor, self._every) != seen.sample:
            raise _changed(seen, "was changed in place since the job was made")

    def _try(self, when: str) -> None:
        """Run the network up to the frost line on two rows, unless that would take more than its share of the time.

        So whatever its code reads is noticed: a global variable, a configuration, an object of another kind.
        """
        if not isinstance(self._head, Reads) or not self._may_run():
            return
        started = time.perf_counter()
        # A step comes soon after the beginning of its pass; the ends of passes are each looked at by themselves.
        before = max(self._tried_at.values()) if when == "step" else self._tried_at[when]
        is_due = (started - before) * _SHARES[when] >= self._took_s
        if not is_due and (when == "step" or self._took_s > _QUICK_S):
            return
        is_moved = [_laid(tensor) for seen in self._seen if (tensor := seen.here) is not None] != self._laid
        computed_s = time.thread_time()
        is_same = self._head.makes_the_same_(is_moved=is_moved)
        self._tried_at[when] = started
        self._took_s = min(self._took_s, time.thread_time() - computed_s)  # a pause once is no reason to look rarely
        if not is_same:
            raise NetworkChanged(
                "the frozen layers give something else than when the job was made, by what their code reads of Python, "
                f"such as a global variable, a configuration or an object: {_REMEDY}"
            )

    def _may_run(self) -> bool:
        """Whether the network may be run here: another thread may be running it, and a forked process cannot."""
        return self._thread == (os.getpid(), threading.get_ident())

    def _see(self, kind: str, path: str, table: Mapping[str, Any], name: str, tensor: torch.Tensor) -> _Seen:
        return _Seen(
            kind=kind,
            path=path,
            table=table,
            name=name,
            tensor=tensor,
            version=version_of(tensor),
            about=_about(tensor),
            content=_read(tensor),
            sample=_read_quickly(tensor, self._every),
        )

    def _count(self) -> Sequence[tuple[Any, ...]]:
        counted = (seen for seen in self._seen if not seen.tensor.is_inference())
        return _columns(((seen.table, seen.name, seen.tensor, seen.version) for seen in counted), 4)

    def _look_at_reads(self) -> None:
        tables, names, values = self._reads
        if all(map(is_same_plain, map(dict.get, tables, names), values)):
            return
        assert isinstance(self._head, Reads), "it has told what it reads"
        if (changed := self._head.changed_read_()) is not None:
            raise NetworkChanged(f"{changed}: {_REMEDY}")

    def _look_at_all(self) -> None:
        for seen in self._seen:
            _look_at(seen)
        self._counted = self._count()

    def _look_at_tree(self) -> None:
        now = _tree(self._model)
        if now.keys() == self._tree.keys() and all(now[path] is module for path, module in self._tree.items()):
            return
        frozen = {module.path for module in self._modules}
        changed = (path for path in {**self._tree, **now} if now.get(path) is not self._tree.get(path))
        near = {path: any(_is_around(path, other) for other in frozen) for path in changed}
        own = dict(self._head.named_modules(remove_duplicate=False))
        paths = [path for path, is_near in near.items() if is_near or not self._is_heads(path, own)]
        if not paths:
            return
        path = next((path for path in paths if near[path]), paths[0])
        done = "replaced" if path in now and path in self._tree else "added" if path in now else "removed"
        raise NetworkChanged(f"module {path!r} was {done} since the job was made: {_REMEDY}")

    def _is_heads(self, path: str, own: Mapping[str, nn.Module]) -> bool:
        """Whether the head has a module, or one around it, as the network has it, and so runs what is there now."""
        around = (path[:end] for end, mark in enumerate(f"{path}.") if mark == ".")
        return any(at in own and own[at] is module_at(self._model, at) for at in around)


def _columns(rows: Iterable[tuple[Any, ...]], width: int) -> tuple[tuple[Any, ...], ...]:
    return tuple(zip(*rows, strict=True)) or ((),) * width


def _tree(model: nn.Module) -> dict[str, nn.Module]:
    return {path: module for path, module in model.named_modules(remove_duplicate=False) if path}


def _is_around(path: str, other: str) -> bool:
    """Whether one of two paths is that of the other module or of one around it."""
    return f"{other}.".startswith(f"{path}.") or f"{path}.".startswith(f"{other}.")


def _tensors(
    model: nn.Module, paths: Iterable[str], modules: Sequence[_Module]
) -> Iterator[tuple[str, str, Mapping[str, Any], str, torch.Tensor]]:
    """Kind, path, table, name and tensor of all that frozen modules compute with."""
    named = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    places = {name: place for place, (name, _) in enumerate(named)}
    for path in sorted(paths, key=lambda path: places.get(path, -1)):
        owner, _, name = path.rpartition(".")
        own = vars(model.get_submodule(owner))
        for kind, table in zip(("parameter", "buffer"), (own[key] for key in _TABLES), strict=True):
            if isinstance(tensor := table.get(name), torch.Tensor):
                yield kind, path, table, name, tensor
    for module in modules:
        own = vars(module.module)
        # Tensors that a module keeps as plain attributes; a trace has them as constants.
        yield from (
            ("tensor", f"{module.path}.{name}", own, name, value)
            for name, value in own.items()
            if isinstance(value, torch.Tensor) and not value.requires_grad
        )


def _look_at(seen: _Seen) -> None:
    """See a tensor again, where no value of it changed.

    Raises:
        NetworkChanged: The tensor is gone, is trained now, or has other values.
    """
    here = seen.here
    if here is None:
        raise _changed(seen, "is no longer there")
    if here.requires_grad:
        raise _changed(seen, "is trained now")
    version = version_of(here)
    has_kind = _about(here) == seen.about
    if here is seen.tensor and version == seen.version and has_kind:
        return
    is_same = has_kind and _is_readable(here) and _read(here) == seen.content
    if not is_same:
        done = "was changed in place" if here is seen.tensor else "was replaced"
        raise _changed(seen, f"{done} since the job was made")
    seen.tensor, seen.version = here, version


def _changed(seen: _Seen, done: str) -> NetworkChanged:
    # What requires gradients is no frozen layer, however often it changes; and no optimiser moves what gets none.
    moved = _MOVED if seen.kind == "parameter" and done.startswith("was changed in place") else ""
    return NetworkChanged(f"{seen.kind} {seen.path!r} {done}: {_REMEDY}{moved}")


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise NetworkChanged(reason)


_KEPT = ("training", "_backward_pre_hooks", "_backward_hooks", *_HOOKS)


def require_whole(head: nn.Module) -> None:
    """Do nothing if a head can become another one.

    Raises:
        ModelError: The network's parameters are sharded over processes.
    """
    if is_split(head):
        raise ModelError(
            "fully_shard has split the head's parameters over processes, and another frost line has other parameters: "
            "make another job with offload, and then call fully_shard(job.head)"
        )


def take_over(head: nn.Module, other: nn.Module) -> None:
    """Let a head become another one, so that whoever holds it has that; its mode and its hooks stay.

    Args:
        head: head that loops, optimisers and trainers hold.
        other: head of the same network with another frost line; not to be used afterwards.
    """
    if isinstance(head, Head) and isinstance(other, Head):
        head.give_modes_back_(other)
    if isinstance(head, SkippingHead) and isinstance(other, SkippingHead):
        (_, before), (_, now) = head.known_by_, other.known_by_
        is_alike = [tensor.shape for tensor in before] == [tensor.shape for tensor in now]
        other.awaits_pass_ = is_alike and (head.awaits_pass_ or not are_close(before, now))
    own: MutableMapping[str, Any] = vars(head)
    kept = {name: own[name] for name in _KEPT}
    head.__class__ = type(other)
    own.clear()
    own.update({**vars(other), **kept})
