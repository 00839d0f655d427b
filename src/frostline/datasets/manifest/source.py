"""Where a data set's manifest and saved splits come from: its own store, or a node that lists it."""

import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frostline.config import LoaderSettings
from frostline.core.units import in_bytes
from frostline.datasets.manifest.manifest import Manifest, load_manifest, manifest_of
from frostline.datasets.manifest.named_splits import NamedSplits
from frostline.datasets.manifest.untrusted import checked, opened, splits_of
from frostline.errors import (
    DataError,
    FrostlineError,
    NodeUnreachable,
    Overloaded,
    Refused,
    SettingError,
    Unavailable,
)
from frostline.events import Observer, PhaseStarted
from frostline.preprocess import Applied
from frostline.private import make_private_folder, open_private
from frostline.stores.objects.local import error_of_system
from frostline.stores.open import open_store
from frostline.wire.http.exchange import Exchange, Message
from frostline.wire.http.node_lists import NodeList, listed_nodes
from frostline.wire.http.pool import Connections, address_of
from frostline.wire.listings import MAX_KNOWN, ListingRequest, ManifestHead, event_from_line, failure_from_json
from frostline.wire.refusals import error_from_answer

__all__ = ("ManifestSource", "NodeListing", "node_urls")

_OK = 200
_MAX_BYTES = 8 << 30
_MAX_SPLIT_BYTES = 1 << 30
_PIECE = 1 << 20
# Manifests of one data set that are kept: a node is told that it need not send these again.
_KEPT = 4
# Ranks of one job ask one after the other, and the first may list for minutes.
_BUSY_S = 1800.0
_NO_SERVICE = "unix:"


def node_urls(near: str | Sequence[str]) -> tuple[str, ...]:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeListing:
    """A data set that a node lists for whoever has no credentials for its store.

    Attributes:
        nodes: their addresses; the first that serves the data answers.
        data: URL of the data set's root.
        format: see ``Dataset``.
        relist: likewise.
        changed: likewise.
        cache: folder in which manifests are kept.
        token: secret with which to ask the node; None takes ``FROSTLINE_TOKEN``.
        sleep: waits so many seconds.
    """

    nodes: tuple[str, ...]
    data: str
    format: str | None
    relist: bool
    changed: str
    cache: Path
    token: str | None = field(default=None, repr=False)
    sleep: Callable[[float], None] = time.sleep

    def manifest(self, observe: Observer) -> Manifest:
        """The manifest, from the first node that answers.

        Args:
            observe: told how far the node is.

        Raises:
            DataError: what is wrong with the data, as the node found it.
            Refused: no node serves the data or lists it, or what one sent makes no sense.
            Unavailable: no node answers.
            StoreError: the store failed at the node.
            OutOfSpace: the disk is full.
        """
        failures: list[FrostlineError] = []
        for url in listed_nodes(self.nodes):
            try:
                return self._from(url, observe)
            except (Refused, Unavailable) as error:
                failures.append(error)
        # Of several, one that answered says more than one that is away.
        raise next((error for error in failures if not isinstance(error, NodeUnreachable)), failures[0])

    def _from(self, url: str, observe: Observer) -> Manifest:
        waited_s = 0.0
        while True:
            try:
                return self._asked(url, observe)
            except Overloaded as error:
                if waited_s >= _BUSY_S:
                    raise
                observe(PhaseStarted(name="waiting for the node to list the data"))
                self.sleep(error.retry_after_s)
                waited_s += error.retry_after_s

    def _asked(self, url: str, observe: Observer) -> Manifest:
        settings = LoaderSettings()
        token = self.token or settings.token
        connections = Connections(*address_of(url), deadline_s=settings.deadline_s, max_idle=0)
        exchange = Exchange(connections, url)
        known = self._known()
        request = ListingRequest(
            data=self.data, format=self.format, relist=self.relist, changed=self.changed, known=tuple(known)
        )
        message = Message(
            method="POST",
            path="/v1/listings",
            body=json.dumps(request.to_json(), separators=(",", ":")).encode(),
            headers={} if token is None else {"Authorization": f"Bearer {token}"},
        )
        try:
            _begin(exchange, message, url)
            return self._received(exchange, _head(exchange, known, observe))
        except BaseException:
            exchange.break_off()
            raise
        finally:
            exchange.end()

    def _received(self, exchange: Exchange, head: ManifestHead) -> Manifest:
        if head.nbytes > _MAX_BYTES or len(head.splits) * head.bitmap_bytes > _MAX_SPLIT_BYTES:
            raise Refused(
                f"the node has a manifest of {in_bytes(head.nbytes)}, and up to {in_bytes(_MAX_BYTES)} are read"
            )
        path = self._folder / f"{head.sha256}.parquet"
        if not head.is_known:
            with self._new_file(path) as part:
                _receive(exchange, head, part)
                checked(part, head)
        splits = bytes(_exactly(exchange, len(head.splits) * head.bitmap_bytes))
        if hashlib.sha256(splits).hexdigest() != head.splits_sha256:
            raise Refused("the splits that the node sent are not those that it announced")
        kept = opened(path, head, self.cache, self.data)
        if kept is None or len(kept.columns) != head.samples or kept.about.get("digest") != head.digest:
            path.unlink(missing_ok=True)
            raise Unavailable(f"the manifest that was kept in {path} is damaged or gone: it is fetched again next time")
        os.utime(path)
        self._tidy()
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


def _head(exchange: Exchange, known: Sequence[str], observe: Observer) -> ManifestHead:
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
            observe(event)
    raise NodeUnreachable("the node broke off before it had listed the data")


def _value(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused("the node tells of its listing what makes no sense")
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
        raise Refused("the node says of a ready format what makes no sense") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestSource:
    """How a data set is listed, as values.

    Attributes:
        url: canonical URL of its root.
        cache: folder for what does not lie beside the data.
        beside: see ``Dataset``.
        format: likewise.
        relist: likewise.
        changed: likewise.
        near: addresses of the nodes that list it; none where it is listed here.
        token: see ``Dataset``.
    """

    url: str
    cache: Path
    beside: bool
    format: str | None
    relist: bool
    changed: str
    near: tuple[str, ...]
    token: str | None = field(repr=False)

    def __post_init__(self) -> None:
        if self.near and self.beside:
            raise SettingError("a node keeps manifests where it can: beside= is for whoever lists a folder themselves")

    @staticmethod
    def nodes(near: str | Sequence[str] | None) -> tuple[str, ...]:
        """Addresses of nodes, as ``near=`` takes them; see ``node_urls`` for what may be raised."""
        return () if near is None else node_urls(near)

    def manifest(self, observe: Observer) -> Manifest:
        """List the data here, or have a node list it; see ``load_manifest`` and ``NodeListing``."""
        if self.near:
            asked = {name: getattr(self, name) for name in ("format", "relist", "changed", "cache", "token")}
            return NodeListing(nodes=self.near, data=self.url, **asked).manifest(observe)
        return load_manifest(
            open_store(self.url),
            cache=self.cache,
            beside=self.beside,
            format=self.format,
            relist=self.relist,
            refuses_changes=self.changed == "refuse",
            looks_elsewhere=self.changed != "skip",
            observe=observe,
        )

    def named(self, manifest: Manifest) -> NamedSplits:
        """The splits that were saved of a manifest of this data."""
        store = None if self.near else open_store(self.url)
        size = len(manifest.samples)
        return NamedSplits(store, self.cache, manifest.digest, size, beside=self.beside, given=manifest.saved)

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
