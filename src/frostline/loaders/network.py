"""What a network adds to a job: it is cut and shipped, both sides are measured with it, and its rest runs here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from frostline.client.transport import Transport
from frostline.core import Cut
from frostline.events import Observer, PhaseStarted
from frostline.loaders.asking import Asking
from frostline.loaders.fetch import Shipment
from frostline.loaders.rest import TorchRest
from frostline.loaders.scene import Scene
from frostline.loaders.situate import agreed, situate
from frostline.loaders.trainer_side import Rest
from frostline.models.artifact import Prefix, digest_of, read_prefix, write_prefix
from frostline.models.cutting import CutNetwork, cut_network
from frostline.models.split import after
from frostline.planning import Situation

__all__ = ("Network", "rest_of")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Network:
    """A job's network.

    Attributes:
        parts: what it was cut into.
        device: where the trainer runs its own, in torch's words.
    """

    parts: CutNetwork
    device: str

    @classmethod
    def of(cls, model: nn.Module, shape: tuple[int, ...], *, frozen_in_eval: bool) -> "Network":
        """Find the frost line of a network.

        Args:
            model: see ``offload``.
            shape: of a sample that it takes.
            frozen_in_eval: see ``offload``.

        Raises:
            ModelError: see ``models.cut_network``.
        """
        parameter = next(model.parameters(), None)
        device = "cpu" if parameter is None else str(parameter.device)
        return cls(parts=cut_network(model, shape, frozen_in_eval=frozen_in_eval), device=device)

    @property
    def computed_by(self) -> str:
        """What decides the last bits of what the trainer computes."""
        return f"{torch.device(self.device).type}, torch {torch.__version__}"

    @property
    def rest(self) -> Callable[[Cut], Rest | None] | None:
        """See ``rest_of``; None where nothing was shipped."""
        return None if self.parts.prefix is None else rest_of(self.parts.prefix, self.device)

    def ship(self, transport: Transport, asking: Asking, observe: Observer) -> Shipment | None:
        """Bring the frozen part to the node; None where there is none to ship."""
        if self.parts.prefix is None:
            return None
        observe(PhaseStarted(name="shipping the frozen layers"))
        artifact = write_prefix(self.parts.prefix)
        shipment = Shipment(digest=digest_of(artifact), artifact=artifact)
        asking(lambda: transport.put_prefix(shipment.digest, shipment.artifact))
        return shipment

    def situate(self, scene: Scene, nodes: Sequence[str], lacking: set[int]) -> Situation:
        """Measure both sides and the link.

        Args:
            scene: of the job.
            nodes: URLs of its nodes; none for one in this process.
            lacking: told of by the transport meanwhile: those that cannot run the engine that was chosen.
        """
        situation = situate(scene)
        if len(nodes) > 1 or (scene.cut or 0) > 1:
            line = scene.cuts[-1].number
            store = agreed(scene, situation.store, min(scene.cut or line, line))
            return replace(situation, store=store, nodes=max(1, len(nodes) - len(lacking)))
        return situation


def rest_of(prefix: Prefix | bytes, device: str) -> Callable[[Cut], Rest | None]:
    """Makes what is left of a prefix behind a cut, ready to run; None where nothing is.

    Args:
        prefix: the frozen part, or its file.
        device: where it runs, in torch's words.
    """
    return partial(_rest, read_prefix(prefix) if isinstance(prefix, bytes) else prefix, device)


def _rest(prefix: Prefix, device: str, cut: Cut) -> Rest | None:
    graph = after(prefix.graph, cut)
    return TorchRest(graph, prefix.tensors, device) if graph.nodes else None
