"""Opens a store of objects by its URL: a folder, memory, a bucket, a web server or a table of Cassandra."""

from frostline.stores.clouds import cloud_store
from frostline.stores.cql import CqlStore
from frostline.stores.cql_urls import parse_cql
from frostline.stores.driver import memory_store
from frostline.stores.faces import Buffer, Entry, Listable, ObjectStore, Readable, Writable
from frostline.stores.folder import FolderStore
from frostline.stores.urls import is_within, normalise_url, object_url, parse_url

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
)


def open_store(url: str) -> ObjectStore:
    """The store at a URL. Nothing is connected or looked at until it is used.

    Args:
        url: ``file:///folder`` or a plain path; ``memory://name``, shared by all of a process that use the name;
            ``s3://bucket/prefix``, ``gs://bucket/prefix`` or ``az://container/prefix``, whose servers and credentials
            come from the usual ``AWS_*``, ``GOOGLE_*`` and ``AZURE_*`` variables, and options such as
            ``?endpoint=https://store:9000`` (``stores.options``); ``https://host/path``, which is read alone;
            ``cql://user@host/keyspace/table``, whose password comes from ``FROSTLINE_CQL_PASSWORD``.

    Raises:
        SettingError: the text is no URL that Frostline reads.
    """
    root = parse_url(url)
    match root.scheme:
        case "cql":
            return CqlStore(parse_cql(url.partition("://")[2]))
        case "file":
            return FolderStore(root.path)
        case "memory":
            return memory_store(normalise_url(url), root.place, root.path)
        case _:
            return cloud_store(normalise_url(url), root)
