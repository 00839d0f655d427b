"""Decodes sounds within bounds to one rate and length, and makes log-mel spectrograms as torchaudio defines them.

Decodes sounds within bounds, with soundfile, and brings them to one rate and length: the same wave on every side.
"""

import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from io import BytesIO
from typing import Any

import numpy as np
import numpy.typing as npt

from frostline.core.errors import SampleError
from frostline.preprocess.steps import DecodeAudio

__all__ = (
    "LACKS_SOUND",
    "check_sound",
    "has_sound_packages",
    "is_sound",
    "seconds_of",
    "sound_bytes",
    "sound_into",
    "sounds_name",
)


_FLOOR = 1e-6  # what is added before the logarithm, so that silence has one
_AT_ONCE = 128  # frames whose spectra are in memory together
_KEPT = 8


def _log_mel_into(
    wave: npt.NDArray[np.float32], out: npt.NDArray[np.float32], *, sample_rate: int, n_fft: int, hop_length: int
) -> None:
    """Write the log-mel spectrogram of a wave into ``out``.

    It is ``log(MelSpectrogram(wave) + 1e-6)`` with torchaudio's ``MelSpectrogram`` as it is by default: a periodic Hann
    window, frames around their middles, reflected at both ends, powers, and HTK's mels without a norm. Doubles are
    rounded once, at the end.

    Args:
        wave: ``float32[n]``, at least ``n_fft`` of them.
        out: ``float32[n_mels, 1 + n // hop_length]``.
        sample_rate: samples a second.
        n_fft: samples of a frame.
        hop_length: samples from one frame to the next.
    """
    filters = _mel_filters(sample_rate, n_fft, len(out))
    padded = np.pad(wave.astype(np.float64), n_fft // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[::hop_length]
    for start in range(0, out.shape[1], _AT_ONCE):
        spectra = np.fft.rfft(frames[start : start + _AT_ONCE] * _window(n_fft))
        powers = np.square(spectra.real) + np.square(spectra.imag)
        # Not by the operator @: how BLAS adds up depends on how many threads it has.
        mels = np.einsum("tf,mf->mt", powers, filters)
        out[:, start : start + _AT_ONCE] = np.log(mels + _FLOOR)


@lru_cache(maxsize=_KEPT)
def _mel_filters(sample_rate: int, n_fft: int, n_mels: int) -> npt.NDArray[np.float64]:
    """The triangles of HTK's mels from 0 to half the sample rate, as torchaudio's ``melscale_fbanks`` has them.

    Returns:
        ``float64[n_mels, n_fft // 2 + 1]``.
    """
    bins = np.linspace(0, sample_rate // 2, n_fft // 2 + 1)
    corners = _hertz(np.linspace(0, _mels(sample_rate / 2), n_mels + 2))
    widths = np.diff(corners)
    slopes = corners[:, None] - bins
    filters: npt.NDArray[np.float64] = np.minimum(-slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None])
    filters = np.maximum(filters, 0)
    filters.flags.writeable = False
    return filters


@lru_cache(maxsize=_KEPT)
def _window(n_fft: int) -> npt.NDArray[np.float64]:
    return np.hanning(n_fft + 1)[:-1]


def _mels(hertz: float) -> float:
    return float(2595.0 * np.log10(1.0 + hertz / 700.0))


def _hertz(mels: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    return np.asarray(700.0 * (10.0 ** (mels / 2595.0) - 1.0), np.float64)


LACKS_SOUND = "sounds need the packages soundfile and soxr: pip install 'frostline[audio]'"

_PACKAGES = ("soundfile", "soxr")
_STARTS = (b"RIFF", b"fLaC", b"OggS")
_WAVE = b"WAVE"
# What libsndfile calls containers and encodings. Others take more of its code, which nobody looks after any more.
_FORMATS = frozenset({"WAV", "WAVEX", "FLAC", "OGG"})
_ENCODINGS = frozenset(
    {"PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW", "VORBIS", "OPUS"}
)
_MAX_CHANNELS = 8
_RATES = range(1_000, 384_001)
_MAX_CHUNKS = 256
_UNKNOWN_SIZE = 0x7FFF0000  # what writes into a pipe puts a number from here on in the place of a size
_UNKNOWN_FRAMES = 1 << 40
_QUIET = 1e-7  # as in transformers' feature extractors
_BLOCK = 1 << 16
_LARGEST_CHUNK = 4 << 20  # spectra of some frames, and what libsndfile needs


@cache
def sounds_name() -> str:
    """What decodes and resamples sounds here, with its versions."""
    try:
        packages = ", ".join(f"{name} {version(name)}" for name in _PACKAGES)
    except PackageNotFoundError:
        return "soundfile and soxr, not installed"
    return f"{packages}, libsndfile {import_module('soundfile').__libsndfile_version__}, NumPy {np.__version__}"


def has_sound_packages() -> bool:
    """Whether the packages are installed that decode and resample sounds."""
    return all(find_spec(name) is not None for name in _PACKAGES)


def is_sound(encoded: bytes | memoryview) -> bool:
    """Whether a sample begins as WAV, FLAC or OGG does."""
    start = bytes(encoded[:12])
    return start.startswith(_STARTS) and (not start.startswith(b"RIFF") or start[8:] == _WAVE)


def check_sound(encoded: bytes | memoryview) -> None:
    """Decode a whole sound, some of it at a time.

    Raises:
        SampleError: The sound is damaged or cut off, or the packages for it are not installed.
    """
    with _opened(encoded) as file:
        count = 0
        for block in file.blocks(_BLOCK, dtype="float32", always_2d=True):
            count += _checked(block)
        _check_count(file, count, file.frames)


def seconds_of(encoded: bytes | memoryview) -> float:
    """Length of a sound in seconds, by its header.

    Raises:
        SampleError: The sound is damaged, or the packages for it are not installed.
    """
    with _opened(encoded) as file:
        frames: int = file.frames
        return frames / float(file.samplerate)


def sound_bytes(step: DecodeAudio, encoded: bytes | memoryview) -> int:
    """An upper bound of the memory that ``sound_into`` needs, from the header alone; 0 where that is broken."""
    try:
        with _opened(encoded) as file:
            return _memory(step, file)
    except SampleError:
        return 0


def sound_into(step: DecodeAudio, encoded: bytes | memoryview, out: npt.NDArray[np.float32], *, max_bytes: int) -> None:
    """Write one sound into ``out``, as its wave or as a log-mel spectrogram. Safe for threads.

    Args:
        step: step that declares the features, the rate and the length.
        encoded: WAV, FLAC or OGG (Vorbis or Opus); its channels are averaged.
        out: see ``step.shape``.
        max_bytes: maximum memory, looked up in its header before anything is decoded.

    Raises:
        SampleError: the sound is broken, cut off, empty, or of a kind that is not read.
    """
    with _opened(encoded) as file:
        if _memory(step, file) > max_bytes:
            raise SampleError(
                f"too long: {step.seconds:g} s at {file.samplerate} Hz take more memory than there is for one"
            )
        mono, rate = _mono(_read(step, file)), file.samplerate
    if rate != step.sample_rate:
        mono = _package("soxr").resample(mono, rate, step.sample_rate)
    wave = _fitted(mono[: step.samples], step)
    if step.features == "waveform":
        out[:] = wave
    else:
        _log_mel_into(wave, out[0], sample_rate=step.sample_rate, n_fft=step.n_fft, hop_length=step.hop_length)


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise SampleError(LACKS_SOUND) from error


@contextmanager
def _opened(encoded: bytes | memoryview) -> Iterator[Any]:
    """The sound, of which the header is read."""
    _check_start(encoded)
    soundfile = _package("soundfile")
    try:
        with soundfile.SoundFile(BytesIO(encoded)) as file:
            _check_header(file)
            yield file
    except (RuntimeError, ValueError, OverflowError, MemoryError) as error:
        # soundfile's own words begin with the name of what it opens, which has an address in memory here.
        words = " ".join(str(getattr(error, "error_string", error)).split())
        raise SampleError(f"broken sound: {words[:120] or type(error).__name__}") from error


def _check_start(encoded: bytes | memoryview) -> None:
    if not is_sound(encoded):
        raise SampleError("it is no sound as WAV, FLAC or OGG keep one")
    if bytes(encoded[:4]) == b"RIFF":
        _check_wave(encoded)


def _check_wave(encoded: bytes | memoryview) -> None:
    """Refuse a WAV that is cut off: libsndfile takes what is left for all there is."""
    place = 12
    for _ in range(_MAX_CHUNKS):
        if place + 8 > len(encoded):
            break
        name, size = struct.unpack_from("<4sI", encoded, place)
        left = len(encoded) - place - 8
        if name == b"data" and left < size < _UNKNOWN_SIZE:
            raise SampleError(f"it is cut off: its header says {size} bytes of sound, and {left} are there")
        if name == b"data":
            return
        place += 8 + size + size % 2
    raise SampleError("broken sound: its header names none, or it is cut off")


def _check_header(file: Any) -> None:
    if file.format not in _FORMATS or file.subtype not in _ENCODINGS:
        raise SampleError(f"sounds of the kind {file.format} {file.subtype} are not read: WAV, FLAC and OGG are")
    if file.channels > _MAX_CHANNELS:
        raise SampleError(f"it has {file.channels} channels, and up to {_MAX_CHANNELS} are read")
    if file.samplerate not in _RATES:
        raise SampleError(f"it has {file.samplerate} samples a second: from {_RATES[0]} to {_RATES[-1]} are read")


def _frames(step: DecodeAudio, file: Any) -> int:
    """How many of its frames are decoded."""
    frames: int = file.frames
    rate: int = file.samplerate
    return min(frames, math.ceil(step.seconds * rate))


def _memory(step: DecodeAudio, file: Any) -> int:
    # Frames of floats, one channel of them twice, and what soxr gives; the wave, in doubles too.
    frames = _frames(step, file)
    channels: int = file.channels
    rate: int = file.samplerate
    resampled = math.ceil(frames * step.sample_rate / rate)
    return _LARGEST_CHUNK + 4 * (frames * (channels + 2) + 2 * resampled) + 16 * step.samples


def _read(step: DecodeAudio, file: Any) -> npt.NDArray[np.float32]:
    """The frames, ``float32[n, channels]``."""
    wanted = _frames(step, file)
    found: npt.NDArray[np.float32] = file.read(wanted, dtype="float32", always_2d=True)
    _check_count(file, _checked(found), wanted)
    return found


def _checked(found: npt.NDArray[np.float32]) -> int:
    """How many frames these are."""
    if not np.isfinite(found).all():
        raise SampleError("broken sound: some of its samples are no finite numbers")
    return len(found)


def _check_count(file: Any, count: int, wanted: int) -> None:
    if not count:
        raise SampleError("it holds no sound: its header says 0 frames, or none could be read")
    if count < wanted and file.frames < _UNKNOWN_FRAMES:
        raise SampleError(f"it is cut off: its header says {file.frames} frames, and {count} could be read")


def _mono(frames: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.ascontiguousarray(frames[:, 0]) if frames.shape[1] == 1 else frames.mean(axis=1)


def _fitted(mono: npt.NDArray[np.float32], step: DecodeAudio) -> npt.NDArray[np.float32]:
    """The wave with silence behind it, so that it is as long as every other."""
    wave = np.zeros(step.samples, np.float32)
    wave[: len(mono)] = (mono - mono.mean()) / np.sqrt(mono.var() + _QUIET) if step.normalize else mono
    return wave
