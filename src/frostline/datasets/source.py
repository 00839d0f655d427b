"""Where a manifest comes from: its own store, the Hugging Face hub, or a node, whose answer is checked first.

Reads a manifest that a node has sent as untrusted: nothing of it is used before all of it was checked.
"""

import hashlib
import importlib
import json
import os
import re
import secrets
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from frostline.core import CELLS, OBJECTS, UNPACKED
from frostline.core.config import LoaderSettings
from frostline.core.errors import (
    DataChanged,
    DataError,
    DataNotFound,
    FrostlineError,
    NodeUnreachable,
    OutOfSpace,
    Overloaded,
    Refused,
    SettingError,
    StoreError,
    Unavailable,
)
from frostline.core.events import NodeBack, NodeLost, Observer, PhaseStarted
from frostline.core.files import make_private_folder, open_private, read_checked, warn_not_kept
from frostline.core.hints import suggest_names
from frostline.core.units import in_bytes
from frostline.datasets.formats.base import COLUMNS, TARGET_COLUMNS
from frostline.datasets.formats.left_out import read_left_out
from frostline.datasets.manifest import IN_MEMORY_BYTES, Manifest, load_manifest, manifest_of
from frostline.datasets.manifest_store import NamedSplits, StoredManifest, read_manifest
from frostline.datasets.mapped import ABOUT, copy_of, open_copy, opened_copy
from frostline.ordering import Chosen
from frostline.preprocess import Applied
from frostline.stores.local import error_of_system
from frostline.stores.open import open_store
from frostline.stores.urls import normalise_url, parse_url
from frostline.wire.connection import Connections, Exchange, Message, address_of, time_limit
from frostline.wire.listings import MAX_KNOWN, ListingRequest, ManifestHead, event_from_line, failure_from_json
from frostline.wire.messages import error_from_answer
from frostline.wire.node_lists import NodeList, listed_nodes

__all__ = (
    "ManifestSource",
    "NodeListing",
    "canonical_url",
    "check_manifest_file",
    "is_loopback",
    "listing_nodes",
    "missing_parts",
    "open_manifest",
    "splits_of",
)


# Ids are hashes, which nothing compresses: eight bytes a sample, and some for its address.
_MIN_BYTES_A_SAMPLE = 4
# What a few bytes may say over and over again, in memory and in a file that is mapped. A million names that differ in
# their number alone take eight bytes each as they are kept.
_MAX_EXPANSION = 256
_EXPANSION_BYTES = 64 << 20
_MAX_TEXT_BYTES, _MAX_MAPPED_TEXT_BYTES = 2 << 30, 64 << 30
_MAX_COLUMNS = 4096
_MAX_CLASSES = 1 << 24
_AT_ONCE = 1 << 16
# Of more, ids are not held against each other: a request in which one stands twice is refused by its node.
_MAX_COMPARED = 1 << 24
_SAID = ("digest", "classes", "reading", "splits", "left_out", "is_turned", "named")


def check_manifest_file(path: Path, head: ManifestHead) -> None:
    """Do nothing if the file holds what its node says of it, and nothing that harms whoever uses it.

    Memory is that of some ten thousand rows, of one page of the file, and of the ids.

    Raises:
        Refused: the manifest does not match; the message names the difference.
    """
    try:
        # Texts come as they are kept, by their numbers: so it is known what they will take before they take it.
        plain = pq.read_schema(path)
        texts = [field.name for field in plain if _is_text(field.type)]
        with pq.ParquetFile(path, page_checksum_verification=True, read_dictionary=texts) as file:
            _check_schema(plain, file.metadata, head)
            about = _about_in(plain, head)
            _check_rows(file, len(about["classes"]), head)
    except (pa.ArrowException, OSError, MemoryError, ValueError) as error:
        raise Refused(f"the node sent a manifest that cannot be read: {str(error)[:200]!a}") from error


def open_manifest(path: Path, head: ManifestHead, cache: Path, url: str) -> StoredManifest | None:
    """A manifest that was checked; None where it is not there any more.

    Args:
        path: location of the manifest's file.
        head: description of the manifest by its node.
        cache: folder for the mapped copy of a large one.
        url: address of the data set's root.
    """
    if head.nbytes <= IN_MEMORY_BYTES:
        try:
            found = read_manifest(path.read_bytes())
        except OSError:
            return None
    else:
        copy = copy_of(cache, url, head.sha256)  # of the file's own digest: no other file has a say in it
        found = open_copy(copy)
        if found is None:
            try:
                with pq.ParquetFile(path, page_checksum_verification=True) as file:
                    found = opened_copy(copy, file)
            except (pa.ArrowException, OSError):
                return None
    return None if found is None else StoredManifest(*found, path.as_uri())


