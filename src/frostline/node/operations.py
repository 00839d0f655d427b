"""Runs trainings and listings beside a node, each in a process that ends with its client."""

import math
import os
import secrets
import tempfile
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from typing import IO, Any

from frostline.batching import readable_bytes
from frostline.core import URLS
from frostline.core.config import NodeSettings
from frostline.core.errors import (
    BadRequest,
    Forbidden,
    OverBudget,
    Overloaded,
    Refused,
    SettingError,
    Unavailable,
    UnknownTraining,
)
from frostline.core.processes import Limits
from frostline.core.system import STARTED
from frostline.datasets.formats.base import ExternalReferences
from frostline.datasets.formats.known import format_named
from frostline.node.pipeline import Stores
from frostline.node.process import BoundedProcess
from frostline.node.tenants import Account
from frostline.wire.listings import ListingRequest

__all__ = (
    "Listing",
    "Listings",
    "Operation",
    "Training",
    "Trainings",
)


# Started by name, because the node is a lower layer than training: it passes data and reads lines.
_TRAINING_RETRY_S = 10.0
# Results are kept on disk until their client fetches them, one of each tenant in any case; the oldest is dropped first.
_MAX_KEPT = 4


class Operation:
    """A training or a listing in a process of its own. ``close`` may be called from any thread, and repeatedly.

    Args:
        what: name of it in sentences.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._process: BoundedProcess | None = None
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._is_closed = False

    def line(self) -> bytes:
        """The next line of its output; empty at the end.

        Raises:
            Refused: The process ended without a final line.
            Unavailable: The process was closed.
        """
        with self._turn:
            self._check()
            assert self._process, "it was started"
            try:
                return self._process.line()
            except Refused:
                self._check()
                raise
            finally:
                self._pay(self._process)

    def piece(self, _: int) -> bytes:
        """Bytes that come behind its last line, from a place on; empty at the end."""
        return b""

    def close(self) -> None:
        """Kill its process if it runs, and free what it held."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            process = self._process
        if process is not None:
            process.processor_s()  # read before the kill, because a dead process has no clock
            process.end()
            with self._turn:  # no thread reads from it any more
                self._pay(process)
                process.close()
        self._free()

    def _pay(self, process: BoundedProcess) -> None:
        """Account for what the process took since the last call."""

    def _free(self) -> None:
        """Free what it held."""

    def _check(self) -> None:
        if self._is_closed:
            raise Unavailable(f"{self._what} was cancelled: its client has gone, or the node is stopping")


class Training(Operation):
    """One training: its files, its process and its slot. Made by ``Trainings``; closing it again does nothing.

    It has a slot from its start, so that an assignment that does not come keeps nobody else from training.

    Attributes:
        id: name that cannot be guessed.
        tenant: name of the tenant that it belongs to.
    """

    def __init__(
        self,
        settings: NodeSettings,
        tenant: str,
        length: int,
        held: ExitStack,
        charge: Callable[[float], None],
        take_slot: Callable[[ExitStack], None],
    ) -> None:
        super().__init__("the training")
        self.id = secrets.token_hex(16)
        self.tenant = tenant
        self._settings = settings
        self._take_slot = take_slot
        self._charge = charge
        self._charged_s = 0.0
        self._length = length
        self._held = held
        # Temporary files without names: nothing stays behind, however the node ends.
        self._assignment = held.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (a context closes it)
        self._trained = tempfile.TemporaryFile()  # noqa: SIM115 (it outlives the process that fills it)

    def write(self, chunk: bytes) -> None:
        """Write the next piece of the assignment.

        Raises:
            BadRequest: The body is longer than announced.
            Unavailable: The disk is full.
        """
        if self._assignment.tell() + len(chunk) > self._length:
            raise BadRequest(f"the training has more than the {self._length} bytes that were announced")
        try:
            self._assignment.write(chunk)
        except OSError as error:
            raise Unavailable(f"the node cannot store the training's assignment: {error.strerror}") from error

    def start(self, url: str, token: str | None) -> bytes:
        """Start the process, and return its first line.

        Args:
            url: URL of this node.
            token: token of the tenant that asks.

        Raises:
            BadRequest: The assignment is shorter than announced.
            Overloaded: All slots are taken.
            Refused: The process ended before its first line.
        """
        if self._assignment.tell() != self._length:
            raise BadRequest(f"the training ended after {self._assignment.tell()} of {self._length} bytes")
        self._assignment.flush()
        self._assignment.seek(0)
        with self._lock:
            if self._is_closed:
                raise Unavailable("the node is stopping")
            self._take_slot(self._held)
            memory_bytes = self._settings.training_memory_bytes
            self._process = BoundedProcess(
                STARTED["training"],
                {"assignment": self._assignment, "trained": self._trained},
                limits=Limits(memory_bytes=memory_bytes, file_bytes=memory_bytes),
                what="the trainer",
                option="--training-memory",
                token=token,
            )
            self._process.begin({"near": url, "threads": self._settings.compute_threads})
        return self.line()

    def stop(self) -> None:
        """Ask the process to end after its current step."""
        with self._lock:
            if self._process is not None and not self._is_closed:
                self._process.stop()

    @property
    def has_result(self) -> bool:
        """Whether it has ended with trained tensors, which were not deleted."""
        return self._process is not None and self._process.has_finished and not self._trained.closed

    def result(self) -> IO[bytes] | None:
        """The trained tensors, as a file that the caller closes; None if there are none."""
        with self._lock:
            if not self.has_result:
                return None
            return os.fdopen(os.dup(self._trained.fileno()), "rb")

    def forget(self) -> None:
        """Delete the result."""
        with self._lock:
            self._trained.close()

    def _free(self) -> None:
        self._held.close()

    def _pay(self, process: BoundedProcess) -> None:
        """Charge the core seconds since the last call."""
        took_s = process.processor_s()
        took_s, self._charged_s = took_s - self._charged_s, took_s
        self._charge(took_s)


