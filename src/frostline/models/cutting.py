"""Cut a user's network: find its frost line, the cuts before it, the prefix to ship and the head to train."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from frostline.core import Cut, Graph
from frostline.errors import FrozenInTrainMode, NothingFrozen
from frostline.models.artifact import Prefix
from frostline.models.cuts import enumerate_cuts, frozen_reach, prune, reads, sources_of_change
from frostline.models.freeze import frozen_modules
from frostline.models.head import Head
from frostline.models.split import after, before, guard_inputs
from frostline.models.trace import trace

__all__ = ("CutNetwork", "cut_network")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CutNetwork:
    """A network with its frost line found.

    Attributes:
        cuts: all legal cuts from 0 (the encoded sample) to the frost line, which is the last.
        prefix: the frozen part, to be shipped.
        head: the trainable rest, which shares the network's tensors.
    """

    cuts: tuple[Cut, ...]
    prefix: Prefix
    head: Head

    @property
    def frost_line(self) -> Cut:
        """The last cut: what comes after it is trained."""
        return self.cuts[-1]

    def rest_of_prefix(self, cut: Cut) -> Graph:
        """The frozen part from ``cut`` to the frost line, for the trainer to run."""
        return after(self.prefix.graph, cut)


def cut_network(model: nn.Module, input_shape: Sequence[int], *, frozen_in_eval: bool = False) -> CutNetwork:
    """Trace ``model`` as it will be while its head trains, and cut it.

    Args:
        model: parameters that are trained require gradients, the others do not.
        input_shape: of one preprocessed sample.
        frozen_in_eval: run frozen layers in eval mode even where they are in train mode now.

    Raises:
        NotTraceable: torch.export cannot follow the network.
        NothingFrozen: Nothing can be computed before the first trainable layer.
        FrozenInTrainMode: A frozen layer is in train mode, where it would behave differently.
    """
    traced = trace(model, input_shape, training=_training_flags(model))
    graph = prune(traced.graph)
    trained = {path for path, parameter in model.named_parameters(remove_duplicate=False) if parameter.requires_grad}
    trainable = {name for name, path in graph.leaves if path in trained}
    reach = frozen_reach(graph, sources_of_change(graph, trainable))
    cuts = enumerate_cuts(graph, tuple(input_shape), reach=reach)
    if len(cuts) <= 2:
        raise NothingFrozen(_why_nothing(graph, trainable, reach))
    head = Head(model, replace(traced, graph=graph), cuts[-1], input_shape)
    frozen = guard_inputs(before(graph, cuts[-1]))
    if not frozen_in_eval:
        _refuse_train_mode(model, {node.module for node in frozen.nodes})
    tensors = {
        **dict(model.named_buffers()),
        **dict(model.named_parameters(remove_duplicate=False)),
        **traced.constants,
    }
    return CutNetwork(
        cuts=_renumbered(cuts, graph, frozen),
        prefix=Prefix(
            graph=frozen,
            cuts=_renumbered(cuts, graph, frozen)[1:],
            tensors={path: tensors[path].detach() for _, path in frozen.leaves},
        ),
        head=head,
    )


def _training_flags(model: nn.Module) -> dict[str, bool]:
    """Everything in train mode but what is frozen whole: the modes in which the head will be trained."""
    frozen = {id(inner) for _, module in frozen_modules(model) for inner in module.modules()}
    return {path: id(module) not in frozen for path, module in model.named_modules()}


def _renumbered(cuts: Sequence[Cut], graph: Graph, frozen: Graph) -> tuple[Cut, ...]:
    """The same cuts with ``after`` counted in the frozen part's own nodes."""
    places = {node.name: place for place, node in enumerate(frozen.nodes)}
    return tuple(cut if cut.after < 0 else replace(cut, after=places[graph.nodes[cut.after].name]) for cut in cuts)


def _refuse_train_mode(model: nn.Module, paths: set[str]) -> None:
    for path, module in model.named_modules():
        if path in paths and module.training and _minds_its_mode(module):
            raise FrozenInTrainMode(
                f"{type(module).__name__} {path!r} is frozen but in train mode, where its output depends on the batch; "
                "put it into eval mode, or pass frozen_in_eval=True to have the frozen layers run in eval mode"
            )


_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _minds_its_mode(module: nn.Module) -> bool:
    if isinstance(module, _DROPOUTS):
        return module.p > 0
    return isinstance(module, (*_NORMS, *_INSTANCE_NORMS)) and bool(module.track_running_stats)


def _why_nothing(graph: Graph, trainable: set[str], reach: int) -> str:
    first = graph.nodes[reach + 1]
    paths = dict(graph.leaves)
    names = [paths[name] for name in reads(first) if name in trainable]
    cause = (
        f"parameter {names[0]!r} is trained" if names else f"{first.module or 'the network'} changes from run to run"
    )
    return (
        f"nothing is frozen before the first layer that changes: {cause}; freeze layers with "
        "frostline.freeze(model, until=...), or load data without a model: offload(None, data, ...)"
    )
