"""Joins Ray: the one that an address names, the one that was started here, or whichever runs."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from frostline.cluster import local
from frostline.config import environment
from frostline.errors import NodeUnreachable, SettingError

__all__ = ("address_of_ray", "join", "joined")

_LOOPBACK = ("127.", "localhost")
# Without it Ray takes 127.0.0.1 for the machine's address in its network, where a Ray started here does not listen.
_STAY_LOCAL = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def address_of_ray(address: str | None = None) -> str | None:
    """The address of the Ray to join; None where whichever runs is meant.

    Args:
        address: as it was asked for; None or ``auto`` take ``RAY_ADDRESS``, and then the Ray that was started here.
    """
    if address not in (None, "auto"):
        return address
    named = environment("RAY_").get("RAY_ADDRESS")
    return named if named not in (None, "auto") else local.running()


def join(address: str | None = None) -> Any:
    """Join Ray and give its package; nothing where this process has joined already.

    Args:
        address: as ``address_of_ray`` takes it.

    Raises:
        SettingError: Ray is not installed.
        NodeUnreachable: No Ray answers.
    """
    if find_spec("ray") is None:
        raise SettingError("nodes under Ray need the package ray: pip install 'frostline[ray]'")
    found = address_of_ray(address)
    # Both are read when the package is imported.
    os.environ.update({"RAY_USAGE_STATS_ENABLED": "0", **(_STAY_LOCAL if _is_local(found) else {})})
    import ray

    if not ray.is_initialized():
        try:
            ray.init(found or "auto", log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise NodeUnreachable(
                f"no Ray answers at {found or 'any address of this machine'}: start it (ray start --head, or frostline "
                f"cluster up on one machine), or correct --address or RAY_ADDRESS ({error})"
            ) from error
    return ray


@contextmanager
def joined() -> Iterator[Any]:
    """Join Ray as ``join`` does, and give its package; a process that had not joined before leaves it afterwards."""
    before = sys.modules.get("ray")
    had_joined = before is not None and before.is_initialized()
    ray = join()
    try:
        yield ray
    finally:
        if not had_joined:
            ray.shutdown()


def _is_local(address: str | None) -> bool:
    return address is not None and address.startswith(_LOOPBACK)
