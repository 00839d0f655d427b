"""Where an I/O service listens: a socket in a folder of the user's own, or a name that no file has."""

import errno
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from frostline.errors import AddressInUse, SettingError
from frostline.file_cache import lock
from frostline.io_service.client.socket import socket_address

__all__ = ("listening_at", "unnamed")

_BACKLOG = 256


def unnamed() -> str:
    """An address that nobody has and that leaves no file behind, whatever becomes of the service."""
    return f"unix:@frostline-{secrets.token_hex(16)}"


@contextmanager
def listening_at(url: str) -> Iterator[socket.socket]:
    """Listen at an address; where it is a file, that is gone afterwards.

    A file that a service left which was killed is taken over.

    Raises:
        AddressInUse: Another service listens there.
        SettingError: It cannot be listened at, or others could reach into its folder.
    """
    address = socket_address(url)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        try:
            if address.startswith("\0"):
                listening.bind(address)
                listening.listen(_BACKLOG)
            else:
                _bind(listening, Path(address))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUse(
                    f"an I/O service listens at {url} already: use it, or name another --socket"
                ) from error
            raise SettingError(f"cannot listen at {url}: {error.strerror or error}") from error
        try:
            yield listening
        finally:
            if not address.startswith("\0"):
                Path(address).unlink(missing_ok=True)


def _bind(listening: socket.socket, path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check(path.parent, os.fstat(folder))
        # Of two that find the file of a killed service, one takes its place and the other finds it in use.
        lock(folder)
        if path.is_socket() and not _answers(path):
            path.unlink()
        listening.bind(str(path))
        listening.listen(_BACKLOG)
    finally:
        os.close(folder)


def _check(folder: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise SettingError(
            f"the socket of an I/O service lies in a folder of your own that nobody else may enter, and {folder} is "
            "none: chmod it to 0700, or name another --socket"
        )


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as trial:
        try:
            trial.connect(str(path))
        except ConnectionRefusedError:
            return False
        return True
