"""Decides which form a listing has: the first that claims it, or the one that was named."""

from collections.abc import Sequence

from frostline.datasets.formats.base import Form
from frostline.datasets.formats.cql import CqlTables
from frostline.datasets.formats.folders import ClassFolderFormat
from frostline.datasets.formats.masks import MaskPairs
from frostline.datasets.formats.parquet import Parquet
from frostline.datasets.formats.ready_form import ReadyForm
from frostline.datasets.formats.url_lists import UrlLists
from frostline.datasets.formats.webdataset import WebDataset
from frostline.errors import SettingError, nearest
from frostline.stores.base.protocols import Entry

__all__ = ("FORMS", "form_named", "form_of")

FORMS: tuple[Form, ...] = (
    ReadyForm(),
    CqlTables(),
    MaskPairs(),
    ClassFolderFormat(),
    WebDataset(),
    Parquet(),
    UrlLists(),
)
"""In the order in which they are asked."""

# Says what it found nothing of, where no form claims a listing.
_LAST: Form = ClassFolderFormat()


def form_of(entries: Sequence[Entry]) -> Form:
    """The first form that claims a listing; class folders where none does."""
    return next((form for form in FORMS if form.claims(entries)), _LAST)


def form_named(name: str) -> Form:
    """The form of that name.

    Raises:
        SettingError: there is none.
    """
    names = [form.name for form in FORMS]
    if name not in names:
        raise SettingError(f"form: there is no {name!r}, only {', '.join(names)}{nearest(name, names)}")
    return FORMS[names.index(name)]
