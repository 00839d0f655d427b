"""Keeps the nodes that a job asks those that are listed and answer: newcomers join, the silent are lost meanwhile."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from frostline.client.balanced import PATIENCE_S, BalancedTransport
from frostline.core.errors import EngineNotReady, FrostlineError, NodeUnreachable, Refused, SettingError, Unavailable
from frostline.core.files import stamp_of
from frostline.core.system import __version__
from frostline.transport import Transport
from frostline.wire.connection import time_limit
from frostline.wire.messages import PROTOCOLS, Health, common_protocol
from frostline.wire.node_lists import NodeList, listed_nodes

__all__ = (
    "PROBE_S",
    "Membership",
    "NodeWatch",
    "ask_protocol",
    "changes",
    "connect_balanced",
    "require_protocol",
    "watch_membership",
    "watch_node",
)

# A name is asked again so often: a new pod takes longer to start, and a name server is asked little.
_EVERY_S = 3.0
# A file is looked at more often: it costs a system call.
_FILE_EVERY_S = 0.5
_PROBES = 16
# Nodes are looked after this often. One that lets a thread wait for longer than the second bound is asked whether it is
# there, which costs next to nothing, and is lost where it does not say so within the third: all of it in 2.5 seconds.
_TEND_EVERY_S = 0.25
_SILENT_S = 0.6
PROBE_S = 1.5
"""Seconds in which a node that is asked whether it is there must have said so, however slowly."""
# A node that says so this often in a row, while a thread waits for its features, keeps them back: a clock that jumped,
# since this process was stopped itself, is no such silence.
_STUCK_LOOKS = 4
# It may only make a new network ready: it is asked again soon, then less often.
_STUCK_AGAIN_S = 4.0
# A lost node is asked this often whether it is back.
_LOST_EVERY_S = 1.0
# A job begins once one of its nodes is ready, and the others had so long.
_GRACE_S = 1.0
# Others that are asked at the same time: where they are silent too, it is this side, or the link, that is in trouble.
_WITNESSES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWatch:
    """Who comes and goes among the nodes of a job.

    Attributes:
        joined: function that is told the URL of a node that takes part from now on.
        left: function that is told the URL of a node that does no more, and why.
        refused: function that is told the URL of a node that cannot take part, and why; once for each reason.
        lost: function that is told the URL of a node that is asked nothing for now, and why.
        back: function that is told the URL of such a node that answers again.
    """

    joined: Callable[[str], None]
    left: Callable[[str, str], None]
    refused: Callable[[str, str], None]
    lost: Callable[[str, str], None]
    back: Callable[[str], None]


def changes(members: Sequence[str], listed: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Who is to join, and who is to leave. A list without a node changes nothing: somebody is about to write it.

    Args:
        members: names of the nodes that take part.
        listed: names of those that should.
    """
    if not listed:
        return (), ()
    return tuple(node for node in listed if node not in members), tuple(node for node in members if node not in listed)


def require_protocol(health: Health, node: str, ours: tuple[int, int] = PROTOCOLS) -> None:
    """Make sure that a node speaks a protocol of this side; the versions of the package may differ.

    Args:
        health: health of the node.
        node: the URL, for the sentence.
        ours: lowest and highest protocol version of this side.

    Raises:
        Refused: The node speaks no protocol version of this side.
    """
    if common_protocol(health.protocol, ours) is None:
        raise Refused(
            f"{node} runs Frostline {health.version}, which speaks {_protocols(health.protocol)}, and "
            f"{__version__} here speaks {_protocols(ours)}: install a release between the two where the older one runs"
        )


def ask_protocol(node: str, probe: Transport) -> None:
    """Ask an only node which protocol it speaks; one that does not answer yet is passed over.

    Args:
        node: the URL, for the sentence.
        probe: way on which it is asked, which is closed.

    Raises:
        Refused: The node speaks no protocol version of this side.
    """
    with closing(probe), suppress(Unavailable), time_limit(PROBE_S, probe.break_off, node):
        require_protocol(probe.health(), node)


def _protocols(versions: tuple[int, int]) -> str:
    least, greatest = versions
    return f"protocol {least}" if least == greatest else f"protocols {least} to {greatest}"


