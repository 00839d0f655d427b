"""Engines of torch: eager as the reference, in other layouts and precisions, and compiled by TorchInductor."""

import io
import logging
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.export import Dim, ExportedProgram

from frostline.core import Cut, Graph, Levels
from frostline.core.errors import BadRequest, EngineUnsupported, UnsafeArtifact
from frostline.core.graph import Lengths, references
from frostline.engines.graph_runner import (
    LOOKUPS,
    LengthRunner,
    Runner,
    as_array,
    input_tensors,
    leaf_values,
    resolve_allowed,
    resolve_symbolic,
)
from frostline.engines.machine import trace_slot, versions
from frostline.engines.measure import CutMemory, cut_values, dry_run, observed_memory, timed_run
from frostline.engines.protocols import Arrays, Between, Footprint, offer_name
from frostline.engines.recipe import Converted, EngineRecipe, converted_files

__all__ = (
    "COMPILER",
    "UNCONVERTED",
    "LevelsModule",
    "PrefixModule",
    "TorchCompiled",
    "TorchEngine",
    "TorchVariant",
    "conversion",
    "export_prefix",
    "has_compiler",
    "own_memory",
    "refuse_lookups",
)


# Operations that an accelerator is given before it is waited for those before: enough that it never runs dry.
_QUEUED = 8


