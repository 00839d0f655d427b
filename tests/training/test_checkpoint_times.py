"""Checkpoints come as often as was asked for, take little time where no steps were, and are lost by no trouble."""

import errno
import json
import os
import resource
import signal
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from frostline.core.errors import ModelError, SettingError, WeightsMismatch
from frostline.core.system import __version__
from frostline.models.artifact import metadata
from frostline.preprocess import text
from frostline.training.loop import Checkpoint
from frostline.training.networks import load_model
from frostline.training.pretrained import processor_of
from frostline.training.run_config import RunConfig, keep_report
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
    folder.keep(replace(plain, head={"weight": torch.tensor([1.0, 2.0, 3.0, 4.0])}))


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


def kept_steps(folder, *steps):
    """A folder that keeps checkpoints of these steps, and what lies in it."""
    for step in steps:
        keep(CheckpointFolder(folder), step)
    return contents(folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in (folder / "checkpoints").iterdir()}


def rewrite(folder, step, change):
    """Write a checkpoint again, with what it says of itself changed."""
    path = folder / "checkpoints" / f"step-{step:010}.safetensors"
    said = json.loads(metadata(path.read_bytes())["checkpoint"])
    change(said)
    save_file(load_file(path), path, {**metadata(path.read_bytes()), "checkpoint": json.dumps(said)})
    return contents(folder)


def test_a_checkpoint_of_another_version_is_refused_by_both_versions_and_stays(tmp_path):
    kept_steps(tmp_path, 3, 5)
    before = rewrite(tmp_path, 5, lambda said: said.update(schema=3, frostline="7.3.1", more=[1]))
    with pytest.raises(SettingError, match=f"written by Frostline 7.3.1 .schema 3., this is {__version__}"):
        CheckpointFolder(tmp_path).read_latest()
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda said: said.update(more=1),
        lambda said: said.pop("epoch"),
        lambda said: said.pop("schema"),
        lambda said: said.update(schema=True),
        lambda said: said.update(scores=[{"nothing": 1}]),
        lambda said: said.update(scores=None),
        lambda said: said.update(scores=[{"epoch": 0, "samples": 1, "loss": "nan", "scores": {}}]),
        lambda said: said.update(scores=[{"epoch": -1, "samples": 1, "loss": 1.0, "scores": {}}]),
        lambda said: said.update(epoch="0"),
        lambda said: said.update(steps=-1),
        lambda said: said.update(samples=1.5),
        lambda said: said.update(best_epoch=True),
        lambda said: said.update(order=[0]),
        lambda said: said.update(is_over="no"),
    ],
)
def test_what_is_not_understood_of_a_checkpoint_is_refused_and_stays(tmp_path, change):
    kept_steps(tmp_path, 3, 5)
    before = rewrite(tmp_path, 5, change)
    with pytest.raises(SettingError):
        CheckpointFolder(tmp_path).read_latest()
    assert contents(tmp_path) == before


def test_a_checkpoint_larger_than_any_of_its_network_is_not_read_into_memory(tmp_path):
    kept_steps(tmp_path, 3)
    large = tmp_path / "checkpoints" / "step-0000000009.safetensors"
    with large.open("wb") as file:
        file.truncate((256 << 20) + 801)
    with pytest.raises(SettingError, match=f"{large} cannot be read: it has more than 268,436,256 bytes"):
        CheckpointFolder(tmp_path).read_latest(100)
    assert large.exists()


@pytest.mark.parametrize("use", [CheckpointFolder.read_latest, CheckpointFolder.clear, lambda folder: keep(folder, 9)])
def test_a_link_in_the_place_of_checkpoints_touches_none_of_another_run(tmp_path, use):
    before = kept_steps(tmp_path / "mine", 3, 5)
    (tmp_path / "given").mkdir()
    (tmp_path / "given" / "checkpoints").symlink_to(tmp_path / "mine" / "checkpoints")
    with pytest.raises(SettingError, match="is a link"):
        use(CheckpointFolder(tmp_path / "given"))
    assert contents(tmp_path / "mine") == before


