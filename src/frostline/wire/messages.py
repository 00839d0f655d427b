"""The messages between trainer and node as values and their JSON, and errors as HTTP answers and back."""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Self

import numpy as np

from frostline.core import EXACT, FLOAT32, LOSSY, OBJECTS, READINGS, REFERENCE, Samples, View
from frostline.core.declared import (
    Amount,
    As,
    Count,
    Flat,
    Matching,
    OneOf,
    Read,
    Refer,
    Sized,
    read_declared,
    refuse_unknown_fields,
)
from frostline.core.errors import (
    AccessDenied,
    AnswerDamaged,
    BadRequest,
    EngineNotReady,
    EngineUnsupported,
    Forbidden,
    FrostlineError,
    NodeUnreachable,
    ObjectNotFound,
    OverBudget,
    Overloaded,
    Refused,
    SettingError,
    StoreError,
    StoreThrottled,
    StoreUnavailable,
    Unauthenticated,
    Unavailable,
    UnknownName,
    UnknownPrefix,
    UnknownTraining,
    UnsafeArtifact,
    Untrusted,
)
from frostline.core.system import crc32
from frostline.wire.codecs import CODECS, Codec, offered_precisions

__all__ = (
    "CHECKSUM_HEADER",
    "MAX_INPUTS",
    "MAX_PATCH_BYTES",
    "PROTOCOLS",
    "PROTOCOL_HEADER",
    "STATUS_OF_ERROR",
    "CodecName",
    "EmbeddingRequest",
    "EngineName",
    "FeatureRequest",
    "Health",
    "Patch",
    "ProfileRequest",
    "SampleColumns",
    "answer_checksum",
    "check_protocol",
    "common_protocol",
    "error_from_answer",
    "error_from_json",
    "error_from_line",
    "error_to_json",
    "fields_of_patch",
    "reason_of",
    "retry_after",
    "status_of",
)


PROTOCOLS = (1, 1)
"""The least and the greatest number of the protocol that this version speaks: raised where an older side would
misread a message. A release speaks that of the one before too (``docs/upgrade.md``)."""

CHECKSUM_HEADER = "Frostline-Crc32"
"""Names the CRC-32 of a request's body, or of a short answer's status and body (``answer_checksum``), in hexadecimal
digits: what came damaged is asked for again."""

PROTOCOL_HEADER = "Frostline-Protocol"
"""Names the protocol that a request is written in; without it the request is of the node's greatest."""


def answer_checksum(status: int, body: bytes) -> str:
    """CRC-32 of the digits of an answer's status and of its body, as its head says it."""
    return f"{crc32(body, crc32(str(status).encode())):08x}"


def common_protocol(theirs: tuple[int, int], ours: tuple[int, int] = PROTOCOLS) -> int | None:
    """The greatest protocol that both sides speak; None where there is none.

    Args:
        theirs: lowest and highest protocol version of the other side.
        ours: lowest and highest protocol version of this side.
    """
    least, greatest = max(theirs[0], ours[0]), min(theirs[1], ours[1])
    return greatest if least <= greatest else None


def check_protocol(said: str) -> None:
    """Check the protocol that a request names; one that names none is of the greatest.

    Raises:
        BadRequest: The protocol is no number.
        Refused: This side does not speak the protocol.
    """
    if not said:
        return
    if not re.fullmatch("[0-9]{1,6}", said, re.ASCII):
        raise BadRequest(f"{PROTOCOL_HEADER} must be a number")
    least, greatest = PROTOCOLS
    if not least <= int(said) <= greatest:
        raise Refused(f"the request is of protocol {said}, and this node speaks {least} to {greatest}")


def _codec(value: object, name: str) -> str:
    try:
        return Codec.parse(str(value)).name
    except SettingError as error:
        raise BadRequest(f"{name}: {error}") from error


def _accuracy(value: object, name: str) -> str | float:
    if not isinstance(value, str | int | float):
        raise BadRequest(f"{name} must be a name or a number")
    offered_precisions(value)
    return value


