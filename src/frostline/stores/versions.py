"""Decides whether two etags name one version of an object: some services quote them in one answer, not in another."""

__all__ = ("is_other_version", "plain_etag")


def plain_etag(etag: str) -> str:
    """An etag without its quotation marks, and without what says that it is a weak one."""
    return etag.removeprefix("W/").strip('"')


def is_other_version(listed: str, found: str) -> bool:
    """Whether an object has changed since it was listed; not where one of the two is unknown."""
    return bool(listed and found) and plain_etag(listed) != plain_etag(found)
