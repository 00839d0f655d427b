"""Has a cache in memory keep to its share of the memory that the control plane divides."""

from collections.abc import Callable

from frostline.control.amounts import Amounts
from frostline.control.reporter import Measured

__all__ = ("CacheStage",)


class CacheStage:
    """A cache as a stage of kind ``cache``.

    Args:
        job: name of the job that it works for.
        max_bytes: bytes that it may take by its own settings, which a share never exceeds.
        held_bytes: returns the bytes that it holds.
        bound: has it keep no more than so many bytes from now on.
    """

    kind = "cache"

    def __init__(self, job: str, max_bytes: int, held_bytes: Callable[[], int], bound: Callable[[int], None]) -> None:
        self.job = job
        self._max_bytes = max_bytes
        self._held_bytes = held_bytes
        self._bound = bound

    def measure(self, *, is_first: bool) -> Measured:  # noqa: ARG002  # as of ReportedStage
        """All that it may keep is wanted: what is not kept is read again."""
        return Measured(
            demand=Amounts(
                compute_s_per_s=0.0,
                bytes_per_s=0.0,
                requests_per_s=0.0,
                requests=0.0,
                memory_bytes=float(self._max_bytes),
            ),
            used=Amounts(memory_bytes=float(self._held_bytes())),
        )

    def keep_to(self, share: Amounts) -> None:
        """Keep no more than this from now on."""
        self._bound(int(min(share.memory_bytes, self._max_bytes)))
