"""Cut a user's network: find its frost line, the cuts before it, the prefix to ship and the head to train."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from frostline.core import Cut, Graph, Ref, TensorSpec
from frostline.errors import NothingFrozen, NotTraceable
from frostline.models.cutting.boundaries import cut_at_a_boundary
from frostline.models.cutting.frozen import find_frozen, refuse_train_mode, training_flags
from frostline.models.cutting.head import Head, TracedHead, WholeHead
from frostline.models.files.artifact import Prefix
from frostline.models.graph.cuts import input_cuts
from frostline.models.graph.split import after
from frostline.models.tracing.recording import Inputs, input_specs
from frostline.models.tracing.trace_cache import trace
from frostline.models.wrappers import unwrapped

__all__ = ("CutNetwork", "cut_network")

_MENDS = {
    "by the values of a tensor": "let its code choose by torch.where, or freeze the layer that decides whole",
    "by the size of the batch": "let its code say sizes as -1 or x.shape[0]",
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
        fallback: why the network, or a part of what is frozen, is not cut as finely as a traced one would be, or why
            the frost line lies before the layer that ``freeze`` was given; None where there is nothing to say.
    """

    cuts: tuple[Cut, ...]
    prefix: Prefix | None
    head: Head
    fallback: str | None = None

    @property
    def frost_line(self) -> Cut:
        """The last cut: what comes after it is trained."""
        return self.cuts[-1]

    def remaining_prefix(self, cut: Cut) -> Graph:
        """The frozen part from ``cut`` to the frost line, for the trainer to run."""
        if self.prefix is None:
            names = self.frost_line.tensors
            return Graph(inputs=names, leaves=(), nodes=(), outputs=tuple(map(Ref, names)))
        return after(self.prefix.graph, cut)


def cut_network(model: nn.Module, inputs: Inputs, *, frozen_in_eval: bool = False) -> CutNetwork:
    """Trace ``model`` as it will be while its head trains, and cut it.

    A network that torch.export cannot follow is cut at the boundary between two of its modules, and where there is
    none either, not at all: its input is delivered. ``fallback`` says so.

    Args:
        model: parameters that are trained require gradients, the others do not. What is compiled, or wrapped for
            several devices, is cut as the network inside (see ``models.wrappers``).
        inputs: the per-sample shape of its one input of float32 pixels, or a ``TensorSpec`` for each of its inputs.
        frozen_in_eval: run frozen layers in eval mode even where they are in train mode now.

    Raises:
        NothingFrozen: Nothing can be computed before the first trainable layer.
        FrozenInTrainMode: A frozen layer is in train mode, where it would behave differently.
        ModelError: The inputs are of a kind that cannot be carried.
    """
    specs, model = input_specs(inputs), unwrapped(model)
    flags = training_flags(model, specs, frozen_in_eval=frozen_in_eval)
    try:
        traced = trace(model, specs, training=flags)
    except NotTraceable as error:
        return _untraced(model, specs, flags, str(error), frozen_in_eval=frozen_in_eval)
    part = find_frozen(model, traced, specs)
    if isinstance(part, str):
        return _plain(model, specs, f"{part}: the whole network runs here; {_ANOTHER}")
    if not frozen_in_eval:
        refuse_train_mode(model, part.prefix.graph)
    stopped = (
        f"a node does not run {part.stopped_by}: the frozen layers from there on run here; compute that by other "
        "operators, or freeze up to a layer before it"
    )
    return CutNetwork(
        cuts=part.cuts,
        prefix=part.prefix,
        head=TracedHead(model, part, specs),
        fallback=stopped if part.stopped_by else part.moved or None,
    )


def _untraced(
    model: nn.Module, specs: Sequence[TensorSpec], flags: Mapping[str, bool], why: str, *, frozen_in_eval: bool
) -> CutNetwork:
    if all(parameter.requires_grad for parameter in model.parameters()):
        raise NothingFrozen(
            "nothing is frozen: freeze layers with frostline.freeze(model, until=...), or load data without a model: "
            "frostline.loader(data, ...)"
        )
    found = cut_at_a_boundary(model, specs, flags)
    if isinstance(found, str):
        return _plain(model, specs, f"{why}, and {found}: the whole network runs here; {_mend(why)}")
    part, head, path = found
    if not frozen_in_eval:
        refuse_train_mode(model, part.prefix.graph)
    ends = f"its modules up to {path!r} can be traced one behind the other, so the frozen part ends there"
    reason = f"{why}; {ends}; {_mend(why)}"
    return CutNetwork(cuts=part.cuts, prefix=part.prefix, head=head, fallback=reason)


def _mend(why: str) -> str:
    """What to do about a network that cannot be traced."""
    return next((mend for cause, mend in _MENDS.items() if cause in why), _ANOTHER)


def _plain(model: nn.Module, specs: Sequence[TensorSpec], reason: str) -> CutNetwork:
    """The network as it is: its inputs are delivered, and all of it is the head."""
    return CutNetwork(cuts=input_cuts(specs), prefix=None, head=WholeHead(model), fallback=reason)
