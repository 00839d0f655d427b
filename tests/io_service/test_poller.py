"""The thread that sees what happens on sockets: each event reaches whoever it is for, and nobody else."""

import os
import threading
from contextlib import contextmanager, suppress

import pytest

from frostline.io_service.service import Poller


@contextmanager
def watching():
    watch = Poller()
    watch.start()
    try:
        yield watch
    finally:
        watch.stop()


@pytest.fixture
def pipe():
    """Makes pipes, and closes what is left of them."""
    made = []

    def make():
        made.extend(os.pipe())
        return made[-2:]

    yield make
    for item in made:
        with suppress(OSError):
            os.close(item)


def test_reports_readable_bytes_until_they_are_read(pipe):
    read, write = pipe()
    came, wanted = [], threading.Event()

    def call():
        came.append(os.read(read, 1))
        if len(came) == 3:
            wanted.set()

    with watching() as watch:
        watch.call_when_readable(read, call)
        os.write(write, b"abc")
        assert wanted.wait(60)
        watch.forget(read)
    assert came == [b"a", b"b", b"c"]


def test_reports_a_closed_connection_once(pipe):
    read, write = pipe()
    other, told = pipe()
    seen, calls = threading.Event(), []

    with watching() as watch:
        watch.call_when_gone(read, lambda: calls.append(1))
        os.close(write)
        watch.call_when_readable(other, lambda: (os.read(other, 1), seen.set()))
        for _ in range(3):  # each is another look at all of them
            os.write(told, b"x")
            assert seen.wait(60)
            seen.clear()
    assert calls == [1]


def test_ignores_events_of_a_closed_descriptor_whose_number_was_reused(pipe):
    """Both pipes have something to read at one look; whichever is told of first puts a new one in the other's place."""
    first, second = pipe(), pipe()
    fresh, _ = pipe()
    other, tells = pipe()
    looked_again, mistaken, turns = threading.Event(), [], []
    watch = Poller()

    def replace(mine, its):
        turns.append(mine)
        watch.forget(mine)
        watch.forget(its)
        os.close(its)
        os.dup2(fresh, its)
        watch.call_when_readable(its, lambda: mistaken.append(its))
        os.write(tells, b"x")

    for mine, its in ((first, second), (second, first)):
        os.write(mine[1], b"x")
        watch.call_when_readable(mine[0], lambda mine=mine[0], its=its[0]: replace(mine, its))
    watch.call_when_readable(other, lambda: (os.read(other, 1), looked_again.set()))
    watch.start()
    try:
        assert looked_again.wait(60)
    finally:
        watch.stop()
    assert len(turns) == 1
    assert mistaken == []
