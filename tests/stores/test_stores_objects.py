"""What is peculiar to folder, memory and S3, and which sentence each failure becomes."""

import errno
import os
import subprocess
import sys
import tempfile
import uuid
from contextlib import contextmanager
from pathlib import Path

import obstore.exceptions
import pytest

from frostline.core import errors
from frostline.core.errors import (
    AccessDenied,
    BadRequest,
    DataNotFound,
    EmptyDataset,
    FrostlineError,
    ObjectNotFound,
    OutOfSpace,
    SettingError,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
)
from frostline.datasets import Dataset
from frostline.stores.errors import error_of_driver
from frostline.stores.local import error_of_system
from frostline.stores.open import open_store
from frostline.stores.protocols import UNREADABLE


def test_a_backslash_in_a_name_separates_no_folders(tmp_path):
    # Not asked of S3: SeaweedFS itself takes one for the other.
    for store in (open_store(str(tmp_path)), open_store(f"memory://{uuid.uuid4()}")):
        store.write("a\\b.jpg", b"x")
        assert [entry.object for entry in store.list()] == ["a\\b.jpg"]


def test_memory_is_shared_by_those_who_use_its_name():
    name = uuid.uuid4()
    open_store(f"memory://{name}").write("a/x", b"x")
    assert [entry.object for entry in open_store(f"memory://{name}/a").list()] == ["x"]
    assert list(open_store(f"memory://{uuid.uuid4()}").list()) == []


def test_a_folder_that_is_not_there_is_not_written_to(tmp_path):
    with pytest.raises(DataNotFound, match="nothing"):
        open_store(str(tmp_path / "nothing")).write("x", b"x")
    assert list(tmp_path.iterdir()) == []


@contextmanager
def nobody_special():
    """Calls of the system as a user without the rights of the administrator."""
    was = os.geteuid()
    if not was:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


