"""Data sets of the Hugging Face hub: their Parquet files in its client's cache, fetched where they are not there."""

import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from frostline.errors import DataNotFound, SettingError
from frostline.stores.base.urls import normalise_url

__all__ = ("canonical_url", "folder_of_hub", "missing_parts")

_SCHEME = "hf:"
_ADDRESS = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?", re.ASCII)
_WAY = "write hf:OWNER/DATASET, or hf:OWNER/DATASET@REVISION"
_FILES = "*.parquet"
_PART = re.compile(r"(?P<start>.*-)(?P<number>\d{5})-of-(?P<count>\d{5})(?P<end>.*)", re.DOTALL)


def canonical_url(url: str, near: str | Sequence[str] | None) -> str:
    """The canonical URL of a data set's root, also of one that the hub has.

    Args:
        url: see ``Dataset``.
        near: likewise.

    Raises:
        SettingError: the URL is none that Frostline reads, or a node is to list what the hub has.
        DataNotFound: see ``folder_of_hub``.
    """
    if not url.startswith(_SCHEME):
        return normalise_url(url)
    if near:
        raise SettingError(f"{url} is read from the cache of this machine, which no node lists: leave near= out")
    return folder_of_hub(url)


def folder_of_hub(url: str) -> str:
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
