"""The messages between trainer and node as values and their JSON, and errors as HTTP answers and back.

The message that asks a node for embeddings of texts or images that come with it, in the widely used shape.

Decides which fields the body of a PATCH sets, within bounds, before anybody looks at what they mean.

Errors as HTTP answers and back: one table, read in both directions.
"""

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

import numpy as np

from frostline.core import EXACT, OBJECTS, READINGS, REFERENCE, Samples, View
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
    suggest_names,
)
from frostline.wire.codecs import CODECS, Codec, offered_precisions

__all__ = (
    "CHECKSUM_HEADER",
    "MAX_INPUTS",
    "MAX_PATCH_BYTES",
    "PROTOCOLS",
    "PROTOCOL_HEADER",
    "TRAVELLING",
    "EmbeddingRequest",
    "FeatureRequest",
    "Health",
    "Patch",
    "ProfileRequest",
    "check_protocol",
    "common_protocol",
    "error_from_answer",
    "error_from_json",
    "error_from_line",
    "error_to_json",
    "fields_of_patch",
    "refuse_unknown_fields",
    "retry_after",
    "status_of",
)


PROTOCOLS = (1, 1)
"""The least and the greatest number of the protocol that this version speaks: raised where an older side would
misread a message. A release speaks that of the one before too (``docs/upgrade.md``)."""

CHECKSUM_HEADER = "Frostline-Crc32"
"""Names the CRC-32 of a request's body, in hexadecimal digits: one that came damaged is asked for again."""

PROTOCOL_HEADER = "Frostline-Protocol"
"""Names the protocol that a request is written in; without it the request is of the node's greatest."""


def common_protocol(theirs: tuple[int, int], ours: tuple[int, int] = PROTOCOLS) -> int | None:
    """The greatest protocol that both sides speak; None where there is none.

    Args:
        theirs: the least and the greatest number that the other side speaks.
        ours: the same of this side.
    """
    least, greatest = max(theirs[0], ours[0]), min(theirs[1], ours[1])
    return greatest if least <= greatest else None