def test_too_many_open_files_lose_no_checkpoint(tmp_path):
    before = kept_steps(tmp_path, 3, 5)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(SettingError, match=os.strerror(errno.EMFILE)):
            CheckpointFolder(tmp_path).read_latest()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert contents(tmp_path) == before


def test_a_disk_that_takes_no_change_ends_in_one_sentence_and_loses_no_checkpoint(tmp_path, monkeypatch):
    kept_steps(tmp_path, 3, 5)
    (tmp_path / "checkpoints" / f"step-{5:010}.safetensors").write_bytes(b"damaged")
    before = contents(tmp_path)

    def refuse(path, *arguments, **options):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    folder = CheckpointFolder(tmp_path)
    monkeypatch.setattr(Path, "rename", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    for act in (folder.read_latest, folder.clear):
        with pytest.raises(SettingError, match="checkpoints cannot be written: Read-only file system"):
            act()
    assert contents(tmp_path) == before


@pytest.mark.promise("data", mended="a pipe or a device in a run's folder held its reader for ever, or filled memory")
@pytest.mark.parametrize("kind", ["folder", "pipe", "device"])
def test_what_is_no_file_in_place_of_a_checkpoint_is_refused_and_stays(tmp_path, kind):
    kept_steps(tmp_path, 3)
    put_in_place(tmp_path / "checkpoints" / f"step-{9:010}.safetensors", kind)
    with pytest.raises(SettingError, match="cannot be read"):
        CheckpointFolder(tmp_path).read_latest()
    assert len(list((tmp_path / "checkpoints").iterdir())) == 2


@pytest.mark.promise("data")
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "sparse", "deep"])
def test_what_is_no_file_in_place_of_a_config_or_of_weights_is_refused(tmp_path, kind):
    put_in_place(tmp_path / "frostline.json", kind)
    with pytest.raises(SettingError, match=r"frostline\.json cannot be read: "):
        RunConfig.read(tmp_path)
    put_in_place(tmp_path / "model.safetensors", kind)
    with pytest.raises(WeightsMismatch, match="cannot be read as safetensors"):
        load_model("torchvision:squeezenet1_0", classes=2, weights=str(tmp_path / "model.safetensors"))


@pytest.mark.promise("data", mended="a device in place of a report, or named as a tokenizer, filled memory")
@pytest.mark.parametrize("kind", ["folder", "pipe", "device", "sparse"])
def test_what_is_no_file_in_place_of_a_report_or_a_tokenizer_is_refused(tmp_path, kind):
    path = tmp_path / "report.json"
    put_in_place(path, kind)
    with pytest.raises(SettingError, match=r"report\.json cannot be read: "):
        keep_report(tmp_path)
    with pytest.raises(SettingError, match=r"tokenizer: .* cannot be read: "):
        text(path)
    with pytest.raises(ModelError, match="no preparation of images"):
        processor_of(path)


def put_in_place(path, kind):
    match kind:
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
        case "device":
            path.symlink_to("/dev/zero")
        case "sparse":
            path.touch()
            os.truncate(path, 1 << 40)
        case "deep":
            path.write_bytes(b"[" * (1 << 20))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(where=st.floats(0, 1, exclude_max=True), how=st.sampled_from(("cut", "flip", "empty", "other")))
