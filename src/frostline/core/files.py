"""Makes private files and folders for caches, keeps the latest used ones, and locks files between processes.

Makes folders and files of caches that nobody but their user may read: they hold what the data held.
"""

import errno
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from io import BufferedWriter
from pathlib import Path
from typing import Any, Literal

from frostline.core.declared import refuse_unknown_fields
from frostline.core.errors import OutOfSpace, SettingError
from frostline.core.system import __version__, crc32
from frostline.core.units import log_named

__all__ = (
    "FileCache",
    "append_line",
    "checked_text",
    "is_full",
    "lock",
    "make_private",
    "make_private_file",
    "make_private_folder",
    "open_private",
    "read_checked",
    "read_regular",
    "replace_file",
    "require_guarded",
    "require_regular",
    "stamp_of",
    "try_lock",
    "warn_not_kept",
    "with_schema",
    "without_schema",
    "write_errors",
)


_LOG = log_named("frostline")
_told: set[Path] = set()

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_BLOCKED = (
    errno.EACCES,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)
_FILE = 0o600
_FOLDER = 0o700


def make_private_folder(path: Path) -> None:
    """Make a folder, and those above it, where they are missing. One that is there keeps its rights.

    Raises:
        OSError: The folder cannot be made.
    """
    missing = [path]
    while not missing[-1].parent.exists():
        missing.append(missing[-1].parent)
    for folder in reversed(missing):
        folder.mkdir(mode=_FOLDER, exist_ok=True)


def open_private(path: Path, mode: Literal["xb", "ab", "wb"]) -> BufferedWriter:
    """Open a file in bytes, as ``open`` does; where it is made, for its user alone.

    Args:
        path: The place where it is.
        mode: ``xb`` for a new one, ``ab`` to write behind what it holds, ``wb`` in the place of it.

    Raises:
        OSError: The file cannot be opened.
    """
    how = {"xb": os.O_EXCL, "ab": os.O_APPEND, "wb": os.O_TRUNC}[mode]
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | how
    return os.fdopen(os.open(path, flags, _FILE), mode)


def make_private_file(path: Path) -> None:
    """Make an empty file for its user alone, where there is none.

    Raises:
        OSError: The file cannot be made.
    """
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _FILE))


def replace_file(path: Path, body: bytes) -> None:
    """Put a file in its place in one step, for its user alone; where that fails, what was there stays and no more.

    It is not forced onto the disk, which ``training.run_config.atomic_file`` does.

    Raises:
        OSError: The file cannot be written.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open_private(part, "xb") as file:
            file.write(body)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def append_line(path: Path, line: bytes, *, may_be_link: bool = False) -> None:
    """Write a line behind the others of a file, which is made for its user alone.

    Half a line, which a kill or a full disk left at its end, is ended first, so that it takes no other with it.

    Args:
        path: the file.
        line: the line, with its end.
        may_be_link: True if its user named the file; else a link that somebody put in its place is not followed.

    Raises:
        OSError: The line cannot be written, or only a part of it can.
    """
    how = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | (0 if may_be_link else os.O_NOFOLLOW)
    handle = os.open(path, how, _FILE)
    with os.fdopen(handle, "r+b", buffering=0) as file:
        nbytes = os.fstat(handle).st_size
        is_ended = not nbytes or os.pread(handle, 1, nbytes - 1) == b"\n"
        left = memoryview(line if is_ended else b"\n" + line)
        while left:
            left = left[file.write(left) :]


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a whole file that anybody may have put there: a pipe or a device in its place would never end.

    Args:
        path: the file; a link is followed.
        max_bytes: maximum size.

    Raises:
        OSError: The file cannot be read, is not a regular one, or is larger than allowed.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        _require_regular(status, path)
        body = b"" if status.st_size > max_bytes else file.read(max_bytes + 1)
    if max(status.st_size, len(body)) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes", str(path))
    return body


def require_regular(path: Path) -> None:
    """Do nothing where a file is a regular one; see ``read_regular``.

    Raises:
        OSError: The path is missing, or leads to something else than a regular file.
    """
    _require_regular(path.stat(), path)


def _require_regular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))


def is_full(error: OSError) -> bool:
    """Whether the disk, the quota or the largest file that the system allows is full."""
    return error.errno in _FULL


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """Turn what the system says while a file is written, or a folder made, into sentences that name it.

    Raises:
        OutOfSpace: The disk, the quota or the largest file allowed is full.
        SettingError: The folder is missing or may not be written.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise OutOfSpace(
                f"no space left to write {path}: free some, or choose another folder; nothing half-written was left"
            ) from error
        if error.errno in _BLOCKED:
            raise SettingError(f"cannot write {path}: {os.strerror(error.errno)}; choose another folder") from error
        raise