def check_protocol(said: str, ours: tuple[int, int] = PROTOCOLS) -> None:
    """Check the protocol that a request names; one that names none is of the greatest.

    Raises:
        BadRequest: It is no number.
        Refused: This side does not speak it.
    """
    if not said:
        return
    if not re.fullmatch("[0-9]{1,6}", said, re.ASCII):
        raise BadRequest(f"{PROTOCOL_HEADER} must be a number")
    if not ours[0] <= int(said) <= ours[1]:
        raise Refused(f"the request is of protocol {said}, and this node speaks {ours[0]} to {ours[1]}")


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
        reading: the way that the bytes at the samples' addresses are found: one of ``core.READINGS``.
    """

    data: str
    samples: Samples
    prefix: str | None
    cut: int
    preprocess: dict[str, Any]
    view: View | None = None
    codec: str = EXACT
    tolerance: float | None = None
    engine: str = REFERENCE
    reading: str = OBJECTS

    def check(self) -> Self:
        """The request itself, if its fields make sense.

        Raises:
            BadRequest: a field does not; the message names it.
        """
        if self.reading not in READINGS:
            raise BadRequest(f"reading must be {', '.join(READINGS[:-1])} or {READINGS[-1]}")
        if not _ENGINE.fullmatch(self.engine):
            raise BadRequest("engine must be small letters, digits and dashes, and may have digests behind + and @")
        try:
            Codec.parse(self.codec)
        except SettingError as error:
            raise BadRequest(f"codec: {error}") from error
        if self.cut == 0 and self.codec != EXACT:
            raise BadRequest(f"codec must be {EXACT} at cut 0, which ships samples as they are stored")
        if self.tolerance is not None and not 0 <= self.tolerance < math.inf:
            raise BadRequest(f"tolerance must be 0 or more, not {self.tolerance}")
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
            "reading": self.reading,
        }

    @classmethod
    def from_json(cls, value: object) -> "FeatureRequest":
        """The inverse of ``to_json``; raises ``BadRequest`` naming the field that is wrong or unknown."""
        body = _object(value, "the request")
        refuse_unknown_fields(body, (field.name for field in fields(cls)), "the request")
        view = body.get("view")
        prefix = body.get("prefix")
        tolerance = body.get("tolerance")
        return cls(
            data=_text(body.get("data"), "data"),
            samples=_samples(_object(body.get("samples"), "samples")),
            prefix=None if prefix is None else _text(prefix, "prefix"),
            cut=_integer(body.get("cut"), "cut"),
            preprocess=_object(body.get("preprocess"), "preprocess"),
            view=None if view is None else _view(_object(view, "view")),
            codec=_text(body.get("codec", EXACT), "codec"),
            tolerance=None if tolerance is None else _number(tolerance, "tolerance"),
            engine=_text(body.get("engine", REFERENCE), "engine"),
            reading=_text(body.get("reading", OBJECTS), "reading"),
        ).check()


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

    features: FeatureRequest
    codecs: tuple[str, ...] = ()
    accuracy: str | float = EXACT
    only_here: bool = False
    trial_s: float | None = None
    samples_left: int | None = None
    only_engine: bool = False

    def __post_init__(self) -> None:
        if self.trial_s is not None and not 0 <= self.trial_s < math.inf:
            raise BadRequest(f"trial_s must be 0 or more, not {self.trial_s}")
        if self.samples_left is not None and self.samples_left < 0:
            raise BadRequest(f"samples_left must be 0 or more, not {self.samples_left}")
        try:
            offered_precisions(self.accuracy)
        except SettingError as error:
            raise BadRequest(str(error)) from error
        unknown = [name for name in self.codecs if name not in CODECS]
        if unknown:
            raise BadRequest(f"codecs: there is no codec {unknown[0][:50]!r}")

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
        body = _object(value, "the request")
        own = {field.name for field in fields(cls)} - {"features"}
        refuse_unknown_fields(body, (*own, *(field.name for field in fields(FeatureRequest))), "the request")
        codecs = _list(body.get("codecs", []), "codecs")
        if len(codecs) > len(CODECS):
            raise BadRequest(f"codecs must be a list of up to {len(CODECS)} names")
        accuracy = body.get("accuracy", EXACT)
        trial_s, samples_left = body.get("trial_s"), body.get("samples_left")
        return cls(
            features=FeatureRequest.from_json({name: said for name, said in body.items() if name not in own}),
            codecs=tuple(_text(codec, "codecs") for codec in codecs),
            accuracy=_text(accuracy, "accuracy") if isinstance(accuracy, str) else _number(accuracy, "accuracy"),
            only_here=_boolean(body.get("only_here", False), "only_here"),
            trial_s=None if trial_s is None else _number(trial_s, "trial_s"),
            samples_left=None if samples_left is None else _integer(samples_left, "samples_left"),
            only_engine=_boolean(body.get("only_engine", False), "only_engine"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a node says of itself.

    Attributes:
        version: version of Frostline.
        host: a digest that names the machine; two sides on one host share its cores.
        hardware: names the processor or accelerator and its threads.
        memory_bytes: the node's budget.
        roots: URLs under which the node serves data.
        cores: numbers of the processor cores that the node may use; two sides on one host share those in common.
        protocol: the least and the greatest protocol that the node speaks, whatever its version.
        trouble: the reason why the node should be asked for nothing now, such as ``draining``; empty where it is ready.
        decoding: says where samples are decoded, and what confines that, such as "apart, confined by Landlock 6 and
            seccomp".
    """

    version: str
    host: str
    hardware: str
    memory_bytes: int
    roots: tuple[str, ...]
    cores: tuple[int, ...] = ()
    protocol: tuple[int, int] = PROTOCOLS
    trouble: str = ""
    decoding: str = ""

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
        value = {"decoding": "", **value}  # which is for people alone
        known = {field.name: value[field.name] for field in fields(cls)}
        lists = {"roots": tuple(value["roots"]), "cores": tuple(value["cores"]), "protocol": (least, greatest)}
        return cls(**{**known, **lists})


