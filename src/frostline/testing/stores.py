"""What every store must do, as test classes: a new store subclasses one a capability, and inherits its tests.

Give ``staged`` in each subclass, and the tests of that capability run over your store under pytest:

    class TestMyStoreReads(ReadingTests, VersionTests, ListingTests, WritingTests, SharingTests):
        @pytest.fixture
        def staged(self):
            store = open_store(...)
            return Staged(store=store, put=store.write)
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from frostline.core.errors import AccessDenied, BadRequest, DataNotFound, ObjectNotFound, StoreError
from frostline.stores.protocols import ByteRange

__all__ = (
    "ABSENT",
    "ODD_NAMES",
    "OUTSIDE",
    "AccessRefusalTests",
    "ListingTests",
    "ManyReadingTests",
    "MissingRootTests",
    "PicklingTests",
    "PruningTests",
    "ReadOnlyTests",
    "ReadingTests",
    "SectionTests",
    "SharingTests",
    "Staged",
    "StoreTests",
    "VersionTests",
    "WritingTests",
)

ODD_NAMES = (
    "a b.jpg",
    "100%.jpg",
    "a%20b.jpg",
    "ü✓日本.jpg",
    "a#b.jpg",
    "a?b=c&d.jpg",
    "a+b.jpg",
    'it\'s "x".jpg',
    "a*[1].jpg",
    "deep/er/.hidden/x.jpg",
    "~/x.jpg",
)
"""Names that objects have in the wild, and that a store must give back as they are."""
OUTSIDE = ("../x", "/etc/passwd", "a/../../x", "a\0b", "")
"""What is no name of an object under the root."""
ABSENT = ((0, 11), (10, 1), (50, 5), (0, 1 << 62), (1 << 62, 1 << 62))
"""Offsets and lengths that an object of ten bytes does not have."""
_TEN = b"0123456789"
_THREADS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    """A store under test, and the way to its objects.

    Attributes:
        store: the store with an empty root, of the capability whose tests run.
        put: function that puts an object of that name under the root, by whatever way there is, and replaces one that
            is there.
    """

    store: Any
    put: Callable[[str, bytes], None]


class StoreTests:
    """What the classes of this module share: subclasses say what is tested."""

    @pytest.fixture
    def staged(self) -> Staged:
        """The store under test, with an empty root.

        Raises:
            NotImplementedError: a subclass did not say.
        """
        raise NotImplementedError("give a fixture `staged` that returns a Staged")


class ReadingTests(StoreTests):
    """For ``Readable``."""

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_an_object_of_an_odd_name_is_read(self, staged: Staged, name: str) -> None:
        staged.put(name, _TEN)
        assert bytes(staged.store.read(name, 0, 10)) == _TEN

    def test_a_range_is_read_exactly(self, staged: Staged) -> None:
        staged.put("x", _TEN)
        assert bytes(staged.store.read("x", 3, 4)) == b"3456"
        assert bytes(staged.store.read("x", 9, 1)) == b"9"
        assert bytes(staged.store.read("x", 10, 0)) == b""

    @pytest.mark.parametrize(("offset", "length"), ABSENT)
    def test_bytes_that_an_object_does_not_have_are_not_found(self, staged: Staged, offset: int, length: int) -> None:
        staged.put("x", _TEN)
        with pytest.raises(ObjectNotFound, match="x"):
            staged.store.read("x", offset, length)

    def test_an_object_that_is_not_there_is_not_found(self, staged: Staged) -> None:
        staged.put("folder/x", b"x")
        for name in ("nothing", "folder/nothing", "folder/x/y"):
            with pytest.raises(ObjectNotFound, match=name):
                staged.store.read(name, 0, 1)

    @pytest.mark.parametrize("name", OUTSIDE)
    def test_a_name_that_leaves_the_root_is_not_read(self, staged: Staged, name: str) -> None:
        with pytest.raises(BadRequest):
            staged.store.read(name, 0, 1)

    def test_what_was_read_stays_as_it_was_when_the_object_is_replaced(self, staged: Staged) -> None:
        staged.put("x", _TEN)
        kept = staged.store.read("x", 0, 10)
        staged.put("x", b"9876543210")
        assert bytes(kept) == _TEN
        assert bytes(staged.store.read("x", 0, 10)) == b"9876543210"


class VersionTests(StoreTests):
    """For ``Versioned``, of stores that have versions."""

    def test_the_version_changes_with_the_bytes(self, staged: Staged) -> None:
        staged.put("x", _TEN)
        data, first = staged.store.read_version("x", 3, 4)
        assert bytes(data) == b"3456"
        assert first != ""
        assert staged.store.read_version("x", 0, 1)[1] == first
        staged.put("x", b"9876543210")
        assert staged.store.read_version("x", 3, 4)[1] != first

    def test_reading_with_the_version_fails_as_reading_does(self, staged: Staged) -> None:
        staged.put("x", _TEN)
        for name, offset, length in (("x", 8, 4), ("y", 0, 1)):
            with pytest.raises(ObjectNotFound):
                staged.store.read_version(name, offset, length)


class ManyReadingTests(StoreTests):
    """For ``Batched``."""

    def test_each_place_comes_once_with_its_bytes_and_its_version(self, staged: Staged) -> None:
        for name in "ab":
            staged.put(name, name.encode() + _TEN)
        places = [
            ByteRange(name, offset, length) for offset, length in ((0, 3), (2, 5), (9, 2), (4, 0)) for name in "ab"
        ]
        found = list(staged.store.read_many(places, maximum=3))
        assert sorted(row for row, _ in found) == list(range(len(places)))
        for row, (data, _) in found:
            name, offset, length = places[row]
            assert bytes(data) == (name.encode() + _TEN)[offset : offset + length]
        assert len({version for row, (_, version) in found if places[row].object == "a" and places[row].length}) == 1

    def test_what_is_not_there_is_said_for_its_place_alone(self, staged: Staged) -> None:
        staged.put("x", _TEN)
        places = [ByteRange("x", 0, 4), ByteRange("nothing", 0, 4), ByteRange("x", 8, 4), ByteRange("x", 2, 8)]
        found = dict(staged.store.read_many(places))
        assert [bytes(found[row][0]) for row in (0, 3)] == [b"0123", b"23456789"]
        assert all(isinstance(found[row], ObjectNotFound) for row in (1, 2))

    def test_nothing_is_read_of_no_place(self, staged: Staged) -> None:
        assert list(staged.store.read_many([])) == []

    @pytest.mark.parametrize("name", OUTSIDE)
    def test_a_name_among_many_that_leaves_the_root_is_not_read(self, staged: Staged, name: str) -> None:
        with pytest.raises(BadRequest):
            list(staged.store.read_many([ByteRange(name, 0, 1)]))


class ListingTests(StoreTests):
    """For ``Listable``."""

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_an_object_of_an_odd_name_is_listed_by_that_name(self, staged: Staged, name: str) -> None:
        staged.put(name, _TEN)
        assert [(entry.object, entry.size) for entry in staged.store.list()] == [(name, 10)]

    def test_all_objects_are_listed_once(self, staged: Staged) -> None:
        names = {f"{folder}/{number}.jpg" for folder in ("a", "b/c", ".d") for number in range(5)}
        for name in names:
            staged.put(name, name.encode())
        found = [(entry.object, entry.size) for entry in staged.store.list()]
        assert sorted(found) == sorted((name, len(name)) for name in names)

    def test_the_listed_version_is_the_one_that_comes_with_the_bytes(self, staged: Staged) -> None:
        staged.put("x", b"one")
        (before,) = staged.store.list()
        if hasattr(staged.store, "read_version"):
            assert staged.store.read_version("x", 0, 3)[1] == before.etag
        staged.put("x", b"three")
        (after,) = staged.store.list()
        assert before.etag != after.etag


class SectionTests(StoreTests):
    """For ``Sectioned`` stores."""

    def test_folder_by_folder_all_objects_are_listed_once(self, staged: Staged) -> None:
        for name in ("top.jpg", "a/1.jpg", "a/b/2.jpg", "a b/3.jpg", ".hidden/4.jpg", "100%/ü.jpg"):
            staged.put(name, name.encode())
        entries, folders = staged.store.sections()
        assert [entry.object for entry in entries] == ["top.jpg"]
        assert sorted(folders) == [".hidden/", "100%/", "a b/", "a/"]
        found = [*entries, *(entry for folder in folders for entry in staged.store.list_section(folder))]
        assert sorted(found) == sorted(staged.store.list())


class WritingTests(StoreTests):
    """For ``Writable`` stores that can be read and listed too."""

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_an_object_of_an_odd_name_comes_back_as_it_was_written(self, staged: Staged, name: str) -> None:
        staged.store.write(name, _TEN)
        assert bytes(staged.store.read(name, 0, 10)) == _TEN
        assert [(entry.object, entry.size) for entry in staged.store.list()] == [(name, 10)]

    def test_writing_again_replaces_the_object(self, staged: Staged) -> None:
        staged.store.write("x", b"one")
        staged.store.write("x", memoryview(b"three"))
        assert bytes(staged.store.read("x", 0, 5)) == b"three"
        assert [entry.size for entry in staged.store.list()] == [5]

    @pytest.mark.parametrize("name", OUTSIDE)
    def test_a_name_that_leaves_the_root_is_not_written(self, staged: Staged, name: str) -> None:
        with pytest.raises(BadRequest):
            staged.store.write(name, b"x")
        assert list(staged.store.list()) == []

    def test_who_reads_while_another_writes_sees_the_old_or_the_new(self, staged: Staged) -> None:
        size = 1 << 16
        whole = {value: bytes([value]) * size for value in b"ab"}
        staged.store.write("x", whole[ord("a")])
        with ThreadPoolExecutor(_THREADS) as threads:
            written = [threads.submit(staged.store.write, "x", whole[value]) for value in b"abababab"]
            read = [threads.submit(staged.store.read, "x", 0, size) for _ in range(24)]
            for write in written:
                write.result()
            assert {bytes(pending.result()) for pending in read} <= set(whole.values())


class PruningTests(StoreTests):
    """For ``Prunable`` stores."""

    @pytest.mark.parametrize("name", ODD_NAMES)
    def test_an_object_that_is_removed_is_gone(self, staged: Staged, name: str) -> None:
        staged.put(name, _TEN)
        staged.put("beside/it", _TEN)
        staged.store.remove(name)
        assert [entry.object for entry in staged.store.list_dated()] == ["beside/it"]
        with pytest.raises(ObjectNotFound):
            staged.store.read(name, 0, 1)

    def test_removing_what_is_not_there_does_nothing(self, staged: Staged) -> None:
        staged.put("folder/x", b"x")
        for name in ("nothing", "folder/nothing"):
            staged.store.remove(name)
        assert [entry.object for entry in staged.store.list_dated()] == ["folder/x"]

    @pytest.mark.parametrize("name", OUTSIDE)
    def test_a_name_that_leaves_the_root_is_not_removed(self, staged: Staged, name: str) -> None:
        with pytest.raises(BadRequest):
            staged.store.remove(name)

    def test_a_listing_tells_the_age_of_what_is_there(self, staged: Staged) -> None:
        staged.put("first", _TEN)
        staged.put("folder/second", b"")
        found = {entry.object: entry for entry in staged.store.list_dated()}
        assert {name: entry.size for name, entry in found.items()} == {"first": 10, "folder/second": 0}
        assert 0 < found["first"].modified_s <= found["folder/second"].modified_s


class ReadOnlyTests(StoreTests):
    """For stores that are read alone, and say so to whoever writes."""

    def test_writing_is_refused_with_a_sentence(self, staged: Staged) -> None:
        with pytest.raises(AccessDenied) as caught:
            staged.store.write("x", b"x")
        assert "\n" not in str(caught.value)


class SharingTests(StoreTests):
    """For every ``Readable``: it is used by many threads at once."""

    def test_threads_get_their_own_bytes(self, staged: Staged) -> None:
        contents = {f"{number}": bytes([number]) * 1000 for number in range(_THREADS)}
        for name, data in contents.items():
            staged.put(name, data)
        asked = [(name, offset) for offset in range(0, 1000, 200) for name in contents]
        with ThreadPoolExecutor(_THREADS) as threads:
            got = list(threads.map(lambda item: bytes(staged.store.read(*item, 200)), asked))
        assert got == [contents[name][offset : offset + 200] for name, offset in asked]


class PicklingTests(StoreTests):
    """For stores that another process can reach: they travel to a spawned one by pickle, also after use."""

    def test_a_store_that_was_used_is_used_by_a_spawned_process(self, staged: Staged) -> None:
        staged.put("x", _TEN)
        assert _read(staged.store, "x", 3, 4) == b"3456"
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
            assert processes.submit(_read, staged.store, "x", 3, 4).result() == b"3456"


class AccessRefusalTests:
    """For stores that know who asks: ``refused`` is one that is told wrong credentials, ``secret`` the wrong secret."""

    secret = "hunter2"

    @pytest.fixture
    def refused(self) -> Any:
        """A store with wrong credentials, on a root that others may use.

        Raises:
            NotImplementedError: a subclass did not say.
        """
        raise NotImplementedError("give a fixture `refused` that returns a store")

    def test_wrong_credentials_are_refused_and_not_shown(self, refused: Any) -> None:
        for use in (lambda: list(refused.list()), lambda: refused.read("x", 0, 1), lambda: refused.write("x", b"x")):
            with pytest.raises(AccessDenied) as caught:
                use()
            assert self.secret not in f"{caught.value}{refused!r}{refused.url}"
            assert "\n" not in str(caught.value)


class MissingRootTests:
    """For stores whose root must be there: ``missing`` is one whose root is not."""

    @pytest.fixture
    def missing(self) -> Any:
        """A store of a folder, bucket or container that does not exist.

        Raises:
            NotImplementedError: a subclass did not say.
        """
        raise NotImplementedError("give a fixture `missing` that returns a store")

    def test_a_root_that_is_not_there_is_named(self, missing: Any) -> None:
        with pytest.raises(DataNotFound) as caught:
            list(missing.list())
        assert missing.url.removeprefix("file://") in str(caught.value)
        with pytest.raises((DataNotFound, StoreError)):
            missing.read("x", 0, 1)


def _read(store: Any, object: str, offset: int, length: int) -> bytes:
    # By a name of this module, so that it can be called in another process.
    return bytes(store.read(object, offset, length))
