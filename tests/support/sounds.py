"""Sounds of two classes: chords above and below each other, as WAV, FLAC and OGG."""

import io

import numpy as np
import pytest

__all__ = ("encoded_sound", "some_waves", "write_sounds")


def some_waves(rows=24, rate=16_000, seconds=0.3, seed=0):
    """Waves of a few tones and some noise, and their labels."""
    draw = np.random.default_rng(seed)
    times = np.arange(round(rate * seconds)) / rate
    labels = [row % 2 for row in range(rows)]
    tones = [(300 + 900 * label) * draw.uniform(1, 2, (3, 1)) for label in labels]
    waves = [0.2 * np.sin(2 * np.pi * tone * times).sum(0) + 0.05 * draw.standard_normal(len(times)) for tone in tones]
    return [wave.astype(np.float32) for wave in waves], labels


def encoded_sound(wave, rate=16_000, kind="WAV", subtype=None):
    """A wave ``[n]`` or ``[n, channels]`` as a file of that kind."""
    soundfile = pytest.importorskip("soundfile")
    file = io.BytesIO()
    soundfile.write(file, wave, rate, format=kind, subtype=subtype)
    return file.getvalue()


def write_sounds(folder, waves, labels, kind="WAV", rate=16_000):
    """Write them in class folders."""
    for row, (wave, label) in enumerate(zip(waves, labels, strict=True)):
        (folder / str(label)).mkdir(parents=True, exist_ok=True)
        (folder / str(label) / f"{row:03}.{kind.lower()}").write_bytes(encoded_sound(wave, rate, kind))
