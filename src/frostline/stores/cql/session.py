"""Sessions with servers that speak CQL: connections, and what is known of one data set's tables.

The driver is brought in by this module, so this module is imported when a store is first used.
"""

import math
import ssl
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from cassandra import ConsistencyLevel, OperationTimedOut, Unauthorized
from cassandra.auth import PlainTextAuthProvider
from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, Session
from cassandra.metadata import Murmur3Token, TableMetadata, TokenMap
from cassandra.policies import (
    ConstantSpeculativeExecutionPolicy,
    DCAwareRoundRobinPolicy,
    RetryPolicy,
    TokenAwarePolicy,
    WrapperPolicy,
)
from cassandra.query import PreparedStatement, tuple_factory

from frostline.core.errors import DataNotFound, SettingError
from frostline.core.hints import suggest_names
from frostline.core.system import background
from frostline.stores.cql.access import CqlAccess
from frostline.stores.cql.schema import Scan, Shape, TableSchema, additions, creation, insertion, shape_of
from frostline.stores.urls import CqlLocation

__all__ = ("CqlSession", "PendingStatements", "connect", "create_table")


Tag = TypeVar("Tag")

_CONNECT_S = 5.0
_REQUEST_S = 20.0
# A read that takes this long is asked of another replica too: the server may have died with the question.
_ASKED_AGAIN_AFTER_S = 1.0
_MAX_ASKED_AGAIN = 2


def connect(place: CqlLocation, access: CqlAccess, deadline_s: float = math.inf) -> tuple[Cluster, Session]:
    """Make a session. Whoever asked for it shuts the cluster down.

    Args:
        place: the place of the table.
        access: the credentials.
        deadline_s: the time that the servers may be silent, where the usual time is not less.

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


_FIRST, _LAST = -(1 << 63), (1 << 63) - 1
# Rows without their data are small, and an answer is held in memory whole.
_ROWS_A_PAGE = 5000
# Enough that the next answer is on its way while one is taken apart.
_RANGES_AT_ONCE = 16


class CqlSession:
    """A session for one data set. Safe for threads.

    Args:
        place: the place of the table.
        access: the credentials.
        deadline_s: the time that the servers may be silent, where the usual time is not less.

    Raises:
        SettingError: there is no password, or certificates cannot be used.
        DataNotFound: the table does not exist.
        DataError: The table's columns cannot be used.

    What the driver raises comes out as it is.
    """

    def __init__(self, place: CqlLocation, access: CqlAccess, deadline_s: float = math.inf) -> None:
        self._cluster, self._session = connect(place, access, deadline_s)
        try:
            self.shape = self._shape(place)
            # Only now: a keyspace that is not there has its own sentence.
            self._session.set_keyspace(place.keyspace)
            self.read = self._prepared(self.shape.read)
            self.read_mask = self._prepared(self.shape.read_mask) if self.shape.read_mask else None
            self.write = self._prepared(self.shape.write)
            self.check = self._prepared(self.shape.check)
            self.digest = self._prepared(self.shape.digest) if self.shape.digest else None
            self.read_digest = self._prepared(self.shape.read_digest) if self.shape.read_digest else None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the session."""
        self._cluster.shutdown()

    def run(self, statement: PreparedStatement, values: tuple[Any, ...]) -> Sequence[Any]:
        """The rows of a statement, waited for."""
        return self._session.execute(statement, values).current_rows or ()

    def flight(self) -> PendingStatements[Any]:
        """Slots for statements under way."""
        return PendingStatements(self._session)

    def put_statement(self, further: Sequence[str]) -> PreparedStatement:
        """The statement that puts a sample with these columns beside its own."""
        return self._prepared(insertion(self.shape, further))

    def check_everywhere(self, key: object) -> Any:
        """The statement that reads a row from all of its replicas, of which the newest tells."""
        statement = self.check.bind((key,))
        statement.consistency_level = ConsistencyLevel.ALL
        return statement

    def answers(
        self, asked: Iterable[tuple[PreparedStatement, object]], maximum: int
    ) -> Iterator[tuple[int, Sequence[Any] | Exception]]:
        """What statements give, as it comes: the place of the statement, and its rows or what went wrong.

        Args:
            asked: statements, each with the key that it takes.
            maximum: the most under way, or waiting to be taken, at once.
        """
        flight: PendingStatements[int] = PendingStatements(self._session)
        waiting = enumerate(asked)
        for index, (statement, key) in islice(waiting, maximum):
            flight.send(index, statement.bind((key,)))
        while len(flight):
            index, answer = flight.receive()
            for later, (statement, key) in islice(waiting, 1):
                flight.send(later, statement.bind((key,)))
            yield index, answer

    def scan(self, scan: Scan) -> Iterator[Sequence[Any]]:
        """The pages of a whole table, in no particular order: ranges of tokens, each asked of a server that has it."""
        statement = self._session.prepare(scan.text)  # asked once: see Flight.receive_page
        statement.fetch_size = _ROWS_A_PAGE
        waiting = iter(self._ranges(statement.keyspace))
        flight: PendingStatements[None] = PendingStatements(self._session)
        for bounds, near in waiting:
            flight.send(None, _near(statement.bind(bounds), near))
            if len(flight) >= _RANGES_AT_ONCE:
                break
        while len(flight):
            _, page = flight.receive_page()
            if isinstance(page, Exception):
                raise page
            if len(flight) < _RANGES_AT_ONCE:
                for bounds, near in waiting:
                    flight.send(None, _near(statement.bind(bounds), near))
                    break
            yield page

    def _prepared(self, text: str) -> PreparedStatement:
        statement = self._session.prepare(text)
        # Reads, and writes that put the same under the same key: each may run again where nobody knows if it did.
        statement.is_idempotent = True
        return statement

    def _ranges(self, keyspace: str) -> Iterator[tuple[tuple[int, int], Sequence[Any]]]:
        known: TokenMap | None = self._cluster.metadata.token_map
        if known is None or known.token_class is not Murmur3Token:
            yield (_FIRST, _LAST), ()
            return
        # A server has what lies behind the token before its own, up to its own; behind the last one is the first's.
        ends = [token.value for token in known.ring]
        for start, end, token in zip([_FIRST, *ends], [*ends, _LAST], [*known.ring, known.ring[0]], strict=True):
            if start < end:
                yield (start, end), known.get_replicas(keyspace, token)

    def _shape(self, place: CqlLocation) -> Shape:
        meta = self._table(place, *place.meta_table) if place.meta else None
        return shape_of(place, self._table(place, place.keyspace, place.table), meta)

    def _table(self, place: CqlLocation, keyspace: str, name: str) -> TableSchema:
        keyspaces = self._cluster.metadata.keyspaces
        if keyspace not in keyspaces:
            known = suggest_names(keyspace, keyspaces)
            raise DataNotFound(f"there is no keyspace {keyspace} on the servers of {place.url}{known}")
        tables = keyspaces[keyspace].tables
        if name not in tables:
            known = suggest_names(name, tables)
            raise DataNotFound(f"there is no table {name} in the keyspace {keyspace} for {place.url}{known}")
        return _table_of(tables[name])