def splits_of(head: ManifestHead, data: bytes | memoryview) -> dict[str, Chosen]:
    """The splits that came behind a manifest, as many bytes as its head says."""
    bits = np.frombuffer(data, np.uint8).reshape(len(head.splits), head.bitmap_bytes).copy()
    if head.samples % 8:
        bits[:, -1] &= (1 << head.samples % 8) - 1
    return {name: Chosen(row, head.samples) for name, row in zip(head.splits, bits, strict=True)}


def _check_schema(schema: pa.Schema, about: pq.FileMetaData, head: ManifestHead) -> None:
    first = pa.schema([schema.field(place) for place in range(min(len(COLUMNS), len(schema)))])
    if not first.equals(COLUMNS) or len(schema) > _MAX_COLUMNS or len(set(schema.names)) < len(schema):
        raise Refused("the node sent a manifest whose columns are not those of samples")
    strange = [field.name for field in schema if not _is_plain(field.type)]
    targets = [schema.field(field.name).type == field.type for field in TARGET_COLUMNS if field.name in schema.names]
    if strange or not all(targets):
        raise Refused("the node sent a manifest with a column of a type that no manifest has")
    if about.num_rows != head.samples or about.num_rows * _MIN_BYTES_A_SAMPLE > head.nbytes:
        raise Refused(f"the node sent a manifest whose {about.num_rows} samples do not fit what it announced")


def _about_in(schema: pa.Schema, head: ManifestHead) -> Mapping[str, Any]:
    try:
        about = read_checked((schema.metadata or {}).get(ABOUT, b"{}"))
        read_left_out(about["left_out"])
    except (KeyError, RecursionError, TypeError, ValueError):
        about = {}
    is_right = (
        about.get("digest") == head.digest
        # What lies elsewhere is listed by no node.
        and about.get("reading") in (OBJECTS, CELLS, UNPACKED)
        and all(_are_texts(about.get(name)) for name in ("classes", "splits"))
        and isinstance(about.get("is_turned"), bool)
        and isinstance(about.get("named"), dict)
        and all(map(_are_texts, about["named"].values()))
    )
    if not is_right:
        raise Refused("the node sent a manifest whose description is damaged")
    return {name: about[name] for name in _SAID}


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and len(value) <= _MAX_CLASSES and all(isinstance(name, str) for name in value)


def _check_rows(file: pq.ParquetFile, classes: int, head: ManifestHead) -> None:
    maximum = _MAX_TEXT_BYTES if head.nbytes <= IN_MEMORY_BYTES else _MAX_MAPPED_TEXT_BYTES
    left = min(_MAX_EXPANSION * head.nbytes + _EXPANSION_BYTES, maximum)
    ids: list[npt.NDArray[np.int64]] = []
    rows = 0
    # One thread: Arrow's pool would not survive a fork of the process.
    for batch in file.iter_batches(_AT_ONCE, use_threads=False):
        rows += len(batch)
        left -= sum(_text_bytes(column) for column in batch.columns if pa.types.is_dictionary(column.type))
        if left < 0:
            raise Refused("the node sent a manifest whose texts are far longer than its bytes can say")
        _check_numbers(batch, classes)
        if head.samples <= _MAX_COMPARED:
            ids.append(batch["id"].to_numpy())
    if rows != head.samples:
        raise Refused(f"the node sent {rows} samples and says that it sent {head.samples}")
    if ids and len(np.unique(np.concatenate(ids))) < rows:
        raise Refused("the node sent a manifest in which an id stands twice")


def _text_bytes(column: pa.DictionaryArray) -> int:
    """What texts take when each is written out."""
    lengths = pc.binary_length(column.dictionary)
    return int(pc.sum(lengths.take(column.indices).cast(pa.int64())).as_py() or 0)


