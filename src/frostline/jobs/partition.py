"""What a network adds to a job: it is cut and shipped, both sides are measured with it, and its rest runs here."""

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from frostline.core import Cut, Graph
from frostline.core.errors import ModelError, NothingFrozen, OverBudget
from frostline.core.events import PhaseStarted, SetupWarning
from frostline.engines.graph_runner import LengthRunner, Runner, as_array, as_tensor, leaf_values
from frostline.jobs.context import JobContext, request_of, some_of, trial_request
from frostline.jobs.measuring import Measurements
from frostline.jobs.profiling import agree_on_engine, situate
from frostline.loaders.fetch import EngineChoice, Shipment
from frostline.loaders.local_stage import LocalPrefix
from frostline.models.artifact import Prefix, digest_of, read_prefix, write_prefix
from frostline.models.changes import FrozenWatch
from frostline.models.cutting import CutNetwork, cut_network, shorten_prefix, uncut_network
from frostline.models.freezing import require_network
from frostline.models.graph import after
from frostline.models.modules import FeaturesGuard, not_averaged, unwrap
from frostline.models.tracing import takes_parts, takes_rows
from frostline.planning import Situation
from frostline.preprocess import Preprocess
from frostline.transport import Cancellation, ExpectsLayouts
from frostline.wire.messages import ProfileRequest

# A frozen norm in a trained part is none.
_WORTH_A_WORD = 0.01

__all__ = ("BucketedLocalPrefix", "PartitionedModel", "TorchLocalPrefix", "rest_of")


