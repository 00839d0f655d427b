"""Sounds as waves and log-mel spectrograms: what soundfile, soxr and torchaudio's definition give, and bounded."""

import io
import json
import math
import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from frostline import preprocess
from frostline.core.errors import BadRequest, SampleError, SettingError
from frostline.preprocess import Applied, CenterCrop, DecodeAudio, Preprocess, sounds
from frostline.preprocess.apply import decode_into, pixels_needed, scratch_bytes
from support.sounds import encoded_sound, some_waves

soundfile = pytest.importorskip("soundfile")
soxr = pytest.importorskip("soxr")

RATE = 16_000
CHANGES = st.lists(st.tuples(st.integers(0, 2**16), st.integers(0, 255)), max_size=9)


def heard(encoded, made, **options):
    out = np.full(made.shape, np.nan, np.float32)
    decode_into(made, encoded, out, id=0, view=None, **options)
    return out


def wave_of(encoded, seconds=0.3, **options):
    return heard(encoded, preprocess.audio(seconds, features="waveform", **options))


def wave(seconds=0.3, rate=RATE):
    return some_waves(1, rate, seconds)[0][0]


def log_mel(samples, rate=RATE, n_fft=400, hop_length=160, n_mels=80):
    """torchaudio's ``MelSpectrogram`` as its documentation defines it, in doubles, and its logarithm."""
    audio_utils = pytest.importorskip("transformers.audio_utils")
    window = torch.hann_window(n_fft, dtype=torch.float64)
    asked = {"hop_length": hop_length, "window": window, "center": True, "pad_mode": "reflect", "return_complex": True}
    powers = torch.stft(torch.tensor(samples, dtype=torch.float64), n_fft, **asked).abs() ** 2
    filters = audio_utils.mel_filter_bank(n_fft // 2 + 1, n_mels, 0, rate / 2, rate, norm=None, mel_scale="htk")
    return np.log(filters.T @ powers.numpy() + 1e-6)


@pytest.mark.parametrize(("kind", "subtype"), [("WAV", "FLOAT"), ("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "ULAW")])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_wave_is_what_soundfile_reads_with_its_channels_averaged(kind, subtype, channels):
    encoded = encoded_sound(np.stack([wave()] * channels, 1) * np.arange(1, channels + 1), kind=kind, subtype=subtype)
    meant, _ = soundfile.read(io.BytesIO(encoded), dtype="float32", always_2d=True)
    assert np.array_equal(wave_of(encoded), meant.mean(1))


@pytest.mark.parametrize(("kind", "subtype"), [("FLAC", None), ("OGG", "VORBIS"), ("OGG", "OPUS")])
def test_reads_flac_and_ogg(kind, subtype):
    encoded = encoded_sound(wave(), kind=kind, subtype=subtype)
    meant, rate = soundfile.read(io.BytesIO(encoded), dtype="float32")
    assert rate == RATE
    assert np.array_equal(wave_of(encoded), meant[: len(wave())])


def test_flac_gives_the_wave_that_was_written():
    ints = np.round(wave() * 2**15).astype(np.int16)
    assert np.array_equal(wave_of(encoded_sound(ints, kind="FLAC")), ints.astype(np.float32) / 2**15)


@pytest.mark.parametrize("rate", [8_000, 22_050, 44_100, 48_000, 11_127])
def test_other_rates_are_resampled(rate):
    encoded = encoded_sound(wave(rate=rate), rate, subtype="FLOAT")
    meant = soxr.resample(wave(rate=rate), rate, RATE)
    found = wave_of(encoded)
    assert np.array_equal(found[: len(meant)], meant[: len(found)])
    assert not found[len(meant) :].any()


def test_a_tone_stays_a_tone_when_its_rate_changes():
    times = np.arange(44_100) / 44_100
    found = wave_of(encoded_sound(np.sin(2 * np.pi * 1000 * times), 44_100, subtype="FLOAT"), 1.0)
    meant = np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE)
    np.testing.assert_allclose(found[500:-500], meant[500:-500], atol=1e-4)


def test_sounds_are_cut_or_padded_with_silence_to_one_length():
    encoded = encoded_sound(wave(0.3), subtype="FLOAT")
    assert np.array_equal(wave_of(encoded, 0.1), wave(0.3)[:1600])
    longer = wave_of(encoded, 0.5)
    assert np.array_equal(longer[:4800], wave(0.3))
    assert longer.shape == (8000,)
    assert not longer[4800:].any()


@pytest.mark.filterwarnings("ignore:At least one mel filter")
@pytest.mark.parametrize("asked", [{}, {"n_fft": 512, "hop_length": 256, "n_mels": 40}, {"n_fft": 1024, "n_mels": 128}])
@pytest.mark.parametrize("rate", [8_000, 16_000, 22_051])
def test_a_spectrogram_is_that_of_torchaudios_definition(rate, asked):
    made = preprocess.audio(0.3, sample_rate=rate, **asked)
    samples = wave(rate=rate)[: made.steps[0].samples]
    found = heard(encoded_sound(samples, rate, subtype="FLOAT"), made)
    padded = np.pad(samples, (0, made.steps[0].samples - len(samples)))
    np.testing.assert_allclose(found[0], log_mel(padded, rate, **asked), atol=1e-4, rtol=0)


def test_silence_has_a_spectrogram():
    found = heard(encoded_sound(np.zeros(4000)), preprocess.audio(0.25))
    assert np.array_equal(found, np.full((1, 80, 26), np.float32(math.log(1e-6))))


def test_a_normalized_wave_is_that_of_wav2vec2s_feature_extractor():
    transformers = pytest.importorskip("transformers")
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True, return_attention_mask=True)
    for seconds in (0.3, 0.2):
        found = wave_of(encoded_sound(wave(), subtype="FLOAT"), seconds, normalize=True)
        meant = extractor(wave()[: round(seconds * RATE)], sampling_rate=RATE).input_values[0]
        np.testing.assert_allclose(found, meant, atol=1e-6)
    padded = wave_of(encoded_sound(wave(), subtype="FLOAT"), 0.5, normalize=True)
    asked = {"sampling_rate": RATE, "padding": "max_length", "max_length": 8000}
    np.testing.assert_allclose(padded, extractor(wave(), **asked).input_values[0], atol=1e-6)


def test_the_same_numbers_come_out_of_every_thread():
    made, encoded = preprocess.audio(0.3), encoded_sound(wave(rate=44_100), 44_100, kind="FLAC")
    meant = heard(encoded, made).tobytes()
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: heard(encoded, made).tobytes(), range(40)))
    assert set(found) == {meant}