_MAX_SAMPLES = 65_536
_LONGEST_VERSION = 256
_SOME = Sized(1, _MAX_SAMPLES)
_Numbers = Annotated[tuple[Count, ...], _SOME]
_ACCURACY = {"anyOf": [{"enum": [EXACT, FLOAT32, *LOSSY]}, {"type": "number", "minimum": 0}]}

CodecName = Annotated[str, Read(_codec, {"enum": list(CODECS)})]
EngineName = Annotated[
    str,
    Matching(
        r"[a-z0-9-]{1,40}(\+[0-9a-f]{16})?(@[0-9a-f]{16})?",
        "small letters, digits and dashes, and may have digests behind + and @",
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SampleColumns:
    """The samples of a request as columns of equal length.

    Attributes:
        ids: the ids, each once.
        objects: names relative to the data; a cell is named FILE#COLUMN@SIZE.VERSION, and its row is the offset.
        offsets: the offset of each sample in its object.
        lengths: the bytes of each sample as it is encoded.
        versions: ETag of each object as the store listed it, empty where unknown; features of a sample with one may be
            kept and found again. Left out, or as long as the other columns.
    """

    ids: _Numbers
    objects: Annotated[tuple[Annotated[str, Sized(1)], ...], _SOME]
    offsets: _Numbers
    lengths: _Numbers
    versions: Annotated[tuple[Annotated[str, Sized(0, _LONGEST_VERSION)], ...], Sized(0, _MAX_SAMPLES)] = ()

    def samples(self) -> Samples:
        """The samples, without labels.

        Raises:
            BadRequest: a column is shorter than another.
        """
        columns = (self.ids, self.objects, self.offsets, self.lengths, self.versions or self.ids)
        if len({len(column) for column in columns}) != 1:
            raise BadRequest("the columns of samples have different lengths")
        return Samples(
            ids=np.array(self.ids, np.int64),
            objects=list(self.objects),
            offsets=np.array(self.offsets, np.int64),
            lengths=np.array(self.lengths, np.int64),
            labels=np.full(len(self.ids), -1, np.int64),
            versions=list(self.versions),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureRequest:
    """Ask for the activations of some samples at one cut. Stateless and idempotent.

    Attributes:
        data: URL of the data set's root, which the node must serve.
        samples: samples whose activations are wanted; answered in this order. Labels do not travel.
        prefix: digest of the prefix; None where ``cut`` is 0 or 1.
        cut: number of the cut (``core.graph.Cut``).
        preprocess: the declared preprocessing as plain JSON (``preprocess.Preprocess.to_json``).
        view: the random view, where the preprocessing is random; else None.
        codec: the way that the activations are packed (``wire.codecs``); ``exact`` at cut 0.
        tolerance: the largest relative error that a lossy codec may make in a batch, which is packed without loss
            where it would make more; None takes any.
        engine: engine that runs the prefix; ignored without one.
        fixed_rows: True if every run of the prefix has the same number of rows, filled up with zeros, so that features
            do not depend on what else is asked for, to the bit. False lets a processor run only the rows that are
            wanted, rounded up to a multiple of eight.
        reading: the way that the bytes at the samples' addresses are found: one of ``core.READINGS``.
    """

    data: Annotated[str, Sized(1)]
    samples: Annotated[Samples, As(SampleColumns, SampleColumns.samples)]
    prefix: Annotated[str, Sized(1)] | None = None
    cut: Count
    preprocess: Annotated[dict[str, Any], Refer("Preprocess")]
    view: View | None = None
    codec: CodecName = EXACT
    tolerance: Amount | None = None
    engine: EngineName = REFERENCE
    fixed_rows: bool = True
    reading: Annotated[str, OneOf(READINGS)] = OBJECTS

    def check(self) -> Self:
        """The request itself, if its fields make sense together.

        Raises:
            BadRequest: Two fields contradict each other; the message names one.
        """
        if self.cut == 0 and self.codec != EXACT:
            raise BadRequest(f"codec must be {EXACT} at cut 0, which ships samples as they are stored")
        return self

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, as the body of ``POST /v1/features``."""
        return {
            "data": self.data,
            "samples": {
                "ids": self.samples.ids.tolist(),
                "objects": list(self.samples.objects),
                "offsets": self.samples.offsets.tolist(),
                "lengths": self.samples.lengths.tolist(),
                **({"versions": list(self.samples.versions)} if self.samples.versions else {}),
            },
            "prefix": self.prefix,
            "cut": self.cut,
            "preprocess": self.preprocess,
            "view": None if self.view is None else asdict(self.view),
            "codec": self.codec,
            "tolerance": self.tolerance,
            "engine": self.engine,
            "fixed_rows": self.fixed_rows,
            "reading": self.reading,
        }

    @classmethod
    def from_json(cls, value: object) -> "FeatureRequest":
        """The inverse of ``to_json``; raises ``BadRequest`` naming the field that is wrong or unknown."""
        return read_declared(cls, value, "the request").check()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProfileRequest:
    """Have reading, decoding, every cut and some codecs measured, by the fastest engine that is exact enough.

    Attributes:
        features: request whose samples and prefix are measured; its codec is ignored. Where it names an engine beside
            the reference, that one is made ready up to its cut.
        codecs: names of the codecs to measure, each at the cuts where it may be worth it.
        accuracy: the error that an engine's features may have against the reference's: ``exact`` takes the reference
            itself and tries no other; another name or a relative error has those tried that it allows and that pay.
        only_here: the job stops at the cut of ``features`` and at no other: engines are tried at that one.
        trial_s: seconds that the job allows for trials; 0 tries none and uses what is known, None leaves it to the
            node.
        samples_left: number of samples that the job has still to compute: an engine is tried where that saves them more
            time than it takes. None where trials need not pay.
        only_engine: find the engine and measure nothing else; the profile has no costs.
    """

    features: Annotated[FeatureRequest, Flat()]
    codecs: Annotated[tuple[CodecName, ...], Sized(0, len(CODECS))] = ()
    accuracy: Annotated[str | float, Read(_accuracy, _ACCURACY)] = EXACT
    only_here: bool = False
    trial_s: Amount | None = None
    samples_left: Count | None = None
    only_engine: bool = False

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, as the body of ``POST /v1/profiles``."""
        return {
            **self.features.to_json(),
            "codecs": list(self.codecs),
            "accuracy": self.accuracy,
            "only_here": self.only_here,
            "trial_s": self.trial_s,
            "samples_left": self.samples_left,
            "only_engine": self.only_engine,
        }

    @classmethod
    def from_json(cls, value: object) -> "ProfileRequest":
        """The inverse of ``to_json``; raises ``BadRequest`` naming the field that is wrong or unknown."""
        request = read_declared(cls, value, "the request")
        request.features.check()
        return request


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a node says of itself.

    Attributes:
        version: version of Frostline.
        host: a digest that names the machine; two sides on one host share its cores.
        hardware: name of the processor or accelerator and its threads.
        memory_bytes: the node's budget.
        roots: URLs under which the node serves data.
        cores: numbers of the processor cores that the node may use; two sides on one host share those in common.
        protocol: lowest and highest protocol version that the node speaks.
        trouble: the reason why the node should be asked for nothing now, such as ``draining``; empty where it is ready.
        decoding: place where samples are decoded and how it is confined, such as "apart, confined by Landlock 6 and
            seccomp".
        operations_per_s: operations a second of a convolution, as the node has measured; 0 until it has.
    """

    version: str
    host: str
    hardware: str
    memory_bytes: Count
    roots: tuple[str, ...]
    cores: tuple[Count, ...] = ()
    protocol: tuple[int, int] = PROTOCOLS
    trouble: str = ""
    decoding: str = ""
    operations_per_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        lists = {name: list(getattr(self, name)) for name in ("roots", "cores", "protocol")}
        return {**asdict(self), **lists}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Health":
        """The inverse of ``to_json``. What a later version says beside it is passed over: a node may be newer."""
        least, greatest = value["protocol"]
        if not isinstance(least, int) or not isinstance(greatest, int) or not isinstance(value["trouble"], str):
            raise TypeError("a node's health says its protocols and its trouble")
        value = {"decoding": "", "operations_per_s": 0.0, **value}  # a job can do without both
        if not 0 <= value["operations_per_s"] < math.inf:
            raise TypeError("a node's speed is a number")
        known = {field.name: value[field.name] for field in fields(cls)}
        lists = {"roots": tuple(value["roots"]), "cores": tuple(value["cores"]), "protocol": (least, greatest)}
        return cls(**{**known, **lists})


_ENCODINGS = ("float", "base64")
"""How the numbers of an embedding are written: as JSON, or as the base64 of little-endian float32."""

MAX_INPUTS = 2048
"""Maximum number of inputs of one request."""

_DATA_URL = re.compile(r"data:[\w.+-]{1,64}/[\w.+-]{1,64};base64,", re.ASCII)


def _inputs(value: object, name: str) -> tuple[str, ...]:
    inputs = [value] if isinstance(value, str) else value
    if not isinstance(inputs, list) or not all(isinstance(text, str) and text for text in inputs):
        raise BadRequest(f"{name} must be a text, a data URL of an image, or a list of these; none may be empty")
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise BadRequest(f"{name} must have from 1 to {MAX_INPUTS} texts or images, not {len(inputs)}")
    return tuple(inputs)


def _no_dimensions(value: object, name: str) -> None:
    if value is not None:
        raise BadRequest(f"{name}: an embedding has as many numbers as the network gives; leave it out")


_HELD = Matching("[0-9a-f]{64}", "the digest of a prefix that this node holds: 64 hexadecimal digits")
_TEXT = {"type": "string", "minLength": 1}
_INPUTS = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_INPUTS}]}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingRequest:
    """Ask for what a network's frozen part gives for some inputs.

    Attributes:
        model: digest of the prefix, which the node must hold.
        input: a text, a data URL of an image (data:image/jpeg;base64,...), or several of these.
        encoding_format: the form of numbers: JSON's own, or the base64 of little-endian float32.
        preprocess: preprocessing of images as plain JSON; None for texts, whose tokenizer is the prefix's.
        dimensions: a null, for an embedding has as many numbers as the network gives.
        user: name, which clients may send and which says nothing here.
    """

    model: Annotated[str, _HELD]
    input: Annotated[tuple[str, ...], Read(_inputs, _INPUTS)]
    encoding_format: Annotated[str, OneOf(_ENCODINGS)] = _ENCODINGS[0]
    preprocess: Annotated[dict[str, Any], Refer("Preprocess")] | None = None
    dimensions: Annotated[None, Read(_no_dimensions, {"type": "null"})] = None
    user: Any = None

    @classmethod
    def from_json(cls, value: object) -> "EmbeddingRequest":
        """Read the body of ``POST /v1/embeddings``; raises ``BadRequest`` naming the field that is wrong or unknown."""
        return read_declared(cls, value, "the request")

    def texts(self) -> tuple[bytes, ...]:
        """The inputs as texts in UTF-8.

        Raises:
            BadRequest: one cannot be written so.
        """
        try:
            return tuple(text.encode() for text in self.input)
        except UnicodeEncodeError as error:
            raise BadRequest("input: a text holds half a character, which cannot be written in UTF-8") from error

    def images(self) -> tuple[bytes, ...]:
        """The encoded images of the inputs.

        Raises:
            BadRequest: one is no data URL.
        """
        return tuple(_image(number, url) for number, url in enumerate(self.input))


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


MAX_PATCH_BYTES = 4 << 10
"""Longest body of a PATCH."""

# As far as floats count whole numbers exactly.
_MAX_NUMBER = 2**52
_MAX_TEXT = 256

Patch = dict[str, int | float | str | None]
"""Values by their fields; None where a field is to be taken back."""


def fields_of_patch(value: object, known: Iterable[str]) -> Patch:
    """The fields that an untrusted client's PATCH sets.

    Args:
        value: the body, as JSON gave it.
        known: names of the fields that may be set.

    Raises:
        BadRequest: The body is no object of such fields, or a value is neither null, a bounded number nor a short text.
    """
    names = tuple(known)
    if not isinstance(value, dict) or not value:
        raise BadRequest(f"a change is an object with one or more of {', '.join(names)}")
    refuse_unknown_fields(value, names, "a change")
    for name, found in value.items():
        if not (found is None or _is_number(found) or _is_text(found)):
            raise BadRequest(f"{name} must be null, a finite number within ±2^52, or a short text")
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _MAX_NUMBER


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_TEXT


STATUS_OF_ERROR: dict[type[FrostlineError], int] = {
    BadRequest: 400,
    Unauthenticated: 401,
    AccessDenied: 403,
    Forbidden: 403,
    Untrusted: 403,
    ObjectNotFound: 404,
    UnknownName: 404,
    UnknownPrefix: 404,
    UnknownTraining: 404,
    EngineNotReady: 409,
    OverBudget: 413,
    EngineUnsupported: 422,
    UnsafeArtifact: 422,
    Overloaded: 429,
    StoreError: 502,
    StoreThrottled: 503,
    StoreUnavailable: 503,
    AnswerDamaged: 503,
    NodeUnreachable: 503,
    Unavailable: 503,
    Refused: 400,
}
"""Every error that a node may answer with, and its HTTP status."""

_BY_NAME = {kind.__name__: kind for kind in STATUS_OF_ERROR}
_TRY_AGAIN = {408, 425, 429}
_RETRY_AFTER_S = 1.0
_LONGEST_WAIT_S = 3600.0


def status_of(error: FrostlineError) -> int:
    """The HTTP status of an error; 500 for one that a node does not answer with."""
    return next((STATUS_OF_ERROR[kind] for kind in type(error).__mro__ if kind in STATUS_OF_ERROR), 500)


def error_to_json(error: FrostlineError) -> dict[str, Any]:
    """The body of the answer: ``error``, ``message`` and, where it is known, ``retry_after_s``."""
    kind = next((kind for kind in type(error).__mro__ if kind in STATUS_OF_ERROR), type(error))
    wait = {"retry_after_s": error.retry_after_s} if isinstance(error, Overloaded | StoreThrottled) else {}
    return {"error": kind.__name__, "message": str(error), **wait}


def retry_after(error: FrostlineError) -> dict[str, str]:
    """The headers that tell a client what to do: ``Retry-After`` in whole seconds, or how to say who it is."""
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded | StoreThrottled):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return {"Retry-After": "1"} if isinstance(error, Unavailable | StoreUnavailable) else {}


def error_from_answer(status: int, body: bytes, what: str = "node") -> FrostlineError:
    """The error that an HTTP answer other than success means; also for one that no node wrote (a proxy's, say).

    Args:
        status: status of the answer.
        body: body of the answer.
        what: kind of the service that was asked.
    """
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    known = error_from_json(value)
    if known is not None:
        return known
    said = body[:200].decode(errors="replace").strip() or "nothing more"
    sentence = f"the {what} answered with HTTP status {status}: {said}"
    if status in _TRY_AGAIN or status >= 500:
        return Unavailable(sentence)
    return Refused(sentence)


def error_from_json(value: object) -> FrostlineError | None:
    """The inverse of ``error_to_json``; None where the value is no error of a node."""
    if not isinstance(value, dict) or not isinstance(value.get("message"), str):
        return None
    kind = _BY_NAME.get(str(value.get("error")))
    if kind is Overloaded or kind is StoreThrottled:
        return kind(value["message"], retry_after_s=_seconds(value.get("retry_after_s")))
    return kind(value["message"]) if kind else None


def error_from_line(line: bytes) -> FrostlineError | None:
    """The error that the first line of a trainer's process tells; None where it tells that all is well."""
    value = json.loads(line) if line else {}
    if value.get("event") == "ready":
        return None
    return error_from_json(value) or Refused(f"the training did not begin: {str(value.get('message'))[:500]}")


def reason_of(error: Exception, what: str) -> str:
    """Why an exchange with a node or another service failed; where nothing listens, what to look at."""
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens there; is frostline {'serve' if what == 'node' else 'control'} running?"
    return str(error) or type(error).__name__


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_WAIT_S:
        return _RETRY_AFTER_S
    return float(value)