class TorchLocalPrefix:
    """The frozen part from one cut to the frost line, ready to run.

    Args:
        graph: graph of that part.
        tensors: weights by the names in ``graph.leaves``.
        device: the place where it runs, in torch's words.
    """

    def __init__(self, graph: Graph, tensors: Mapping[str, torch.Tensor], device: str) -> None:
        self._device = torch.device(device)
        self._leaves = [leaf.to(self._device) for leaf in leaf_values(graph, tensors)]
        self._runner = Runner(graph, device=self._device)

    def run(self, arrays: Sequence[npt.NDArray[np.generic]], size: int) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``loaders.local_stage.LocalPrefix``."""
        starts = range(0, len(arrays[0]), size)
        parts = [self._run_batch([array[start : start + size] for array in arrays], size) for start in starts]
        return parts[0] if len(parts) == 1 else tuple(np.concatenate(columns) for columns in zip(*parts, strict=True))

    def _run_batch(self, arrays: Sequence[npt.NDArray[np.generic]], size: int) -> tuple[npt.NDArray[np.generic], ...]:
        rows = len(arrays[0])
        inputs = [as_tensor(_filled(array, size)).to(self._device) for array in arrays]
        with torch.inference_mode():
            outputs = self._runner.run(inputs, self._leaves)
        return tuple(as_array(output[:rows].contiguous()) for output in outputs)


class BucketedLocalPrefix:
    """The whole frozen part of a network for texts, which runs at each text's own length.

    Args:
        prefix: the frozen part, with its lengths.
        device: the place where it runs, in torch's words.
    """

    def __init__(self, prefix: Prefix, device: str) -> None:
        assert prefix.lengths is not None, "its texts may be shortened"
        self._device = torch.device(device)
        leaves = [leaf.to(self._device) for leaf in leaf_values(prefix.graph, prefix.tensors)]
        self._line = prefix.cuts[-1].number
        self._runner = LengthRunner(prefix.graph, prefix.cuts, leaves, prefix.lengths, device=self._device)

    def run(self, arrays: Sequence[npt.NDArray[np.generic]], size: int) -> tuple[npt.NDArray[np.generic], ...]:
        """See ``loaders.local_stage.LocalPrefix``."""
        [rows] = arrays
        batch = as_tensor(rows if rows.flags.writeable else rows.copy())
        with torch.inference_mode():
            parts = [self._runner.run(some.to(self._device), self._line) for some in torch.split(batch, size)]
        return tuple(as_array(torch.cat(columns)) for columns in zip(*parts, strict=True))


def _filled(array: npt.NDArray[np.generic], rows: int) -> npt.NDArray[np.generic]:
    """The array with zeros behind it; a copy where torch could not take it as it is."""
    if len(array) == rows:
        return array if array.flags.writeable else array.copy()
    return np.concatenate([array, np.zeros((rows - len(array), *array.shape[1:]), array.dtype)])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartitionedModel:
    """A job's network.

    Attributes:
        parts: parts that it was cut into.
        device: the place where the trainer runs its own, in torch's words.
        not_averaged: the reason why its gradients are not averaged over processes, though the user's are; None where
            all is well.
        tokenizer: JSON of the tokenizer that is shipped with its frozen part; empty where samples are images.
        packed: shipment of the frozen part, where it was packed before the network was checked; None where it was not.
        watch: function that makes a watch for later changes of the network, given its head.
    """

    parts: CutNetwork
    device: str
    watch: Callable[[nn.Module], FrozenWatch]
    not_averaged: str | None = None
    tokenizer: bytes = b""
    packed: Shipment | None = None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        preprocess: Preprocess,
        *,
        frozen_in_eval: bool,
        may_shorten: bool = True,
        may_be_trained_whole: bool = False,
        on_found: Callable[[Shipment], None] | None = None,
    ) -> "PartitionedModel":
        """Find the frost line of a network.

        Args:
            model: see ``offload``.
            preprocess: preprocessing that makes the samples that the model takes.
            frozen_in_eval: see ``offload``.
            may_shorten: run frozen layers on texts of their own length, where that gives the same but for the order of
                sums.
            may_be_trained_whole: let all of it run at the trainer where nothing is frozen.
            on_found: function that is given what will travel if all checks of the network succeed, before they are
                made; not for texts, whose frozen part is shortened then.

        Raises:
            SettingError: The model is no network.
            ModelError: see ``models.cut_network``.
        """
        require_network(model)
        parameter = next(model.parameters(), None)
        device = "cpu" if parameter is None else str(parameter.device)
        not_whole, own = not_averaged(model), unwrap(model)
        if preprocess.input_slots:
            model = takes_parts(unwrap(model), preprocess.input_slots)
        elif preprocess.tokens is not None:
            model = takes_rows(model, preprocess.tokens.names)
        packed: list[tuple[Prefix, Shipment]] = []

        def found(prefix: Prefix) -> None:
            if on_found is not None and preprocess.tokens is None and not packed:
                with suppress(ModelError):  # which is raised if it stays so
                    packed.append((prefix, _packed(prefix)))
                    on_found(packed[0][1])

        try:
            parts = cut_network(model, (preprocess.sample,), frozen_in_eval=frozen_in_eval, on_found=found)
        except NothingFrozen as error:
            if not may_be_trained_whole:
                raise
            why = str(error).partition(";")[0]
            parts = uncut_network(unwrap(model), (preprocess.sample,), f"{why}: the whole network runs here")
        if preprocess.tokens is not None and not preprocess.input_slots and parts.prefix is not None and may_shorten:
            tokenizer, head = preprocess.tokenizer, parts.head
            prefix = shorten_prefix(model, parts.prefix, tokenizer, head, frozen_in_eval=frozen_in_eval)
            parts = replace(parts, prefix=prefix)
        guard = partial(FeaturesGuard.on, own, parts.cuts[-1].shapes, preprocess.shape)
        watch = partial(FrozenWatch, unwrap(model), parts.part, minds_modes=not frozen_in_eval, guard=guard)
        return cls(
            parts=parts,
            device=device,
            watch=watch,
            not_averaged=not_whole,
            tokenizer=preprocess.tokenizer,
            packed=next((shipment for prefix, shipment in packed if prefix is parts.prefix), None),
        )

    @property
    def behind(self) -> str:
        """The frozen layers behind the frost line, in words; empty where there are none worth a word."""
        rest = self.parts.rest
        if rest is None or rest.share < _WORTH_A_WORD:
            return ""
        layers = "layer" if rest.layers == 1 else "layers"
        return f"{rest.layers} frozen {layers} behind that ({rest.share:.0%} of the frozen work)"

    @property
    def computed_by(self) -> str:
        """What decides the last bits of what the trainer computes."""
        return f"{torch.device(self.device).type}, torch {torch.__version__}"

    @property
    def rest(self) -> Callable[[Cut], LocalPrefix | None] | None:
        """See ``rest_of``; None where nothing was shipped."""
        return None if self.parts.prefix is None else rest_of(self.parts.prefix, self.device)

    def rest_by(self, whole: LocalPrefix) -> Callable[[Cut], LocalPrefix | None]:
        """See ``rest_of``; the whole frozen part is run by what is given."""
        assert self.parts.prefix is not None, "something was shipped"
        others = rest_of(self.parts.prefix, self.device)
        return lambda cut: whole if cut.number <= 1 else others(cut)

    @property
    def row_s(self) -> float | None:
        """Seconds that this processor takes for a row of the frozen part in eager PyTorch; None where nobody knows.

        An accelerator takes many rows at once, and a text is run at its own length, so that a few rows say little.
        """
        part, prefix = self.parts.part, self.parts.prefix
        if part is None or prefix is None or prefix.lengths is not None or self.device != "cpu":
            return None
        return part.row_s[-1] if part.row_s else None

    def pack(self) -> Shipment | None:
        """The frozen part as it is to travel; None where there is none."""
        if self.parts.prefix is None:
            return None
        return self.packed or _packed(replace(self.parts.prefix, tokenizer=self.tokenizer))

    def ship(self, context: JobContext, before_upload: Callable[[], None] | None = None) -> str | None:
        """Bring the frozen part to the nodes. Returns why they have no memory for it, in their words; None if they do.

        That is told, and is no reason to end the job: the frozen layers then run here.

        Args:
            context: context of the job.
            before_upload: function that is called before many bytes are sent; not where the nodes have them.
        """
        shipment = context.shipment
        assert shipment is not None, "there is a prefix"
        context.asking.on_event(PhaseStarted(name="shipping the frozen layers"))
        if shipment.under_way is not None:
            shipment.under_way.wait()
        if isinstance(context.transport, ExpectsLayouts):
            context.transport.layouts |= {
                (shipment.digest, cut.number): tuple(zip(cut.shapes, cut.dtypes, strict=True))
                for cut in context.cuts
                if cut.number > 1
            }
        if shipment.is_there:
            return None
        try:
            context.asking(lambda: context.transport.put_prefix(shipment.digest, shipment.artifact, before_upload))
        except OverBudget as error:
            context.asking.on_event(SetupWarning(reason=f"the frozen layers run here: {error}"))
            return str(error)
        return None

    def situate(
        self, context: JobContext, nodes: Sequence[str], lacking: set[str], refused: str | None = None
    ) -> Situation:
        """Measure both sides and the link.

        Args:
            context: context of the job.
            nodes: URLs of its nodes; none for one in this process.
            lacking: function that is told by the transport meanwhile: those that cannot run the engine that was chosen.
            refused: the reason why the nodes have no memory for the frozen part; None where they do.
        """
        situation = situate(context, refused)
        if len(nodes) > 1 or (context.cut or 0) > 1:
            line = context.cuts[-1].number
            store = agree_on_engine(context, situation.store, min(context.cut or line, line))
            return replace(situation, store=store, nodes=max(1, len(nodes) - len(lacking)))
        return situation

    def refusal(self, context: JobContext) -> str | None:
        """Ship the network, and find out why the nodes do not run it up to the frost line; None where they do."""
        return self.settle(context, lambda: self.ship(context) or self.lacking_memory(context))

    def settle(self, context: JobContext, find: Callable[[], str | None]) -> str | None:
        """Find out why the nodes do not run the network, None where they do, and let those go on who wait for that."""
        assert context.shipment is not None, "there is a prefix"
        refused: str | None = "it could not be sent"
        try:
            refused = find()
        finally:
            context.shipment.settle(refused)
        return refused

    def lacking_memory(self, context: JobContext) -> str | None:
        """Find out why the nodes, which have the network, have no memory to run it; None where they do.

        Nothing is measured: a node says so by its weights and by what a run would take. The reason, in its words, is
        told.
        """
        one = request_of(context, some_of(context.data, 1), cut=context.cuts[-1].number)
        try:
            context.asking(lambda: context.transport.profile(ProfileRequest(features=one, only_engine=True)))
        except OverBudget as error:
            context.asking.on_event(SetupWarning(reason=f"the node does not run the network: {error}"))
            return str(error)
        return None

    def engine(self, context: JobContext, cancellation: Cancellation, samples_left: int) -> Measurements:
        """Find the node's engine at the frost line while the job runs, and measure nothing else.

        Args:
            context: context of the job.
            cancellation: cancellation by which another thread ends the waiting.
            samples_left: number of samples that the job has still to compute, for which trials must pay.
        """
        trial_s = context.settings.trial_s
        wanted = ProfileRequest(
            features=replace(trial_request(context), cut=context.cuts[-1].number),
            accuracy=context.accuracy,
            only_here=True,
            only_engine=True,
            trial_s=trial_s,
            samples_left=samples_left if trial_s is None else None,
        )
        return Measurements(choice=EngineChoice.of(context.transport.profile(wanted, cancellation)))

    def measurements(self, context: JobContext, nodes: Sequence[str], lacking: set[str]) -> Measurements:
        """Measure all that a plan needs; see ``situate``."""
        situation = self.situate(context, nodes, lacking)
        return Measurements(choice=EngineChoice.of(situation.store), situation=situation)


def _packed(prefix: Prefix) -> Shipment:
    artifact = write_prefix(prefix)
    return Shipment(digest=digest_of(artifact), artifact=artifact, is_settled=threading.Event())


def rest_of(prefix: Prefix | bytes, device: str) -> Callable[[Cut], LocalPrefix | None]:
    """Makes what is left of a prefix behind a cut, ready to run; None where nothing is.

    Args:
        prefix: the frozen part, or its file.
        device: the place where it runs, in torch's words.
    """
    return partial(_rest, read_prefix(prefix) if isinstance(prefix, bytes) else prefix, device)


def _rest(prefix: Prefix, device: str, cut: Cut) -> LocalPrefix | None:
    if prefix.lengths is not None and cut.number <= 1:
        return BucketedLocalPrefix(prefix, device)
    graph = after(prefix.graph, cut)
    return TorchLocalPrefix(graph, prefix.tensors, device) if graph.nodes else None
