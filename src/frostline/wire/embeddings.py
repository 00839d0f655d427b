"""The message that asks a node for embeddings of texts or images that come with it, in the widely used shape."""

import base64
import binascii
import re
from dataclasses import dataclass
from typing import Any

from frostline.errors import BadRequest

__all__ = ("ENCODINGS", "MAX_INPUTS", "EmbeddingRequest")

ENCODINGS = ("float", "base64")
"""How the numbers of an embedding are written: as JSON, or as the base64 of little-endian float32."""

MAX_INPUTS = 2048
"""Maximum number of inputs of one request."""

_DIGEST = re.compile(r"[0-9a-f]{64}")
_DATA_URL = re.compile(r"data:[\w.+-]{1,64}/[\w.+-]{1,64};base64,", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingRequest:
    """Ask for what a network's frozen part gives for some inputs.

    Attributes:
        model: digest of the prefix, which the node must hold.
        inputs: texts, or images as data URLs.
        encoding: one of ``ENCODINGS``.
        preprocess: preprocessing of images as plain JSON; None for texts, whose tokenizer is the prefix's.
    """

    model: str
    inputs: tuple[str, ...]
    encoding: str = ENCODINGS[0]
    preprocess: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, value: object) -> "EmbeddingRequest":
        """Read the body of ``POST /v1/embeddings``; fields that it does not know are passed over.

        Raises:
            BadRequest: naming the field that is wrong.
        """
        if not isinstance(value, dict):
            raise BadRequest("the request must be an object with 'model' and 'input'")
        model, encoding = value.get("model"), value.get("encoding_format", ENCODINGS[0])
        preprocess = value.get("preprocess")
        if not isinstance(model, str) or not _DIGEST.fullmatch(model):
            raise BadRequest("model must be the digest of a prefix that this node holds: 64 hexadecimal digits")
        if encoding not in ENCODINGS:
            raise BadRequest(f"encoding_format must be {' or '.join(ENCODINGS)}")
        if preprocess is not None and not isinstance(preprocess, dict):
            raise BadRequest("preprocess must be an object")
        if value.get("dimensions") is not None:
            raise BadRequest("dimensions: an embedding has as many numbers as the network gives; leave it out")
        return cls(model=model, inputs=_inputs(value.get("input")), encoding=encoding, preprocess=preprocess)

    def texts(self) -> tuple[bytes, ...]:
        """The inputs as texts in UTF-8.

        Raises:
            BadRequest: one cannot be written so.
        """
        try:
            return tuple(text.encode() for text in self.inputs)
        except UnicodeEncodeError as error:
            raise BadRequest("input: a text holds half a character, which cannot be written in UTF-8") from error

    def images(self) -> tuple[bytes, ...]:
        """The encoded images of the inputs.

        Raises:
            BadRequest: one is no data URL.
        """
        return tuple(_image(number, url) for number, url in enumerate(self.inputs))


def _inputs(value: object) -> tuple[str, ...]:
    inputs = [value] if isinstance(value, str) else value
    if not isinstance(inputs, list) or not all(isinstance(text, str) and text for text in inputs):
        raise BadRequest("input must be a text, a data URL of an image, or a list of these; none may be empty")
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise BadRequest(f"input must have from 1 to {MAX_INPUTS} texts or images, not {len(inputs)}")
    return tuple(inputs)


def _image(number: int, url: str) -> bytes:
    start = _DATA_URL.match(url)
    if start is None:
        raise BadRequest(
            f"input[{number}] is a text, and this network takes images: write each as data:image/jpeg;base64,..."
        )
    try:
        data = base64.b64decode(url[start.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"input[{number}] holds no base64 behind its comma") from error
    if not data:
        raise BadRequest(f"input[{number}] holds no image")
    return data
