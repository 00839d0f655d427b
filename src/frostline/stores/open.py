"""Opens a store of objects by its URL: a folder or a file, memory, a bucket, a web server or a table of Cassandra."""

from pathlib import Path

from frostline.stores import cloud as driver
from frostline.stores.cloud import cloud_store
from frostline.stores.cql import store as cql
from frostline.stores.local import FileOrFolder, FolderStore, Objects, SingleFile
from frostline.stores.protocols import NO_LIMITS, Buffer, Entry, Listable, ObjectStore, Readable, StoreLimits, Writable
from frostline.stores.urls import Root, is_within, names_file, normalise_url, object_url, parse_cql, parse_url, root_url

__all__ = (
    "Buffer",
    "Entry",
    "Listable",
    "ObjectStore",
    "Readable",
    "Writable",
    "is_within",
    "normalise_url",
    "object_url",
    "open_store",
    "survives_fork",
)


def open_store(url: str, limits: StoreLimits = NO_LIMITS) -> ObjectStore:
    """The store at a URL. Nothing is connected or looked at until it is used, but for whether a name is a folder's.

    Where the name ends as that of a table or a shard (``FILE_SUFFIXES``), a file of that name is a store of one object.

    Args:
        url: ``file:///folder`` or a plain path; ``memory://name``, shared by all of a process that use the name;
            ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``, whose servers and credentials
            come from the usual ``AWS_*``, ``GOOGLE_*`` and ``AZURE_*`` variables, and options such as
            ``?endpoint=https://store:9000`` (``stores.urls``); ``https://host/path``, which is read alone;
            ``cql://user@host/keyspace/table``, whose password comes from ``FROSTLINE_CQL_PASSWORD``.
        limits: limits of the store.

    Raises:
        SettingError: the text is no URL that Frostline reads.
    """
    root = parse_url(url)
    if root.scheme == "cql":
        return cql.CqlStore(parse_cql(url.partition("://")[2]), deadline_s=limits.deadline_s)
    if names_file(root.path):
        return _file_or_folder(root, limits)
    return FolderStore(root.path, limits.links) if root.scheme == "file" else _objects(root, limits)


def _file_or_folder(root: Root, limits: StoreLimits) -> ObjectStore:
    """What lies at a name such as ``x.parquet``: a file, or a folder of files as Spark writes one."""
    if root.scheme == "file":
        is_folder = Path(root.path).is_dir()
        return FolderStore(root.path, limits.links) if is_folder else SingleFile(root.path, limits.links)
    folder, _, name = root.path.rpartition("/")
    return FileOrFolder(name, outside=_objects(root._replace(path=folder), limits), inside=_objects(root, limits))


def _objects(root: Root, limits: StoreLimits) -> Objects:
    url = root_url(root)
    if root.scheme == "memory":
        return driver.memory_store(url, root.place, root.path)
    return cloud_store(url, root, deadline_s=limits.deadline_s)


def survives_fork(url: str) -> bool:
    """Whether a process that is forked from this one now could read what lies at a URL.

    Drivers of object stores and of Cassandra have threads, which it would lack; folders and web servers need none.

    Raises:
        SettingError: the text is no URL that Frostline reads.
    """
    match parse_url(url).scheme:
        case "file" | "http" | "https":
            return True
        case "cql":
            return not cql.DRIVER.is_used
        case _:
            return not driver.DRIVER.is_used
