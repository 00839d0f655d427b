"""Data sets and parts of jobs as tasks of Ray: ``read`` gives a data set of Ray Data.

It needs the extra ``frostline[ray]``, and is imported by whoever asks for it.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from frostline.ray.datasource import read

__all__ = ("read",)


def __getattr__(name: str) -> Any:
    if name != "read":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from frostline.ray.datasource import read

    return read
