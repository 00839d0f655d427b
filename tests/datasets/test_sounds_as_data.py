"""Sounds and arrays as data sets: found in class folders and tars, copied with their names, and checked."""

import io
import tarfile

import numpy as np
import pytest

from frostline.core.errors import SampleError
from frostline.datasets import Dataset
from frostline.datasets.check import check
from frostline.datasets.copy.layout import suffix_by_content
from frostline.datasets.copy.repack import repack
from frostline.preprocess import imagenet
from frostline.preprocess.apply import decode_into
from support.signals import array_bytes, some_arrays, write_arrays

SOUND = b"RIFF\x24\0\0\0WAVE" + bytes(20)


def quiet(_):
    """Observe nothing."""


def written(folder, *names):
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(SOUND + bytes([number]))
    return folder


def objects(data):
    return list(data.samples.objects)


def test_sounds_in_class_folders_are_a_data_set(tmp_path):
    names = ["no/1.wav", "no/2.FLAC", "yes/a/3.ogg", "yes/4.opus"]
    data = Dataset(written(tmp_path / "data", *names, "yes/notes.txt", "yes/.5.wav", "6.wav"), cache=tmp_path)
    assert sorted(objects(data)) == sorted(names)
    assert data.classes == ("no", "yes")


def test_folders_of_splits_are_seen_among_sounds(tmp_path):
    data = Dataset(written(tmp_path / "data", "train/no/1.wav", "test/no/2.wav"), cache=tmp_path)
    assert sorted(data.splits) == ["test", "train"]
    assert data.classes == ("no",)


def test_where_there_are_images_the_sounds_beside_them_are_no_samples(tmp_path):
    data = Dataset(written(tmp_path / "data", "no/1.wav", "no/1.jpg", "yes/2.jpg"), cache=tmp_path)
    assert objects(data) == ["no/1.jpg", "yes/2.jpg"]


def test_sounds_in_no_folder_are_samples_without_classes(tmp_path):
    data = Dataset(written(tmp_path / "data", "1.wav", "2.wav"), cache=tmp_path)
    assert objects(data) == ["1.wav", "2.wav"]
    assert data.classes == ()


def test_a_sound_is_the_sample_of_a_key_without_an_image(tmp_path):
    (tmp_path / "data").mkdir()
    with tarfile.open(tmp_path / "data" / "0.tar", "w") as tar:
        for name in ("1.wav", "1.cls", "2.flac", "2.jpg", "2.cls", "3.audio.wav", "3.cls"):
            content = b"0" if name.endswith("cls") else SOUND
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    data = Dataset(tmp_path / "data", cache=tmp_path)
    assert list(data.whole.names) == ["0.tar/1.wav", "0.tar/2.jpg", "0.tar/3.audio.wav"]


@pytest.mark.parametrize("format", ["webdataset", "original", "parquet"])
def test_sounds_and_arrays_are_copied_as_they_are(tmp_path, format):
    written(tmp_path / "sounds", "no/1.wav", "yes/2.flac")
    arrays, labels = some_arrays(rows=4, shape=(2, 3))
    write_arrays(tmp_path / "arrays", "folders", arrays, labels)
    for kind in ("sounds", "arrays"):
        source = Dataset(tmp_path / kind, cache=tmp_path / "cache")
        repack(source, tmp_path / f"{kind}-copy", format, observe=quiet)
        copy = Dataset(tmp_path / f"{kind}-copy", cache=tmp_path / "cache")
        assert copy.classes == source.classes
        assert len(copy) == len(source)


@pytest.mark.parametrize(
    ("start", "suffix"),
    [(SOUND, ".wav"), (b"RIFF\x24\0\0\0WEBP", ".webp"), (b"fLaC", ".flac"), (b"OggS", ".ogg"), (b"\x93NUMPY", ".npy")],
)
def test_first_bytes_say_what_a_sample_is(start, suffix):
    assert suffix_by_content(start + bytes(20)) == suffix


def test_a_check_reads_arrays_of_any_shape_and_names_those_that_are_cut_off(tmp_path):
    arrays, labels = some_arrays(rows=4, shape=(2, 3, 5))
    write_arrays(tmp_path / "data", "folders", arrays, labels)
    broken = tmp_path / "data" / "1" / "003.npy"
    broken.write_bytes(broken.read_bytes()[:-1])
    np.save(tmp_path / "data" / "1" / "004.npy", np.array(["a"]))
    found = check(Dataset(tmp_path / "data", cache=tmp_path), observe=quiet)
    reasons = {skipped.object: skipped.reason for skipped in found.unreadable}
    assert set(reasons) == {"1/003.npy", "1/004.npy"}
    assert "broken array" in reasons["1/003.npy"]
    assert "are no numbers" in reasons["1/004.npy"]


def test_a_check_decodes_whole_sounds(tmp_path):
    pytest.importorskip("soundfile")
    pytest.importorskip("soxr")
    from support.sounds import some_waves, write_sounds

    write_sounds(tmp_path / "data", *some_waves(4), kind="FLAC")
    broken = tmp_path / "data" / "1" / "003.flac"
    broken.write_bytes(broken.read_bytes()[:-500])
    found = check(Dataset(tmp_path / "data", cache=tmp_path), observe=quiet)
    assert [skipped.object for skipped in found.unreadable] == ["1/003.flac"]


def test_explains_what_to_declare_as_targets():
    images, out = imagenet(8), np.zeros((3, 8, 8), np.float32)
    for encoded, said in [
        (SOUND, r"declare .*preprocess\.audio"),
        (array_bytes(np.zeros(3)), r"with preprocess\.array"),
    ]:
        with pytest.raises(SampleError, match=said):
            decode_into(images, encoded, out, id=0, view=None)
