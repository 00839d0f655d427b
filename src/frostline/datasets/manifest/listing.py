"""Lists a store: folder by folder, several at once where the store can, and says how far it is."""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed

from frostline.events import Event, Observer, PhaseStarted, ProgressMade
from frostline.stores.base.listing import Entries
from frostline.stores.base.protocols import Entry, Listable, Sectioned

__all__ = ("list_all", "nobody")

# A listing of S3 comes 1,000 names a request, one request after another: folders are what can be asked for at once.
_FOLDERS_AT_ONCE = 16
_SAID_EVERY = 10_000


def list_all(store: Listable, observe: Observer) -> Entries:
    """Every object of a store, in the order of their names. Memory is that of their columns, and for a while of two.

    Args:
        store: to list.
        observe: told how many objects were found by now.

    Raises:
        DataNotFound: the root is not there.
        AccessDenied: the store refused.
        StoreUnavailable: asking again may help.
    """
    observe(PhaseStarted(name="listing the data"))
    parts = _by_folders(store, observe) if isinstance(store, Sectioned) else [_at_once(store, observe)]
    return Entries.gathered(parts)


def _by_folders(store: Sectioned, observe: Observer) -> list[Entries]:
    entries, folders = store.sections()
    found, count = [Entries.of(entries)], len(entries)
    with ThreadPoolExecutor(_FOLDERS_AT_ONCE, "frostline-list") as threads:
        asked = {threads.submit(store.list_section, folder) for folder in folders}
        try:
            for future in as_completed(asked):
                asked.discard(future)  # which holds what it found
                found.append(Entries.of(future.result()))
                count += len(found[-1])
                observe(ProgressMade(done=count, total=0))
        finally:
            threads.shutdown(cancel_futures=True)
    return found


def _at_once(store: Listable, observe: Observer) -> Entries:
    return Entries.of(_counted(store.list(), observe))


def _counted(entries: Iterable[Entry], observe: Observer) -> Iterator[Entry]:
    for number, entry in enumerate(entries, 1):
        yield entry
        if number % _SAID_EVERY == 0:
            observe(ProgressMade(done=number, total=0))


def nobody(event: Event) -> None:
    """An observer that is told and does nothing."""
