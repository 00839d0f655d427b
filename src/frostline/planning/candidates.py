"""Decides what every way that a sample may take would cost, and the published rules that choose one for all.

Each takes the cuts that the node can run, with the exact codec (they know of none other), by number, cut 0 among
them, and gives the number of one. They differ in how they choose. What the chosen cut then gives is reckoned by the
same means as the plan's own: the steady state in which all stages overlap, also for rules whose authors ran the
stages one after another.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from frostline.core import EXACT, FLOAT32, LOSSY, REFERENCE, Cut, Route
from frostline.core.units import in_bytes
from frostline.planning.situation import Situation
from frostline.profiles import CodecCost, CutCost, Profile

__all__ = (
    "ALL_IN_STORE",
    "BEST",
    "LINK",
    "POLICIES",
    "RULES",
    "STORE_ACCELERATOR",
    "STORE_CPU",
    "TRAINER_CPU",
    "Candidate",
    "Option",
    "all_in_store",
    "baseline",
    "freeze",
    "hapi_v1",
    "hapi_v3",
    "in_store",
    "min_bytes",
    "neurosurgeon",
    "options",
    "resources",
    "sides",
)


STORE_CPU = "store cpu"
STORE_ACCELERATOR = "store accelerator"
LINK = "link"
TRAINER_CPU = "trainer cpu"
_TRAINER_ACCELERATOR = "trainer accelerator"
_SHARED_MACHINE = "shared machine"

_SMALLEST_DEVICE_BATCH = 8
_ACCELERATOR = "cuda"
_ALLOWED: Mapping[str, tuple[str, ...]] = {
    EXACT: (),
    FLOAT32: (),
    **{name: LOSSY[: place + 1] for place, name in enumerate(LOSSY)},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """What one cut with one codec would cost if every sample took it.

    Attributes:
        route: the cut and the codec.
        name: the place where the cut is in the network.
        wire_bytes_per_sample: payload that crosses, encoded by the codec.
        store_s: seconds a sample at the store side, processor and accelerator together: read, decode, the prefix
            up to the cut, and the codec; with several nodes, divided by their number.
        link_s: seconds a sample on the link.
        trainer_s: seconds a sample at the trainer, processor and accelerator together: the codec, what is left up
            to the frost line (decoding too at cut 0), and the head.
        memory_bytes: the node's, for a run of ``device_batch`` samples.
        device_batch: the largest multiple of eight, up to the profiled one, that fits the budget.
        samples_per_s: steady state, all resources working at the same time; infinite where nothing costs anything.
        error: error of the codec, as measured: root-mean-square error of the worst sample, relative to the sample's
            own.
        rejected: the reason why the plan does not use it, in a sentence; None where it does.
        is_possible: the memory of both sides and the job's accuracy allow it.
    """

    route: Route
    name: str
    wire_bytes_per_sample: int
    store_s: float
    link_s: float
    trainer_s: float
    memory_bytes: int
    device_batch: int
    samples_per_s: float
    error: float = 0.0
    rejected: str | None = None
    is_possible: bool = True

    @property
    def cut(self) -> int:
        """Number of the cut."""
        return self.route.cut

    @property
    def codec(self) -> str:
        """Name of the codec."""
        return self.route.codec


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A candidate, with the seconds that a sample on this way takes of each resource, by the resource's name."""

    candidate: Candidate
    seconds: Mapping[str, float]


def resources(situation: Situation) -> tuple[str, ...]:
    """Names of what the job has. All work at the same time, each on another sample.

    The processors of two sides that share a machine are one resource. Accelerators are counted apart: two sides
    that use one accelerator together are not told from two that have one each.
    """
    store, trainer = sides(situation)
    return (
        _SHARED_MACHINE if situation.same_host else STORE_CPU,
        *([STORE_ACCELERATOR] if store.device == _ACCELERATOR else []),
        LINK,
        *([] if situation.same_host else [TRAINER_CPU]),
        *([_TRAINER_ACCELERATOR] if trainer.device == _ACCELERATOR else []),
    )


def sides(situation: Situation) -> tuple[Profile, Profile]:
    """The profiles of the store side and of the trainer.

    On one machine with equal hardware and engine one profile serves both, so that noise between two measurements of
    the same work decides nothing.
    """
    store, trainer = situation.store, situation.trainer
    is_alike = situation.same_host and (store.hardware, store.engine) == (trainer.hardware, trainer.engine)
    return situation.store, situation.store if is_alike else situation.trainer


def options(situation: Situation) -> tuple[Option, ...]:
    """Every way that was measured, by cut, the exact codec first; the ones that are not allowed say why."""
    job = _Job.of(situation)
    return tuple(_option(cut, codec, cost, job) for cut in situation.cuts for codec, cost in _codecs(cut, job.store))