class _Prober:
    """Asks nodes whether they are there, ready, and speak a protocol of this side. Safe for threads.

    Args:
        probe: function that makes a way to a node from its URL; the way is closed afterwards.
    """

    def __init__(self, probe: Callable[[str], Transport]) -> None:
        self._probe = probe
        self._probes: set[Transport] = set()
        self._is_closed = False

    def require(self, node: str) -> None:
        """Make sure that a node can take part.

        Raises:
            FrostlineError: The node cannot, or nobody asks any more.
        """
        transport = self._probe(node)
        self._probes.add(transport)
        try:
            if self._is_closed:
                raise NodeUnreachable("nobody asks any more")
            with time_limit(PROBE_S, transport.break_off, node):
                health = transport.health()
        finally:
            self._probes.discard(transport)
            transport.close()
        require_protocol(health, node)
        if health.trouble:
            raise NodeUnreachable(f"the node at {node} is not ready: {health.trouble}")

    def trouble(self, node: str) -> FrostlineError | None:
        """Why a node cannot take part now; None where it can."""
        try:
            self.require(node)
        except FrostlineError as error:
            return error
        return None

    def close(self) -> None:
        """Ask no more; whoever waits for an answer is freed."""
        self._is_closed = True
        for probe in tuple(self._probes):
            probe.break_off()


