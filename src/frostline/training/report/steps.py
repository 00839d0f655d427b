"""The record of a run's steps: digests and small sketches of what each recorded batch was, by which it is verified.

A line of JSON for each recorded step, behind one that says of which weights; each has a checksum of its own. It grows
with the logarithm of the steps, and is read within bounds: a folder may come from anybody.
"""

import base64
import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from frostline.core import EXACT, FLOAT32, LOSSY, SampleTable
from frostline.core.declared import parse_json
from frostline.core.errors import SettingError
from frostline.core.files import append_line, read_regular, warn_not_kept, with_schema, without_schema
from frostline.loaders import Batch
from frostline.training.run_config import write_text

__all__ = (
    "RecordedStep",
    "RecordedSteps",
    "SourceDigests",
    "StepRecorder",
    "digests_of",
    "fingerprint",
    "forget_steps",
    "sketched_error",
)


_FILE = "steps.jsonl"
_FORMAT = 1
_SUM = "blake2b"
# The first so many steps, and then half as many of each doubling.
_DENSE = 256
# Recording takes at most this share of the time; a short run has so many seconds for it.
_SHARE, _FREE_S = 0.01, 0.05
# Rows of a batch that are looked at: all of most batches.
_ROWS = 256
_DIGEST, _SOURCE, _BUCKETS = 16, 8, 8
# A table of more samples is not sorted to find where a batch's objects lie.
_MAX_SORTED = 1 << 22
_MAX_DIGESTED_BYTES = 1 << 30
_MAX_FILE, _MAX_LINE, _MAX_STEPS = 64 << 20, 4 << 20, 1 << 13
_MAX_NUMBER = 1 << 53


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedStep:
    """What the batch of a step was, as far as its first 256 samples.

    Attributes:
        step: number of the step in the run, from 1.
        epoch: epoch of the step, from 0.
        number: number of the batch in its epoch, from 0.
        engine: name of the engine that ran the frozen layers at the node.
        ids: ``int64[n]`` of the samples, in their order.
        rows: 16 bytes a sample, a digest of its features.
        sources: 8 bytes a sample, a digest of its object's name, size and version as listed; empty where nobody looked.
        sketch: ``float32[tensors, n, 9]``, for each tensor of floats a sample's norm and 8 sums of its values under
            random signs, from which the distance to other values is estimated; None where values are not finite.
    """

    step: int
    epoch: int
    number: int
    engine: str
    ids: npt.NDArray[np.int64]
    rows: bytes
    sources: bytes = b""
    sketch: npt.NDArray[np.float32] | None = None

    def rows_unlike(self, other: "RecordedStep") -> list[int]:
        """Rows whose features differ in a bit; all where the two have other numbers of rows."""
        return _unlike(self.rows, other.rows, _DIGEST)

    def sources_unlike(self, other: "RecordedStep") -> list[int]:
        """Rows whose objects are listed by another name, size or version; none where nobody looked."""
        return _unlike(self.sources, other.sources, _SOURCE) if self.sources and other.sources else []

    def to_json(self) -> dict[str, Any]:
        """The same as JSON."""
        sketch = b"" if self.sketch is None else self.sketch.astype("<f4").tobytes()
        coded = {"ids": self.ids.astype("<i8").tobytes(), "rows": self.rows, "sources": self.sources, "sketch": sketch}
        plain = {"step": self.step, "epoch": self.epoch, "number": self.number, "engine": self.engine}
        return plain | {name: base64.b64encode(value).decode() for name, value in coded.items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The inverse of ``to_json``.

        Raises:
            ValueError: The JSON is no sketch.
        """
        numbers = {name: value.get(name) for name in ("step", "epoch", "number")}
        wrong = [name for name, found in numbers.items() if type(found) is not int or not 0 <= found < _MAX_NUMBER]
        if wrong or not isinstance(value.get("engine"), str):
            raise ValueError(f"{wrong[0] if wrong else 'engine'} makes no sense")
        coded = ("ids", "rows", "sources", "sketch")
        ids, rows, sources, sketch = (base64.b64decode(str(value.get(name)), validate=True) for name in coded)
        count = len(ids) // 8
        if not 0 < count <= _ROWS or (len(ids), len(rows)) != (8 * count, _DIGEST * count):
            raise ValueError("ids and digests do not belong together")
        if len(sources) not in (0, _SOURCE * count) or len(sketch) % (4 * count * (1 + _BUCKETS)):
            raise ValueError("a column has another length")
        return cls(
            step=value["step"],
            epoch=value["epoch"],
            number=value["number"],
            engine=value["engine"],
            ids=np.frombuffer(ids, "<i8").astype(np.int64),
            rows=rows,
            sources=sources,
            sketch=np.frombuffer(sketch, "<f4").reshape(-1, count, 1 + _BUCKETS) if sketch else None,
        )


def _unlike(mine: bytes, other: bytes, width: int) -> list[int]:
    count = max(len(mine), len(other)) // width
    return [row for row in range(count) if mine[width * row :][:width] != other[width * row :][:width]]


def fingerprint(batch: Batch, sources: bytes, *, step: int, epoch: int, number: int, engine: str) -> RecordedStep:
    """What a batch is; the arguments are those of ``RecordedStep``. Features are in CPU memory."""
    features = batch.features if isinstance(batch.features, tuple) else (batch.features,)
    ids = batch.ids[:_ROWS].numpy().copy()
    flat = [tensor[:_ROWS].detach().contiguous().reshape(len(ids), -1) for tensor in features]
    kinds = "".join(f"{tensor.dtype}{tuple(tensor.shape[1:])}" for tensor in features).encode()
    hashes = [hashlib.blake2b(kinds, digest_size=_DIGEST) for _ in ids]
    for tensor in flat:
        for made, row in zip(hashes, tensor.view(torch.uint8).numpy(), strict=True):
            made.update(row)
    return RecordedStep(
        step=step,
        epoch=epoch,
        number=number,
        engine=engine,
        ids=ids,
        rows=b"".join(made.digest() for made in hashes),
        sources=sources,
        sketch=_sketch([tensor.float().numpy() for tensor in flat if tensor.is_floating_point()]),
    )


def _sketch(tensors: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32] | None:
    found = []
    for values in tensors:
        signed = values * _signs(values.shape[1])
        # Its sums round less than the features themselves do.
        padded = np.pad(signed, ((0, 0), (0, -signed.shape[1] % _BUCKETS)))
        sums = padded.reshape(len(values), -1, _BUCKETS).sum(1, dtype=np.float64)
        norm = np.sqrt(np.einsum("ij,ij->i", values, values, dtype=np.float64))
        with np.errstate(over="ignore"):
            found.append(np.concatenate([norm[:, None], sums], 1).astype(np.float32))
    made = np.stack(found) if found else None
    return made if made is not None and bool(np.isfinite(made).all()) else None


@lru_cache(maxsize=4)
def _signs(count: int) -> npt.NDArray[np.float32]:
    """The same random signs on every machine: the raw bits of a generator that is what it is by its publication."""
    bits = np.random.Philox(key=0).random_raw(-(-count // 64)).astype("<u8").view(np.uint8)
    return (np.unpackbits(bits, count=count).astype(np.float32) * 2) - 1


def sketched_error(was: RecordedStep, now: RecordedStep) -> float | None:
    """The relative error of the worst sample (``wire.codecs.relative_error``), as estimated from both sketches.

    The square of an estimate is right on average, and off by half of itself as its standard deviation.

    Returns:
        None where one of them has no sketch, or they are of other tensors.
    """
    if was.sketch is None or now.sketch is None or was.sketch.shape != now.sketch.shape:
        return None
    lost = was.sketch[..., 1:].astype(np.float64) - now.sketch[..., 1:]
    distance, norm = np.sqrt(np.square(lost).sum(-1)), was.sketch[..., 0].astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        shares = np.where(distance == 0, 0.0, distance / norm)
    return float(shares.max(initial=0.0))


def forget_steps(folder: Path) -> None:
    """Remove the record of a run from its folder, if there is one."""
    (folder / _FILE).unlink(missing_ok=True)


def digests_of(model: nn.Module) -> dict[str, str]:
    """Digests of the tensors that are not trained and of the buffers, by name; none where they are above 1 GiB."""
    fixed = {name: tensor for name, tensor in model.named_parameters() if not tensor.requires_grad}
    tensors = fixed | dict(model.named_buffers())
    if sum(tensor.nbytes for tensor in tensors.values()) > _MAX_DIGESTED_BYTES:
        return {}
    return {name: _digest(tensor) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    made = hashlib.blake2b(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), digest_size=_DIGEST)
    content: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    made.update(content)
    return made.hexdigest()


class StepRecorder:
    """Writes the record of a run as its steps go by, at a bounded cost; what cannot be written ends the record alone.

    Args:
        folder: the run's folder.
        samples: samples that are trained on.
        clock: function that returns the time in seconds.
    """

    def __init__(self, folder: Path, samples: SampleTable, clock: Callable[[], float] = time.perf_counter) -> None:
        self._path = folder / _FILE
        self._samples = samples
        self._clock = clock
        self._began = clock()
        self._took_s = 0.0
        self._written = _MAX_FILE  # until it has begun
        self._known: SourceDigests | None = None

    def begin(self, weights: Mapping[str, str], accuracy: str | float, *, after: int = 0) -> None:
        """Begin the file anew, with the whole lines of steps up to the one after which the run goes on.

        Raises:
            SettingError: the folder cannot be written.
            OutOfSpace: the disk is full.
        """
        lines = [_line(with_schema({"accuracy": accuracy, "weights": dict(weights)}, _FORMAT))]
        if after:
            try:
                steps = RecordedSteps.read(self._path.parent).steps
            except SettingError:
                steps = ()  # there was none, or it says nothing: the run is no worse for that
            lines += [_line(step.to_json()) for step in steps if step.step <= after]
        write_text(self._path, "".join(lines))
        self._written = sum(map(len, lines))
        self._began = self._clock()

    def is_due(self, step: int) -> bool:
        """Whether this step is one of those that are recorded, and it costs little by now."""
        apart = 1 << max(0, (step // _DENSE).bit_length())
        if self._written >= _MAX_FILE or (step >= _DENSE and step % apart):
            return False
        return self._took_s <= max(_FREE_S, _SHARE * (self._clock() - self._began))

    def add(self, batch: Batch, *, step: int, epoch: int, number: int, engine: str) -> None:
        """Record the batch of a step before anything changes it."""
        began = self._clock()
        if self._known is None:
            self._known = SourceDigests(self._samples)
        sources = self._known.of(batch.ids[:_ROWS].numpy())
        made = fingerprint(batch, sources, step=step, epoch=epoch, number=number, engine=engine)
        line = _line(made.to_json())
        try:
            if len(line) <= _MAX_LINE:
                append_line(self._path, line.encode())
                self._written += len(line)
        except OSError as error:
            warn_not_kept(self._path, error)
            self._written = _MAX_FILE
        self._took_s += self._clock() - began


class SourceDigests:
    """Digests of where samples lie and in which version, by id.

    Args:
        samples: the samples; more than four million are not looked at.
    """

    def __init__(self, samples: SampleTable) -> None:
        self._samples = samples if len(samples) <= _MAX_SORTED else None
        ids = np.empty(0, np.int64) if self._samples is None else samples.ids
        self._order = np.argsort(ids, kind="stable")
        self._sorted = ids[self._order]

    def of(self, ids: npt.NDArray[np.int64]) -> bytes:
        """8 bytes for each id; nothing where one of them is unknown."""
        if self._samples is None:
            return b""
        places = np.minimum(np.searchsorted(self._sorted, ids), len(self._sorted) - 1)
        if not np.array_equal(self._sorted[places], ids):
            return b""
        found = self._samples.take(self._order[places])
        versions = found.versions or [""] * len(ids)
        columns = zip(found.objects, found.offsets.tolist(), found.lengths.tolist(), versions, strict=True)
        said = ("\0".join(map(str, row)).encode(errors="surrogatepass") for row in columns)
        return b"".join(hashlib.blake2b(text, digest_size=_SOURCE).digest() for text in said)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedSteps:
    """The record of a run, as it was read.

    Attributes:
        accuracy: accuracy of the run's job.
        weights: digests of its frozen tensors, by name.
        steps: the steps that are whole, by their numbers.
        damaged: numbers of the lines that are not what was written.
    """

    accuracy: str | float
    weights: Mapping[str, str]
    steps: tuple[RecordedStep, ...]
    damaged: tuple[int, ...] = field(default=())

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The record in a run's folder. A last line that a kill has cut off counts as not written.

        Raises:
            SettingError: The folder has no record, the record is larger than any that is written or of another version,
                or its first line is damaged.
        """
        path = folder / _FILE
        first, *lines = _lines(path)
        try:
            head = without_schema(_parsed(first), _FORMAT, path, ("accuracy", "weights"))
            accuracy, weights = _checked(head["accuracy"], head["weights"])
        except (LookupError, ValueError, RecursionError) as error:
            raise SettingError(f"the first line of {path} is damaged ({error}): nothing can be compared") from error
        found, damaged = {}, []
        for number, line in enumerate(lines, 2):
            try:
                step = RecordedStep.from_json(_parsed(line))
            except (ValueError, RecursionError):
                damaged.append(number)
                continue
            found[step.step] = step
        steps = tuple(found[step] for step in sorted(found))
        return cls(accuracy=accuracy, weights=weights, steps=steps, damaged=tuple(damaged))


def _checked(accuracy: object, weights: object) -> tuple[str | float, dict[str, str]]:
    """Both, where they make sense; else ``ValueError``."""
    is_error = type(accuracy) in (int, float) and 0 < float(str(accuracy)) < math.inf
    if not isinstance(weights, dict) or not all(isinstance(digest, str) for digest in weights.values()):
        raise ValueError("weights are digests by name")
    if isinstance(accuracy, str) and accuracy in (EXACT, FLOAT32, *LOSSY):
        return accuracy, weights
    if is_error:
        return float(str(accuracy)), weights
    raise ValueError("its accuracy makes no sense")


def _lines(path: Path) -> list[bytes]:
    """All whole lines, at least one."""
    try:
        body = read_regular(path, _MAX_FILE + _MAX_LINE)
    except FileNotFoundError:
        raise SettingError(
            f"there is no {path}, which frostline train --out writes as its steps go by (not with --policy "
            "all_in_store): nothing can be compared"
        ) from None
    except OSError as error:
        raise SettingError(f"{path} cannot be read ({error.strerror}): nothing can be compared") from error
    lines = body.split(b"\n", _MAX_STEPS + 1)[:-1]
    if len(lines) > _MAX_STEPS or any(len(line) > _MAX_LINE for line in lines):
        raise SettingError(f"{path} is larger than any record that is written: nothing can be compared")
    if not lines:
        raise SettingError(f"{path} is empty: nothing can be compared")
    return lines


def _line(value: dict[str, Any]) -> str:
    return json.dumps({**value, _SUM: _sum(value)}) + "\n"


def _parsed(line: bytes) -> dict[str, Any]:
    """A line's value; ``ValueError`` where its checksum is another one."""
    value = parse_json(line)
    if not isinstance(value, dict):
        raise ValueError("it has no fields")  # noqa: TRY004 -- as of all that is no line of a record
    said = value.pop(_SUM, None)
    if said != _sum(value):
        raise ValueError("its checksum is another one")
    return value


def _sum(value: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(value).encode(), digest_size=_DIGEST).hexdigest()