def test_a_sound_that_is_cut_off_is_refused():
    for kind in ("WAV", "FLAC"):
        encoded = encoded_sound(wave(), kind=kind)
        with pytest.raises(SampleError, match=r"cut off|broken sound"):
            wave_of(encoded[: len(encoded) // 2])


def test_a_wave_from_a_pipe_says_no_size_and_is_read():
    encoded = bytearray(encoded_sound(wave(), subtype="PCM_16"))
    place = encoded.index(b"data") + 4
    encoded[place : place + 4] = b"\xff" * 4
    assert np.array_equal(wave_of(bytes(encoded)), wave_of(encoded_sound(wave(), subtype="PCM_16")))


@pytest.mark.parametrize(
    ("encoded", "said"),
    [
        (b"", "no sound"),
        (b"RIFF\x24\0\0\0WEBPVP8 ", "no sound"),
        (b"RIFF\x24\0\0\0WAVE", "names none"),
        (b"RIFF\x24\0\0\0WAVE" + b"junk\0\0\0\0" * 1000, "names none"),
        (b"RIFF\x24\0\0\0WAVEdata\0\0\0\0", "broken sound"),
        (b"fLaC" + bytes(100), "broken sound"),
        (b"OggS" + bytes(100), "broken sound"),
        (b"ID3\x04" + bytes(100), "no sound"),
        (b"FORMAT\0\0\0\0AIFF", "no sound"),
    ],
)
def test_refuses_an_invalid_sound_in_one_sentence(encoded, said):
    with pytest.raises(SampleError, match=said) as raised:
        wave_of(encoded)
    assert "0x" not in str(raised.value)
    assert pixels_needed(preprocess.audio(0.3), encoded) == 0


def test_refuses_files_without_sound_or_with_too_much():
    for encoded, said in [
        (encoded_sound(np.zeros(0)), "holds no sound"),
        (encoded_sound(np.zeros((100, 9))), "9 channels"),
        (encoded_sound(np.zeros(100), 800), "800 samples a second"),
        (encoded_sound(np.zeros(100), 400_000), "400000 samples a second"),
        (encoded_sound(np.zeros(1000), subtype="IMA_ADPCM"), "WAV IMA_ADPCM"),
        (encoded_sound(np.array([0, np.inf]), subtype="FLOAT"), "no finite numbers"),
    ]:
        with pytest.raises(SampleError, match=said):
            wave_of(encoded)


def flac_that_says(frames):
    """A FLAC whose header says another number of frames than there are."""
    encoded = bytearray(encoded_sound(wave(), kind="FLAC"))
    last = struct.unpack_from(">I", encoded, 22)[0]
    struct.pack_into(">I", encoded, 22, frames)
    assert last == len(wave())
    return bytes(encoded)


def test_a_header_that_promises_more_than_there_is_is_refused_and_costs_no_memory():
    made, encoded = preprocess.audio(600.0, features="waveform"), flac_that_says(2**32 - 1)
    with pytest.raises(SampleError, match="too long"):
        heard(encoded, made, max_pixels=1000)
    small = preprocess.audio(2.0, features="waveform")
    tracemalloc.start()
    with pytest.raises(SampleError, match=r"cut off|broken sound"):
        heard(encoded, small)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20


def test_memory_stays_within_what_the_header_says_it_takes():
    encoded = encoded_sound(np.stack([wave(3.0, 48_000)] * 2, 1), 48_000, subtype="FLOAT")
    made = preprocess.audio(3.0)
    needed = pixels_needed(made, encoded)
    tracemalloc.start()
    heard(encoded, made, max_pixels=needed)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < scratch_bytes(needed) + len(encoded) + 4 * math.prod(made.shape)
    with pytest.raises(SampleError, match="too long"):
        heard(encoded, made, max_pixels=needed - 1)


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(["WAV", "FLAC", "OGG"]), CHANGES)
def test_broken_bytes_give_finite_numbers_or_a_sentence(kind, changes):
    encoded = bytearray(encoded_sound(wave(0.05), kind=kind))
    for place, value in changes:
        encoded[place % min(len(encoded), 200)] = value
    made = preprocess.audio(0.05)
    with suppress(SampleError):
        assert np.isfinite(heard(bytes(encoded), made)).all()
    assert pixels_needed(made, bytes(encoded)) >= 0


def test_says_shape_and_type_of_a_sample():
    made = preprocess.audio(2.0)
    assert (made.shape, made.dtype, made.levels, made.is_random, made.stored) == (
        (1, 80, 201),
        "float32",
        None,
        False,
        None,
    )
    assert preprocess.audio(seconds=2, sample_rate=8000, features="waveform").shape == (16_000,)


def test_comes_back_from_its_json_and_has_a_digest_of_its_own():
    made = preprocess.audio(1)
    again = Preprocess.from_json(json.loads(json.dumps(made.to_json())))
    assert again == made
    assert again.digest == made.digest
    others = [
        preprocess.audio(1, n_mels=64),
        preprocess.audio(1, hop_length=100),
        preprocess.audio(1, sample_rate=8000),
    ]
    assert len({made.digest, *(other.digest for other in others)}) == 4


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"seconds": 0}, "seconds"),
        ({"seconds": 601}, "seconds"),
        ({"seconds": math.nan}, "seconds"),
        ({"seconds": 0.01}, "at least one frame"),
        ({"seconds": 600, "sample_rate": 192_000}, "too long"),
        ({"seconds": 600, "hop_length": 1}, "too long"),
        ({"sample_rate": 999}, "sample_rate"),
        ({"sample_rate": 16e3}, "sample_rate"),
        ({"features": "mfcc"}, "features must be log_mel or waveform"),
        ({"n_mels": 202}, "n_mels"),
        ({"n_fft": 8}, "n_fft"),
        ({"n_fft": 401}, "even"),
        ({"hop_length": 401}, "hop_length"),
        ({"normalize": 1}, "normalize"),
        ({"normalize": True}, "normalize is for"),
    ],
)
def test_refuses_invalid_arguments(asked, said):
    with pytest.raises(SettingError, match=said):
        preprocess.audio(**{"seconds": 1, **asked})


def test_decoding_a_sound_allows_no_other_step():
    step = DecodeAudio(RATE, 1.0)
    for steps in [(step, CenterCrop(3)), (step, step)]:
        with pytest.raises(SettingError):
            Preprocess(steps=steps)
    with pytest.raises(BadRequest, match="n_mels"):
        Preprocess.from_json({"steps": [{**preprocess.audio(1).to_json()["steps"][0], "n_mels": [1]}]})
    with pytest.raises(SettingError, match="made of images"):
        Applied.to(preprocess.audio(1), "uint8")


def test_says_which_packages_are_missing(monkeypatch):
    monkeypatch.setattr(sounds, "_PACKAGES", ("soundfile", "no_such_package"))
    with pytest.raises(SettingError, match=r"frostline\[audio\]"):
        preprocess.audio(1)
