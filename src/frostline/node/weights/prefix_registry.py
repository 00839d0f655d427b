"""The prefixes that a node holds, and engines made for them: shared by all requests, dropped when others need room."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from frostline.core import REFERENCE, Cut, Levels
from frostline.engines.base.protocols import Arrays, Engine, Footprint, Queueing, RunningBatch
from frostline.errors import BadRequest, EngineNotReady, UnknownPrefix
from frostline.node.scheduling.statistics import Counters
from frostline.node.scheduling.tenants import Account
from frostline.node.weights.torch_bridge import TorchDoor
from frostline.node.weights.weight_memory import WeightMemory, WeightReservation, prefix_key
from frostline.profiles import Trial

if TYPE_CHECKING:  # of PyTorch, which the first of them brings
    from frostline.engines.backends.torch_eager import TorchEngine
    from frostline.models.files.artifact import Prefix

__all__ = ("Prefixes", "Resident")

# What the prefix and its engine keep beside the weights: 2.7 kB (ViT-S/16) to 4.5 kB (EfficientNet-lite0) a node.
_NODE_BYTES = 5000
# Room for a file whose graph nobody has read yet: that of ShuffleNet takes a quarter of what its weights do.
_EXPECTED, _EXPECTED_BYTES = 1.25, 1 << 18
# Who asks for an engine that has to be made waits so long for its room.
_ENGINE_WITHIN_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Resident:
    """A prefix with what runs it.

    Attributes:
        prefix: as it was uploaded.
        reference: runs it up to every cut, as the user's own network does.
        engine: runs it for the request that uses it; up to the request's own cut where it is not the reference.
        rows: of a run, at most: those at which the engine is fastest.
        served: told of the device seconds that each use took, divided by its tenant's weight.
    """

    prefix: "Prefix"
    reference: "TorchEngine"
    engine: Engine
    rows: int
    served: Callable[[float], None]

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
        places: in memory, for their weights.
        max_rows: of a run.
        door: to what reads prefixes and makes engines.
        counters: told what happens.
    """

    def __init__(self, places: WeightMemory[Resident], max_rows: int, door: TorchDoor, counters: Counters) -> None:
        self._places = places
        self._max_rows = max_rows
        self._door = door
        self._counters = counters
        self._making = threading.Lock()

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, digest: str) -> bool:
        return prefix_key(digest) in self._places

    def owned_bytes(self, owner: str) -> int:
        """What is held of what a tenant uploaded, and of the engines that were made for it."""
        return self._places.owned_bytes(owner)

    def room_bytes(self, digest: str, asker: Account) -> float:
        """What engines of a prefix may take that are made for a tenant; its own copy of the prefix counts too."""
        return self._places.left_bytes(prefix_key(digest), asker)

    def room(
        self, digest: str, length: int, asker: Account, longest_s: float, is_abandoned: Callable[[], bool]
    ) -> WeightReservation[Resident] | None:
        """Room for a prefix that is to come; None where it is held already.

        Args:
            digest: its name.
            length: of its file.
            asker: who uploads it.
            longest_s: that it waits for its turn.
            is_abandoned: looked at again after ``wake``.

        Raises:
            OverBudget: Its weights can never fit.
            Overloaded: They do not fit beside those in use now.
            Abandoned: Nobody wants it any more.
        """
        nbytes = max(length, min(int(_EXPECTED * length) + _EXPECTED_BYTES, self._places.total_bytes))
        return self._places.room(
            prefix_key(digest),
            nbytes,
            asker,
            counted_bytes=length,
            longest_s=longest_s,
            is_abandoned=is_abandoned,
        )

    def put(self, digest: str, body: bytes, room: WeightReservation[Resident], tenant: str) -> None:
        """Take a prefix in.

        Args:
            digest: its name.
            body: the file.
            room: for it.
            tenant: Who uploads it.

        Raises:
            BadRequest: The body is not what the digest names.
            UnsafeArtifact: It is no prefix, or names what is not allowed.
            OverBudget: It computes more than this node allows.
            Overloaded: It takes more than there is room, or the machine has too much to do to check it.
        """
        if self._door.digest_of(body) != digest:
            raise BadRequest("the prefix is not the one that its digest names: it changed on its way")
        inspection = self._door.inspect(body, tenant)
        prefix = self._door.read(body)
        room.resize(len(body) + len(prefix.graph.nodes) * _NODE_BYTES)
        engine = self._door.reference(prefix, inspection)
        room.keep(self._resident(digest, prefix, engine, engine, min(self._door.rows(inspection), self._max_rows)))
        self._counters.add(uploads=1)

    def wake(self) -> None:
        """Have all who wait for room look whether they are still wanted."""
        self._places.wake()

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
            asker: who uses it, and whose quota an engine counts against where it has to be made. None where it is used
                for long, as by a training, and no engine is asked for.
            levels: what pixels mean, where the engine's name says that it takes them.

        Raises:
            UnknownPrefix: It is not held.
            EngineNotReady: The engine was not tried on it up to that cut.
            Overloaded: The engine does not fit beside what is in use now, or the prefix is to leave.
            OverBudget: It is more than the tenant may have here.
        """
        user = None if asker is None else asker.name
        with ExitStack() as stack:
            if engine == REFERENCE:
                yield stack.enter_context(self._using(digest, user))
                return
            assert asker is not None, "somebody asks for an engine"
            held = None
            while held is None:  # others may take its place before it is used
                stack.close()
                number = self._make(digest, engine, cut, asker, levels)
                stack.enter_context(self._using(digest, user))
                held = stack.enter_context(self._places.using((digest, engine, number), user))
            yield held

    @contextmanager
    def _using(self, digest: str, user: str | None) -> Iterator[Resident]:
        with self._places.using(prefix_key(digest), user) as held:
            if held is None:
                raise UnknownPrefix(f"this node does not hold the prefix {digest[:12]}: upload it and ask again")
            yield held

    def _make(self, digest: str, engine: str, cut: int, asker: Account, levels: Levels | None) -> int:
        """Make an engine where it is not held, and give its cut's number.

        Its room is waited for while nothing is in use, so that nobody waits for who waits.
        """
        with self._using(digest, asker.name) as reference:
            number = reference.cut(cut).number
        key = (digest, engine, number)
        if key in self._places:
            return number
        trial = self._door.trials.ready(digest, engine, number)
        if trial is None:
            raise EngineNotReady(
                f"{engine} is not ready for cut {number} of the prefix {digest[:12]}: ask for a profile that names "
                "both, and ask again"
            )
        room = self._places.room(
            key, trial.load_bytes, asker, counted_bytes=trial.weight_bytes, longest_s=_ENGINE_WITHIN_S
        )
        if room is not None:
            with room, self._making, self._using(digest, asker.name) as reference:
                checked = reference.reference.footprint(number)
                engine_made = self._door.trials.made(digest, reference.prefix, trial, levels, checked)
                made = _Measured(engine=engine_made, trial=trial)
                room.resize(trial.weight_bytes)
                rows = min(trial.rows, self._max_rows)
                room.keep(self._resident(digest, reference.prefix, reference.reference, made, rows))
        return number

    def _resident(self, digest: str, prefix: "Prefix", reference: "TorchEngine", engine: Engine, rows: int) -> Resident:
        served = partial(self._places.served, digest)
        return Resident(prefix=prefix, reference=reference, engine=engine, rows=rows, served=served)


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

    def begin(self, inputs: Arrays, cut: int) -> RunningBatch | None:
        return self.engine.begin(inputs, cut) if isinstance(self.engine, Queueing) else None
