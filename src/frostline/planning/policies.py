"""Published rules that decide one cut for all samples, beside which the plan has to stand.

Each takes the cuts that the node can run, with the exact codec (they know of none other), by number, cut 0 among
them, and gives the number of one. They differ in how they choose. What the chosen cut then gives is reckoned by the
same means as the plan's own: the steady state in which all stages overlap, also for rules whose authors ran the
stages one after another.
"""

from collections.abc import Callable, Mapping, Sequence

from frostline.planning.candidates import Candidate
from frostline.planning.situation import Situation
from frostline.profiles import CutCost

__all__ = (
    "ALL_IN_STORE",
    "BEST",
    "POLICIES",
    "RULES",
    "all_in_store",
    "baseline",
    "freeze",
    "hapi_v1",
    "hapi_v3",
    "min_bytes",
    "neurosurgeon",
)

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

    def seconds(one: Candidate) -> float:
        store_s, trainer_s, link_s = one.store_s, one.trainer_s, one.link_s
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