class Membership:
    """The nodes of a transport, as lists name them and as they answer. For one thread at a time; close it at the end.

    Args:
        near: addresses of nodes and of lists of nodes.
        transport: transport whose nodes come and go.
        make: function that makes the way to a node, from its URL.
        probe: function that makes a way to a node on which it is asked whether it is there; that way is closed
            afterwards.
        watch: function that is told who comes and goes.
    """

    def __init__(
        self,
        near: Sequence[str],
        transport: BalancedTransport,
        *,
        make: Callable[[str], Transport],
        probe: Callable[[str], Transport],
        watch: NodeWatch,
    ) -> None:
        self._near = tuple(near)
        self._transport = transport
        self._make = make
        self._prober = _Prober(probe)
        self._watch = watch
        self._refused: dict[str, str] = {}
        self._out: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(_PROBES, "frostline-probe")
        self._joining: dict[str, Future[None]] = {}
        self._tried_at: dict[str, float] = {}
        self._stuck: dict[str, int] = {}

    @property
    def files(self) -> tuple[Path, ...]:
        """Files in which nodes are listed."""
        return tuple(NodeList(url=url).path for url in self._near if url.startswith("file://"))

    def check(self) -> None:
        """Ask all first nodes at once whether they are there, and begin once one is.

        Those that speak another protocol are left out. Those that do not answer are lost, until they do: where none
        answers, all stay.

        Raises:
            FrostlineError: No node can take part.
        """
        members = self._transport.members
        asked = {self._pool.submit(self._prober.trouble, node): node for node in members}
        self._wait_for_one(set(asked))
        found = {node: future.result() for future, node in asked.items() if future.done()}
        unfit = {node: error for node, error in found.items() if error and not isinstance(error, Unavailable)}
        if len(unfit) == len(members):
            raise unfit[members[0]]
        for node, error in unfit.items():
            self._transport.leave(node)
            self._refuse(node, error)
        if any(error is None for error in found.values()):
            for node in self._transport.members:
                if (reason := found.get(node, _SLOW)) is not None:
                    self._transport.lose(node, reason)

    def _wait_for_one(self, pending: "set[Future[FrostlineError | None]]") -> None:
        """Wait until a node is ready and the others had a while more, or all have said that they are not."""
        is_ready = False
        while pending and not is_ready:
            done, pending = wait(pending, return_when=FIRST_COMPLETED)
            is_ready = any(future.result() is None for future in done)
        wait(pending, _GRACE_S)

    def list_nodes(self) -> tuple[str, ...] | None:
        """The nodes that the lists name by now, which a name server may take long to say; None where nobody says."""
        try:
            return listed_nodes(self._near)
        except (NodeUnreachable, SettingError):
            return None  # a name server that is away, or a file that is being written, ends no job

    def follow(self, listed: Sequence[str] | None) -> None:
        """Bring the nodes in line with those that are listed, and ask those again that had not answered."""
        if listed is None:
            return
        joining, leaving = changes(self._transport.members, listed)
        self._join(joining)
        for node in leaving:
            # The last one stays until another can take its place.
            if len(self._transport.members) > 1:
                self._transport.leave(node)
                self._watch.left(node, "it is listed no more")

    def tend(self) -> None:
        """Lose members that fall silent or are gone, ask the lost again, and tell who is lost and who is back."""
        silent = self._transport.silent_nodes(_SILENT_S)
        self._stuck = {node: looks for node, looks in self._stuck.items() if node in silent}
        # A node that is gone is named at once, however few requests were left for it.
        failed = self._newly_failed()
        if silent or failed:
            self._probe_doubtful(silent, failed)
        now = time.monotonic()
        self._join([node for node in self._transport.to_join if now - self._tried_at.get(node, 0.0) >= _LOST_EVERY_S])
        self._tell()

    def _newly_failed(self) -> list[str]:
        """Members that did not answer since they were looked at last, and are not left out yet."""
        found = set[str]()
        while self._transport.failed:
            found.add(self._transport.failed.pop())
        return sorted(found.intersection(self._transport.members).difference(self._transport.out))

    def settle(self) -> None:
        """Wait until those that are about to join have, or cannot."""
        wait(self._joining.values())

    def end_probes(self) -> None:
        """Ask no more whether nodes are there; whoever waits for an answer is freed."""
        self._prober.close()

    def close(self) -> None:
        """End all that was begun. The transport, which is closed before, is the caller's."""
        self.end_probes()
        self._pool.shutdown(cancel_futures=True)

    def _probe_doubtful(self, silent: Sequence[str], failed: Sequence[str]) -> None:
        """Ask nodes that let somebody wait, or failed, whether they are there, and some others to compare."""
        away = {*silent, *failed, *self._transport.out}
        others = [node for node in self._transport.members if node not in away][:_WITNESSES]
        doubtful = tuple(dict.fromkeys((*silent, *failed)))
        asked = [*doubtful, *others]
        answers = dict(zip(asked, self._pool.map(self._prober.trouble, asked), strict=True))
        if all(answers.values()):
            return
        for node in doubtful:
            if (error := answers[node]) is not None:
                self._transport.lose(node, error)
            elif others and node in silent:
                self._doubt(node)

    def _doubt(self, node: str) -> None:
        """Leave a node out that says that it is there, and lets somebody wait far longer than nodes did of late."""
        self._stuck[node] = self._stuck.get(node, 0) + 1
        if self._stuck[node] >= _STUCK_LOOKS and node in self._transport.silent_nodes(None):
            del self._stuck[node]
            self._transport.lose(node, _STUCK, _STUCK_AGAIN_S)

    def _tell(self) -> None:
        """Say what has changed since it was said last."""
        out = self._transport.out
        for node, reason in out.items():
            if node not in self._out:
                self._watch.lost(node, reason)
        members = self._transport.members
        for node in self._out:
            if node not in out and node in members:
                self._watch.back(node)
        self._out = out

    def _join(self, nodes: Sequence[str]) -> None:
        """Let nodes join, all at once and meanwhile: one may have to be sent a network first."""
        for node in nodes:
            before = self._joining.get(node)
            if before is None or before.done():
                self._tried_at[node] = time.monotonic()
                self._joining[node] = self._pool.submit(self._let_join, node)

    def _let_join(self, node: str) -> None:
        is_new = node not in self._transport.members
        try:
            self._prober.require(node)
            self._transport.join(node, partial(self._make, node))
        except Unavailable:
            return  # it is asked again later
        except FrostlineError as error:
            if is_new:
                self._refuse(node, error)
            else:
                self._transport.lose(node, error)
            return
        self._refused.pop(node, None)
        if is_new:
            self._watch.joined(node)

    def _refuse(self, node: str, error: FrostlineError) -> None:
        if self._refused.get(node) != str(error):
            self._refused[node] = str(error)
            self._watch.refused(node, str(error))


