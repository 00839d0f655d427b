"""A session with servers that speak CQL, and what it knows of one data set's tables: statements, keys and ranges."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from cassandra import ConsistencyLevel, Unauthorized
from cassandra.metadata import Murmur3Token, TableMetadata, TokenMap
from cassandra.query import PreparedStatement

from frostline.errors import DataNotFound, nearest
from frostline.stores.base.cql_urls import CqlLocation
from frostline.stores.cql.connect import PendingStatements, connect
from frostline.stores.cql.credentials import CqlAccess
from frostline.stores.cql.ddl import additions, creation, insertion
from frostline.stores.cql.schema import Scan, Shape, TableSchema, shape_of

__all__ = ("CqlSession", "create_table")

_FIRST, _LAST = -(1 << 63), (1 << 63) - 1
# Rows without their data are small, and an answer is held in memory whole.
_ROWS_A_PAGE = 5000
# Enough that the next answer is on its way while one is taken apart.
_RANGES_AT_ONCE = 16


class CqlSession:
    """A session for one data set. Safe for threads.

    Args:
        place: which.
        access: as whom.
        deadline_s: how long the servers may be silent, where the usual time is not less.

    Raises:
        SettingError: there is no password, or certificates cannot be used.
        DataNotFound: the table does not exist.
        DataError: its columns cannot be used.

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
            self.seal = self._prepared(self.shape.seal) if self.shape.seal else None
            self.sealed = self._prepared(self.shape.sealed) if self.shape.sealed else None
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
        """Room for statements under way."""
        return PendingStatements(self._session)

    def putting(self, further: Sequence[str]) -> PreparedStatement:
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
            maximum: under way, or waiting to be taken, at once.
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
            known = nearest(keyspace, keyspaces)
            raise DataNotFound(f"there is no keyspace {keyspace} on the servers of {place.url}{known}")
        tables = keyspaces[keyspace].tables
        if name not in tables:
            known = nearest(name, tables)
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
