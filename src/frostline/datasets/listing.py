"""Lists a store: folder by folder, several at once where the store can, and says how far it is."""

from concurrent.futures import ThreadPoolExecutor, as_completed

from frostline.events import Counted, Event, Observer, PhaseStarted
from frostline.stores.faces import Entry, Listable, Sectioned

__all__ = ("list_all", "nobody")

# A listing of S3 comes 1,000 names a request, one request after another: folders are what can be asked for at once.
_FOLDERS_AT_ONCE = 16
_SAID_EVERY = 10_000


def list_all(store: Listable, observe: Observer) -> list[Entry]:
    """Every object of a store, in no particular order.

    Args:
        store: to list.
        observe: told how many objects were found by now.

    Raises:
        DataNotFound: the root is not there.
        AccessDenied: the store refused.
        StoreUnavailable: asking again may help.
    """
    observe(PhaseStarted(name="listing the data"))
    found: list[Entry] = []
    if isinstance(store, Sectioned):
        entries, folders = store.sections()
        found.extend(entries)
        with ThreadPoolExecutor(_FOLDERS_AT_ONCE, "frostline-list") as threads:
            asked = [threads.submit(store.list_section, folder) for folder in folders]
            try:
                for one in as_completed(asked):
                    found.extend(one.result())
                    observe(Counted(done=len(found), total=0))
            finally:
                threads.shutdown(cancel_futures=True)
        return found
    for entry in store.list():
        found.append(entry)
        if len(found) % _SAID_EVERY == 0:
            observe(Counted(done=len(found), total=0))
    return found


def nobody(event: Event) -> None:
    """An observer that is told and does nothing."""