def test_whatever_becomes_of_the_newest_every_byte_that_was_there_is_kept(tmp_path_factory, where, how):
    """Damage of any kind, in any place: an older one is read, or all is refused, and no content is lost."""
    folder = tmp_path_factory.mktemp("run")
    kept_steps(folder, 3, 5)
    path = folder / "checkpoints" / f"step-{5:010}.safetensors"
    body = bytearray(path.read_bytes())
    place = int(where * len(body))
    body[place] ^= 0x10
    path.write_bytes({"cut": bytes(body[:place]), "flip": bytes(body), "empty": b"", "other": b"text" * 9}[how])
    before = sorted(contents(folder).values())
    try:
        found, reasons = CheckpointFolder(folder).read_latest()
    except SettingError:
        pass
    else:
        assert found is not None
        assert (found.step == 5) is not bool(reasons)
        assert found.losses == (1.0,) * found.step, "what is read is what was written"
        assert found.head["weight"].tolist() == [1.0, 2.0, 3.0, 4.0]
        assert found.epoch_steps == found.step
    assert sorted(contents(folder).values()) == before


@pytest.mark.promise("data", mended="a flipped bit in a checkpoint's weights went on as another training")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
def test_a_flipped_bit_in_a_weight_is_a_damaged_checkpoint(tmp_path, dtype):
    kept_steps(tmp_path, 3)
    scalar, none = torch.ones((), dtype=dtype), torch.ones(0, dtype=dtype)
    newer = CheckpointFolder(tmp_path).read_latest()[0]
    head, losses = {"bias": scalar, "none": none}, (1.0,) * 5
    CheckpointFolder(tmp_path).keep(replace(newer, epoch_steps=5, losses=losses, head=head, optimizer={"step": scalar}))
    found, reasons = CheckpointFolder(tmp_path).read_latest()
    assert found.head["bias"] == scalar
    assert not reasons
    path = tmp_path / "checkpoints" / f"step-{5:010}.safetensors"
    body = bytearray(path.read_bytes())
    body[-1] ^= 1
    path.write_bytes(body)
    found, reasons = CheckpointFolder(tmp_path).read_latest()
    assert found.step == 3
    assert reasons == (f"{path.name} is damaged (it has another checksum than it was written with)",)
    assert path.with_name(f"{path.name}.damaged").read_bytes() == body


def calls_of(work, killed_at=None):
    """How many functions of C, the system's among them, some work calls; the process is killed before one of them."""
    count = 0

    def see(_, event, __):
        nonlocal count
        if event == "c_call":
            if count == killed_at:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1

    sys.setprofile(see)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_trainer_killed_while_writing_leaves_a_whole_checkpoint(tmp_path):
    kept_steps(tmp_path, 1, 2)
    count, latest = calls_of(partial(kept_steps, tmp_path, 3)), 3
    for step, point in enumerate(range(0, count * 5 // 4, max(1, count // 16)), 4):
        pid = os.fork()
        if not pid:  # it never comes back
            calls_of(partial(keep, CheckpointFolder(tmp_path), step), point)
            os._exit(0)
        ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert ended == -signal.SIGKILL or (ended == 0 and point > count // 2)
        found, reasons = CheckpointFolder(tmp_path).read_latest()
        assert found.step in ((latest, step) if ended else (step,))
        assert found.losses == (1.0,) * found.step
        assert not reasons
        latest = found.step
    assert latest > 3, "the last points are behind the writing"
    names = {f"step-{step:010}.safetensors" for step in (latest, step + 1)}
    assert kept_steps(tmp_path, step + 1).keys() == names


def test_what_was_set_aside_is_neither_counted_nor_written_over(tmp_path):
    kept_steps(tmp_path, 3, 5)
    newest = tmp_path / "checkpoints" / f"step-{5:010}.safetensors"
    newest.write_bytes(b"damaged")
    folder = CheckpointFolder(tmp_path)
    found, _ = folder.read_latest()
    assert found.step == 3
    for step in (4, 5, 6):
        keep(folder, step)
    names = {f"step-{step:010}.safetensors" for step in (5, 6)}
    assert contents(tmp_path).keys() == {*names, f"{newest.name}.damaged"}
    assert contents(tmp_path)[f"{newest.name}.damaged"] == b"damaged"
    assert torch.tensor(CheckpointFolder(tmp_path).read_latest()[0].losses).sum() == 6
