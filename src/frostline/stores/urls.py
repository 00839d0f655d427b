"""Decides what a URL or path means: its root, which names stay within it, and its options, never a secret.

Decides which options a store's URL may carry: where its server is and as whom to ask, never a secret.
"""

import os.path
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from frostline.core.errors import BadRequest, SettingError

__all__ = (
    "ARROW_SUFFIXES",
    "COMPRESSED",
    "FILE_SUFFIXES",
    "PORT",
    "TAR_GZ",
    "CqlLocation",
    "Options",
    "Root",
    "check_name",
    "is_name",
    "is_within",
    "names_file",
    "normalise_url",
    "object_url",
    "parse_cql",
    "parse_url",
    "root_url",
)


Options = tuple[tuple[str, str], ...]
"""Names and values, ordered by name."""

_OF_SCHEME = {
    "s3": ("anonymous", "endpoint", "profile", "region"),
    "gs": ("anonymous", "endpoint"),
    "az": ("account", "anonymous", "endpoint"),
}
_WORD = re.compile(r"[\w.@/ +=-]{1,128}", re.ASCII)
_HOST = re.compile(r"[A-Za-z0-9._-]+(:\d{1,5})?|\[[0-9A-Fa-f:.]+\](:\d{1,5})?")


def _parse_options(scheme: str, text: str) -> Options:
    """What stands after the question mark of a store's URL.

    Raises:
        SettingError: an option is unknown, stands there twice or has a value that makes no sense. The sentence repeats
            no value: somebody may have put a secret there.
    """
    values = _named_values(
        scheme, text, _OF_SCHEME.get(scheme, ()), "secrets go into environment variables or profiles"
    )
    return tuple(sorted((name, _CHECKED[name](name, value)) for name, value in values.items()))


def _named_values(scheme: str, text: str, known: Collection[str], secrets: str) -> dict[str, str]:
    """The values of what stands after a question mark, by name, as they are.

    Args:
        scheme: scheme of the URL.
        text: ``name=value&name=value``.
        known: names that there are.
        secrets: the place where secrets go instead, for the sentence about a name that is not known.

    Raises:
        SettingError: see ``_parse_options``.
    """
    try:
        pairs = parse_qsl(text, strict_parsing=True, errors="strict")
    except ValueError as error:
        raise SettingError(f"the options of a {scheme}:// URL are written name=value&name=value") from error
    unknown = [name for name, _ in pairs if name not in known]
    if unknown:
        raise SettingError(
            f"a {scheme}:// URL has no option {unknown[0]!a}; it has {', '.join(known) or 'none'}, and {secrets}"
        )
    values = dict(pairs)
    if len(values) < len(pairs):
        raise SettingError(f"an option of a {scheme}:// URL stands there twice")
    return values


def _options_text(options: Options) -> str:
    """The options as they end a canonical URL, with their question mark; empty where there are none."""
    return "?" + urlencode(options, quote_via=quote, safe=":/") if options else ""