def warn_not_kept(folder: Path, error: Exception) -> None:
    """Log, once for each of them, that a cache or a file beside the work takes no more; the work goes on without."""
    if folder not in _told:
        _told.add(folder)
        why = (error.strerror if isinstance(error, OSError) else None) or error
        _LOG.warning("nothing more can be kept in %s (%s): the work goes on without it", folder, why)


def make_private(folder: Path) -> None:
    """Give a folder that a library wrote, and all that is in it, to its user alone.

    Raises:
        OSError: The folder's rights cannot be changed.
    """
    for path in (folder, *folder.rglob("*")):
        path.chmod(_FOLDER if path.is_dir() else _FILE)


def require_guarded(path: Path, *, in_any_folder: bool = False) -> None:
    """Do nothing where nobody but the user, the user's own group and the system's own user can change a file.

    It is asked of files that decide who is trusted with what. Who owns a file, or may replace it in its folder, can
    change it; on what is mounted to be read alone, as secrets of containers are, nobody can.

    Args:
        path: the file.
        in_any_folder: True for a file that a server makes, whose folder may be a volume with the rights of a cluster.

    Raises:
        SettingError: Other users can change the file.
        OSError: There is no such file.
    """
    _refuse_change(path, path.lstat(), "")  # of a link, who may lead it elsewhere
    _refuse_change(path, path.stat(), "")
    if not in_any_folder:
        for folder in dict.fromkeys((path.absolute().parent, path.resolve().parent)):
            _refuse_change(folder, folder.stat(), f", the folder of {path}")


def _refuse_change(path: Path, status: os.stat_result, what: str) -> None:
    if os.statvfs(path).f_flag & os.ST_RDONLY:
        return
    if status.st_uid not in (0, os.geteuid()):
        raise SettingError(
            f"{path}{what}, which decides who is trusted, is of another user (number {status.st_uid}): give it to the "
            f"user of this process (chown {os.geteuid()} {path}), or mount it to be read alone"
        )
    mode = 0 if stat.S_ISLNK(status.st_mode) else status.st_mode
    is_by_group = mode & stat.S_IWGRP and status.st_gid != os.getegid()
    # In a folder such as /tmp everybody makes files, and nobody replaces those of others.
    is_safe = stat.S_ISDIR(mode) and mode & stat.S_ISVTX
    if (mode & stat.S_IWOTH or is_by_group) and not is_safe:
        raise SettingError(
            f"others may write to {path}{what} (mode {stat.S_IMODE(mode):04o}), which decides who is trusted: take "
            f"that right away (chmod go-w {path})"
        )


def stamp_of(path: Path) -> tuple[int, int, int] | None:
    """What is another where a file was written or put in place since; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


_NUMBER, _VERSION = "schema", "frostline"


def with_schema(value: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What is to be written, behind the number of its schema and the version of Frostline that writes it."""
    return {_NUMBER: number, _VERSION: __version__, **value}