@contextmanager
def watch_membership(membership: Membership) -> Iterator[None]:
    """Tend the nodes and look at the lists from time to time, each in a thread.

    A name server, a disk or a cluster that hangs as it is asked for a list keeps nobody from noticing a node that does,
    and holds no job at its end.
    """
    ended = threading.Event()
    found: deque[tuple[str, ...] | None] = deque()

    def look() -> None:
        seen, looked_at = _stamps(membership.files), time.monotonic()
        while not ended.wait(_FILE_EVERY_S):
            now, stamps = time.monotonic(), _stamps(membership.files)
            if stamps != seen or now - looked_at >= _EVERY_S:
                seen, looked_at = stamps, now
                found.append(membership.list_nodes())

    def tend() -> None:
        while not ended.wait(_TEND_EVERY_S):
            try:
                membership.tend()
            except RuntimeError:
                # Pools take nothing more once the main thread has ended: a script that closed no job is at its end.
                threading.main_thread().join(_GRACE_S)
                if threading.main_thread().is_alive():
                    raise
                return
            while found:
                membership.follow(found.popleft())

    threads = [
        threading.Thread(target=work, name=name, daemon=True)
        for work, name in ((tend, "frostline-nodes"), (look, "frostline-lists"))
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        membership.end_probes()
        threads[0].join()
        threads[1].join(_GRACE_S)


class _Silence:
    """Breaks off what is under way on a link on which nothing has moved for ``patience_s``."""

    def __init__(self, transport: Transport, patience_s: float) -> None:
        self._transport, self._patience_s = transport, patience_s
        self._moved, self._since = (-1, -1), 0.0

    def look(self) -> None:
        seen, now = self._transport.statistics(), time.monotonic()
        if self._moved != (seen.bytes_received, seen.bytes_sent):
            self._moved, self._since = (seen.bytes_received, seen.bytes_sent), now
        elif now - self._since >= self._patience_s:
            self._since = now
            self._transport.break_off()


@contextmanager
def watch_node(
    node: str, transport: Transport, *, probe: Callable[[str], Transport], watch: NodeWatch, patience_s: float
) -> Iterator[None]:
    """Say within seconds that an only node has fallen silent while somebody waits for it, and when it answers again.

    Nobody else can do its work, so it is waited for: a node that was stopped for a while goes on where it was. After
    ``patience_s`` of silence what was asked of it is broken off, also that whose answer may take half an hour. What
    moves on a link says that the node is there, however long an answer takes.

    Args:
        node: the URL.
        transport: way to it.
        probe: function that makes a way to it, on which it is asked whether it is there.
        watch: functions that are told.
        patience_s: seconds of silence after which requests under way are broken off.
    """
    ended, prober = threading.Event(), _Prober(probe)

    def tend() -> None:
        moved, moved_at = (-1, -1), 0.0
        while not ended.wait(_TEND_EVERY_S):
            seen, now = transport.statistics(), time.monotonic()
            if not seen.waiting or moved != (seen.bytes_received, seen.bytes_sent):
                moved, moved_at = (seen.bytes_received, seen.bytes_sent), now
            elif now - moved_at >= _SILENT_S:
                moved_at = now  # one that is there, and computes for long, is asked again after as long
                if (error := prober.trouble(node)) is None or ended.is_set():
                    continue
                watch.lost(node, str(error))
                silence = _Silence(transport, patience_s)
                while prober.trouble(node) and not ended.wait(_LOST_EVERY_S):
                    silence.look()
                if not ended.is_set():
                    watch.back(node)

    thread = threading.Thread(target=tend, name="frostline-node", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        prober.close()
        thread.join()


@contextmanager
def connect_balanced(
    near: Sequence[str],
    *,
    make: Callable[[str], Transport],
    probe: Callable[[str], Transport],
    left_out: Callable[[str, str, EngineNotReady], None],
    watch: NodeWatch,
    patience_s: float = PATIENCE_S,
) -> Iterator[BalancedTransport]:
    """The way to several nodes, which come and go as lists say; closed at the end.

    Args:
        near: addresses of nodes and of lists of nodes.
        make: function that makes the way to a node, from its URL.
        probe: function that makes a way to a node on which it is asked whether it is there.
        left_out: function that is told of a node that cannot run an engine.
        watch: function that is told who comes and goes.
        patience_s: seconds, as of ``BalancedTransport``.

    Raises:
        NodeUnreachable: A list cannot be read, or names no node.
        FrostlineError: No node can take part.
    """
    nodes = listed_nodes(tuple(near))
    if not nodes:
        raise NodeUnreachable(f"there is no node in {', '.join(near)}: start one and list it there, or correct near=")
    transport = BalancedTransport([make(node) for node in nodes], left_out=left_out, names=nodes, patience_s=patience_s)
    membership = Membership(near, transport, make=make, probe=probe, watch=watch)
    try:
        membership.check()
        with watch_membership(membership):
            yield transport
    finally:
        transport.close()
        membership.close()


_STUCK = NodeUnreachable("it says that it is there, and keeps what it is asked for far longer than others do")
_SLOW = NodeUnreachable("it was not there when the job began")


def _stamps(paths: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    return [stamp_of(path) for path in paths]
