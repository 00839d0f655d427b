"""Decides whether two versions are of one object's bytes: services quote them in one answer, and not in another."""

__all__ = ("is_other_version", "plain_etag", "version_of_time")

_TIME = "modified-"


def plain_etag(etag: str) -> str:
    """An etag without its quotation marks, and without what says that it is a weak one."""
    return etag.removeprefix("W/").strip('"')


def version_of_time(changed_s: float) -> str:
    """The version of an object that has no etag: when it was changed last, to the second; empty where nobody knows."""
    return f"{_TIME}{int(changed_s)}" if changed_s >= 1 else ""


def is_other_version(listed: str, found: str) -> bool:
    """Whether an object has changed since it was listed; not where one of the two is unknown, or only one is a time."""
    if not listed or not found or listed.startswith(_TIME) != found.startswith(_TIME):
        return False
    return plain_etag(listed) != plain_etag(found)
