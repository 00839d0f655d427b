"""Makes a request for features of inputs that came with it, and gathers the numbers of the answer."""

import base64
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from frostline.core import FeatureBatch, Samples
from frostline.core.features import widened
from frostline.errors import BadRequest, OverBudget
from frostline.node.weights.prefix_registry import Resident
from frostline.preprocess import Preprocess, Tokenize
from frostline.preprocess.apply import decode_into
from frostline.preprocess.tokens import content_digest
from frostline.stores.base.protocols import Buffer
from frostline.wire.embeddings import EmbeddingRequest
from frostline.wire.messages import FeatureRequest

__all__ = (
    "MAX_NUMBERS",
    "EmbeddingInputs",
    "SentSamples",
    "answer_body",
    "embedding_inputs",
    "gathered",
    "max_numbers",
)

MAX_NUMBERS = 1 << 18
"""Maximum count of numbers in an answer, of nodes with enough memory."""

_MEMORY_PER_NUMBER = 2048


def max_numbers(memory_bytes: int) -> int:
    """Maximum count of numbers in an answer of a node with that much memory.

    A number takes 25 bytes while it is written as JSON, fewer than what a request reserves for a byte of its body.
    """
    return min(MAX_NUMBERS, memory_bytes // _MEMORY_PER_NUMBER)


class SentSamples:
    """The inputs of a request as a ``Versioned`` store, whose objects are called by their numbers.

    Args:
        inputs: encoded inputs.
    """

    def __init__(self, inputs: Sequence[bytes]) -> None:
        self._inputs = inputs

    def read(self, object: str, offset: int, length: int) -> Buffer:
        """See ``Readable.read``."""
        return self._inputs[int(object)][offset : offset + length]

    def read_version(self, object: str, offset: int, length: int) -> tuple[Buffer, str]:
        """See ``Versioned.read_version``; there is no version."""
        return self.read(object, offset, length), ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingInputs:
    """The inputs of a request, as the node computes them.

    Attributes:
        request: request for their features at the frost line.
        sent: store that holds them.
        tokens: number of tokens of all texts; 0 for images.
    """

    request: FeatureRequest
    sent: SentSamples
    tokens: int


def embedding_inputs(wanted: EmbeddingRequest, resident: Resident, maximum: int) -> EmbeddingInputs:
    """The features that a request for embeddings is answered by.

    Args:
        wanted: request.
        resident: network that it names.
        maximum: maximum count of numbers in the answer.

    Raises:
        BadRequest: the inputs are not of the network's kind, or it gives several tensors.
        OverBudget: the answer would have more numbers.
    """
    prefix = resident.prefix
    line = prefix.cuts[-1]
    if len(line.shapes) != 1:
        raise BadRequest(
            "model: several tensors cross the frost line of this network, and an embedding is one: freeze it up to a "
            "layer that gives one"
        )
    count = len(wanted.inputs) * math.prod(line.shapes[0])
    if count > maximum:
        raise OverBudget(
            f"the answer would have {count} numbers, and this node gives up to {maximum}: send fewer inputs, or start "
            "it with more --memory"
        )
    preprocess = _preprocess(wanted, resident)
    encoded = wanted.images() if preprocess.tokens is None else wanted.texts()
    samples = Samples(
        ids=np.arange(len(encoded)),
        objects=[str(number) for number in range(len(encoded))],
        offsets=np.zeros(len(encoded), np.int64),
        lengths=np.array([len(data) for data in encoded], np.int64),
        labels=np.full(len(encoded), -1, np.int64),
    )
    return EmbeddingInputs(
        request=FeatureRequest(
            data="", samples=samples, prefix=wanted.model, cut=line.number, preprocess=preprocess.to_json()
        ),
        sent=SentSamples(encoded),
        tokens=0 if preprocess.tokens is None else _tokens(preprocess.with_tokenizer(prefix.tokenizer), encoded),
    )


def _preprocess(wanted: EmbeddingRequest, resident: Resident) -> Preprocess:
    prefix = resident.prefix
    if prefix.tokenizer:
        if wanted.preprocess is not None:
            raise BadRequest("preprocess: texts are tokenized as the network says; leave it out")
        return Preprocess(steps=(Tokenize(content_digest(prefix.tokenizer), prefix.input_shape[-1]),))
    if wanted.preprocess is None:
        raise BadRequest("preprocess: say how this network's images are prepared, as for /v1/features")
    preprocess = Preprocess.from_json(wanted.preprocess)
    if preprocess.tokens is not None:
        raise BadRequest("preprocess: this network came without a tokenizer, and takes no texts")
    if preprocess.stored is not None or preprocess.is_random:
        raise BadRequest("preprocess: images that are sent are decoded, without random steps")
    return preprocess


def _tokens(preprocess: Preprocess, texts: Sequence[bytes]) -> int:
    """Tokens of all texts, without those of padding."""
    row = np.zeros(preprocess.shape, np.int64)
    count = 0
    for number, text in enumerate(texts):
        decode_into(preprocess, text, row, id=number, view=None)
        count += int(row[1].sum())
    return count


def gathered(batches: Iterable[FeatureBatch]) -> npt.NDArray[np.float32]:
    """The embeddings ``float32[n, numbers]`` of an answer, in the order of the inputs.

    Raises:
        BadRequest: an input could not be read, or its embedding has numbers that are not finite.
    """
    rows = []
    for batch in batches:
        for skipped in batch.skipped:
            raise BadRequest(f"input[{skipped.id}]: {skipped.reason}")
        rows.append(np.array(widened(batch.tensors[0]), np.float32).reshape(len(batch), -1))
    found = np.concatenate(rows)
    if not np.isfinite(found).all():
        row = int(np.flatnonzero(~np.isfinite(found).all(axis=1))[0])
        raise BadRequest(f"input[{row}]: the network gives numbers that are not finite")
    return found


def answer_body(wanted: EmbeddingRequest, found: npt.NDArray[np.float32], tokens: int) -> bytes:
    """The answer to a request for embeddings as JSON, written a row at a time, since lists of floats are large."""
    rows = b",".join(
        b'{"object":"embedding","index":%d,"embedding":%s}' % (number, _written(row, wanted.encoding))
        for number, row in enumerate(found)
    )
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    rest = json.dumps({"model": wanted.model, "usage": usage}, separators=(",", ":")).encode()
    return b'{"object":"list","data":[' + rows + b"]," + rest[1:]


def _written(row: npt.NDArray[np.float32], encoding: str) -> bytes:
    if encoding == "base64":
        return b'"' + base64.b64encode(row.astype("<f4").tobytes()) + b'"'
    return json.dumps(row.tolist(), separators=(",", ":")).encode()
