"""The messages between trainer and node as values, and their JSON."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from frostline.core import Samples, View
from frostline.errors import BadRequest

__all__ = ("FeatureRequest", "Health")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeatureRequest:
    """Ask for the activations of some samples at one cut. Stateless and idempotent.

    Attributes:
        data: URL of the data set's root, which the node must serve.
        samples: whose activations; answered in this order. Labels do not travel.
        prefix: digest of the prefix; None where ``cut`` is 0 or 1.
        cut: number of the cut (``core.graph.Cut``).
        preprocess: the declared preprocessing as plain JSON (``preprocess.Preprocess.to_json``).
        view: which random view, where the preprocessing is random; else None.
    """

    data: str
    samples: Samples
    prefix: str | None
    cut: int
    preprocess: dict[str, Any]
    view: View | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values, as the body of ``POST /v1/features``."""
        return {
            "data": self.data,
            "samples": {
                "ids": self.samples.ids.tolist(),
                "objects": list(self.samples.objects),
                "offsets": self.samples.offsets.tolist(),
                "lengths": self.samples.lengths.tolist(),
            },
            "prefix": self.prefix,
            "cut": self.cut,
            "preprocess": self.preprocess,
            "view": None if self.view is None else asdict(self.view),
        }

    @classmethod
    def from_json(cls, value: object) -> "FeatureRequest":
        """The inverse of ``to_json``; raises ``BadRequest`` naming the field that is wrong."""
        body = _object(value, "the request")
        view = body.get("view")
        prefix = body.get("prefix")
        return cls(
            data=_text(body.get("data"), "data"),
            samples=_samples(_object(body.get("samples"), "samples")),
            prefix=None if prefix is None else _text(prefix, "prefix"),
            cut=_integer(body.get("cut"), "cut"),
            preprocess=_object(body.get("preprocess"), "preprocess"),
            view=None if view is None else _view(_object(view, "view")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """What a node says of itself.

    Attributes:
        version: of Frostline.
        host: a digest that names the machine; two sides on one host share its cores.
        hardware: names the processor or accelerator and its threads.
        memory_bytes: the node's budget.
        roots: URLs under which the node serves data.
    """

    version: str
    host: str
    hardware: str
    memory_bytes: int
    roots: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return {**asdict(self), "roots": list(self.roots)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Health":
        """The inverse of ``to_json``."""
        return cls(**{**value, "roots": tuple(value["roots"])})


_MOST_SAMPLES = 65_536
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


def _list(value: object, field: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{field} must be a list")
    return value


def _samples(body: dict[str, Any]) -> Samples:
    columns = {name: _list(body.get(name), f"samples.{name}") for name in ("ids", "objects", "offsets", "lengths")}
    if len({len(column) for column in columns.values()}) != 1:
        raise BadRequest("the columns of samples have different lengths")
    if not 1 <= len(columns["ids"]) <= _MOST_SAMPLES:
        raise BadRequest(f"a request names 1 to {_MOST_SAMPLES} samples")
    numbers = {
        name: np.array([_integer(one, f"samples.{name}") for one in columns[name]], np.int64)
        for name in ("ids", "offsets", "lengths")
    }
    objects = [_text(one, "samples.objects") for one in columns["objects"]]
    return Samples(objects=objects, labels=np.full(len(objects), -1, np.int64), **numbers)


def _view(body: dict[str, Any]) -> View:
    return View(seed=_integer(body.get("seed"), "view.seed"), epoch=_integer(body.get("epoch"), "view.epoch"))
