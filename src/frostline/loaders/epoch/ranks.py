"""Which rank of how many this process is, and how the ranks tell each other what they are about to read."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from frostline.errors import SettingError, Unavailable
from frostline.ordering import Gather, OrderState, ReadingPlan, check_agreement
from frostline.ordering.rank_agreement import RECORD_BYTES

if TYPE_CHECKING:
    from torch import distributed as dist

__all__ = ("ALONE", "KeyValueStore", "Ranks")


class KeyValueStore(Protocol):
    """What a handshake needs of a store that all ranks reach, such as ``TCPStore`` and ``FileStore`` of torch."""

    def set(self, key: str, value: Any, /) -> None:
        """Keep a value."""

    def get(self, key: str, /) -> bytes:
        """The value, once it is there; an error after the store's own deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The processes that share an epoch. The environment is not asked: a launcher's variables reach nobody.

    Attributes:
        rank: rank of this process.
        world_size: how many there are.
        worker: worker of this rank, which takes its steps in turn with the others; a ``DataLoader`` says it.
        workers: how many the rank has.
        gather: gives this rank's record to the others and returns all, by rank; None where they cannot speak to each
            other, so that nobody notices when they read different things.

    Raises:
        SettingError: the rank is not below the number of ranks.
    """

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1
    gather: Gather | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise SettingError(
                f"rank must lie from 0 to below world_size, and {self.rank} of {self.world_size} does not"
            )

    @classmethod
    def current(cls) -> Self:
        """Those of ``torch.distributed`` where it is initialised; else this process is alone."""
        torch = sys.modules.get("torch")  # where nobody imported it, no group was made
        is_shared = torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()
        return cls.of_torch() if is_shared else cls()

    @classmethod
    def of_torch(cls, group: "dist.ProcessGroup | None" = None) -> Self:
        """Those of a process group, of the default one if none is given. They wait for each other as long as it does.

        Raises:
            SettingError: this process is not in it.
        """
        from torch import distributed as dist

        rank = dist.get_rank(group)
        if rank < 0:
            raise SettingError("this process is not in the process group that should share the epoch")
        return cls(rank=rank, world_size=dist.get_world_size(group), gather=_TorchGather(group))

    @classmethod
    def by_store(cls, store: KeyValueStore, rank: int, world_size: int) -> Self:
        """Processes without a process group that reach one store, such as those of JAX or TensorFlow.

        Args:
            store: for these ranks alone (``torch.distributed.PrefixStore`` makes one of a larger one), empty at first.
            rank: rank of this process.
            world_size: how many there are.

        Raises:
            SettingError: the rank is not below the number of ranks.
        """
        return cls(rank=rank, world_size=world_size, gather=_StoreGather(store, rank, world_size))

    @property
    def are_several(self) -> bool:
        """This process is not alone: other ranks share the epoch, or other workers its rank."""
        return self.world_size > 1 or self.workers > 1

    def agree(self, state: OrderState) -> None:
        """Make sure that all ranks are about to read from there; each must call it as often as the others.

        Raises:
            OrderMismatch: they are not; the sentence says what differs, and at which ranks.
            Unavailable: a rank did not say it.
        """
        if self.are_several and self.gather is not None:
            check_agreement(
                self.gather(ReadingPlan(state=state, rank=self.rank, world_size=self.world_size).to_bytes())
            )


ALONE = Ranks()
"""One process that shares with nobody."""


class _TorchGather:
    """Gathers bytes as tensors, which are never unpickled."""

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self._group = group

    def __call__(self, record: bytes) -> Sequence[bytes]:
        import torch
        from torch import distributed as dist

        device = "cuda" if dist.get_backend(self._group) == "nccl" else "cpu"
        own = torch.frombuffer(bytearray(record), dtype=torch.uint8).to(device)
        size = dist.get_world_size(self._group)
        found = [torch.empty(RECORD_BYTES, dtype=torch.uint8, device=device) for _ in range(size)]
        try:
            dist.all_gather(found, own, self._group)
        except RuntimeError as error:  # what every backend raises
            raise Unavailable(f"the ranks could not tell each other what they are about to read: {error}") from error
        return [array.cpu().numpy().tobytes() for array in found]


class _StoreGather:
    """Gathers bytes over a store: each handshake has keys of its own, and each rank waits for all of them."""

    def __init__(self, store: KeyValueStore, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._number = 0

    def __call__(self, record: bytes) -> Sequence[bytes]:
        self._number += 1
        self._store.set(f"frostline/{self._number}/{self._rank}", record)
        return [self._get(rank) for rank in range(self._world_size)]

    def _get(self, rank: int) -> bytes:
        try:
            return bytes(self._store.get(f"frostline/{self._number}/{rank}"))
        except RuntimeError as error:  # what every store of torch raises
            raise Unavailable(f"rank {rank} did not say what it is about to read: {error}; does it run?") from error
