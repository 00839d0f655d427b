"""Scales an encoded image down and encodes it again, for copies that are to take less room."""

from io import BytesIO

from PIL import Image

from frostline.preprocess.apply import MAX_PIXELS
from frostline.preprocess.decoder import decoded, size_of

__all__ = ("scaled",)

# At 95 of 100 what the codec loses is below what scaling changes.
_QUALITY = 95


def scaled(encoded: bytes | memoryview, shorter_side: int) -> bytes:
    """Scale an image so that its shorter side has at most so many pixels.

    One that is small enough keeps its bytes. Others become JPEG where they were JPEG, and PNG elsewhere, in the
    orientation in which they are stored; scaling is bicubic with antialiasing, as in ``preprocess.Resize``.

    Raises:
        SampleError: the image is broken, too large or of a kind that is not read.
    """
    width, height = size_of(encoded)
    if 0 < min(width, height) <= shorter_side:
        return bytes(encoded)
    image = decoded(encoded, "RGB", max_pixels=MAX_PIXELS)
    share = shorter_side / min(image.size)
    size = (round(image.width * share), round(image.height * share))
    file = BytesIO()
    kind = "JPEG" if bytes(encoded[:2]) == b"\xff\xd8" else "PNG"
    image.resize(size, Image.Resampling.BICUBIC).save(file, kind, quality=_QUALITY)
    return file.getvalue()
