"""Connects to servers that speak CQL, with the rules by which a request goes to a server and to the next one.

The driver is brought in by this module, so this module is imported when a store is first used.
"""

import math
import ssl
from collections.abc import Iterator, Sequence
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from cassandra import ConsistencyLevel, DriverException, OperationTimedOut
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable, Session
from cassandra.connection import ConnectionBusy, ConnectionException, ProtocolError
from cassandra.policies import (
    ConstantSpeculativeExecutionPolicy,
    DCAwareRoundRobinPolicy,
    RetryPolicy,
    TokenAwarePolicy,
    WrapperPolicy,
)
from cassandra.pool import NoConnectionsAvailable
from cassandra.protocol import ErrorMessage
from cassandra.query import tuple_factory

from frostline.errors import SettingError
from frostline.processors import background
from frostline.stores.base.cql_urls import CqlLocation
from frostline.stores.cql.credentials import CqlAccess

__all__ = ("ERRORS", "PendingStatements", "connect")


Tag = TypeVar("Tag")

ERRORS = (
    ConnectionBusy,
    ConnectionException,
    DriverException,
    ErrorMessage,
    NoConnectionsAvailable,
    NoHostAvailable,
    OSError,
    ProtocolError,
)
"""What the driver may raise where a server or the way to it is at fault."""

_CONNECT_S = 5.0
_REQUEST_S = 20.0
# A read that takes this long is asked of another replica too: the server may have died with the question.
_ASKED_AGAIN_AFTER_S = 1.0
_MAX_ASKED_AGAIN = 2


def connect(place: CqlLocation, access: CqlAccess, deadline_s: float = math.inf) -> tuple[Cluster, Session]:
    """Make a session. Whoever asked for it shuts the cluster down.

    Args:
        place: where to.
        access: as whom.
        deadline_s: how long the servers may be silent, where the usual time is not less.

    Raises:
        SettingError: the URL names a user and there is no password, or certificates cannot be used.

    What the driver raises comes out as it is.
    """
    if place.user and not access.password:
        raise SettingError("the password of a cql:// URL's user is read from FROSTLINE_CQL_PASSWORD, which is empty")
    policy = _NearFirst(TokenAwarePolicy(DCAwareRoundRobinPolicy(local_dc=place.dc)))
    profile = ExecutionProfile(
        load_balancing_policy=policy,
        retry_policy=_NextHost(),
        consistency_level=ConsistencyLevel.name_to_value[place.consistency],
        request_timeout=min(_REQUEST_S, deadline_s),
        row_factory=tuple_factory,
        speculative_execution_policy=ConstantSpeculativeExecutionPolicy(_ASKED_AGAIN_AFTER_S, _MAX_ASKED_AGAIN),
    )
    known = {"protocol_version": int(place.protocol)} if place.protocol else {}
    cluster = Cluster(
        [host.strip("[]") for host in place.hosts],
        port=place.port,
        auth_provider=PlainTextAuthProvider(place.user, access.password) if place.user else None,
        ssl_context=_tls(place, access) if place.tls else None,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        connect_timeout=min(_CONNECT_S, deadline_s),
        control_connection_timeout=min(_CONNECT_S, deadline_s),
        **known,
    )
    try:
        with background():
            return cluster, cluster.connect()
    except BaseException:
        cluster.shutdown()
        raise


class PendingStatements(Generic[Tag]):
    """Statements under way, whose answers come in the order in which they arrive. For one thread.

    Each is answered once: where a slow server's statement was asked of another one too, the driver tells of both
    answers.

    Args:
        session: session that sends them.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._arrived: SimpleQueue[tuple[int, Sequence[Any] | Exception]] = SimpleQueue()
        self._under_way: dict[int, tuple[Tag, Any]] = {}
        self._sent = 0

    def __len__(self) -> int:
        return len(self._under_way)

    def send(self, tag: Tag, statement: Any) -> None:
        """Have a statement run; its tag comes back with its answer."""
        self._sent += 1
        future = self._session.execute_async(statement)
        self._under_way[self._sent] = tag, future
        future.add_callbacks(self._came, self._came, callback_args=(self._sent,), errback_args=(self._sent,))

    def receive(self) -> tuple[Tag, Sequence[Any] | Exception]:
        """Wait for the next answer: its rows, or what went wrong."""
        number, answer = self._next()
        tag, _ = self._under_way.pop(number)
        return tag, answer

    def receive_page(self) -> tuple[Tag, Sequence[Any] | Exception]:
        """Wait for the next page of any answer, and ask for the one that follows it.

        Only for statements that are not asked twice: the driver takes a second answer to one page for the next page.
        """
        number, answer = self._next()
        tag, future = self._under_way[number]
        if isinstance(answer, Exception) or not future.has_more_pages:
            del self._under_way[number]
        else:
            future.start_fetching_next_page()
        return tag, answer

    def _next(self) -> tuple[int, Sequence[Any] | Exception]:
        while True:
            try:
                # The driver answers each within its own time; it would have to have died not to.
                number, answer = self._arrived.get(timeout=3 * _REQUEST_S)
            except Empty as error:
                raise OperationTimedOut from error
            if number in self._under_way:
                return number, answer

    def _came(self, answer: Sequence[Any] | Exception | None, number: int) -> None:
        # On the driver's own thread, which must not be held up.
        self._arrived.put((number, [] if answer is None else answer))


class _NextHost(RetryPolicy):  # type: ignore[misc]
    """What one server cannot answer in time is asked of others: all our statements may run twice."""

    def on_read_timeout(self, *_: Any, retry_num: int, **__: Any) -> tuple[int, None]:
        return (self.RETRY_NEXT_HOST if retry_num < _MAX_ASKED_AGAIN else self.RETHROW), None

    def on_write_timeout(self, *_: Any, retry_num: int, **__: Any) -> tuple[int, None]:
        return (self.RETRY_NEXT_HOST if retry_num < _MAX_ASKED_AGAIN else self.RETHROW), None


class _NearFirst(WrapperPolicy):  # type: ignore[misc]
    """A statement with an attribute ``near`` goes to those servers first: scans, whose key the driver cannot see."""

    def make_query_plan(self, working_keyspace: str | None = None, query: Any = None) -> Iterator[Any]:
        near = [host for host in getattr(query, "near", ()) if host.is_up]
        yield from near
        for host in self._child_policy.make_query_plan(working_keyspace, query):
            if host not in near:
                yield host


def _tls(place: CqlLocation, access: CqlAccess) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=access.authority or None)
        if access.certificate:
            context.load_cert_chain(access.certificate, access.key or None)
    except OSError as error:
        raise SettingError(
            "the files that FROSTLINE_CQL_CA, FROSTLINE_CQL_CERTIFICATE and FROSTLINE_CQL_KEY name must hold PEM "
            "certificates and their key"
        ) from error
    context.check_hostname = place.tls == "true"
    return context