@pytest.fixture
def open_folder():
    """A folder that every user may enter, unlike those of other tests."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def test_a_folder_that_may_not_be_entered_is_named(open_folder):
    closed = open_folder / "closed"
    (closed / "cats").mkdir(parents=True)
    (open_folder / "x.jpg").write_bytes(b"x")
    closed.chmod(0)
    with nobody_special():
        for folder in (open_folder, closed, closed / "cats"):
            with pytest.raises(AccessDenied, match=f"no access to the folder {max(folder, closed)}: Permission denied"):
                list(open_store(str(folder)).list())
        with pytest.raises(AccessDenied, match=f"no access to the folder {closed / 'cats'}"):
            open_store(str(closed / "cats")).write("x", b"x")


def test_a_folder_whose_name_is_too_long_is_not_there(tmp_path):
    store = open_store(str(tmp_path / ("a" * 300)))
    for use in (lambda: list(store.list()), lambda: store.write("x", b"x")):
        with pytest.raises(DataNotFound, match=r"there is no folder .*: File name too long"):
            use()


def test_a_store_tells_of_single_objects(tmp_path):
    for store in (open_store(str(tmp_path)), open_store(f"memory://{uuid.uuid4()}")):
        store.write("a/b.jpg", b"123")
        assert [store.describe("a/b.jpg")] == list(store.list())
        for name in ("a", "a/c.jpg"):
            with pytest.raises(ObjectNotFound):
                store.describe(name)


def test_links_in_a_folder_are_followed_but_never_in_a_circle(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"x")
    (tmp_path / "a" / "up").symlink_to(tmp_path)
    (tmp_path / "b").symlink_to(tmp_path / "a")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    names = {entry.object for entry in open_store(str(tmp_path)).list()}
    assert {"a/x", "b/x"} <= names
    assert len(names) < 10


def test_lists_odd_file_names_and_tells_those_that_cannot_be_read(tmp_path):
    readable = ["a\tb", "a\nb", "..a", "a\\b", "é"]
    for name in readable:
        (tmp_path / name).write_bytes(b"x")
    latin = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    latin.mkdir()
    (latin / "\udcff.jpg").write_bytes(b"xy")
    (tmp_path / "broken").symlink_to(tmp_path / "nothing")
    (tmp_path / "itself").symlink_to(tmp_path / "itself")
    os.mkfifo(tmp_path / "pipe")
    store = open_store(str(tmp_path))
    entries, folders = store.sections()
    by_folder = [*entries, *(entry for folder in folders for entry in store.list_section(folder))]
    unreadable = {"caf\\xe9/\\xff.jpg", "broken", "itself", "pipe"}
    for found in (list(store.list()), by_folder):
        assert {entry.object for entry in found if entry.size == 1} == set(readable)
        assert {entry.object for entry in found if entry.size == UNREADABLE} == unreadable
        assert len(found) == len(readable) + len(unreadable)
    assert {bytes(store.read(name, 0, 1)) for name in readable} == {b"x"}
    assert {entry.object for entry in store.list_dated()} == set(readable)


def test_a_folder_with_odd_names_is_a_data_set_of_all_that_can_be_read(tmp_path):
    for name in ("cats/1.jpg", "cats/a\nb.jpg", "dogs/1.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "dogs" / "broken.jpg").symlink_to(tmp_path / "nothing.jpg")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/cats/\xff.jpg")).write_bytes(b"x")
    data = Dataset(tmp_path)
    assert sorted(data.manifest.names) == ["cats/1.jpg", "cats/a\nb.jpg", "dogs/1.jpg"]
    (left,) = data.manifest.left_out
    assert (left.total, set(left.names)) == (2, {"dogs/broken.jpg", "cats/\\xff.jpg"})


def test_a_folder_of_which_nothing_can_be_read_says_so(tmp_path):
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "1.jpg").symlink_to(tmp_path / "nothing.jpg")
    with pytest.raises(EmptyDataset, match=r"nothing but 1 object that cannot be read by that name \(cats/1\.jpg\)"):
        len(Dataset(tmp_path))


def test_a_pipe_in_a_folder_holds_up_no_reader(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ObjectNotFound):
        open_store(str(tmp_path)).read("pipe", 0, 1)


def test_reports_a_full_disk_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    store = open_store(str(tmp_path))
    store.write("x", b"old")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfSpace, match="the disk is full"):
        store.write("x", b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, ObjectNotFound),
        (errno.EACCES, AccessDenied),
        (errno.EROFS, AccessDenied),
        (errno.ENOSPC, OutOfSpace),
        (errno.EDQUOT, OutOfSpace),
        (errno.EIO, StoreUnavailable),
    ],
)
def test_explains_errors_of_the_operating_system(number, kind):
    assert type(error_of_system(OSError(number, "x"), "photo.jpg")) is kind


EXPECTED = {
    "BaseError": StoreUnavailable,
    "GenericError": StoreUnavailable,
    "NotFoundError": ObjectNotFound,
    "InvalidPathError": BadRequest,
    "JoinError": StoreUnavailable,
    "NotSupportedError": StoreError,
    "AlreadyExistsError": StoreError,
    "PreconditionError": StoreError,
    "NotModifiedError": StoreError,
    "PermissionDeniedError": AccessDenied,
    "UnauthenticatedError": AccessDenied,
    "UnknownConfigurationKeyError": SettingError,
}


def test_every_exception_of_the_driver_has_its_own_in_our_tree():
    assert set(EXPECTED) == set(obstore.exceptions.__all__)
    for name, kind in EXPECTED.items():
        made = error_of_driver(getattr(obstore.exceptions, name)("secret"), "s3://photos", "x")
        assert type(made) is kind, name
        assert "s3://photos/x" in str(made) or kind is SettingError
        assert "secret" not in str(made)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("status code: 404 Not Found: <Code>NoSuchKey</Code>", ObjectNotFound),
        ("status code: 404 Not Found: <Code>NoSuchBucket</Code>", StoreError),
        ("status code: 404 Not Found: <Code>ContainerNotFound</Code>", StoreError),
        ("status code: 403 Forbidden: <Code>SignatureDoesNotMatch</Code>", AccessDenied),
        ("status code: 416 Range Not Satisfiable", ObjectNotFound),
        ("status code: 507 Insufficient Storage", OutOfSpace),
        ("status code: 400 Bad Request", StoreError),
        ("status code: 503 Service Unavailable", StoreThrottled),
        ("status code: 502 Bad Gateway", StoreUnavailable),
        ("status code: 503 Slow Down: <Code>SlowDown</Code>", StoreThrottled),
        ("status code: 503 Service Unavailable: <Code>ServerBusy</Code>", StoreThrottled),
        ("status code: 429 Too Many Requests", StoreThrottled),
        ("Received non-partial response when range requested", StoreError),
        ("Wanted range starting at 10, but object was only 10 bytes long", ObjectNotFound),
        ("HTTP error: builder error", SettingError),
        ("PUT http://169.254.169.254/latest/api/token", AccessDenied),
        ("error sending request for http://user:hunter2@host/", StoreUnavailable),
    ],
)
def test_tells_the_drivers_general_errors_apart_by_their_response(text, kind):
    made = error_of_driver(obstore.exceptions.GenericError(text), "s3://photos", "x")
    assert type(made) is kind
    assert "hunter2" not in str(made)
    assert "\n" not in str(made)


def test_a_server_that_does_not_answer_is_worth_another_try(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    with pytest.raises(StoreUnavailable, match="no answer"):
        list(open_store("s3://photos").list())


def test_a_plain_http_address_needs_a_setting_that_the_sentence_names(s3, monkeypatch):
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(SettingError, match="AWS_ALLOW_HTTP=true"):
        list(open_store("s3://photos").list())


FORKED = """
import os, sys
from frostline.core.errors import StoreError
from frostline.stores.open import open_store

open_store("memory://x").write("x", b"x")
child = os.fork()
if child == 0:
    try:
        open_store("memory://other").read("x", 0, 1)
    except StoreError as error:
        os._exit(7 if "'spawn'" in str(error) and "frostline io --data-root" in str(error) else 1)
    os._exit(2)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_forked_child_of_a_user_of_the_driver_gets_a_sentence_and_never_hangs():
    done = subprocess.run([sys.executable, "-c", FORKED], timeout=200, check=False, env={**os.environ, **_path()})
    assert done.returncode == 7


def test_the_driver_is_not_loaded_before_a_store_needs_it(tmp_path):
    code = (
        "import sys, frostline, frostline.datasets; from frostline.stores.open import open_store;"
        f"list(open_store({str(tmp_path)!r}).list()); open_store('s3://photos');"
        "sys.exit(any(name.startswith('obstore') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env={**os.environ, **_path()}).returncode == 0


def test_every_error_of_a_store_is_in_the_tree():
    assert issubclass(StoreError, FrostlineError)
    assert issubclass(errors.OutOfSpace, errors.UserError)


def _path():
    return {"PYTHONPATH": os.pathsep.join(sys.path)}
