"""The prefixes that a node holds, and engines made for them: shared by all requests, dropped when others need room."""

import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from frostline.batching import readable_bytes
from frostline.core import REFERENCE, Cut, Levels
from frostline.engines.faces import Arrays, Begun, Engine, Footprint, Queueing
from frostline.errors import BadRequest, EngineNotReady, OverBudget, Overloaded, UnknownPrefix
from frostline.node.memory import Pool, Reservation
from frostline.node.statistics import Counters
from frostline.node.tenants import Account
from frostline.node.torch_door import TorchDoor
from frostline.profiles import Trial

if TYPE_CHECKING:  # of PyTorch, which the first of them brings
    from frostline.engines.torch_eager import TorchEngine
    from frostline.models.artifact import Prefix

__all__ = ("Prefixes", "Resident")

_RETRY_AFTER_S = 1.0
# What the prefix and its engine keep beside the weights: 2.7 kB (ViT-S/16) to 4.5 kB (EfficientNet-lite0) a node.
_NODE_BYTES = 5000

_Key = tuple[str, str, int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resident:
    """A prefix with what runs it.

    Attributes:
        prefix: as it was uploaded.
        reference: runs it up to every cut, as the user's own network does.
        engine: runs it for the request that uses it; up to the request's own cut where it is not the reference.
        rows: of a run, at most: those at which the engine is fastest.
    """

    prefix: "Prefix"
    reference: "TorchEngine"
    engine: Engine
    rows: int

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
    """Prefixes by digest, and engines by digest, name and cut. Safe for threads.

    Args:
        memory: for their weights.
        most_rows: of a run.
        door: to what reads prefixes and makes engines.
        counters: told what happens.
    """

    def __init__(self, memory: Pool, most_rows: int, door: TorchDoor, counters: Counters) -> None:
        self._memory = memory
        self._most_rows = most_rows
        self._door = door
        self._counters = counters
        self._lock = threading.Lock()
        self._making = threading.Lock()
        self._held: OrderedDict[_Key, _Held] = OrderedDict()  # least recently used first
        self._coming: Counter[str] = Counter()  # bytes of what is being made, by tenant

    def __len__(self) -> int:
        with self._lock:
            return sum(engine == REFERENCE for _, engine, _ in self._held)

    def __contains__(self, digest: str) -> bool:
        with self._lock:
            return _prefix_key(digest) in self._held

    def owned_bytes(self, owner: str) -> int:
        """What is held of what a tenant uploaded, and of the engines that were made for it."""
        with self._lock:
            return self._owned_bytes(owner)

    def room_bytes(self, digest: str, asker: Account) -> float:
        """What engines of a prefix may take that are made for a tenant; its own copy of the prefix counts too."""
        with self._lock:
            held = self._held.get(_prefix_key(digest))
        taken = 0 if held is None or held.owner != asker.name else held.nbytes
        return asker.most_weight_bytes(self._memory.total_bytes) - taken

    def put(self, digest: str, body: bytes, asker: Account) -> None:
        """Take a prefix in; one that is held already is left as it is.

        Args:
            digest: its name.
            body: the file.
            asker: who uploads it; where that is more than it may have here, its own longest unused ones make room.

        Raises:
            BadRequest: The body is not what the digest names.
            UnsafeArtifact: It is no prefix, or names what is not allowed.
            OverBudget: Its weights can never fit.
            Overloaded: They do not fit beside those in use now.
        """
        if digest in self:
            return
        if self._door.digest_of(body) != digest:
            raise BadRequest("the prefix is not the one that its digest names: it changed on its way")
        with self._charged(len(body), asker), ExitStack() as memory:
            resident = self._resident(body, memory)
            held = _Held(resident=resident, memory=memory, owner=asker.name, nbytes=len(body))
            if not self._keep(_prefix_key(digest), held):  # another upload was faster
                return
        self._counters.add(uploads=1)

    @contextmanager
    def used(
        self,
        digest: str,
        engine: str = REFERENCE,
        cut: int = 0,
        asker: Account | None = None,
        levels: Levels | None = None,
    ) -> Iterator[Resident]:
        """A prefix that stays while the context lasts, with the engine that is to run it.

        Args:
            digest: of the prefix.
            engine: its name.
            cut: up to which the engine runs; of no account for the reference.
            asker: whose quota an engine counts against where it has to be made; not needed for the reference.
            levels: what pixels mean, where the engine's name says that it takes them.

        Raises:
            UnknownPrefix: It is not held.
            EngineNotReady: The engine was not tried on it up to that cut.
            Overloaded: The engine does not fit beside what is in use now.
            OverBudget: It is more than the tenant may have here.
        """
        with ExitStack() as stack:
            held = stack.enter_context(self._using(_prefix_key(digest)))
            if held is None:
                raise UnknownPrefix(f"this node does not hold the prefix {digest[:12]}: upload it and ask again")
            if engine != REFERENCE:
                assert asker is not None, "somebody asks for an engine"
                held = self._with_engine(held, (digest, engine, held.cut(cut).number), asker, levels, stack)
            yield held

    def _with_engine(
        self, reference: Resident, key: _Key, asker: Account, levels: Levels | None, stack: ExitStack
    ) -> Resident:
        """The engine, which is made where it is not held; ``stack`` lets go of it."""
        held = stack.enter_context(self._using(key))
        while held is None:
            with self._making:
                if key not in self._held:
                    self._make(reference, key, asker, levels)
            held = stack.enter_context(self._using(key))  # None where others took its place at once
        return Resident(prefix=reference.prefix, reference=reference.reference, engine=held.engine, rows=held.rows)

    def _make(self, reference: Resident, key: _Key, asker: Account, levels: Levels | None) -> None:
        digest, engine, cut = key
        trial = self._door.trials.ready(digest, engine, cut)
        if trial is None:
            raise EngineNotReady(
                f"{engine} is not ready for cut {cut} of the prefix {digest[:12]}: ask for a profile that names both, "
                "and ask again"
            )
        with self._charged(trial.weight_bytes, asker), ExitStack() as memory:
            room = memory.enter_context(self._room(trial.load_bytes))
            made = _Measured(engine=self._door.trials.made(digest, reference.prefix, trial, levels), trial=trial)
            room.shrink(trial.weight_bytes)
            rows = min(trial.rows, self._most_rows)
            resident = Resident(prefix=reference.prefix, reference=reference.reference, engine=made, rows=rows)
            self._keep(key, _Held(resident=resident, memory=memory, owner=asker.name, nbytes=trial.weight_bytes))

    @contextmanager
    def _using(self, key: _Key) -> "Iterator[Resident | None]":
        """What is held under a key, which stays while the context lasts."""
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
                held.users += 1
        try:
            yield None if held is None else held.resident
        finally:
            with self._lock:
                if held is not None:
                    held.users -= 1

    def _keep(self, key: _Key, held: "_Held") -> bool:
        """Hold it from now on, with its memory, unless something is held under the key."""
        with self._lock:
            if key in self._held:
                return False
            held.memory = held.memory.pop_all()
            self._held[key] = held
            return True

    def _resident(self, body: bytes, memory: ExitStack) -> Resident:
        memory.enter_context(self._room(len(body)))
        prefix = self._door.read(body)
        memory.enter_context(self._room(len(prefix.graph.nodes) * _NODE_BYTES))
        engine = self._door.reference(prefix)
        return Resident(prefix=prefix, reference=engine, engine=engine, rows=self._most_rows)

    def _room(self, nbytes: int) -> Reservation:
        """Memory for weights, for which what nobody uses is dropped, longest unused first."""
        while True:
            memory = self._memory.take(nbytes)
            if memory is not None:
                return memory
            if not self._evict():
                raise Overloaded("the prefixes in use leave no room for this one", retry_after_s=_RETRY_AFTER_S)

    @contextmanager
    def _charged(self, nbytes: int, asker: Account) -> Iterator[None]:
        """Count so much against a tenant's quota while it is made; its own longest unused ones make room."""
        most = asker.most_weight_bytes(self._memory.total_bytes)
        if nbytes > most:
            raise OverBudget(
                f"this takes {readable_bytes(nbytes)} of weights, and tenant {asker.name} may have "
                f"{readable_bytes(most)} here: give it more weight_bytes, or start the node with more --memory"
            )
        while not self._charge(nbytes, asker.name, most):
            if not self._evict(asker.name):
                why = f"the prefixes in use take what tenant {asker.name} may have here"
                raise Overloaded(why, retry_after_s=_RETRY_AFTER_S)
        try:
            yield
        finally:
            with self._lock:
                self._coming[asker.name] -= nbytes

    def _charge(self, nbytes: int, owner: str, most: float) -> bool:
        with self._lock:
            is_within = self._owned_bytes(owner) + self._coming[owner] + nbytes <= most
            if is_within:
                self._coming[owner] += nbytes
        return is_within

    def _owned_bytes(self, owner: str) -> int:
        return sum(one.nbytes for one in self._held.values() if one.owner == owner)

    def _evict(self, owner: str | None = None) -> bool:
        """Drop the one that was not used for longest, of an owner where one is named; False where there is none."""
        with self._lock:
            unused = (key for key, one in self._held.items() if not one.users and owner in (None, one.owner))
            key = next(unused, None)
            if key is None:
                return False
            # Engines of a prefix are only used together with it, and without it they would keep its weights alive.
            for other in [other for other in self._held if other[0] == key[0]] if key[1] == REFERENCE else [key]:
                self._held.pop(other).memory.close()
        self._counters.add(evicted=1)
        return True


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    """What is ready to run.

    Attributes:
        resident: itself.
        memory: gives back what it takes.
        owner: the tenant that uploaded it or that it was made for, whose quota it counts against.
        nbytes: of the prefix's file, or that the engine keeps.
        users: requests that use it now; it stays while there are any.
    """

    resident: Resident
    memory: ExitStack
    owner: str
    nbytes: int
    users: int = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, weakref_slot=True)
class _Measured:
    """An engine with the memory that its trial took, whatever it says of itself."""

    engine: Engine
    trial: Trial

    @property
    def name(self) -> str:
        return self.engine.name

    @property
    def weight_bytes(self) -> int:
        return self.trial.weight_bytes

    def footprint(self, cut: int) -> Footprint:
        assert cut == self.trial.cut, "an engine is made for one cut"
        return Footprint(fixed_bytes=self.trial.fixed_bytes, bytes_per_sample=self.trial.bytes_per_sample)

    def run(self, inputs: Arrays, cut: int) -> tuple[npt.NDArray[np.generic], ...]:
        return self.engine.run(inputs, cut)

    def begin(self, inputs: Arrays, cut: int) -> Begun | None:
        return self.engine.begin(inputs, cut) if isinstance(self.engine, Queueing) else None


def _prefix_key(digest: str) -> _Key:
    return digest, REFERENCE, 0