def _check_numbers(batch: pa.RecordBatch, classes: int) -> None:
    has_targets = set(TARGET_COLUMNS.names) <= set(batch.schema.names)
    for column_field in (*COLUMNS, *(TARGET_COLUMNS if has_targets else ())):
        column = batch[column_field.name]
        if column.null_count and column_field.name != "label":
            raise Refused(f"the node sent a manifest with samples that have no {column_field.name}")
        if column_field.type == pa.int64() and len(column) > column.null_count:
            found = pc.min_max(column).as_py()
            maximum = classes - 1 if column_field.name == "label" else np.iinfo(np.int64).max
            if not 0 <= found["min"] <= found["max"] <= maximum:
                raise Refused(f"the node sent a manifest with a {column_field.name} that no sample can have")


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _is_plain(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
        or pa.types.is_null(kind)
        or pa.types.is_decimal(kind)
        or pa.types.is_temporal(kind)
        or _is_text(kind)
    )


_OK = 200
_MAX_BYTES = 8 << 30
_MAX_SPLIT_BYTES = 1 << 30
_PIECE = 1 << 20
# Manifests of one data set that are kept: a node is told that it need not send these again.
_KEPT = 4
# Ranks of one job ask one after the other, and the first may list for minutes.
_BUSY_S = 1800.0
_NO_SERVICE = "unix:"


def _node_urls(near: str | Sequence[str]) -> tuple[str, ...]:
    """Addresses of nodes as ``Dataset(near=)`` takes them.

    Raises:
        SettingError: an address is not a URL, or belongs to an I/O service.
    """
    urls = (near,) if isinstance(near, str) else tuple(near)
    for url in urls:
        if not isinstance(url, str):
            raise SettingError(f"near= takes addresses of nodes, such as http://host:7070, not {type(url).__name__}")
        if url.startswith(_NO_SERVICE):
            raise SettingError(
                f"{url} is an I/O service, which lists nothing: give Dataset(near=) the address of a node, or none"
            )
        if NodeList.is_one(url):
            NodeList(url=url)  # refuses one that makes no sense
        else:
            address_of(url)
    return urls


def listing_nodes(near: Sequence[str], data: str) -> tuple[str, ...]:
    """Addresses of a job's nodes, which list its data; none where it is listed here.

    That is so for an I/O service, which lists nothing, and for a folder of this machine beside nodes of this machine.

    Args:
        near: addresses of nodes and of lists of nodes.
        data: path or URL of the data.

    Raises:
        NodeUnreachable: a list cannot be read.
        SettingError: an address is none.
    """
    nodes = listed_nodes(tuple(near))
    if any(not url.startswith(("http:", "https:")) for url in nodes):
        return ()
    return () if all(map(is_loopback, nodes)) and _is_folder_here(data) else tuple(near)