def _endpoint(name: str, value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not _HOST.fullmatch(parts.netloc) or parts.query or parts.fragment:
        raise SettingError(f"the option {name} is the address of a server, such as https://store.example:9000")
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def _word(name: str, value: str) -> str:
    if not _WORD.fullmatch(value):
        raise SettingError(f"the option {name} is a name of at most 128 plain characters")
    return value


def _true(name: str, value: str) -> str:
    if value != "true":
        raise SettingError(f"the option {name} is true or not there")
    return value


_CHECKED: dict[str, Callable[[str, str], str]] = {
    "account": _word,
    "anonymous": _true,
    "endpoint": _endpoint,
    "profile": _word,
    "region": _word,
}


PORT = 9042
"""Where servers listen for CQL unless they are told otherwise."""
_CONSISTENCIES = ("ALL", "LOCAL_ONE", "LOCAL_QUORUM", "ONE", "QUORUM", "THREE", "TWO")
"""How many replicas must answer; those that both reads and writes know."""

_PROTOCOLS = ("3", "4", "5")
_TLS = ("chain", "true")
# What servers take as the name of a keyspace or table. A quotation mark is in none of these, so none ends a name early.
_NAME = re.compile(r"\w{1,48}", re.ASCII)
_COLUMN = re.compile(r"[\w.-]{1,100}", re.ASCII)
_USER = re.compile(r"[^\s:@/]{1,255}")
_CQL_HOST = re.compile(r"(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:(?P<port>\d{1,5}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class CqlLocation:
    """What a ``cql://`` URL says.

    Attributes:
        user: name of the user who asks; empty where servers ask for no name.
        hosts: servers to begin with, ordered; the others of their ring are learned from them.
        port: port of CQL, the same on all servers.
        keyspace: keyspace of the tables; alone it is a root, under which a node serves all its tables.
        table: the table with a row a sample; empty where the URL is a keyspace's.
        consistency: one of ``_CONSISTENCIES``.
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
        if not self.hosts or any(not _CQL_HOST.fullmatch(host) for host in self.hosts):
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
        _one_of("consistency", self.consistency, _CONSISTENCIES)
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
        SettingError: The URL makes no sense. The sentence repeats neither a user nor the value of an option, which may
            be a secret.
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
    found = [_CQL_HOST.fullmatch(host) for host in text.split(",")]
    servers = [match_ for match_ in found if match_ is not None]
    if len(servers) < len(found):
        raise SettingError("cql:// needs servers after it, such as cql://store-1:9042,store-2/photos/waste")
    ports = {int(server["port"]) for server in servers if server["port"]}
    if len(ports) > 1:
        raise SettingError("all servers of a cql:// URL listen on one port")
    return tuple(sorted({server["host"] for server in servers})), ports.pop() if ports else PORT


def _options(query: str) -> dict[str, str]:
    values = _named_values("cql", query, _OPTIONS, "the password goes into FROSTLINE_CQL_PASSWORD")
    return {name: value.upper() if name == "consistency" else value for name, value in values.items()}


def _one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise SettingError(f"the option {name} of a cql:// URL is one of {', '.join(filter(None, known))}")


TAR_GZ = (".tar.gz", ".tgz")
"""Ends of the names of tars that are compressed as a whole and unpacked once."""

ARROW_SUFFIXES = (".arrow", ".feather", ".ipc")
"""Ends of the names of Arrow's files, as pandas and Polars call theirs."""

FILE_SUFFIXES = (*ARROW_SUFFIXES, ".csv", ".jsonl", ".ndjson", ".parquet", ".tar", ".tsv", *TAR_GZ)
"""Ends of the names of files that are data sets by themselves."""

COMPRESSED = (".tar.bz2", ".tar.xz", ".tar.zst", ".zip", ".csv.gz")
"""Ends of the names of other files that are compressed as a whole, in which nothing has a place to read at."""

_SCHEMES = ("file", "memory", "s3", "gs", "az", "http", "https", "cql")
_AZURE = ("az", "azure", "abfs", "abfss")
# A container and the account that it is of, as Spark and Azure's own tools write them.
_AZURE_HOST = re.compile(r"([a-z0-9-]+)@([a-z0-9]+)\.(?:dfs|blob)\.core\.windows\.net")
_WEB_HOST = re.compile(r"(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::\d{1,5})?")
_USUAL_PORT = {"http": ":80", "https": ":443"}


class Root(NamedTuple):
    """A root taken apart.

    Attributes:
        scheme: ``file``, ``memory``, ``s3``, ``gs``, ``az``, ``http``, ``https`` or ``cql``.
        place: the bucket or container, the host and its port, the name of the memory, servers and user, or empty.
        path: the absolute folder, or the prefix within the place without slashes at its ends.
        options: options of the store, ordered by name.
    """

    scheme: str
    place: str
    path: str
    options: Options = ()


def normalise_url(url_or_path: str) -> str:
    """The canonical URL of a root: equal roots have equal URLs.

    A plain path becomes absolute, with ``..`` taken out by name (links are not followed). Characters of ``file`` and
    ``http`` URLs are escaped as RFC 3986 wants; those of buckets are written raw, as their tools do. No slash at the
    end. Options are part of it, ordered by name: the same bucket elsewhere, or as somebody else, is another root.

    Raises:
        SettingError: the text is no URL that Frostline reads.
    """
    return root_url(parse_url(url_or_path))


def object_url(url: str, name: str) -> str:
    """The URL of an object under a root, for people and for records.

    Raises:
        SettingError: ``url`` is none that Frostline reads.
    """
    root = parse_url(url)
    return root_url(root._replace(path=f"{root.path.rstrip('/')}/{name}" if root.path else name))


def root_url(root: Root) -> str:
    """The canonical URL of a root that was taken apart."""
    if root.scheme == "file":
        return "file://" + quote(root.path, errors="surrogateescape")
    path = quote(root.path) if root.scheme in _USUAL_PORT else root.path
    return f"{root.scheme}://{root.place}" + (f"/{path}" if path else "") + _options_text(root.options)


def is_within(url: str, root: str) -> bool:
    """Whether a URL is a root or lies under it, judged by name. Both must have the same options.

    Raises:
        SettingError: a text is not a URL that Frostline reads.
    """
    inner, outer = parse_url(url), parse_url(root)
    if inner._replace(path="") != outer._replace(path=""):
        return False
    return not outer.path or inner.path == outer.path or inner.path.startswith(outer.path.rstrip("/") + "/")


def names_file(path: str) -> bool:
    """Whether a root's path, or the name of an object, ends as that of a table or a shard does."""
    return path.lower().endswith(FILE_SUFFIXES)


_MEANT = {
    **dict.fromkeys(("minio", "s3", "s3a", "s3n"), ": write s3://"),
    **dict.fromkeys(("gcs", "gs"), ": write gs://"),
    **dict.fromkeys(("wasb", "wasbs"), ": write az://"),
    **dict.fromkeys(("cassandra", "scylla"), ": write cql://"),
}  # schemes that other programs have


def parse_url(url_or_path: str) -> Root:
    """Take a URL or path apart.

    Raises:
        SettingError: the text is no URL that Frostline reads. The sentence never repeats a name and password.
    """
    if not url_or_path or "\0" in url_or_path:
        raise SettingError("the data's URL must not be empty nor hold a NUL")
    scheme, mark, rest = url_or_path.partition("://")
    if not mark:
        return Root("file", "", _absolute(url_or_path))
    scheme = "az" if scheme in _AZURE else scheme
    if scheme not in _SCHEMES:
        raise SettingError(
            f"Frostline reads folders, {', '.join(f'{known}://' for known in _SCHEMES)}; not {scheme}://"
            f"{_MEANT.get(scheme.lower(), '')}"
        )
    if scheme == "file":
        return _file(rest)
    if scheme == "cql":
        table = parse_cql(rest)
        return Root(scheme, table.authority, table.path, table.options)
    return _web(scheme, rest) if scheme in _USUAL_PORT else _placed(scheme, rest)


def check_name(name: str) -> str:
    """An object's name, if it stays within the root.

    Raises:
        BadRequest: The name is empty, absolute, leaves the root with ``..``, or cannot be written in UTF-8.
    """
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise BadRequest(f"the object name {name!a} does not stay within the data")
    if not name.isascii():
        _check_utf8(name)
    return name


def is_name(name: str) -> bool:
    """Whether an object's name stays within the root, as ``check_name`` says."""
    try:
        check_name(name)
    except BadRequest:
        return False
    return True


def _check_utf8(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(f"the object name {name!a} cannot be written in UTF-8") from error


def _file(rest: str) -> Root:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise SettingError("a file URL has three slashes and an absolute path: file:///path/to/folder")
    return Root("file", "", _absolute("/" + unquote(path, errors="surrogateescape")))


def _absolute(path: str) -> str:
    # By name alone: what a link points to may differ between the machine that asks and the one that serves.
    return "/" + os.path.normpath(Path(path).absolute()).lstrip("/")


def _placed(scheme: str, rest: str) -> Root:
    rest, has_options, text = rest.partition("?")
    options = _parse_options(scheme, text) if has_options else ()
    place, _, path = rest.partition("/")
    if scheme == "az" and (found := _AZURE_HOST.fullmatch(place)):
        place, options = found[1], _with_account(options, found[2])
    if "@" in place:
        raise SettingError("a URL carries no name or password: they are read from AWS_ACCESS_KEY_ID and its like")
    if not place:
        raise SettingError(f"{scheme}:// needs a name after it, such as {scheme}://photos")
    return Root(scheme, place, _prefix(path), options)


def _with_account(options: Options, account: str) -> Options:
    if dict(options).get("account", account) != account:
        raise SettingError("the URL names two Azure accounts")
    return tuple(sorted({**dict(options), "account": account}.items()))


def _web(scheme: str, rest: str) -> Root:
    place, _, path = rest.partition("/")
    place = place.lower().removesuffix(_USUAL_PORT[scheme])
    if "?" in rest or "#" in rest or "@" in place:
        raise SettingError(f"a {scheme}:// root carries no name, password or query: those may be secrets")
    if not _WEB_HOST.fullmatch(place):
        raise SettingError(f"{scheme}:// needs a host after it, such as {scheme}://photos.example/waste")
    return Root(scheme, place, _prefix(unquote(path, errors="surrogateescape")))


def _prefix(path: str) -> str:
    path = path.strip("/")
    if path:
        _check_prefix(path)
    return path


def _check_prefix(path: str) -> None:
    if any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
        raise SettingError(f"the prefix {path!a} must not hold '//', '.' or '..'")
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise SettingError(f"the prefix {path!a} cannot be written in UTF-8") from error
