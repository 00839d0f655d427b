"""Makes log-mel spectrograms as torchaudio defines them, with NumPy alone and in double precision."""

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ("log_mel_into", "mel_filters")

_FLOOR = 1e-6  # what is added before the logarithm, so that silence has one
_AT_ONCE = 128  # frames whose spectra are in memory together
_KEPT = 8


def log_mel_into(
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
    filters = mel_filters(sample_rate, n_fft, len(out))
    padded = np.pad(wave.astype(np.float64), n_fft // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, n_fft)[::hop_length]
    for start in range(0, out.shape[1], _AT_ONCE):
        spectra = np.fft.rfft(frames[start : start + _AT_ONCE] * _window(n_fft))
        powers = np.square(spectra.real) + np.square(spectra.imag)
        # Not by the operator @: how BLAS adds up depends on how many threads it has.
        mels = np.einsum("tf,mf->mt", powers, filters)
        out[:, start : start + _AT_ONCE] = np.log(mels + _FLOOR)


@lru_cache(maxsize=_KEPT)
def mel_filters(sample_rate: int, n_fft: int, n_mels: int) -> npt.NDArray[np.float64]:
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