def create_table(
    place: CqlLocation, access: CqlAccess, further: Mapping[str, str], *, has_masks: bool
) -> Collection[str]:
    """Make the table that a place names, or add the columns to it that it lacks; see ``cql_making``.

    Returns:
        The columns that it still lacks, because the user may not add them.

    What the driver raises comes out as it is.
    """
    cluster, session = connect(place, access)
    try:
        # Looked for first, so that who may only write rows of it need not have the right to make tables.
        keyspaces = cluster.metadata.keyspaces
        if place.keyspace not in keyspaces:
            raise DataNotFound(f"there is no keyspace {place.keyspace} on the servers of {place.url}: make it first")
        tables = keyspaces[place.keyspace].tables
        if place.table not in tables:
            releases = [host.release_version for host in cluster.metadata.all_hosts()]
            oldest = min(release or "" for release in releases)
            session.execute(creation(place, oldest, further, has_masks=has_masks))
            return ()
        found = _table_of(tables[place.table])
        lacking = additions(place, found, further, has_masks=has_masks)
        for name in [*lacking]:
            with suppress(Unauthorized):
                session.execute(lacking[name])
                del lacking[name]
        return tuple(lacking)
    finally:
        cluster.shutdown()


def _table_of(found: TableMetadata) -> TableSchema:
    return TableSchema(
        keyspace=found.keyspace_name,
        name=found.name,
        columns={column.name: str(column.cql_type) for column in found.columns.values()},
        partition=tuple(column.name for column in found.partition_key),
        clustering=tuple(column.name for column in found.clustering_key),
    )


def _near(statement: Any, hosts: Sequence[Any]) -> Any:
    statement.near = hosts
    return statement