def in_store(situation: Situation) -> Option:
    """The frost line with the head trained on the node too, so that nothing crosses for a sample.

    The head's seconds there are those at the trainer, times how much longer the node takes for the frozen layers.
    """
    job, line = _Job.of(situation), situation.frost_line
    # The head is trained by torch, whatever engine runs the frozen layers.
    trials = [trial for trial in situation.store.trials if (trial.engine, trial.cut) == (REFERENCE, line.number)]
    ours_s = trials[0].seconds + job.store.decode_s if trials else job.store.costs[line.number].seconds
    theirs_s = job.trainer.costs[line.number].seconds
    slowness = ours_s / theirs_s if ours_s > 0 and theirs_s > 0 else 1.0
    work = _on_store(line, None, job, extra_s=situation.head_s * slowness)
    seconds = job.per_resource(work)
    candidate = replace(
        _option(line, EXACT, None, job).candidate,
        wire_bytes_per_sample=0,
        store_s=sum(work.values()),
        link_s=0.0,
        trainer_s=0.0,
        samples_per_s=_rate(seconds),
    )
    return Option(candidate=candidate, seconds=seconds)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Side:
    """One side's profile, to be looked up in."""

    costs: Mapping[int, CutCost]
    codecs: Mapping[tuple[int, str], CodecCost]
    read_s: float
    device_batch: int
    is_accelerated: bool

    @classmethod
    def of(cls, profile: Profile) -> "_Side":
        return cls(
            costs={cut.number: cut for cut in profile.cuts},
            codecs={(codec.cut, codec.codec): codec for codec in profile.codecs},
            read_s=profile.read_s,
            device_batch=profile.device_batch,
            is_accelerated=profile.device == _ACCELERATOR,
        )

    @property
    def decode_s(self) -> float:
        """From the encoded sample to the pixels, which is the processor's work on every side."""
        return self.costs[1].seconds if 1 in self.costs else 0.0

    def apart(self, cpu_s: float, run_s: float) -> tuple[float, float]:
        """Seconds of the processor and of the accelerator, where ``run_s`` is what an accelerator would do."""
        return (cpu_s, run_s) if self.is_accelerated else (cpu_s + run_s, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """A situation with its two sides, and the names of its resources."""

    situation: Situation
    store: _Side
    trainer: _Side
    resources: tuple[str, ...]

    @classmethod
    def of(cls, situation: Situation) -> "_Job":
        store, trainer = sides(situation)
        return cls(
            situation=situation, store=_Side.of(store), trainer=_Side.of(trainer), resources=resources(situation)
        )

    def per_resource(self, work: Mapping[str, float]) -> dict[str, float]:
        """Seconds a sample of every resource that the job has; two processors of one machine add up."""
        shared_s = work.get(STORE_CPU, 0.0) + work.get(TRAINER_CPU, 0.0)
        return {name: shared_s if name == _SHARED_MACHINE else work.get(name, 0.0) for name in self.resources}


def _codecs(cut: Cut, store: _Side) -> Iterator[tuple[str, CodecCost | None]]:
    """Codecs of a cut with what they cost at the store: the exact one is always there, and free if not measured."""
    yield EXACT, store.codecs.get((cut.number, EXACT))
    if cut.number > 0:
        others = [cost for (number, codec), cost in store.codecs.items() if number == cut.number and codec != EXACT]
        yield from ((cost.codec, cost) for cost in others)


def _option(cut: Cut, codec: str, encode: CodecCost | None, job: _Job) -> Option:
    wire_bytes = _wire_bytes(cut, codec, encode, job.situation)
    link_s = wire_bytes / job.situation.link.bytes_per_s
    # A codec that was not measured at the trainer is taken to cost what it does at the store.
    decode = job.trainer.codecs.get((cut.number, codec), encode)
    on_store, on_trainer = _on_store(cut, encode, job), _on_trainer(cut, decode, job)
    seconds = job.per_resource({**on_store, LINK: link_s, **on_trainer})
    device_batch, memory_bytes = _memory(cut, job)
    error = 0.0 if encode is None else encode.error
    lost = job.situation.store.engine_error if cut.number > 1 else 0.0
    rejected = (
        _forbidden(cut, memory_bytes, job.situation)
        or _too_large_for_trainer(cut, job)
        or _inaccurate(codec, error, lost, job.situation.accuracy)
    )
    candidate = Candidate(
        route=Route(cut.number, codec),
        name=cut.name,
        wire_bytes_per_sample=round(wire_bytes),
        store_s=sum(on_store.values()),
        link_s=link_s,
        trainer_s=sum(on_trainer.values()),
        memory_bytes=memory_bytes,
        device_batch=device_batch,
        samples_per_s=_rate(seconds),
        error=error,
        rejected=rejected,
        is_possible=rejected is None,
    )
    return Option(candidate=candidate, seconds=seconds)


def _wire_bytes(cut: Cut, codec: str, encode: CodecCost | None, situation: Situation) -> float:
    if cut.number == 0:
        return situation.encoded_bytes
    return cut.bytes_per_sample if codec == EXACT or encode is None else encode.bytes_per_sample


def _on_store(cut: Cut, encode: CodecCost | None, job: _Job, *, extra_s: float = 0.0) -> dict[str, float]:
    """Seconds a sample of the nodes' processors and accelerators; ``extra_s`` is more for what runs networks."""
    store, nodes = job.store, job.situation.nodes
    total_s = store.costs[cut.number].seconds
    decode_s = min(total_s, store.decode_s)
    encode_s = 0.0 if encode is None else encode.encode_s
    cpu_s, accelerator_s = store.apart(store.read_s + decode_s + encode_s, total_s - decode_s + extra_s)
    return {STORE_CPU: cpu_s / nodes, STORE_ACCELERATOR: accelerator_s / nodes}


def _on_trainer(cut: Cut, decode: CodecCost | None, job: _Job) -> dict[str, float]:
    """Seconds a sample of the trainer's processor and accelerator.

    Measured with noise, a later cut may seem cheaper than an earlier one: what is left is never below nothing.
    """
    trainer, situation = job.trainer, job.situation
    left_s = max(0.0, trainer.costs[situation.frost_line.number].seconds - trainer.costs[cut.number].seconds)
    decode_s = min(left_s, trainer.decode_s) if cut.number == 0 else 0.0
    unpack_s = 0.0 if decode is None else decode.decode_s
    cpu_s, accelerator_s = trainer.apart(decode_s + unpack_s, left_s - decode_s + situation.head_s)
    return {TRAINER_CPU: cpu_s, _TRAINER_ACCELERATOR: accelerator_s}


def _rate(seconds: Mapping[str, float]) -> float:
    max_s = max(seconds.values())
    return 1 / max_s if max_s > 0 else math.inf


def _memory(cut: Cut, job: _Job) -> tuple[int, int]:
    """The device batch and the memory of a run: whole eights, up to the profiled batch; eight where none fits."""
    cost, maximum = job.store.costs[cut.number], job.store.device_batch
    if cost.bytes_per_sample:
        maximum = min(maximum, (job.situation.memory_bytes - cost.fixed_bytes) // cost.bytes_per_sample)
    device_batch = max(_SMALLEST_DEVICE_BATCH, maximum // _SMALLEST_DEVICE_BATCH * _SMALLEST_DEVICE_BATCH)
    return device_batch, cost.fixed_bytes + device_batch * cost.bytes_per_sample


def _forbidden(cut: Cut, memory_bytes: int, situation: Situation) -> str | None:
    """Why the node cannot run up to a cut; None where it can. Encoded samples always go."""
    budget_bytes = situation.memory_bytes
    if cut.number == 0:
        return None
    if situation.refused is not None:
        return situation.refused
    if memory_bytes <= budget_bytes:
        return None
    return (
        f"needs {in_bytes(memory_bytes)} at the node for {_SMALLEST_DEVICE_BATCH} samples, the budget is "
        f"{in_bytes(budget_bytes)}; raise the node's memory_bytes"
    )


def _too_large_for_trainer(cut: Cut, job: _Job) -> str | None:
    """Why the trainer cannot run what is left of the frozen layers; None where it can, or nothing is left."""
    situation, cost = job.situation, job.trainer.costs[cut.number]
    budget_bytes, rows = situation.trainer_memory_bytes, situation.trainer_batch
    if budget_bytes is None or cut.number == situation.frost_line.number:
        return None
    needed_bytes = cost.remaining_fixed_bytes + rows * cost.remaining_bytes_per_sample
    if needed_bytes <= budget_bytes:
        return None
    return (
        f"needs {in_bytes(needed_bytes)} at the trainer for {rows} samples, which has {in_bytes(budget_bytes)}; "
        "raise the job's trainer_memory_bytes, or lower its device_batch and the node's"
    )


def _inaccurate(codec: str, error: float, lost: float, accuracy: str | float) -> str | None:
    """Why the job's ``accuracy`` does not allow a codec; None where it does. An unknown error is not allowed.

    Args:
        codec: the name.
        error: error that the engine makes.
        lost: the error of the engine, before.
        accuracy: accuracy that the job demands of both together.
    """
    precision = codec.partition("+")[0]
    if precision not in LOSSY:
        return None
    if isinstance(accuracy, str):
        allowed = precision in _ALLOWED[accuracy]
        return None if allowed else f"is lossy (error {error:.2g}), and accuracy is {accuracy!r}"
    if error + lost <= accuracy:
        return None
    beside = f" beside the engine's {lost:.2g}" if lost else ""
    return f"has an error of {error:.2g}{beside}, and accuracy allows {accuracy:.2g}"


Rule = Callable[[Sequence[Candidate], Situation], int]

# HAPI's training batch, in samples.
_BATCH = 2500
# HAPI compares a batch's activations with what the link carries in this time.
_LINK_S = 1.0
# Batches of an epoch in HAPI's and Neurosurgeon's formulas: enough that the first and last weigh little.
_ITERATIONS = 100


def baseline(_: Sequence[Candidate], __: Situation) -> int:
    """Everything at the trainer: the store only sends encoded samples, as without near-data processing."""
    return 0


def all_in_store(_: Sequence[Candidate], situation: Situation) -> int:
    """Everything on the node, training too, so that nothing crosses for a sample (HAPI's ALL_IN_COS)."""
    return situation.frost_line.number


def freeze(_: Sequence[Candidate], situation: Situation) -> int:
    """All frozen layers at the store: the cut is the frost line, whatever it costs (HAPI's static freeze split)."""
    return situation.frost_line.number


def min_bytes(cuts: Sequence[Candidate], _: Situation) -> int:
    """The fewest bytes on the wire, encoded samples included; of equal ones the earliest."""
    return min(cuts, key=lambda cut: (cut.wire_bytes_per_sample, cut.cut)).cut


def neurosurgeon(cuts: Sequence[Candidate], _: Situation) -> int:
    """The least latency of a sample: store, link and trainer one after another, never at the same time.

    ``T(s) = (S + C + N) I`` with S, C, N the store's, the trainer's and the link's seconds of one of I iterations
    (Kang et al., Neurosurgeon, ASPLOS 2017, section 4.3, as HAPI compares itself with it).
    """
    return min(cuts, key=lambda cut: ((cut.store_s + cut.trainer_s + cut.link_s) * _ITERATIONS, cut.cut)).cut


def hapi_v1(cuts: Sequence[Candidate], situation: Situation) -> int:
    """HAPI's first rule (arXiv 2210.08650v1, section on splitting): thin enough for the link, then early, then small.

    Candidates are the layers i with ``out_i * 2500 < min(in * 2500, bandwidth * 1 s)``, where ``out_i`` and ``in``
    are bytes a sample after the layer and of the network's input (cut 1). The earliest one wins for which the store's
    memory plus the trainer's is under that of running everything at the trainer; where there is none, the layer with
    the smallest output.

    The store's memory is that of its own batch (HAPI adapts it apart from the training batch), the trainer's that of
    the training batch of 2500.
    """
    layers = [cut for cut in cuts if cut.cut >= 2]
    if not layers:
        return 0
    input_bytes = situation.cuts[1].bytes_per_sample
    max_bytes = min(input_bytes * _BATCH, situation.link.bytes_per_s * _LINK_S)
    costs = {cost.number: cost for cost in situation.trainer.cuts}
    everything_bytes = _rest_memory(costs[1])
    for layer in layers:
        is_thin = layer.wire_bytes_per_sample * _BATCH < max_bytes
        if is_thin and layer.memory_bytes + _rest_memory(costs[layer.cut]) < everything_bytes:
            return layer.cut
    return min(layers, key=lambda layer: (layer.wire_bytes_per_sample, layer.cut)).cut


def hapi_v3(cuts: Sequence[Candidate], _: Situation) -> int:
    """HAPI's later rule (arXiv 2210.08650v3, section on splitting): iterations overlap across store and trainer.

    With S, C and N the store's, the trainer's and the non-overlapping (link's) seconds of one of I iterations,
    ``T(s) = S + (max(S, C) + N)(I - 1) + N + C``; the cut with the least wins, among those that fit the memory. Back
    to the baseline where that was measured faster, here: where its steady state is.
    """

    def seconds(candidate: Candidate) -> float:
        store_s, trainer_s, link_s = candidate.store_s, candidate.trainer_s, candidate.link_s
        return store_s + (max(store_s, trainer_s) + link_s) * (_ITERATIONS - 1) + link_s + trainer_s

    chosen = min(cuts, key=lambda cut: (seconds(cut), cut.cut))
    return 0 if cuts[0].samples_per_s > chosen.samples_per_s else chosen.cut


BEST = "best"
ALL_IN_STORE = "all_in_store"
RULES: Mapping[str, Rule] = {
    "baseline": baseline,
    ALL_IN_STORE: all_in_store,
    "freeze": freeze,
    "min_bytes": min_bytes,
    "neurosurgeon": neurosurgeon,
    "hapi_v1": hapi_v1,
    "hapi_v3": hapi_v3,
}
POLICIES = (BEST, *RULES)
"""Names of all policies: the optimum, and the published rules."""


def _rest_memory(cost: CutCost) -> int:
    """Of the trainer, from a cut to the frost line at the training batch."""
    return cost.remaining_fixed_bytes + _BATCH * cost.remaining_bytes_per_sample
