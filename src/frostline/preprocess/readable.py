"""Reads a whole sample of any kind, as a check does, and says what is wrong with it."""

from frostline.preprocess.apply import MAX_PIXELS
from frostline.preprocess.arrays import check_array
from frostline.preprocess.decoder import decoded, is_array
from frostline.preprocess.sounds import check_sound, is_sound

__all__ = ("check_readable",)


def check_readable(encoded: bytes | memoryview) -> None:
    """Decode an image or a sound, or read the header of an array.

    Raises:
        SampleError: it cannot be read.
    """
    if is_array(encoded):
        check_array(encoded)
    elif is_sound(encoded):
        check_sound(encoded)
    else:
        decoded(encoded, "RGB", max_pixels=MAX_PIXELS)
