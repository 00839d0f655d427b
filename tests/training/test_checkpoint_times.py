"""Checkpoints come as often as was asked for, and take a fiftieth of the time at most where no steps were."""

import pytest

from frostline.training.loop import Checkpoint
from frostline.training.run_folder import CheckpointFolder
from frostline.training.settings import CheckpointEvery


class Clock:
    """A clock that a disk moves on: each file takes so many seconds."""

    def __init__(self, file_s):
        self.now, self.file_s = 0.0, file_s

    def __call__(self):
        return self.now


def keep(folder, step):
    plain = Checkpoint(epoch=0, epoch_steps=step, steps=0, order=None, losses=(1.0,) * step, epoch_losses=(), samples=0)
    folder.keep(plain)


@pytest.fixture
def clock(monkeypatch):
    from frostline.training import run_folder

    clock, write = Clock(0.0), run_folder.write_tensors

    def slowly(*arguments):
        write(*arguments)
        clock.now += clock.file_s

    monkeypatch.setattr(run_folder, "write_tensors", slowly)
    return clock


def due_after(folder, clock, *, ends_epoch, step=5):
    """The seconds after which one is due, in whole ones."""
    begun = clock.now
    while not folder.is_due(step, ends_epoch=ends_epoch):
        clock.now += 1.0
    return clock.now - begun


@pytest.mark.parametrize(("file_s", "within_s", "between_s"), [(0.0, 60, 0), (0.5, 60, 25), (4.0, 200, 200)])
def test_a_slow_disk_makes_them_rarer(tmp_path, clock, file_s, within_s, between_s):
    folder = CheckpointFolder(tmp_path, CheckpointEvery.parse("60s"), clock)
    clock.file_s = file_s
    keep(folder, 4)
    begun = clock.now
    assert due_after(folder, clock, ends_epoch=False) == within_s
    clock.now = begun
    assert due_after(folder, clock, ends_epoch=True) == between_s


def test_steps_that_were_asked_for_are_kept_whatever_they_take(tmp_path, clock):
    folder = CheckpointFolder(tmp_path, CheckpointEvery.parse("3"), clock)
    clock.file_s = 1000.0
    keep(folder, 4)
    assert not folder.is_due(6, ends_epoch=False)
    assert folder.is_due(7, ends_epoch=False)
    assert folder.is_due(7, ends_epoch=True)
    assert not folder.is_due(6, ends_epoch=True)
