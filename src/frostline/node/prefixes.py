"""The prefixes that a node holds: taken in once, shared by all requests, dropped when others need their place."""

import math
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from frostline.batching import readable_bytes
from frostline.core import Cut
from frostline.engines.torch_eager import TorchEngine
from frostline.errors import BadRequest, OverBudget, Overloaded, UnknownPrefix
from frostline.models.artifact import Prefix, digest_of, read_prefix
from frostline.node.memory import Pool, Reservation
from frostline.node.statistics import Counters

__all__ = ("Prefixes", "Resident")

_RETRY_AFTER_S = 1.0
# What the prefix and its engine keep beside the weights: 2.7 kB (ViT-S/16) to 4.5 kB (EfficientNet-lite0) a node.
_NODE_BYTES = 5000


@dataclass(slots=True, kw_only=True, eq=False)
class Resident:
    """A prefix that is ready to run.

    Attributes:
        prefix: as it was uploaded.
        engine: runs it.
        memory: gives back what its weights and its graph take.
        users: requests that use it now; it stays while there are any.
        owner: the tenant that uploaded it, whose quota it counts against.
        nbytes: of its file.
    """

    prefix: Prefix
    engine: TorchEngine
    memory: ExitStack
    users: int = field(default=0)
    owner: str = ""
    nbytes: int = 0

    def cut(self, number: int) -> Cut:
        """The cut of that number.

        Raises:
            BadRequest: There is none.
        """
        cuts = self.prefix.cuts
        if not 1 <= number <= len(cuts):
            raise BadRequest(f"cut must be from 0 to {len(cuts)} for this prefix, not {number}")
        return cuts[number - 1]


class Prefixes:
    """Prefixes by digest. Safe for threads.

    Args:
        memory: for their weights.
        device: where they run, in torch's words.
        most_rows: of a run.
        counters: told what happens.
    """

    def __init__(self, memory: Pool, device: str, most_rows: int, counters: Counters) -> None:
        self._memory = memory
        self._device = device
        self._most_rows = most_rows
        self._counters = counters
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Resident] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            return digest in self._held

    def owned_bytes(self, owner: str) -> int:
        """What a tenant uploaded and is held."""
        with self._lock:
            return sum(one.nbytes for one in self._held.values() if one.owner == owner)

    def put(self, digest: str, body: bytes, owner: str = "", most_bytes: float = math.inf) -> None:
        """Take a prefix in; one that is held already is left as it is.

        Args:
            digest: its name.
            body: the file.
            owner: the tenant that uploads it.
            most_bytes: of files that the tenant may have here; its own longest unused ones make room.

        Raises:
            BadRequest: The body is not what the digest names.
            UnsafeArtifact: It is no prefix, or names what is not allowed.
            OverBudget: Its weights can never fit.
            Overloaded: They do not fit beside those in use now.
        """
        if digest in self:
            return
        if digest_of(body) != digest:
            raise BadRequest("the prefix is not the one that its digest names: it changed on its way")
        self._keep_quota(len(body), owner, most_bytes)
        with ExitStack() as memory:
            resident = self._resident(body, memory)
            resident.owner, resident.nbytes = owner, len(body)
            with self._lock:
                if digest in self._held:  # another upload was faster
                    return
                resident.memory = memory.pop_all()
                self._held[digest] = resident
        self._counters.add(uploads=1)

    @contextmanager
    def used(self, digest: str) -> Iterator[Resident]:
        """A prefix that stays while the context lasts.

        Raises:
            UnknownPrefix: It is not held.
        """
        with self._lock:
            resident = self._held.get(digest)
            if resident is None:
                raise UnknownPrefix(f"this node does not hold the prefix {digest[:12]}: upload it and ask again")
            self._held.move_to_end(digest)
            resident.users += 1
        try:
            yield resident
        finally:
            with self._lock:
                resident.users -= 1

    def _resident(self, body: bytes, memory: ExitStack) -> Resident:
        memory.enter_context(self._room(len(body)))
        prefix = read_prefix(body)
        memory.enter_context(self._room(len(prefix.graph.nodes) * _NODE_BYTES))
        engine = TorchEngine(prefix.graph, prefix.cuts, prefix.tensors, device=self._device, most_rows=self._most_rows)
        return Resident(prefix=prefix, engine=engine, memory=memory)

    def _room(self, nbytes: int) -> Reservation:
        """Memory for weights, for which prefixes that nobody uses are dropped, longest unused first."""
        while True:
            memory = self._memory.take(nbytes)
            if memory is not None:
                return memory
            if not self._evict():
                raise Overloaded("the prefixes in use leave no room for this one", retry_after_s=_RETRY_AFTER_S)

    def _keep_quota(self, nbytes: int, owner: str, most_bytes: float) -> None:
        if nbytes > most_bytes:
            most = readable_bytes(most_bytes)
            raise OverBudget(f"the prefix has {readable_bytes(nbytes)}, and tenant {owner} may have {most} here")
        while self.owned_bytes(owner) + nbytes > most_bytes:
            if not self._evict(owner):
                why = f"the prefixes in use take what tenant {owner} may have here"
                raise Overloaded(why, retry_after_s=_RETRY_AFTER_S)

    def _evict(self, owner: str | None = None) -> bool:
        """Drop the one that was not used for longest, of an owner where one is named; False where there is none."""
        with self._lock:
            unused = (digest for digest, one in self._held.items() if not one.users and owner in (None, one.owner))
            digest = next(unused, None)
            if digest is None:
                return False
            self._held.pop(digest).memory.close()
        self._counters.add(evicted=1)
        return True