def without_schema(value: object, number: int, what: str | Path, known: Iterable[str]) -> dict[str, Any]:
    """What was written by ``with_schema``.

    Args:
        value: the parsed content of the file.
        number: the schema that is read here.
        what: name of the file, for the sentence.
        known: names of the fields that it may have.

    Raises:
        SettingError: The schema number is missing, or is not this version's; or a field is unknown.
    """
    if not isinstance(value, dict):
        raise SettingError(f"{what} is damaged: it holds no fields")
    if type(value.get(_NUMBER)) is not int or value[_NUMBER] != number:
        by = f"Frostline {value[_VERSION]}" if _NUMBER in value and _VERSION in value else "another Frostline"
        raise SettingError(
            f"{what} was written by {by} (schema {value.get(_NUMBER, 'without a number')}), this is {__version__}, "
            f"which reads schema {number}: go on with the version that wrote it, or begin anew elsewhere"
        )
    fields = {name: item for name, item in value.items() if name not in (_NUMBER, _VERSION)}
    refuse_unknown_fields(fields, known, f"schema {number} of {what}", SettingError)
    return fields


_CHECKSUM = "crc32"


def checked_text(value: Mapping[str, Any]) -> str:
    """Fields as JSON with their checksum, for what stands beside pages of a table, which have theirs."""
    return json.dumps({**value, _CHECKSUM: _checksum(value)})


def read_checked(text: bytes) -> dict[str, Any]:
    """What was written by ``checked_text``; nothing where it is damaged: a bit may be a class of another name."""
    try:
        value = json.loads(text)
        said = value.pop(_CHECKSUM)
    except (AttributeError, LookupError, RecursionError, TypeError, ValueError):
        return {}
    return value if said == _checksum(value) else {}


def _checksum(value: Mapping[str, Any]) -> int:
    return crc32(json.dumps(value, sort_keys=True).encode())


_MAX_FILES = 200


class FileCache:
    """Small files by key. Whatever cannot be read or written is as if it had not been kept, which is logged once.

    Several processes may use the folder. Those that were not used for longest go first.

    Args:
        folder: The folder, made when something is kept, for its user alone.
        suffix: Suffix of the files' names, such as ``.json``.
    """

    def __init__(self, folder: Path, suffix: str) -> None:
        self._folder = folder
        self._suffix = suffix

    @property
    def is_empty(self) -> bool:
        """Nothing is kept."""
        try:
            return next(self._folder.glob(f"*{self._suffix}"), None) is None
        except OSError:
            return True

    def get(self, key: str) -> bytes | None:
        """What was kept under a key; None where nothing was.

        Args:
            key: Part of a file's name.
        """
        path = self._path(key)
        try:
            body = path.read_bytes()
            os.utime(path)
        except OSError:
            return None
        return body

    def put(self, key: str, body: bytes) -> None:
        """Keep it; a file is whole or not there.

        Args:
            key: Part of a file's name.
            body: content of the file.
        """
        try:
            make_private_folder(self._folder)
            replace_file(self._path(key), body)
            files = sorted(self._folder.glob(f"*{self._suffix}"), key=lambda path: path.stat().st_mtime)
            for path in files[:-_MAX_FILES]:
                path.unlink(missing_ok=True)
        except OSError as error:
            warn_not_kept(self._folder, error)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}{self._suffix}"


def try_lock(handle: int) -> bool:
    """Lock an open file or folder, unless another process has locked it; closing it unlocks it.

    Returns:
        True if this process holds the lock now.

    Raises:
        SettingError: The system has no such locks.
    """
    try:
        _flock(handle, may_wait=False)
    except BlockingIOError:
        return False
    return True


def lock(handle: int) -> None:
    """The same, but wait until no other process has it.

    Raises:
        SettingError: The system has no such locks.
    """
    _flock(handle, may_wait=True)


def _flock(handle: int, *, may_wait: bool) -> None:
    try:
        import fcntl
    except ImportError as error:
        raise SettingError("this system has no locks of files (flock): do this on Linux or macOS") from error
    fcntl.flock(handle, fcntl.LOCK_EX | (0 if may_wait else fcntl.LOCK_NB))
