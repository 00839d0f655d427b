"""What engines that are made from an order have alike: a name, the one cut, and the reference's memory."""

from frostline.engines.backends.recipe import EngineRecipe
from frostline.engines.base.protocols import Footprint

__all__ = ("Converted",)


class Converted:
    """The part of an engine that is the same whatever it was converted to.

    Args:
        name: as in ``engines.backends.catalog.OFFERS``.
        order: what it was made from.

    Raises:
        UnsafeArtifact: The graph names what is not allowed, or does not give what its cuts declare.
    """

    def __init__(self, name: str, order: EngineRecipe) -> None:
        self.name = name
        self._order = order
        self._footprint = order.footprint()

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in fp32; those in fewer bits take less."""
        return self._order.weight_bytes

    def footprint(self, cut: int) -> Footprint:
        """The reference engine's: what others take can only be measured, and fused kernels and 16 bits take less."""
        assert cut == self._order.cut
        return self._footprint