def is_loopback(url: str) -> bool:
    """Whether a node's address is the loopback's."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def _is_folder_here(data: str) -> bool:
    root = parse_url(data)
    return root.scheme == "file" and Path(root.path).exists()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeListing:
    """A data set that a node lists for whoever has no credentials for its store.

    Attributes:
        nodes: the addresses; the first that serves the data answers.
        data: URL of the data set's root.
        format: see ``Dataset``.
        relist: False reuses the last manifest, see ``Dataset``.
        on_change: policy for changed objects, see ``Dataset``.
        cache: folder in which manifests are kept.
        token: secret with which to ask the node; None takes ``FROSTLINE_TOKEN``.
        sleep: function that waits so many seconds.
    """

    nodes: tuple[str, ...]
    data: str
    format: str | None
    relist: bool
    on_change: str
    cache: Path
    token: str | None = field(default=None, repr=False)
    sleep: Callable[[float], None] = time.sleep

    def manifest(self, on_event: Observer) -> Manifest:
        """The manifest, from the first node that answers; those that hang or are not ready are asked last.

        Args:
            on_event: function that is called with the node's progress, and with nodes that were left for others.

        Raises:
            DataError: The node found the data to be wrong; the sentence says what.
            Refused: no node serves the data or lists it, or what one sent makes no sense.
            Unavailable: no node answers.
            StoreError: the store failed at the node.
            OutOfSpace: the disk is full.
        """
        failures, lost = list[FrostlineError](), set[str]()
        urls = _ready_first(listed_nodes(self.nodes))
        # One that falls silent is waited for where no other lists; all that do so together have so long.
        left_s = _ALL_SILENT_S
        for url, silence_s in [*((url, _QUIET_S) for url in urls[:-1]), *((url, _SILENCE_S) for url in reversed(urls))]:
            began = time.monotonic()
            try:
                found = self._from(url, on_event, min(silence_s, round(left_s, 1)))
            except DataChanged:  # by what this node listed before, of which others may know nothing
                raise
            except _ITS_OWN as error:
                failures.append(error)
                if [*map(type, failures)].count(DataError) > 1:  # two have found the data to be wrong
                    raise
                left_s -= (time.monotonic() - began) if isinstance(error, NodeUnreachable) else 0.0
                if len(urls) > 1 and url not in lost:
                    lost.add(url)
                    on_event(NodeLost(url=url, reason=str(error)))
            else:
                if url in lost:
                    on_event(NodeBack(url=url))
                return found
            if left_s < 0.1:
                break
        # Of several, one that answered says more than one that is away.
        answered = next((error for error in failures if not isinstance(error, NodeUnreachable)), None)
        if answered is None and len(urls) > 1:
            raise NodeUnreachable(f"none of {len(urls)} nodes lists the data: {failures[-1]}")
        raise answered or failures[0]

    def _from(self, url: str, on_event: Observer, silence_s: float) -> Manifest:
        waited_s = 0.0
        while True:
            try:
                return self._asked(url, on_event, silence_s)
            except Overloaded as error:
                if waited_s >= _BUSY_S:
                    raise
                on_event(PhaseStarted(name="waiting for the node to list the data"))
                self.sleep(error.retry_after_s)
                waited_s += error.retry_after_s

    def _asked(self, url: str, on_event: Observer, silence_s: float) -> Manifest:
        settings = LoaderSettings()
        token = self.token or settings.token
        exchange = Exchange(Connections(url, deadline_s=min(settings.deadline_s, silence_s), max_idle=0), url)
        known = self._known()
        request = ListingRequest(
            data=self.data, format=self.format, relist=self.relist, on_change=self.on_change, known=tuple(known)
        )
        message = Message(
            method="POST",
            path="/v1/listings",
            body=json.dumps(request.to_json(), separators=(",", ":")).encode(),
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
        )
        try:
            with time_limit(silence_s, exchange.break_off, url):
                _begin(exchange, message, url)
            return self._received(exchange, _head(exchange, known, on_event), url, silence_s)
        except BaseException:
            exchange.break_off()
            raise
        finally:
            exchange.end()

    def _received(self, exchange: Exchange, head: ManifestHead, url: str, silence_s: float) -> Manifest:
        of_splits = len(head.splits) * head.bitmap_bytes
        if head.nbytes > _MAX_BYTES or of_splits > _MAX_SPLIT_BYTES:
            raise Refused(
                f"the node has a manifest of {in_bytes(head.nbytes)}, and up to {in_bytes(_MAX_BYTES)} are read"
            )
        limit_s = silence_s + (head.nbytes + of_splits) / _MIN_BYTES_PER_S
        with ExitStack() as stack, time_limit(limit_s, exchange.break_off, url):
            return self._opened(exchange, head, self._place(head, stack))

    def _place(self, head: ManifestHead, stack: ExitStack) -> Path:
        """The folder for a manifest: in the cache, or a temporary one where that has no space for it."""
        if head.is_known:
            return self._folder
        why: Exception = OutOfSpace("the disk is full")
        try:
            make_private_folder(self._folder)
            if shutil.disk_usage(self._folder).free >= head.nbytes:
                return self._folder
        except OSError as error:
            why = error
        warn_not_kept(self._folder, why)
        return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="frostline-")))

    def _opened(self, exchange: Exchange, head: ManifestHead, folder: Path) -> Manifest:
        path = folder / f"{head.sha256}.parquet"
        if not head.is_known:
            with self._new_file(path) as part:
                _receive(exchange, head, part)
                check_manifest_file(part, head)
        splits = bytes(_exactly(exchange, len(head.splits) * head.bitmap_bytes))
        if hashlib.sha256(splits).hexdigest() != head.splits_sha256:
            raise Refused("the splits that the node sent are not those that it announced")
        kept = open_manifest(path, head, self.cache, self.data)
        if kept is None or len(kept.columns) != head.samples or kept.about.get("digest") != head.digest:
            path.unlink(missing_ok=True)
            raise Unavailable(f"the manifest that was kept in {path} is damaged or gone: it is fetched again next time")
        if folder == self._folder:
            os.utime(path)
            self._tidy()
        else:
            kept = kept._replace(place="")
        return manifest_of(kept, found=head.found, applied=_applied(head), saved=splits_of(head, splits))

    @property
    def _folder(self) -> Path:
        root = hashlib.sha256(self.data.encode(errors="surrogateescape")).hexdigest()[:16]
        return self.cache / "from-nodes" / root

    def _known(self) -> list[str]:
        """SHA-256 of the files that are here and whole, the newest first."""
        return [path.stem for path in self._kept()[: min(_KEPT, MAX_KNOWN)] if _is_whole(path)]

    def _kept(self) -> list[Path]:
        found: list[tuple[float, Path]] = []
        for path in self._folder.glob("*.parquet"):
            with suppress(OSError):  # another process tidied
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found, reverse=True)]

    def _tidy(self) -> None:
        for path in self._kept()[_KEPT:]:
            path.unlink(missing_ok=True)

    @contextmanager
    def _new_file(self, path: Path) -> Iterator[Path]:
        """A file that appears under its name once it is whole."""
        part = path.parent / f".partial-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            make_private_folder(path.parent)
            open_private(part, "xb").close()
            yield part
            part.replace(path)
        except OSError as error:
            raise error_of_system(error, str(path)) from error
        finally:
            part.unlink(missing_ok=True)


# What may be wrong with one node alone: its roots, its mount, its credentials, its store, the way to it, its disk.
_ITS_OWN = (DataError, Refused, StoreError, Unavailable)
# Seconds of a node that is asked whether it is ready; and of silence before others are asked to list: three of the
# beats by which one that lists says that it is there. Nodes of the release before have a beat in 10 s.
_READY_S, _QUIET_S, _PROBES = 1.5, 3.0, 16
_SILENCE_S, _ALL_SILENT_S = 30.0, 60.0
_MIN_BYTES_PER_S = 4 << 10  # at which nodes want their own clients to take an answer


def _folder_meant(url: str) -> str:
    """End a sentence about a folder of this machine that is not there; a node says nothing of what it has beside it."""
    root = parse_url(url)
    if root.scheme != "file" or Path(root.path).exists():
        return ""
    folder = Path(root.path)
    try:
        return suggest_names(folder.name, sorted(beside.name for beside in folder.parent.iterdir() if beside.is_dir()))
    except OSError:  # that of its parent is not there either, or cannot be read
        return ""


def _ready_first(urls: Sequence[str]) -> Sequence[str]:
    """Addresses of nodes, those in front that say at once that they are ready; all are asked at the same time."""
    if len(urls) < 2:
        return urls
    with ThreadPoolExecutor(_PROBES, "frostline-probe") as probes:
        ready = dict(zip(urls, probes.map(_is_ready, urls), strict=True))
    return sorted(urls, key=lambda url: not ready[url])


def _is_ready(url: str) -> bool:
    exchange = Exchange(Connections(url, deadline_s=_READY_S, max_idle=0), url)
    try:
        with time_limit(_READY_S, exchange.break_off, url):
            return exchange.send(Message(method="GET", path="/v1/ready")) == _OK
    except Unavailable:
        return False
    finally:
        exchange.break_off()
        exchange.end()


def _refusal(status: int, body: bytes, url: str) -> FrostlineError:
    if status == 404 and b'"error":"Refused"' in body:
        return Refused(
            f"the node at {url} is of a version that does not list data: update it, or list the data with credentials "
            "of your own (--list-locally; in Python Dataset without near=)"
        )
    return error_from_answer(status, body)


def _begin(exchange: Exchange, message: Message, url: str) -> None:
    status = exchange.send(message)
    if status != _OK:
        raise _refusal(status, exchange.read_all(), url)


def _head(exchange: Exchange, known: Sequence[str], on_event: Observer) -> ManifestHead:
    """What the node says of the manifest, once it has listed the data."""
    while line := exchange.read_line():
        if not line.strip():  # it only says that the node is there
            continue
        value = _value(line)
        if value.get("event") == "listed":
            head = ManifestHead.from_json(value)
            if head.is_known and head.sha256 not in known:
                raise Refused("the node leaves out a manifest that it was not told of")
            return head
        if value.get("event") == "failed":
            raise failure_from_json(value)
        event = event_from_line(value)
        if event is not None:
            on_event(event)
    raise NodeUnreachable("the node broke off before it had listed the data")


def _value(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused("the node sent a line that is no event of the listing")
    return value


def _receive(exchange: Exchange, head: ManifestHead, path: Path) -> None:
    digest, left = hashlib.sha256(), head.nbytes
    with open_private(path, "ab") as file:
        while left:
            piece = _exactly(exchange, min(_PIECE, left))
            digest.update(piece)
            file.write(piece)
            left -= len(piece)
    if digest.hexdigest() != head.sha256:
        raise Refused("the manifest that the node sent is not the one that it announced: its SHA-256 is another")


def _exactly(exchange: Exchange, nbytes: int) -> memoryview:
    data = exchange.read(nbytes)
    if len(data) < nbytes:
        raise NodeUnreachable("the node broke off in the middle of a manifest")
    return data


def _is_whole(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == path.stem
    except OSError:
        return False


def _applied(head: ManifestHead) -> Applied | None:
    if head.applied is None:
        return None
    try:
        return Applied.from_json(head.applied)
    except (AttributeError, DataError, TypeError, ValueError) as error:
        raise Refused("the node sent a description of a ready format that is damaged") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSource:
    """How a data set is listed, as values.

    Attributes:
        url: the canonical URL of its root.
        cache: folder for what does not lie beside the data.
        manifest_location: see ``Dataset``.
        format: name of the format, see ``Dataset``.
        relist: False reuses the last manifest, see ``Dataset``.
        on_change: policy for changed objects, see ``Dataset``.
        near: addresses of the nodes that list it; none where it is listed here.
        token: see ``Dataset``.
    """

    url: str
    cache: Path
    manifest_location: str
    format: str | None
    relist: bool
    on_change: str
    near: tuple[str, ...]
    token: str | None = field(repr=False)

    def __post_init__(self) -> None:
        if self.near and self._is_in_data:
            raise SettingError(
                "a node keeps manifests where it can: manifest_location= is for whoever lists a folder themselves"
            )

    @property
    def _is_in_data(self) -> bool:
        return self.manifest_location == "data"

    @staticmethod
    def nodes(near: str | Sequence[str] | None) -> tuple[str, ...]:
        """Addresses of nodes, as ``near=`` takes them; see ``_node_urls`` for what may be raised."""
        return () if near is None else _node_urls(near)

    def manifest(self, on_event: Observer) -> Manifest:
        """List the data here, or have a node list it; see ``load_manifest`` and ``NodeListing``."""
        if self.near:
            asked = {name: getattr(self, name) for name in ("format", "relist", "on_change", "cache", "token")}
            return NodeListing(nodes=self.near, data=self.url, **asked).manifest(on_event)
        try:
            return load_manifest(
                open_store(self.url),
                cache=self.cache,
                beside=self._is_in_data,
                format=self.format,
                relist=self.relist,
                refuses_changes=self.on_change == "refuse",
                looks_elsewhere=self.on_change != "skip",
                on_event=on_event,
            )
        except DataNotFound as error:
            raise DataNotFound(f"{error}{_folder_meant(self.url)}") from error

    def named_splits(self, manifest: Manifest) -> NamedSplits:
        """The splits that were saved of a manifest of this data."""
        store = None if self.near else open_store(self.url)
        size = len(manifest.samples)
        digest = manifest.listing or manifest.digest
        return NamedSplits(store, self.cache, digest, size, beside=self._is_in_data, given=manifest.saved)

    def require_store(self) -> None:
        """Do nothing where the data's own store is asked.

        Raises:
            SettingError: a node listed it.
        """
        if self.near:
            raise SettingError(
                f"{self.url} was listed by the node at {', '.join(self.near)} and has no store here: what reads its "
                "samples is given that node (near=), or a Dataset without near= and credentials for the store"
            )


_SCHEME = "hf:"
_SHARD_PATTERN = re.compile(r"\{\d+\.\.\d+\}", re.ASCII)  # as WebDataset has it
_ADDRESS = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_WAY = "write hf:OWNER/DATASET, or hf:OWNER/DATASET@REVISION"
_FILES = "*.parquet"
_PART = re.compile(r"(?P<start>.*-)(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>.*)", re.DOTALL)


def canonical_url(url: str, near: str | Sequence[str] | None) -> str:
    """The canonical URL of a data set's root, also of one that the hub has.

    Raises:
        SettingError: the URL is none that Frostline reads, or a node is to list what the hub has.
        DataNotFound: see ``_folder_of_hub``.
    """
    if pattern := _SHARD_PATTERN.search(url):
        folder = url[: pattern.start()].rpartition("/")[0] or "."
        give = "a file of their URLs" if url.startswith("http") else f"their folder, {folder}, and all of them are read"
        raise SettingError(f"{url} names shards by a pattern: give {give}")
    if not url.startswith(_SCHEME):
        return normalise_url(url if near else str(Path(url).expanduser()) if url.startswith("~") else url)
    if near:
        raise SettingError(f"{url} is read from the cache of this machine, which no node lists: leave near= out")
    return _folder_of_hub(url)


def _folder_of_hub(url: str) -> str:
    """The canonical URL of the folder in which a data set's Parquet files lie in the cache of the hub's client.

    What the cache has is taken without asking the network, as long as no part of a split is missing; else the files
    are fetched.

    Args:
        url: ``hf:OWNER/DATASET``, or ``hf:OWNER/DATASET@REVISION``.

    Raises:
        SettingError: the text is no such address, or the package ``huggingface_hub`` is missing.
        DataNotFound: the data is not in the cache and cannot be fetched, or has no Parquet files.
    """
    found = _ADDRESS.fullmatch(url.removeprefix(_SCHEME).removeprefix("//"))
    if found is None:
        raise SettingError(f"{url[:200]!a} is no data set of the hub: {_WAY}")
    name, revision = found.groups()
    hub = _client(url)
    kept = _kept(hub, name, revision)
    folder = kept if kept is not None and not _why_unfit(kept) else _fetched(hub, name, revision, kept)
    if why := _why_unfit(folder):
        raise DataNotFound(f"{url} in {folder} {why}: bring its Parquet files and give their folder")
    return normalise_url(str(folder))


def missing_parts(names: Iterable[str]) -> list[str]:
    """Names that files like ``train-00000-of-00002.parquet`` say are there, and are not among them."""
    numbers: defaultdict[tuple[str, str, str], set[str]] = defaultdict(set)
    for name in names:
        if part := _PART.fullmatch(name):
            numbers[part["start"], part["count"], _without_digest(part["end"])].add(part["number"])
    return [
        f"{start}{number:05}-of-{count}{end}"
        for (start, count, end), there in sorted(numbers.items())
        for number in range(int(count))
        if f"{number:05}" not in there
    ]


def _without_digest(end: str) -> str:
    # The hub's older files have one of their own before the suffix.
    return re.sub(r"^-[0-9a-f]{16}", "", end)


def _client(url: str) -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise SettingError(
            f"{url} needs the package huggingface_hub, which cannot be imported ({error}): install it, or bring the "
            "Parquet files and give their folder"
        ) from error


def _kept(hub: Any, name: str, revision: str | None) -> Path | None:
    try:
        return _snapshot(hub, name, revision, is_offline=True)
    except hub.errors.LocalEntryNotFoundError:
        return None
    except hub.errors.HFValidationError as error:
        raise SettingError(f"{name} is no name that the hub gives to data: {_WAY}") from error


def _fetched(hub: Any, name: str, revision: str | None, kept: Path | None) -> Path:
    try:
        return _snapshot(hub, name, revision, is_offline=False)
    except (OSError, RuntimeError) as error:
        has = "not in the hub's cache on this machine" if kept is None else f"in {kept}, which {_why_unfit(kept)}"
        why = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise DataNotFound(
            f"{name} is {has}, and cannot be fetched ({why}): bring its Parquet files and give their folder, or fetch "
            f"them where there is a network (hf download --repo-type dataset {name})"
        ) from error


def _snapshot(hub: Any, name: str, revision: str | None, *, is_offline: bool) -> Path:
    return Path(
        hub.snapshot_download(
            name, repo_type="dataset", revision=revision, allow_patterns=[_FILES], local_files_only=is_offline
        )
    )


def _why_unfit(folder: Path) -> str:
    """What the data in a folder lacks; empty where it lacks nothing."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob(_FILES) if path.is_file()]
    missing = missing_parts(names)
    if missing:
        return f"lacks {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "")
    return "" if names else "has no Parquet files"
