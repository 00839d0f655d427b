"""Keeps the nodes that a job asks those that are listed: newcomers join once they can serve, and who is gone leaves."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from frostline.client.balanced import BalancedTransport
from frostline.core.errors import EngineNotReady, FrostlineError, NodeUnreachable, Refused, SettingError, Unavailable
from frostline.core.system import __version__
from frostline.transport import Transport
from frostline.wire.node_lists import NodeList, listed_nodes

__all__ = ("Membership", "NodeWatch", "balanced", "can_talk", "changes", "watching")

# A name is asked again so often: a new pod takes longer to start, and a name server is asked little.
_EVERY_S = 3.0
# A file is looked at more often: it costs a system call.
_FILE_EVERY_S = 0.5
_PROBES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeWatch:
    """Who comes and goes among the nodes of a job.

    Attributes:
        joined: told the URL of a node that takes part from now on.
        left: told the URL of a node that does no more, and why.
        refused: told the URL of a node that cannot take part, and why; once for each reason.
    """

    joined: Callable[[str], None]
    left: Callable[[str, str], None]
    refused: Callable[[str, str], None]


def changes(members: Sequence[str], listed: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Who is to join, and who is to leave. A list without a node changes nothing: somebody is about to write it.

    Args:
        members: names of the nodes that take part.
        listed: names of those that should.
    """
    if not listed:
        return (), ()
    return tuple(node for node in listed if node not in members), tuple(node for node in members if node not in listed)


def can_talk(version: str, other: str = __version__) -> bool:
    """Whether two versions of Frostline have the same protocol: the first two numbers say."""
    return version.split(".")[:2] == other.split(".")[:2]


class Membership:
    """The nodes of a transport, as lists name them. For one thread at a time.

    Args:
        near: addresses of nodes and of lists of nodes.
        transport: transport whose nodes come and go.
        make: makes the way to a node.
        probe: makes a way to a node on which it is asked whether it is there; closed after that.
        watch: told who comes and goes.
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
        self._probe = probe
        self._watch = watch
        self._refused: dict[str, str] = {}

    @property
    def files(self) -> tuple[Path, ...]:
        """Files in which nodes are listed."""
        return tuple(NodeList(url=url).path for url in self._near if url.startswith("file://"))

    def check(self) -> None:
        """Leave out those of the first nodes that another version runs; one that does not answer yet stays.

        Raises:
            FrostlineError: None of them can take part.
        """
        members = self._transport.members
        with ThreadPoolExecutor(_PROBES) as probes:
            found = dict(zip(members, probes.map(self._refusal, members), strict=True))
        unfit = {node: error for node, error in found.items() if error is not None}
        if len(unfit) == len(members):
            raise unfit[members[0]]
        for node, error in unfit.items():
            self._transport.leave(node)
            self._refuse(node, error)

    def look(self) -> None:
        """Bring the nodes in line with the lists, and ask those again that had not answered."""
        try:
            listed = listed_nodes(self._near)
        except (NodeUnreachable, SettingError):
            return  # a name server that is away, or a file that is being written, ends no job
        joining, leaving = changes(self._transport.members, listed)
        for node in joining:
            self._let_join(node)
        for node in leaving:
            # The last one stays until another can take its place.
            if len(self._transport.members) > 1:
                self._transport.leave(node)
                self._watch.left(node, "it is listed no more")
        for node in self._transport.lost:
            self._let_join(node)

    def _let_join(self, node: str) -> None:
        is_new = node not in self._transport.members
        try:
            self._require(node)
            self._transport.join(node, lambda: self._make(node))
        except Unavailable:
            return  # it is asked again at the next look
        except FrostlineError as error:
            self._refuse(node, error)
            return
        self._refused.pop(node, None)
        if is_new:
            self._watch.joined(node)

    def _refusal(self, node: str) -> FrostlineError | None:
        """Why a node cannot take part; None where it can, or does not answer yet."""
        try:
            self._require(node)
        except Unavailable:
            return None
        except FrostlineError as error:
            return error
        return None

    def _require(self, node: str) -> None:
        """Make sure that a node is there and of a version that can talk."""
        transport = self._probe(node)
        try:
            version = transport.health().version
        finally:
            transport.close()
        if not can_talk(version):
            raise Refused(
                f"{node} runs Frostline {version}, which does not talk with {__version__}: bring both to one version"
            )

    def _refuse(self, node: str, error: FrostlineError) -> None:
        if self._refused.get(node) != str(error):
            self._refused[node] = str(error)
            self._watch.refused(node, str(error))


@contextmanager
def watching(membership: Membership) -> Iterator[None]:
    """Look at the lists from time to time, in a thread."""
    ended = threading.Event()

    def look() -> None:
        seen, waited_s = _stamps(membership.files), 0.0
        while not ended.wait(_FILE_EVERY_S):
            waited_s += _FILE_EVERY_S
            now = _stamps(membership.files)
            if now == seen and waited_s < _EVERY_S:
                continue
            seen, waited_s = now, 0.0
            membership.look()

    thread = threading.Thread(target=look, name="frostline-nodes", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextmanager
def balanced(
    near: Sequence[str],
    *,
    make: Callable[[str], Transport],
    probe: Callable[[str], Transport],
    left_out: Callable[[str, str, EngineNotReady], None],
    watch: NodeWatch,
) -> Iterator[BalancedTransport]:
    """The way to several nodes, which come and go as lists say; closed at the end.

    Args:
        near: addresses of nodes and of lists of nodes.
        make: makes the way to a node.
        probe: makes a way to a node on which it is asked whether it is there.
        left_out: told of a node that cannot run an engine.
        watch: told who comes and goes.

    Raises:
        NodeUnreachable: A list cannot be read, or names no node.
        FrostlineError: None of the nodes can take part.
    """
    nodes = listed_nodes(tuple(near))
    if not nodes:
        raise NodeUnreachable(f"there is no node in {', '.join(near)}: start one and list it there, or correct near=")
    transport = BalancedTransport([make(node) for node in nodes], left_out=left_out, names=nodes)
    membership = Membership(near, transport, make=make, probe=probe, watch=watch)
    try:
        membership.check()
        with watching(membership):
            yield transport
    finally:
        transport.close()


def _stamps(paths: Sequence[Path]) -> list[tuple[int, int, int] | None]:
    return [_stamp(path) for path in paths]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
