"""Decides what a URL or path means: the one way to write a root, and which object names stay within it."""

import os.path
import re
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from frostline.errors import BadRequest, SettingError
from frostline.stores.base.cql_urls import parse_cql
from frostline.stores.base.url_options import Options, options_text, parse_options

__all__ = (
    "COMPRESSED",
    "FILE_SUFFIXES",
    "TAR_GZ",
    "Root",
    "check_name",
    "is_within",
    "names_file",
    "normalise_url",
    "object_url",
    "parse_url",
    "root_url",
)

TAR_GZ = (".tar.gz", ".tgz")
"""Ends of the names of tars that are compressed as a whole and unpacked once."""

FILE_SUFFIXES = (".arrow", ".csv", ".parquet", ".tar", *TAR_GZ)
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
    return f"{root.scheme}://{root.place}" + (f"/{path}" if path else "") + options_text(root.options)


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
        BadRequest: it is empty, absolute, climbs out with ``..``, or cannot be written in UTF-8.
    """
    if "\0" in name or any(part in ("", ".", "..") for part in name.split("/")):
        raise BadRequest(f"the object name {name!a} does not stay within the data")
    if not name.isascii():
        _check_utf8(name)
    return name


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
    options = parse_options(scheme, text) if has_options else ()
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