class TorchEngine:
    """A prefix ready to run up to any of its cuts. Immutable, so that threads may share it.

    Args:
        graph: the frozen part, from the network's input to the frost line.
        cuts: every place where a run may stop, in order, cut 1 (the input) first.
        tensors: weights by the names in ``graph.leaves``.
        device: the device in torch's words.
        max_rows: the largest batch that will be run, a multiple of 8.
        memory: memory found by a dry run elsewhere, by the number of the cut; None makes a dry run here.
        lengths: the way that the graph runs on fewer tokens, which it does on a CPU; None where all samples are as
            long.

    Raises:
        UnsafeArtifact: The graph names what is not allowed, or does not give what its cuts declare.
    """

    name = "torch-eager"

    def __init__(
        self,
        graph: Graph,
        cuts: Sequence[Cut],
        tensors: Mapping[str, torch.Tensor],
        *,
        device: str = "cpu",
        max_rows: int = 32,
        memory: Mapping[int, CutMemory] | None = None,
        lengths: Lengths | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._graph = graph
        self._leaves = [leaf.to(self._device) for leaf in leaf_values(graph, tensors)]
        self._cuts = {cut.number: cut for cut in cuts}
        self._inputs = (cuts[0].shapes, cuts[0].dtypes)
        self._runner = Runner(graph, cuts=cuts, device=self._device, resolve_op=resolve_allowed)
        self._bucketed = (
            None
            if lengths is None or self._device.type != "cpu"
            else LengthRunner(graph, cuts, self._leaves, lengths, device=self._device, resolve_op=resolve_allowed)
        )
        self._memory = dry_run(graph, self._leaves, cuts, max_rows=max_rows) if memory is None else memory

    @property
    def weight_bytes(self) -> int:
        """Bytes of the resident weights."""
        return sum({leaf.data_ptr(): leaf.nbytes for leaf in self._leaves}.values())

    def footprint(self, cut: int) -> Footprint:
        """Memory of one run up to this cut, at its peak, without the weights."""
        whole = self._memory[cut].to_here
        if not self._is_bucketed(cut):
            return whole
        # What crosses is put together beside a run that is no larger than one of the whole length.
        more = self._cuts[cut].bytes_per_sample
        return replace(whole, bytes_per_sample=whole.bytes_per_sample + more)

    def remaining_footprint(self, cut: int) -> Footprint:
        """Memory of one run from this cut to the frost line, at its peak, without the weights."""
        return self._memory[cut].rest

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Compute what crosses a cut.

        Args:
            inputs: an array ``[n, ...]`` for each input of the network, as cut 1 declares them, or the one; not
                changed. Keep ``n`` the same from run to run: a sample's features do not depend on the others beside
                it, but for another ``n`` kernels may round otherwise.
            cut: number of the cut, 1 or higher.

        Returns:
            One C-contiguous array ``[n, ...]`` for each tensor that crosses.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that cut 1 declares.
            UnsafeArtifact: The prefix fails on these values, which no dry run can see.
        """
        return self._run(inputs, cut, None)

    def run_divided(self, inputs: Arrays, cut: int, between: Between) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``engines.protocols.PreemptibleEngine``."""
        return self._run(inputs, cut, _Paced(between, self._device) if self._device.type == "cuda" else between)

    def _run(self, inputs: Arrays, cut: int, between: Between | None) -> tuple[npt.NDArray[np.generic], ...]:
        batch = input_tensors(inputs, self._device)
        self._check(batch)
        try:
            with torch.inference_mode():
                tensors = self._tensors(batch, cut, between)
        except (LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise UnsafeArtifact(f"the prefix does not run on these samples: {why}") from error
        return tuple(as_array(tensor.contiguous()) for tensor in tensors)

    def _is_bucketed(self, cut: int) -> bool:
        return self._bucketed is not None and self._bucketed.takes(cut)

    def _tensors(self, batch: Sequence[torch.Tensor], cut: int, between: Between | None) -> tuple[torch.Tensor, ...]:
        if self._bucketed is not None and self._bucketed.takes(cut):
            return self._bucketed.run(batch[0], cut, between)
        return self._runner.run(batch, self._leaves, upto=self._cuts[cut], between=between)

    def timed_run(
        self, inputs: Arrays, *, repeats: int, clock: Callable[[], float], between: Between | None = None
    ) -> tuple[npt.NDArray[np.float64], tuple[npt.NDArray[np.generic], ...]]:
        """Seconds a sample up to each cut, and the features; see ``engines.measure.timed_run``."""
        cuts = tuple(self._cuts.values())
        return timed_run(self._graph, self._leaves, cuts, inputs, repeats=repeats, clock=clock, between=between)

    def cut_values(
        self, cuts: Sequence[Cut], inputs: Arrays, between: Between | None = None
    ) -> dict[int, tuple[npt.NDArray[np.generic], ...]]:
        """What crosses some cuts; see ``engines.measure.cut_values``."""
        return cut_values(self._graph, self._leaves, cuts, inputs, between)

    def _check(self, batch: Sequence[torch.Tensor]) -> None:
        wanted = [(shape, f"torch.{dtype}") for shape, dtype in zip(*self._inputs, strict=True)]
        given = [(tuple(array.shape[1:]), str(array.dtype)) for array in batch]
        if given != wanted or len({len(array) for array in batch}) != 1:
            raise BadRequest(f"the prefix takes inputs {wanted} of one batch, not {given}")


class _Paced:
    """Calls something between operations that an accelerator has done, which are otherwise queued far ahead."""

    def __init__(self, between: Between, device: torch.device) -> None:
        self._between = between
        self._device = device
        self._count = 0
        self._marks: deque[torch.cuda.Event] = deque()

    def __call__(self) -> None:
        self._count += 1
        if self._count % _QUEUED == 0:
            mark = torch.cuda.Event()  # type: ignore[no-untyped-call]
            mark.record(torch.cuda.current_stream(self._device))
            self._marks.append(mark)
            if len(self._marks) > 1:
                self._marks.popleft().synchronize()
        self._between()


UNCONVERTED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What converters raise at a network that they cannot take."""

# Any batch does, since its size is traced as a symbol; two or more keeps torch from fixing it as one.
_EXAMPLE_ROWS = 8


class PrefixModule(torch.nn.Module):
    """A prefix up to one cut. Its weights are buffers: nothing in it is trained.

    Args:
        order: order to make it from.
        dtype: the dtype to compute in, where the operators allow it (torch's automatic casting); None leaves all as it
            is.
    """

    def __init__(self, order: EngineRecipe, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self._cut = order.last
        self._device = torch.device(order.device)
        self._dtype = dtype
        self._runner = Runner(order.graph, cuts=[order.last], device=self._device, resolve_op=resolve_symbolic)
        self._names = [f"leaf_{place}" for place in range(len(order.graph.leaves))]
        for name, leaf in zip(self._names, order.leaves(), strict=True):
            self.register_buffer(name, leaf.detach().to(self._device))
        self._front = (
            None if order.levels is None else LevelsModule(order.levels, order.taken[0][0][1]).to(self._device)
        )

    def forward(self, *inputs: torch.Tensor) -> tuple[Any, ...]:
        """What crosses the cut; for tracing only (see ``Runner.run_traced``)."""
        leaves = [getattr(self, name) for name in self._names]
        if self._front is not None:
            inputs = (self._front(*inputs),)
        with torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None):
            return self._runner.run_traced(inputs, leaves, upto=self._cut)


class LevelsModule(torch.nn.Module):
    """What a network takes, of pixels as they are kept: ``float32[n, C, H, W]`` of ``uint8[n, H, W, C]``.

    One multiplication and one addition over lines of pixels, which vectors have no trouble with; with three numbers for
    three channels that lie side by side OpenVINO takes 0.4 ms longer for an image of 224 x 224. It rounds otherwise
    than a difference that is divided, by 1e-7 or so.
    """

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self, levels: Levels, width: int) -> None:
        super().__init__()
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (levels.mean, levels.std))
        self.register_buffer("scale", (1 / std).to(torch.float32).repeat(width))
        self.register_buffer("offset", (-mean / std).to(torch.float32).repeat(width))

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """The numbers that ``core.Levels`` gives, but for rounding."""
        lines = pixels.flatten(2).to(torch.float32) * self.scale + self.offset
        return lines.view(pixels.shape).permute(0, 3, 1, 2)


def own_memory(graph: Graph, tensors: Mapping[str, torch.Tensor], cuts: Sequence[Cut]) -> dict[int, CutMemory]:
    """The memory up to each cut of a prefix that this process made itself, from a run on two samples of zeros."""
    return observed_memory(graph, leaf_values(graph, tensors), cuts)


def export_prefix(order: EngineRecipe, *, dtype: torch.dtype | None = None) -> ExportedProgram:
    """The prefix up to its cut as torch.export gives it, for any batch.

    Call it only within ``engines.machine.trace_slot``.

    Args:
        order: order to export, after its footprint was taken, which is how a graph is checked.
        dtype: type of the computation, as for ``PrefixModule``.

    Raises:
        EngineUnsupported: The prefix reads at indices among its own values, which other engines do not check.
    """
    refuse_lookups(order)
    example = [
        torch.zeros((_EXAMPLE_ROWS, *shape), dtype=getattr(torch, kind), device=order.device)
        for shape, kind in order.taken
    ]
    batch = tuple({0: Dim("batch")} for _ in example)
    module = PrefixModule(order, dtype).eval()
    with torch.no_grad():
        return torch.export.export(module, tuple(example), strict=False, dynamic_shapes=(batch,))


def refuse_lookups(order: EngineRecipe) -> None:
    """Do nothing if other engines may run the prefix.

    Raises:
        EngineUnsupported: The prefix reads at indices among its own values, which other engines do not check.
    """
    found = {node.op for node in order.graph.nodes[: order.last.after + 1]} & LOOKUPS
    if found:
        raise EngineUnsupported(f"the network uses {min(found)}, which is left to engines that check its indices")


@contextmanager
def conversion(engine: str) -> Iterator[None]:
    """Convert a network for an engine: what it warns of, logs and prints is left out, and what it raises translated.

    Args:
        engine: the title, for the error.

    Raises:
        EngineUnsupported: The converter cannot take the network.
    """
    try:
        with _quiet():
            yield
    except UNCONVERTED as error:
        why = str(error).strip().partition("\n")[0] or type(error).__name__
        raise EngineUnsupported(f"{engine} cannot take this network: {why[:300]}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep to themselves what converters warn of, log and print: where one fails, the error says what matters."""
    before = logging.root.manager.disable
    nowhere = io.StringIO()
    with warnings.catch_warnings(), redirect_stdout(nowhere), redirect_stderr(nowhere):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


# What torch's automatic casting computes in few bits, and so casts its weights for: they are cast once instead.
_NARROW = frozenset(
    {"aten.bmm.default", "aten.conv1d.default", "aten.conv2d.default", "aten.conv2d.padding", "aten.linear.default"}
    | {"aten.matmul.default", "aten.mm.default"}
)


class TorchVariant(Converted):
    """A prefix in eager torch, channels-last, in fp32 or in 16 bits where the operators allow it; see ``Converted``.

    Args:
        dtype: the dtype to compute in; None is fp32.
    """

    def __init__(self, name: str, order: EngineRecipe, dtype: torch.dtype | None = None) -> None:
        super().__init__(name, order)
        self._dtype = dtype
        self._device = torch.device(order.device)
        self._levels = _tiled(order, self._device)
        self._runner = Runner(order.graph, cuts=[order.last], device=self._device, resolve_op=_resolve)
        narrow = _only_narrow(order) if dtype is not None else frozenset()
        self._leaves = [
            _channels_last(leaf.detach().to(self._device, dtype if name in narrow else leaf.dtype))
            for (name, _), leaf in zip(order.graph.leaves, order.leaves(), strict=True)
        ]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the resident weights."""
        return sum({leaf.data_ptr(): leaf.nbytes for leaf in self._leaves}.values())

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """As ``engines.protocols.Engine`` says.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that the engine takes.
            EngineUnsupported: The prefix does not run in this variant.
        """
        given = input_tensors(self._order.batch(inputs, cut), self._device)
        casting = torch.autocast(self._device.type, dtype=self._dtype, enabled=self._dtype is not None)
        try:
            with torch.inference_mode(), casting, _on_threads(self._order.threads):
                batch = [
                    _channels_last(array if self._levels is None else _applied(self._levels, array)) for array in given
                ]
                tensors = self._runner.run(batch, self._leaves, upto=self._order.last)
                declared = zip(tensors, self._order.last.dtypes, strict=True)
                return tuple(as_array(tensor.to(getattr(torch, kind)).contiguous()) for tensor, kind in declared)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            why = str(error).partition("\n")[0]
            raise EngineUnsupported(f"{self.name} cannot run this network: {why}") from error


@contextmanager
def _on_threads(threads: int) -> Iterator[None]:
    """Have torch compute on so many threads for this one.

    It keeps the number for each thread, and one for threads that compute for the first time, which may meanwhile
    begin with this one.
    """
    before = torch.get_num_threads()
    if before == threads:
        yield
        return
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _resolve(name: str) -> Callable[..., Any]:
    # A view of what another layout spread over the memory is not to be had; a copy has the same values.
    return resolve_allowed("aten.reshape.default" if name == "aten.view.default" else name)


def _only_narrow(order: EngineRecipe) -> frozenset[str]:
    """Names of the leaves that nothing reads but what computes in few bits."""
    leaves = {name for name, _ in order.graph.leaves}
    narrow: set[str] = set()
    other: set[str] = set()
    for node in order.graph.nodes[: order.last.after + 1]:
        (narrow if node.op in _NARROW else other).update(references((node.args, node.kwargs)))
    return frozenset((narrow - other) & leaves)


def _tiled(order: EngineRecipe, device: torch.device) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What to take from a line of pixels, and what to divide it by; None where the engine takes no pixels.

    Over lines of pixels torch computes 10 times faster than over three channels, 0.02 ms a sample of 224 x 224.
    """
    if order.levels is None:
        return None
    _, width, channels = order.taken[0][0]
    assert channels == len(order.levels.mean)
    mean, std = (
        torch.tensor(values, dtype=torch.float32, device=device) for values in (order.levels.mean, order.levels.std)
    )
    return mean.repeat(width), std.repeat(width)


def _applied(levels: tuple[torch.Tensor, torch.Tensor], pixels: torch.Tensor) -> torch.Tensor:
    """``float32[n, C, H, W]``, channels last, of ``uint8[n, H, W, C]``."""
    mean, std = levels
    made = pixels.flatten(2).to(torch.float32).sub_(mean).div_(std)
    return made.view(pixels.shape).permute(0, 3, 1, 2)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    is_image = tensor.dim() == 4 and tensor.is_floating_point()
    return tensor.contiguous(memory_format=torch.channels_last) if is_image else tensor


_FILE = "prefix.pt2"
COMPILER = "g++"
"""What inductor calls to compile its kernels."""


def has_compiler() -> bool:
    """Whether there is a compiler of C++."""
    return shutil.which(COMPILER) is not None


class TorchCompiled(Converted):
    """A prefix compiled ahead of its runs by inductor; see ``Converted``.

    The file that it keeps is native code, made here: a folder of them must be writable by nobody else.

    Args:
        dtype: the dtype to compute in, where the operators allow it; None is fp32.

    Raises:
        EngineUnsupported: Inductor cannot take the network.
    """

    def __init__(self, name: str, order: EngineRecipe, dtype: torch.dtype | None = None) -> None:
        super().__init__(name, order)
        self._device = torch.device(order.device)
        made_by = f"{order.threads}-threads-{versions('torch')}"
        files = f"{offer_name(name)}-{order.file_name(made_by)}"
        with converted_files(order.folder, files, lambda place: _compile(order, dtype, place)) as place:
            self._call = _loaded(place)

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        """As ``engines.protocols.Engine`` says.

        Raises:
            BadRequest: The inputs are not of the shapes and dtypes that the engine takes.
            EngineUnsupported: The compiled prefix fails on them.
        """
        batch = input_tensors(self._order.batch(inputs, cut), self._device)
        try:
            with torch.inference_mode():
                tensors = self._call(*batch)
        except UNCONVERTED as error:
            raise EngineUnsupported(f"the compiled network failed on these samples: {str(error)[:300]}") from error
        declared = zip(tensors, self._order.last.dtypes, strict=True)
        return tuple(as_array(tensor.to(getattr(torch, kind)).contiguous()) for tensor, kind in declared)


def _compile(order: EngineRecipe, dtype: torch.dtype | None, place: Path) -> None:
    from torch._inductor import aoti_compile_and_package

    settings: dict[str, Any] = {
        "freezing": True,
        "max_autotune": torch.device(order.device).type == "cuda",
        "cpp.threads": order.threads,  # which stands in the kernels
    }
    with trace_slot(), conversion("torch's compiler"), torch.no_grad():
        program = export_prefix(order, dtype=dtype)
        aoti_compile_and_package(program, package_path=str(place / _FILE), inductor_configs=settings)


def _loaded(place: Path) -> Any:
    from torch._inductor import aoti_load_package

    with conversion("torch's compiler"):
        return aoti_load_package(str(place / _FILE))