_MAX_SAMPLES = 65_536
_ENGINE = re.compile(r"[a-z0-9-]{1,40}(\+[0-9a-f]{16})?(@[0-9a-f]{16})?")
_LONGEST_VERSION = 256
_LIMIT = 1 << 63


def _object(value: object, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{field} must be an object")
    return value


def _text(value: object, field: str) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise BadRequest(f"{field} must be a text that is not empty")
    return value


def _integer(value: object, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _LIMIT:
        raise BadRequest(f"{field} must be an integer from 0 to 2^63 - 1")
    return value


def _boolean(value: object, field: str) -> bool:
    if not isinstance(value, bool):
        raise BadRequest(f"{field} must be true or false")
    return value


def _number(value: object, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadRequest(f"{field} must be a number")
    return value


def _list(value: object, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{field} must be a list")
    return value


def refuse_unknown_fields(body: dict[str, Any], known: Iterable[str], what: str) -> None:
    """Make sure that somebody's JSON has no field that nobody reads: one that is misspelt would be left out unseen.

    Args:
        body: the object.
        known: names of its fields.
        what: name of it, for the sentence.

    Raises:
        BadRequest: It has another field; the sentence names it, and those that are near.
    """
    names = sorted(known)
    unknown = [str(name) for name in body if name not in names]
    if unknown:
        shown = unknown[0][:50]
        there_are = f": there are {', '.join(names)}" if names else ", and no other one"
        raise BadRequest(f"{what} has no field {shown!r}{suggest_names(shown, names) or there_are}")


_SAMPLE_COLUMNS = ("ids", "objects", "offsets", "lengths", "versions")


def _samples(body: dict[str, Any]) -> Samples:
    refuse_unknown_fields(body, _SAMPLE_COLUMNS, "samples")
    columns = {name: _list(body.get(name), f"samples.{name}") for name in ("ids", "objects", "offsets", "lengths")}
    if len({len(column) for column in columns.values()}) != 1:
        raise BadRequest("the columns of samples have different lengths")
    if not 1 <= len(columns["ids"]) <= _MAX_SAMPLES:
        raise BadRequest(f"a request names 1 to {_MAX_SAMPLES} samples")
    numbers = {
        name: np.array([_integer(value, f"samples.{name}") for value in columns[name]], np.int64)
        for name in ("ids", "offsets", "lengths")
    }
    objects = [_text(name, "samples.objects") for name in columns["objects"]]
    versions = [_version(version) for version in _list(body.get("versions", []), "samples.versions")]
    if versions and len(versions) != len(objects):
        raise BadRequest("the columns of samples have different lengths")
    labels = np.full(len(objects), -1, np.int64)
    return Samples(objects=objects, labels=labels, versions=versions, targets=None, **numbers)


def _version(value: object) -> str:
    if not isinstance(value, str) or len(value) > _LONGEST_VERSION or "\0" in value:
        raise BadRequest(f"samples.versions must be texts of up to {_LONGEST_VERSION} characters")
    return value


def _view(body: dict[str, Any]) -> View:
    refuse_unknown_fields(body, (field.name for field in fields(View)), "view")
    return View(
        seed=_integer(body.get("seed"), "view.seed"),
        epoch=_integer(body.get("epoch"), "view.epoch"),
        recurs=_boolean(body.get("recurs", False), "view.recurs"),
    )


_ENCODINGS = ("float", "base64")
"""How the numbers of an embedding are written: as JSON, or as the base64 of little-endian float32."""

MAX_INPUTS = 2048
"""Maximum number of inputs of one request."""

_EMBEDDING_FIELDS = ("model", "input", "encoding_format", "preprocess", "dimensions", "user")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DATA_URL = re.compile(r"data:[\w.+-]{1,64}/[\w.+-]{1,64};base64,", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EmbeddingRequest:
    """Ask for what a network's frozen part gives for some inputs.

    Attributes:
        model: digest of the prefix, which the node must hold.
        inputs: texts, or images as data URLs.
        encoding: one of ``_ENCODINGS``.
        preprocess: preprocessing of images as plain JSON; None for texts, whose tokenizer is the prefix's.
    """

    model: str
    inputs: tuple[str, ...]
    encoding: str = _ENCODINGS[0]
    preprocess: dict[str, Any] | None = None

    @classmethod
    def from_json(cls, value: object) -> "EmbeddingRequest":
        """Read the body of ``POST /v1/embeddings``. ``user``, which clients may send, says nothing here.

        Raises:
            BadRequest: naming the field that is wrong, or that there is none of.
        """
        if not isinstance(value, dict):
            raise BadRequest("the request must be an object with 'model' and 'input'")
        refuse_unknown_fields(value, _EMBEDDING_FIELDS, "the request")
        model, encoding = value.get("model"), value.get("encoding_format", _ENCODINGS[0])
        preprocess = value.get("preprocess")
        if not isinstance(model, str) or not _DIGEST.fullmatch(model):
            raise BadRequest("model must be the digest of a prefix that this node holds: 64 hexadecimal digits")
        if encoding not in _ENCODINGS:
            raise BadRequest(f"encoding_format must be {' or '.join(_ENCODINGS)}")
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


MAX_PATCH_BYTES = 4 << 10
"""Longest body of a PATCH."""

# As far as floats count whole numbers exactly.
_MAX_NUMBER = 2**52
_MAX_TEXT = 256

Patch = dict[str, int | float | str | None]
"""Values by their fields; None where a field is to be taken back."""


def fields_of_patch(value: object, known: Iterable[str]) -> Patch:
    """The fields that a stranger's PATCH sets.

    Args:
        value: the body, as JSON gave it.
        known: names of the fields that may be set.

    Raises:
        BadRequest: It is no object of such fields, or a value is neither null, a bounded number nor a short text.
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


TRAVELLING: dict[type[FrostlineError], int] = {
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

_BY_NAME = {kind.__name__: kind for kind in TRAVELLING}
_TRY_AGAIN = {408, 425, 429}
_RETRY_AFTER_S = 1.0
_LONGEST_WAIT_S = 3600.0


def status_of(error: FrostlineError) -> int:
    """The HTTP status of an error; 500 for one that a node does not answer with."""
    return next((TRAVELLING[kind] for kind in type(error).__mro__ if kind in TRAVELLING), 500)


def error_to_json(error: FrostlineError) -> dict[str, Any]:
    """The body of the answer: ``error``, ``message`` and, where it is known, ``retry_after_s``."""
    kind = next((kind for kind in type(error).__mro__ if kind in TRAVELLING), type(error))
    wait = {"retry_after_s": error.retry_after_s} if isinstance(error, Overloaded | StoreThrottled) else {}
    return {"error": kind.__name__, "message": str(error), **wait}


def retry_after(error: FrostlineError) -> dict[str, str]:
    """The headers that tell a client what to do: ``Retry-After`` in whole seconds, or how to say who it is."""
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if isinstance(error, Overloaded | StoreThrottled):
        return {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    return {"Retry-After": "1"} if isinstance(error, Unavailable | StoreUnavailable) else {}


def error_from_answer(status: int, body: bytes) -> FrostlineError:
    """The error that an HTTP answer other than success means; also for one that no node wrote (a proxy's, say)."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        value = None
    known = error_from_json(value)
    if known is not None:
        return known
    said = body[:200].decode(errors="replace").strip() or "nothing more"
    sentence = f"the node answered with HTTP status {status}: {said}"
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


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_WAIT_S:
        return _RETRY_AFTER_S
    return float(value)
