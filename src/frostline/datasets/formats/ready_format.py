"""The ready format: pixels that ``ingest`` kept, with a table of their own."""

from collections.abc import Sequence

import pyarrow as pa

from frostline.datasets.formats.base import COLUMNS, ListedSamples, digest_of, is_named
from frostline.datasets.formats.targets import NO_MASK, Mask, target_columns
from frostline.datasets.ready.layout import LAYOUT, TABLE, ReadyTable, is_part_of_format, masks_beside
from frostline.errors import DataError, EmptyDataset
from frostline.stores.base.protocols import Entry, ObjectStore

__all__ = ("ReadyFormat",)

_RULE = "frostline ready 1"


class ReadyFormat:
    """What ``ingest`` made: its table is read each time, and no manifest is kept beside it."""

    name = "ready"
    is_incremental = False

    def claims(self, entries: Sequence[Entry]) -> bool:
        """See ``Format.claims``: the file that is written first is enough, so an unfinished format is refused."""
        return is_named(entries, LAYOUT)

    def digest(self, entries: Sequence[Entry]) -> str:
        """See ``Format.digest``."""
        return digest_of(_RULE, (entry for entry in entries if is_part_of_format(entry.object)))

    def read(self, store: ObjectStore, entries: Sequence[Entry], before: ListedSamples | None = None) -> ListedSamples:  # noqa: ARG002
        """See ``Format.read``; names are those of the images that the records were made from.

        A sample's image is what is kept of it, so that its mask has that size too.
        """
        there = {entry.object: entry for entry in entries}
        if LAYOUT not in there:
            raise EmptyDataset(f"{store.url} holds no ready format: frostline ingest makes one")
        if TABLE not in there:
            raise DataError(
                f"the ready format at {store.url} is not whole: run frostline ingest again, it goes on where it was"
            )
        ready = ReadyTable.from_file(store.read(TABLE, 0, there[TABLE].size))
        _check_whole(ready, there, store.url)
        return ListedSamples(
            table=_table(ready, there),
            classes=ready.classes,
            digest=self.digest(entries),
            applied=ready.layout.applied,
            kept_at=TABLE,
        )


def _check_whole(ready: ReadyTable, there: dict[str, Entry], url: str) -> None:
    lost = [name for name, size in ready.sizes.items() if name not in there or there[name].size != size]
    if lost:
        raise DataError(f"{lost[0]} of the ready format at {url} is gone or cut off: run frostline ingest again")


def _table(ready: ReadyTable, there: dict[str, Entry]) -> pa.Table:
    samples = ready.samples
    columns = [
        pa.array(samples.ids),
        pa.array(ready.names, pa.string()),
        pa.array(samples.objects, pa.string()),
        pa.array(samples.offsets),
        pa.array(samples.lengths),
        pa.array(samples.labels),
        pa.array([there[name].etag for name in samples.objects], pa.string()),
    ]
    table = pa.table(columns, schema=COLUMNS)
    for name, column in {**ready.about, **_targets(ready, there)}.items():
        table = table.append_column(name, column)
    return table


def _targets(ready: ReadyTable, there: dict[str, Entry]) -> dict[str, pa.Array]:
    """``TARGET_COLUMNS``, where it has masks."""
    if ready.masks is None:
        return {}
    side = ready.layout.applied.stored.side
    places = zip(ready.samples.objects, ready.masks.offsets.tolist(), ready.masks.lengths.tolist(), strict=True)
    masks = [
        Mask(masks_beside(object), offset, length, there[masks_beside(object)].etag) if length else NO_MASK
        for object, offset, length in places
    ]
    return target_columns(masks, [(side, side)] * len(masks))
