"""The thread that sees what happens on sockets: each event reaches whoever it is for, and nobody else."""

import os
import threading
from contextlib import contextmanager, suppress

import pytest

from frostline.io_service.poller import Poller


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


def test_what_is_there_to_read_is_told_until_it_is_read(pipe):
    read, write = pipe()
    came, wanted = [], threading.Event()

    def call():
        came.append(os.read(read, 1))
        if len(came) == 3:
            wanted.set()

    with watching() as watch:
        watch.readable(read, call)
        os.write(write, b"abc")
        assert wanted.wait(60)
        watch.forget(read)
    assert came == [b"a", b"b", b"c"]


def test_who_is_gone_is_told_once(pipe):
    read, write = pipe()
    other, told = pipe()
    seen, calls = threading.Event(), []

    with watching() as watch:
        watch.gone(read, lambda: calls.append(1))
        os.close(write)
        watch.readable(other, lambda: (os.read(other, 1), seen.set()))
        for _ in range(3):  # each is another look at all of them
            os.write(told, b"x")
            assert seen.wait(60)
            seen.clear()
    assert calls == [1]


def test_an_event_of_a_descriptor_that_was_closed_is_not_taken_for_one_of_the_next_that_has_its_number(pipe):
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
        watch.readable(its, lambda: mistaken.append(its))
        os.write(tells, b"x")

    for mine, its in ((first, second), (second, first)):
        os.write(mine[1], b"x")
        watch.readable(mine[0], lambda mine=mine[0], its=its[0]: replace(mine, its))
    watch.readable(other, lambda: (os.read(other, 1), looked_again.set()))
    watch.start()
    try:
        assert looked_again.wait(60)
    finally:
        watch.stop()
    assert len(turns) == 1
    assert mistaken == []