class Trainings:
    """The trainings of a node. Safe for threads.

    Args:
        settings: settings of the node, with the number of trainings and their memory.
        hold: function that returns a context that keeps a prefix resident.
        charge: function that is called with an account and the core seconds of its training.
        tenants: function that returns the names of all tenants.
    """

    def __init__(
        self,
        settings: NodeSettings,
        hold: Callable[[str], AbstractContextManager[object]],
        charge: Callable[[Account, float], None],
        tenants: Callable[[], Iterable[str]],
    ) -> None:
        self._settings = settings
        self._hold = hold
        self._charge = charge
        self._tenants = tenants
        self._lock = threading.Lock()
        self._running: dict[str, Training] = {}
        self._kept: OrderedDict[str, Training] = OrderedDict()
        self._slots = settings.trainings
        self._at_work: Counter[str] = Counter()
        self._senders: dict[str, object] = {}
        self._is_shut = False

    def check(self) -> None:
        """Check that this node trains.

        Raises:
            Forbidden: This node does not train.
        """
        if not self._settings.allow_training:
            raise Forbidden("this node trains no heads: start it with --allow-training (allow_training)")

    def begin(self, prefix: str, length: int, account: Account) -> Training:
        """Prepare a training, before its body is read; it takes a slot when it starts.

        Args:
            prefix: digest of the frozen part.
            length: the announced size of the assignment in bytes.
            account: account that is charged.

        Raises:
            Forbidden: This node does not train.
            OverBudget: The assignment can never fit.
            Overloaded: All slots are taken, or the tenant sends another assignment or has used up a quota.
            UnknownPrefix: The prefix is not held.
        """
        self.check()
        account.check_may("train", prefix)
        account.check()
        memory_bytes = self._settings.training_memory_bytes
        if length > memory_bytes // 2:
            raise OverBudget(
                f"the head and its samples have {readable_bytes(length)}, but may have half of the "
                f"{readable_bytes(memory_bytes)} of a training: start the node with more --training-memory"
            )
        with ExitStack() as held:
            held.enter_context(self._sending(account.name))
            held.enter_context(self._hold(prefix))
            charge = partial(self._charge, account)
            take_slot = partial(self._take_slot, account.name)
            training = Training(self._settings, account.name, length, held.pop_all(), charge, take_slot)
        with self._lock:
            self._running[training.id] = training
        return training

    def is_sending(self, tenant: str) -> bool:
        """Whether a tenant sends an assignment now."""
        with self._lock:
            return tenant in self._senders

    def end(self, training: Training) -> None:
        """End a training, and keep its result if it has one."""
        training.close()
        late = [] if training.has_result else [training]
        with self._lock:
            self._running.pop(training.id, None)
            if not late:
                self._kept[training.id] = training
                late += self._surplus()
        for other in late:
            other.forget()

    def stop(self, name: str, account: Account) -> bool:
        """Ask a running training to end, and return True; or delete the result of one that has ended.

        Raises:
            UnknownTraining: The tenant has no training of that name.
        """
        with self._lock:
            running, kept = self._running.get(name), self._kept.get(name)
            found = running or kept
            if found is None or found.tenant != account.name:
                raise UnknownTraining(_UNKNOWN)
            self._kept.pop(name, None)
        if running is not None:
            running.stop()
        if kept is not None:
            kept.forget()
        return running is not None

    def result(self, name: str, account: Account) -> IO[bytes]:
        """The trained tensors of a training that has ended, as an open file.

        Raises:
            UnknownTraining: The tenant has no training of that name, or it ended without a result.
        """
        with self._lock:
            kept = self._kept.get(name)
        found = None if kept is None or kept.tenant != account.name else kept.result()
        if found is None:
            raise UnknownTraining(_UNKNOWN)
        return found

    def close(self) -> None:
        """End all trainings. Calling it again does nothing."""
        with self._lock:
            self._is_shut = True
            running, kept = list(self._running.values()), list(self._kept.values())
            self._kept.clear()
        for training in running:
            training.close()
        for training in (*running, *kept):
            training.forget()

    @contextmanager
    def _sending(self, tenant: str) -> Iterator[None]:
        """While a tenant sends an assignment: until its training has a slot, or ends."""
        mark = object()
        with self._lock:
            self._check_slots(tenant)
            if tenant in self._senders:
                raise Overloaded("you send another assignment: ask again later", retry_after_s=_TRAINING_RETRY_S)
            self._senders[tenant] = mark
        try:
            yield
        finally:
            with self._lock:
                if self._senders.get(tenant) is mark:
                    del self._senders[tenant]

    def _check_slots(self, tenant: str) -> None:
        """A tenant that trains already leaves slots to those that do not, up to half of all."""
        idle = sum(name != tenant and not self._at_work[name] for name in self._tenants())
        kept = min(idle, self._settings.trainings // 2) if self._at_work[tenant] else 0
        if self._is_shut or self._slots <= kept:
            why = "for you" if self._slots > 0 and not self._is_shut else f"({self._settings.trainings})"
            raise Overloaded(
                f"the node already trains as many heads as it may {why}: ask again later",
                retry_after_s=_TRAINING_RETRY_S,
            )

    def _surplus(self) -> list[Training]:
        """Take out results that are too many: the oldest of the tenant with most of them, but no tenant's only one."""
        late = []
        while len(self._kept) > _MAX_KEPT:
            [(tenant, count)] = Counter(training.tenant for training in self._kept.values()).most_common(1)
            if count == 1:
                break
            late.append(self._kept.pop(next(name for name, kept in self._kept.items() if kept.tenant == tenant)))
        return late

    def _take_slot(self, tenant: str, held: ExitStack) -> None:
        with self._lock:
            self._check_slots(tenant)
            self._slots -= 1
            self._at_work[tenant] += 1
            self._senders.pop(tenant, None)
        held.callback(self._give_slot, tenant)

    def _give_slot(self, tenant: str) -> None:
        with self._lock:
            self._slots += 1
            self._at_work[tenant] -= 1


_UNKNOWN = "there is no such training, or it has no result: results are kept for a while only"


# Started by name: the listing code and its memory stay out of the node's own process.
_LISTING_RETRY_S = 2.0
_PIECE = 256 << 10
# Niceness added to a listing, so that serving goes first.
_NICENESS = 5
# The job that asked for a listing has begun by then, and the next process can import what it needs.
_REST_S = 30.0


class Listing(Operation):
    """A running listing.

    Args:
        process: process that lists.
        file: file to which it writes the manifest.
    """

    def __init__(self, process: BoundedProcess, file: IO[bytes]) -> None:
        super().__init__("the listing")
        self._process = process
        self._file = file

    def begin(self, orders: Mapping[str, Any]) -> None:
        """Have it list; it goes behind what the node serves from then on."""
        assert self._process is not None
        self._process.begin(orders, niceness=_NICENESS)

    @property
    def has_ended(self) -> bool:
        """Whether its process has ended."""
        return self._process is None or self._process.has_ended

    def piece(self, place: int) -> bytes:
        """Some bytes of the manifest, or of the splits behind it, from ``place`` on; empty at the end.

        Raises:
            Unavailable: The listing was closed.
        """
        with self._turn:
            self._check()
            return os.pread(self._file.fileno(), _PIECE, place)

    def _free(self) -> None:
        with self._turn:
            self._file.close()


class Listings:
    """The listings of a node. Safe for threads.

    Args:
        settings: settings of the node, with the limits of a listing.
        stores: stores that the node serves.
    """

    def __init__(self, settings: NodeSettings, stores: Stores) -> None:
        self._settings = settings
        self._stores = stores
        self._lock = threading.Lock()
        self._running: dict[str, Listing] = {}
        self._spare: Listing | None = None
        self._next_warm: threading.Timer | None = None
        self._is_closed = False

    def warm(self) -> None:
        """Start the process of the next listing: it imports for a second or more what each needs, and waits."""
        with self._lock, suppress(OSError):  # the listing says what the system lacks
            if not self._is_closed and self._spare is None:
                self._spare = self._new()

    def begin(self, request: ListingRequest, account: Account) -> Listing:
        """Start to list a data set.

        Raises:
            BadRequest: The node does not serve the data to that account, or cannot list it.
            Forbidden: The data's format may lead to other hosts.
            Overloaded: The account has a listing under way.
            Unavailable: The node is stopping.
        """
        account.check_may("list")
        url, folders = self._stores.resolve_data(request.data, account.settings.roots)
        _check(url, request)
        with self._lock:
            if self._is_closed:
                raise Unavailable("the node is stopping")
            if account.name in self._running:
                raise Overloaded(
                    f"the node already lists data for {account.name}: list one data set after the other",
                    retry_after_s=_LISTING_RETRY_S,
                )
            self._running[account.name] = listing = self._started(url, folders, request)
        return listing

    def end(self, listing: Listing) -> None:
        """Close a listing, so that its tenant may begin another one. Calling it again does nothing."""
        listing.close()
        with self._lock:
            self._running = {name: other for name, other in self._running.items() if other is not listing}

    def close(self) -> None:
        """End all listings. Calling it again does nothing."""
        with self._lock:
            self._is_closed = True
            running = [*self._running.values(), *filter(None, (self._spare,))]
            if self._next_warm is not None:
                self._next_warm.cancel()
        for listing in running:
            listing.close()

    def _started(self, url: str, folders: tuple[str, ...] | None, request: ListingRequest) -> Listing:
        settings = self._settings
        orders = {
            "data": url,
            "format": request.format,
            "relist": request.relist,
            "refuses_changes": request.on_change == "refuse",
            "folders": folders,
            "deadline_s": None if settings.store_deadline_s == math.inf else settings.store_deadline_s,
            "known": list(request.known),
            "max_samples": settings.max_listed,
            "max_bytes": settings.max_manifest_bytes,
        }
        try:
            listing = self._taken() or self._new()
        except OSError as error:
            raise Unavailable(f"the node cannot start a listing: {error.strerror or error}") from error
        listing.begin(orders)
        return listing

    def _taken(self) -> Listing | None:
        """The process that waits for a listing, in whose place another will; None where none does."""
        spare, self._spare = self._spare, None
        if spare is None:
            return None
        self._next_warm = threading.Timer(_REST_S, self.warm)
        self._next_warm.daemon = True
        self._next_warm.start()
        if spare.has_ended:
            spare.close()
            return None
        return spare

    def _new(self) -> Listing:
        file = tempfile.TemporaryFile()  # noqa: SIM115 (the listing closes it); it has no name, so nothing stays behind
        limits = Limits(memory_bytes=self._settings.listing_memory_bytes)
        try:
            process = BoundedProcess(
                STARTED["listing"],
                {"out": file},
                limits=limits,
                what="the listing",
                option="--listing-memory",
                reads_stores=not all(root.startswith("file:") for root in self._stores.roots),
            )
        except OSError:
            file.close()
            raise
        return Listing(process, file)


def _check(url: str, request: ListingRequest) -> None:
    if url.startswith("memory:"):
        raise BadRequest(f"{url} lies in the memory of the node's process, which the node does not list")
    try:
        format = None if request.format is None else format_named(request.format)
    except SettingError as error:
        raise BadRequest(str(error)) from error
    if format is not None and isinstance(format, ExternalReferences):
        raise Forbidden(
            f"a node does not list data of the format {URLS}, which may lead to other hosts: list it with your own "
            "credentials (--list-locally; in Python Dataset without near=)"
        )
