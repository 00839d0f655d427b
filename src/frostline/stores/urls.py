"""Decides what a URL or path means: the one way to write a root, and which object names stay within it."""

import os.path
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

from frostline.errors import BadRequest, SettingError
from frostline.stores.cql_urls import parse_cql

__all__ = ("Root", "check_name", "is_within", "normalise_url", "parse_url")

_SCHEMES = ("cql", "file", "memory", "s3")


class Root(NamedTuple):
    """A root taken apart.

    Attributes:
        scheme: ``cql``, ``file``, ``memory`` or ``s3``.
        place: the bucket, the name of the memory, the servers and the user, or empty.
        path: the absolute folder, or the prefix within the place without slashes at its ends.
        options: ordered by name.
    """

    scheme: str
    place: str
    path: str
    options: tuple[tuple[str, str], ...] = ()


def normalise_url(url_or_path: str) -> str:
    """The canonical URL of a root: equal roots have equal URLs.

    A plain path becomes absolute, with ``..`` taken out by name (links are not followed). Characters of a
    ``file`` URL are escaped as RFC 3986 wants; an ``s3`` URL is written raw, as S3 tools do. No slash at the end.

    Raises:
        SettingError: the text is no URL that Frostline reads.
    """
    root = parse_url(url_or_path)
    if root.scheme == "cql":
        return parse_cql(url_or_path.partition("://")[2]).url
    if root.scheme == "file":
        return "file://" + quote(root.path, errors="surrogateescape")
    return f"{root.scheme}://{root.place}" + (f"/{root.path}" if root.path else "")


def is_within(url: str, root: str) -> bool:
    """Whether a URL is a root or lies under it, judged by name.

    Raises:
        SettingError: one of them is no URL that Frostline reads.
    """
    if parse_url(url).options != parse_url(root).options:
        return False
    inner, outer = normalise_url(url).partition("?")[0], normalise_url(root).partition("?")[0]
    return inner == outer or inner.startswith(outer.rstrip("/") + "/")


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
    if scheme not in _SCHEMES:
        raise SettingError(f"Frostline reads folders, {', '.join(f'{one}://' for one in _SCHEMES)}; not {scheme}://")
    if scheme == "cql":
        place = parse_cql(rest)
        return Root(scheme, place.authority, place.path, place.options)
    return _file(rest) if scheme == "file" else _placed(scheme, rest)


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
    place, _, path = rest.partition("/")
    if "@" in place:
        raise SettingError("a URL carries no name or password: S3 reads them from AWS_ACCESS_KEY_ID and its like")
    if not place:
        raise SettingError(f"{scheme}:// needs a name after it, such as {scheme}://photos")
    path = path.strip("/")
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise SettingError(f"the prefix {path!r} must not hold '//', '.' or '..'")
    return Root(scheme, place, path)
