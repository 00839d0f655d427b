"""Decides what a ``cql://`` URL means: which servers, which tables, which columns; never a secret."""

import re
from dataclasses import dataclass, fields
from urllib.parse import quote, unquote, urlencode

from frostline.errors import SettingError
from frostline.stores.base.url_options import named_values

__all__ = ("CONSISTENCIES", "PORT", "CqlLocation", "parse_cql")

PORT = 9042
"""Where servers listen for CQL unless they are told otherwise."""
CONSISTENCIES = ("ALL", "LOCAL_ONE", "LOCAL_QUORUM", "ONE", "QUORUM", "THREE", "TWO")
"""How many replicas must answer; those that both reads and writes know."""

_PROTOCOLS = ("3", "4", "5")
_TLS = ("chain", "true")
# What servers take as the name of a keyspace or table. A quotation mark is in none of these, so none ends a name early.
_NAME = re.compile(r"\w{1,48}", re.ASCII)
_COLUMN = re.compile(r"[\w.-]{1,100}", re.ASCII)
_USER = re.compile(r"[^\s:@/]{1,255}")
_HOST = re.compile(r"(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CqlLocation:
    """What a ``cql://`` URL says.

    Attributes:
        user: as whom to ask; empty where servers ask for no name.
        hosts: servers to begin with, ordered; the others of their ring are learned from them.
        port: port of CQL, the same on all servers.
        keyspace: keyspace of the tables; alone it is a root, under which a node serves all its tables.
        table: with a row a sample; empty where the URL is a keyspace's.
        consistency: one of ``CONSISTENCIES``.
        data: column of the encoded samples.
        dc: datacentre whose servers are asked; empty is that of the first host that answers.
        id: column of the key.
        label: column of the labels, in ``meta`` where there is one, else in the table.
        meta: table of labels and further columns, ``table`` or ``keyspace.table``; empty is none.
        meta_id: column of the keys in ``meta``; empty is the same as ``id``.
        name: column of names, where there is one.
        protocol: protocol of the servers, ``3`` for Cassandra 2; empty is the newest that they and the driver speak.
        size: column of the samples' bytes, where there is one.
        tls: ``true`` to encrypt and know servers by name, ``chain`` to leave the name out; empty is neither.
    """

    user: str = ""
    hosts: tuple[str, ...]
    port: int = PORT
    keyspace: str
    table: str = ""
    consistency: str = "LOCAL_ONE"
    data: str = "data"
    dc: str = ""
    id: str = "id"
    label: str = "label"
    meta: str = ""
    meta_id: str = ""
    name: str = "name"
    protocol: str = ""
    size: str = "bytes"
    tls: str = ""

    def __post_init__(self) -> None:
        if not self.hosts or any(not _HOST.fullmatch(host) for host in self.hosts):
            raise SettingError("cql:// needs a server after it, such as cql://store-1/photos/waste")
        if not 0 < self.port < 1 << 16:
            raise SettingError(f"cql:// has no port {self.port}: they go from 1 to 65535")
        if self.user and not _USER.fullmatch(self.user):
            raise SettingError("the user of a cql:// URL is one word without ':', '@' or '/'")
        self._check_tables()
        self._check_options()

    def _check_tables(self) -> None:
        meta = self.meta.split(".") if self.meta else []
        if not _NAME.fullmatch(self.keyspace) or (self.table and not _NAME.fullmatch(self.table)):
            raise SettingError(
                "a cql:// URL ends in /keyspace/table, as their servers write them: letters, digits and '_', at most 48"
            )
        if len(meta) > 2 or any(not _NAME.fullmatch(name) for name in meta):
            raise SettingError("the option meta names a table or keyspace.table")

    def _check_options(self) -> None:
        for name in ("data", "id", "label", "name", "size"):
            if not _COLUMN.fullmatch(getattr(self, name)):
                raise SettingError(f"the option {name} names a column: letters, digits, '_', '-' and '.'")
        if self.meta_id and not _COLUMN.fullmatch(self.meta_id):
            raise SettingError("the option meta_id names a column: letters, digits, '_', '-' and '.'")
        if self.dc and not _COLUMN.fullmatch(self.dc):
            raise SettingError("the option dc names a datacentre: letters, digits, '_', '-' and '.'")
        _one_of("consistency", self.consistency, CONSISTENCIES)
        _one_of("protocol", self.protocol, ("", *_PROTOCOLS))
        _one_of("tls", self.tls, ("", *_TLS))

    @property
    def authority(self) -> str:
        """Who asks, and whom, as it stands in the canonical URL."""
        port = "" if self.port == PORT else f":{self.port}"
        user = f"{quote(self.user, safe='')}@" if self.user else ""
        return user + ",".join(f"{host}{port}" for host in self.hosts)

    @property
    def path(self) -> str:
        """Keyspace and table."""
        return f"{self.keyspace}/{self.table}" if self.table else self.keyspace

    @property
    def options(self) -> tuple[tuple[str, str], ...]:
        """What differs from the defaults, ordered by name."""
        return tuple((name, getattr(self, name)) for name, usual in _OPTIONS.items() if getattr(self, name) != usual)

    @property
    def url(self) -> str:
        """The canonical URL: equal places have equal ones."""
        options = self.options
        return f"cql://{self.authority}/{self.path}" + (f"?{urlencode(options)}" if options else "")

    @property
    def meta_table(self) -> tuple[str, str]:
        """Keyspace and name of ``meta``."""
        keyspace, _, table = self.meta.rpartition(".")
        return keyspace or self.keyspace, table


_NOT_OPTIONS = ("user", "hosts", "port", "keyspace", "table")
_OPTIONS: dict[str, str] = {
    field.name: str(field.default)
    for field in sorted(fields(CqlLocation), key=lambda item: item.name)
    if field.name not in _NOT_OPTIONS
}


def parse_cql(text: str) -> CqlLocation:
    """Take what follows ``cql://`` apart.

    Raises:
        SettingError: it makes no sense. The sentence repeats neither a user nor the value of an option: somebody may
            have put a secret there.
    """
    address, has_options, query = text.partition("?")
    authority, _, path = address.partition("/")
    user, _, hosts = authority.rpartition("@")
    if ":" in user:
        raise SettingError("a cql:// URL carries no password: it is read from FROSTLINE_CQL_PASSWORD")
    names = path.rstrip("/").split("/")
    if len(names) > 2:
        raise SettingError("a cql:// URL ends in /keyspace/table, and nothing behind it")
    keyspace, table = names if len(names) == 2 else (names[0], "")
    servers, port = _servers(hosts.lower())
    options = _options(query) if has_options else {}
    return CqlLocation(user=unquote(user), hosts=servers, port=port, keyspace=keyspace, table=table, **options)


def _servers(text: str) -> tuple[tuple[str, ...], int]:
    found = [_HOST.fullmatch(host) for host in text.split(",")]
    servers = [match_ for match_ in found if match_ is not None]
    if len(servers) < len(found):
        raise SettingError("cql:// needs servers after it, such as cql://store-1:9042,store-2/photos/waste")
    ports = {int(server["port"]) for server in servers if server["port"]}
    if len(ports) > 1:
        raise SettingError("all servers of a cql:// URL listen on one port")
    return tuple(sorted({server["host"] for server in servers})), ports.pop() if ports else PORT


def _options(query: str) -> dict[str, str]:
    values = named_values("cql", query, _OPTIONS, "the password goes into FROSTLINE_CQL_PASSWORD")
    return {name: value.upper() if name == "consistency" else value for name, value in values.items()}


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(f"the option {name} of a cql:// URL is one of {', '.join(filter(None, known))}")
