"""Everything that a node needs from torch, imported with the first network: reading and decoding do not need torch."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import numpy.typing as npt

from frostline.batching import ROWS
from frostline.core.config import NodeSettings, cache_folder, devices_of
from frostline.core.errors import ModelError, UnsafeArtifact
from frostline.engines.machine import estimated_operations_per_s, hardware_name, is_accelerator, operations_per_s
from frostline.engines.protocols import Arrays
from frostline.node.trials.queue import EngineMemory, policy_of

if TYPE_CHECKING:
    from frostline.engines.measure import CutMemory, GraphLimits
    from frostline.engines.torch import TorchEngine
    from frostline.models.artifact import Inspection, Prefix
    from frostline.node.inspection import Inspector
    from frostline.node.known_weights import KnownWeights
    from frostline.node.trials.selection import Trials

__all__ = ("TorchBridge",)

T = TypeVar("T")

_NEEDED = (
    "frostline.engines.torch",
    "frostline.models.artifact",
    "frostline.node.trials.selection",
)


class TorchBridge:
    """Reads prefixes, makes their reference engines and holds the trials of other engines. Safe for threads.

    Args:
        settings: settings of the node.
        memory: memory that engines must fit.
        inspector: inspector of prefixes in another process; None if they come from this process.

    Attributes:
        operations_per_s: speed of all devices together as ``engines.machine`` measures it; 0 until ``warm`` has.
    """

    def __init__(self, settings: NodeSettings, memory: EngineMemory, inspector: "Inspector | None" = None) -> None:
        self._settings = settings
        self._memory = memory
        self._inspector = inspector
        self._lock = threading.Lock()
        self._trials: Trials | None = None
        self._known: KnownWeights | None = None
        self.operations_per_s = 0.0
        self._ahead: set[str] = set()  # tenants with a prefix that is inspected ahead
        self._is_closed = False
        self._devices = devices_of(settings.device)
        # Parts of one processor share engines, and of the others some run one batch at a time.
        is_divided = len(self._devices) > 1 and not is_accelerator(settings.device)
        self._engines = () if is_divided else settings.engines

    @property
    def trials(self) -> "Trials":
        """The trials of engines on this hardware."""
        from frostline.node.trials.selection import Trials

        with self._lock:
            if self._trials is None:
                self._trials = Trials(
                    cache_folder() / "engines",
                    policy_of(self._settings),
                    self._memory,
                    longest_s=self._settings.trial_s,
                    engines=self._engines,
                )
                self._trials.tidy()
                if self._is_closed:
                    self._trials.close()
            return self._trials

    def warm(self) -> None:
        """Import what the first network and the usual engine need, which takes seconds, before a request waits.

        Weights that the node has are read after that, and how fast it is is measured.
        """
        for module in _NEEDED:
            import_module(module)
        if not is_accelerator(self._settings.device) and find_spec("openvino"):
            import_module("frostline.engines.openvino").warm()
            self.trials.warm()
        if self._inspector is not None:  # who uploads is elsewhere
            from frostline.node.known_weights import KnownWeights, demo_weights, weight_files

            known = KnownWeights([*demo_weights(), *weight_files(self._settings.weight_folders)])
            known.read()
            self._known = known
            # Parts of one processor are one device.
            devices = self._devices if is_accelerator(self._settings.device) else self._devices[:1]
            self.operations_per_s = sum(map(operations_per_s, devices))

    @property
    def known(self) -> "KnownWeights | None":
        """Weights that this node has; None until ``warm`` has read them."""
        return self._known

    def digest_of(self, body: bytes) -> str:
        """See ``models.artifact``."""
        from frostline.models.artifact import digest_of

        return digest_of(body)

    def read(self, body: bytes) -> "Prefix":
        """See ``models.artifact.read_prefix``."""
        from frostline.models.artifact import read_prefix

        return read_prefix(body)

    def pieces_of(self, prefix: "Prefix") -> dict[str, str]:
        """See ``models.artifact.named_pieces``."""
        from frostline.models.artifact import named_pieces

        return named_pieces(prefix)

    def file_bytes(self, prefix: "Prefix", tensor: str) -> memoryview:
        """See ``models.artifact.file_bytes``."""
        from frostline.models.artifact import file_bytes

        return file_bytes(prefix, tensor)

    def inspect(self, body: bytes, tenant: str) -> "Inspection | None":
        """Inspect an uploaded prefix before any of it is run here; None if it comes from this process.

        See ``Inspector.inspect`` for the errors.
        """
        from frostline.models.artifact import header_of, tokenizer_of

        return None if self._inspector is None else self._inspected(header_of(body), tenant, tokenizer_of(body))

    def inspect_ahead(self, header: bytes, tenant: str) -> "Future[Inspection | None] | None":
        """Begin to inspect a prefix while its weights still come; the result is None if it has a tokenizer.

        Returns None if the prefix comes from this process, or another one of the tenant is inspected ahead: whoever
        ends uploads behind their headers has one thread here.

        Args:
            header: header of its file.
            tenant: name of the tenant that uploads it.
        """
        with self._lock:
            if self._inspector is None or tenant in self._ahead:
                return None
            self._ahead.add(tenant)
        thread = ThreadPoolExecutor(1, "frostline-inspecting")
        found = thread.submit(self._inspected_ahead, header, tenant)
        thread.shutdown(wait=False)
        return found

    def _inspected_ahead(self, header: bytes, tenant: str) -> "Inspection | None":
        from frostline.models.artifact import tokenizer_span

        try:
            return self._inspected(header, tenant) if tokenizer_span(header) == (0, 0) else None
        finally:
            with self._lock:
                self._ahead.remove(tenant)

    def _inspected(self, header: bytes, tenant: str, tokenizer: bytes = b"") -> "Inspection":
        assert self._inspector is not None, "prefixes come from elsewhere"
        return self._inspector.inspect(
            header,
            max_rows=self._settings.device_batch,
            max_check_s=self._settings.max_check_s,
            limits=_limits(self._settings),
            tenant=tenant,
            tokenizer=tokenizer,
        )

    def is_mixing(self, prefix: "Prefix", values: Callable[[Arrays], Sequence[npt.NDArray[np.generic]]]) -> bool:
        """Whether the rows of a batch change each other's values; see ``models.row_check``.

        Args:
            prefix: prefix that is run.
            values: function that runs the prefix on up to eight rows.

        Raises:
            UnsafeArtifact: The graph fails on all rows that are made up for it.
        """
        from frostline.models.row_check import is_mixing

        try:
            return is_mixing(prefix, values)
        except ModelError as error:
            raise UnsafeArtifact(str(error)) from error

    def references(self, prefix: "Prefix", inspection: "Inspection | None" = None) -> "tuple[TorchEngine, ...]":
        """Make what runs a prefix as the user's own network does, for each device; see ``TorchEngine`` for the errors.

        Args:
            prefix: prefix to be run.
            inspection: result of its inspection; None for a prefix of this process's own, which is run on two samples.
        """
        from frostline.engines.torch import TorchEngine, own_memory

        if inspection is None:
            memory: Mapping[int, CutMemory] = own_memory(prefix.graph, prefix.tensors, prefix.cuts)
        else:
            memory = inspection.memory

        def made(device: str) -> TorchEngine:
            return TorchEngine(
                prefix.graph,
                prefix.cuts,
                prefix.tensors,
                device=device,
                max_rows=self._settings.device_batch,
                memory=memory,
                lengths=prefix.lengths,
            )

        return self.for_each_device(made)

    def for_each_device(self, make: Callable[[str], T]) -> tuple[T, ...]:
        """What is made for each device of the node; parts of one processor share it."""
        made = {device: make(device) for device in dict.fromkeys(self._devices)}
        return tuple(made[device] for device in self._devices)

    def rows(self, inspection: "Inspection | None") -> int:
        """The rows of a run: fewer than the node's if one operation on so many would take too long."""
        if inspection is None:
            return self._settings.device_batch
        heaviest = max(operation.heaviest for operation in inspection.operations.values())
        runs = self._settings.max_operation_s * _operations_per_s(self._settings) / max(1, heaviest)
        return ROWS * max(1, min(int(runs), self._settings.device_batch // ROWS))

    def wake(self) -> None:
        """See ``Trials.wake``."""
        with self._lock:
            trials = self._trials
        if trials is not None:
            trials.wake()

    def close(self) -> None:
        """Cancel the running trial, and start no other."""
        with self._lock:
            self._is_closed = True
            trials = self._trials
        if trials is not None:
            trials.close()


def _limits(settings: NodeSettings) -> "GraphLimits":
    from frostline.engines.machine import abilities, quick_dtypes
    from frostline.engines.measure import GraphLimits

    return GraphLimits(
        max_nodes=settings.max_graph_nodes,
        max_values=settings.max_graph_values,
        max_run_s=settings.max_run_s,
        max_operation_s=settings.max_operation_s,
        operations_per_s=_operations_per_s(settings),
        cores=1 if is_accelerator(settings.device) else settings.compute_threads,
        quick_dtypes=quick_dtypes(abilities(settings.device)),
    )


def _operations_per_s(settings: NodeSettings) -> float:
    """What bounds strangers' runs: the same on a busy machine as on an idle one, so not what was measured."""
    return estimated_operations_per_s(hardware_name(settings.device), settings.compute_threads)
