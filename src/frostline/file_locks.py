"""Locks files for this process; the system unlocks them when the process ends, however it ends."""

from frostline.errors import SettingError

__all__ = ("lock", "try_lock")


def try_lock(handle: int) -> bool:
    """Lock an open file or folder, unless another process has locked it; closing it unlocks it.

    Returns:
        Whether this process has it now.

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
