"""Decides what a job begins with: what an earlier one found, what is measured first, or the frost line at the node."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from frostline.batching import ROWS
from frostline.core import EXACT, Route
from frostline.core.config import cache_folder
from frostline.core.errors import OverBudget
from frostline.core.events import Event, MeasurementFailed, PhaseStarted, SetupWarning
from frostline.jobs.context import (
    JobContext,
    first_batch_bytes,
    has_same_hardware,
    keeps_features,
    measurement_key,
    shares_cores,
    total_samples,
)
from frostline.jobs.measuring import (
    FoundHere,
    Left,
    MeasurementCache,
    Measurements,
    Measuring,
    Shipping,
    Stage,
    doing_after,
)
from frostline.jobs.router import BothSides
from frostline.loaders.fetch import EngineChoice, NodeEngine
from frostline.planning import Plan, Situation, make_plan, plan_at_cut
from frostline.planning.replanning import is_worth_measuring, is_worth_sending, is_worth_trying
from frostline.transport import Cancellation

if TYPE_CHECKING:  # of PyTorch, which jobs without a model do without
    from frostline.jobs.both_sides import TrainerEngine
    from frostline.jobs.partition import PartitionedModel

__all__ = ("Beginning", "begin", "pays_for_trial", "pays_for_upload", "rows_before_trial")

_MEASURING = "measuring the cuts"
# A trial in the node's own process takes two to five seconds on one core, three times as long beside a job's work; a
# job of fewer samples does not win that back with any network (``benchmarks/near.py``).
_SOON_S = 10.0
# A node that tries for longer than this, as a busy or slow one does, computes its share in eager torch meanwhile.
_LONG_TRIAL_S = 15.0
_MIN_TO_TRY = 200
# Where a first batch takes eager torch longer, a loop has it as soon by an engine that is tried before any of its rows,
# and those behind it sooner: a trial takes about as long as eager torch does for eight of them, and a second.
_SLOW_BATCH_S = 1.5
# How often it is looked whether a job that waits for its trainer's trial is over.
_LOOK_S = 0.2
# Runs that wait at a node which may try engines soon: a loop waits for their rows until it has done so.
_FEW_RUNS = 2
_TRYING = "measuring the cuts, and trying engines where the node has not (some minutes)"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Beginning:
    """What a job begins with.

    Attributes:
        engine: engine of the node.
        situation: situation that the plan is made from.
        plan: plan of an earlier job; None if there is none yet.
        measuring: measurements that are made later; None where there are none.
        refused: the reason why the node does not run the network, so that encoded samples come instead; None where it
            does.
        both_sides: router that deals requests to both sides as each is free; None where the plan or the node alone
            counts.
        trainer: engine that runs the whole frozen part at the trainer; None where eager torch does.
    """

    engine: NodeEngine
    situation: Situation | None = None
    plan: Plan | None = None
    measuring: Measuring | None = None
    refused: str | None = None
    both_sides: BothSides | None = None
    trainer: "TrainerEngine | None" = None


def begin(
    context: JobContext,
    network: "PartitionedModel | None",
    nodes: Sequence[str],
    lacking: set[str],
    *,
    policy: str,
    codec: str | None,
) -> Beginning:
    """Begin with what is known, and measure while the job runs; or measure first, where somebody asks for it.

    A published rule chooses once, and a cut that was given is looked at: both are measured first. Where nothing is
    known all frozen layers run at the node: so the fewest bytes cross in one step.

    Args:
        context: the parts of the job.
        network: network of the job; None for a plain loader, which has nothing to measure.
        nodes: URLs of its nodes; none for one in this process.
        lacking: addresses of nodes that cannot run the chosen engine; the transport adds to them while the job runs.
        policy: the rule that chooses.
        codec: codec that the user chose for the cut of the job's context.
    """
    engine = NodeEngine(context.accuracy)
    if network is None or context.shipment is None:
        return Beginning(engine=engine)
    if context.settings.measure_first or policy != "best" or context.cut is not None:
        refused = network.ship(context)
        context.shipment.settle(refused)
        context.asking.on_event(PhaseStarted(name=_MEASURING if context.accuracy == EXACT else _TRYING))
        situation = network.situate(context, nodes, lacking, refused)
        engine.choice = EngineChoice.of(situation.store)
        plan = make_plan(situation, policy) if context.cut is None else plan_at_cut(situation, context.cut, codec)
        return Beginning(engine=engine, situation=situation, plan=plan)
    # With it come the engines, for which a plain loader has no use.
    from frostline.jobs.both_sides import both_sides_of, can_be_tried

    health = context.asking(context.transport.health)
    kept = MeasurementCache(cache_folder() / "measurements", measurement_key(context, health, len(nodes)))
    tries_here = total_samples(context) >= _MIN_TO_TRY and can_be_tried(context)
    # What an engine may change more, another number of rows may: neither side fills its runs up.
    engine.fixed_rows = not tries_here
    run_rows = context.settings.device_batch if engine.fixed_rows else ROWS
    both_sides = both_sides_of(context, health, len(nodes), run_rows, network.row_s)
    found = kept.get()
    planned = _planned(context, found, both_sides)
    later = None
    if not (len(nodes) < 2 and shares_cores(health, context.device)) and (found is None or found.situation is None):
        later = _plan(context, network, nodes, lacking, kept, both_sides)
    if both_sides is not None and planned is None:
        is_alike = len(nodes) == 1 and has_same_hardware(health, context.device)
        return _at_once(
            context, network, engine, both_sides, found, kept, later, tries_here=tries_here, is_alike=is_alike
        )
    refused = network.refusal(context)
    if refused is not None:
        return Beginning(engine=engine, refused=refused)
    tries = found is None and context.accuracy != EXACT
    stages = ([_engine(context, network, kept)] if tries else []) + ([later] if later else [])
    measuring = Measuring(samples=total_samples(context), stages=stages) if stages else None
    if measuring is not None and tries and total_samples(context) >= _MIN_TO_TRY:
        found = _soon(context, measuring)
    if found is not None:
        engine.choice = found.choice
    return replace(planned or Beginning(engine=engine), engine=engine, measuring=measuring)


def _planned(context: JobContext, found: Measurements | None, both_sides: BothSides | None) -> Beginning | None:
    """What an earlier job found, as a plan; None where it was not measured, or both sides do as well without one."""
    if found is None or found.situation is None:
        return None
    known = replace(found.situation, epochs=context.epochs, keeps_features=keeps_features(context))
    plan = make_plan(known)
    if both_sides is not None and both_sides.takes(part.route for part in plan.mixture):
        return None
    return Beginning(engine=NodeEngine(context.accuracy), situation=known, plan=plan)


def _at_once(
    context: JobContext,
    network: "PartitionedModel",
    engine: NodeEngine,
    both_sides: BothSides,
    found: Measurements | None,
    kept: MeasurementCache,
    later: Stage | None,
    *,
    tries_here: bool,
    is_alike: bool,
) -> Beginning:
    """Begin at the trainer, while the frozen part is on its way to the node and the node tries an engine."""
    from frostline.jobs.both_sides import TrainerEngine

    line, samples = Route(context.cuts[-1].number), total_samples(context)
    first_bytes = first_batch_bytes(context.data, context.settings)
    tries = found is None and context.accuracy != EXACT and samples >= _MIN_TO_TRY
    if found is not None:
        first_bytes = 0  # the loop begins when the node is ready
        engine.choice = found.choice

    rows = rows_before_trial(context.settings.device_batch, network.row_s, samples) if found is None else 0
    found_here: Future[FoundHere] = Future()
    if not tries_here:
        found_here.set_result(FoundHere())

    def tell(event: Event) -> None:
        """A warning belongs to the loop's thread, where Python's filters and the user's own observer expect it."""
        (measuring.tell if isinstance(event, SetupWarning) else context.asking.on_event)(event)

    node_start = _NodeStart(
        context=context,
        beside=replace(context, asking=replace(context.asking, on_event=tell)),
        network=network,
        engine=engine,
        both_sides=both_sides,
        kept=kept,
        found_here=found_here,
        first_bytes=first_bytes,
        tries=tries,
        follows_trainer=tries and tries_here and is_alike and not rows,
    )
    both_sides.close(line)
    stages = [Stage(is_worth=is_worth_trying, measure=node_start.measure), *filter(None, (later,))]
    measuring = Measuring(samples=samples, stages=stages)

    def ready(what: FoundHere, why_not: str | None) -> None:
        both_sides.begin_again(Route(0), what.samples_per_s)
        found_here.set_result(what)
        if why_not is not None:
            tell(SetupWarning(reason=f"the trainer's share runs in eager PyTorch, and no engine was tried: {why_not}"))

    # A node where an earlier job found an engine has the weights, and says so in one round trip.
    measuring.begin(wait_s=0 if found is None else _SOON_S)
    trainer = TrainerEngine(context, ready, eager_rows=rows, row_s=network.row_s) if tries_here else None
    return Beginning(engine=engine, measuring=measuring, both_sides=both_sides, trainer=trainer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _NodeStart:
    """Has a node begin beside a trainer that computes already: its weights, their checks and the trial of an engine.

    Attributes:
        context: context of the job.
        beside: the same, whose warnings go to the loop's thread.
        network: network of the job.
        engine: engine of the node.
        both_sides: router of the job.
        kept: cache for the engine that is found.
        found_here: result of the trainer's trial, once there is one.
        first_bytes: see ``Shipping``.
        tries: True if the node may try an engine.
        follows_trainer: True if the node is like the trainer, which tries engines before its first rows: of two sides
            alike one does that, and the other computes in eager torch meanwhile.
    """

    context: JobContext
    beside: JobContext
    network: "PartitionedModel"
    engine: NodeEngine
    both_sides: BothSides
    kept: MeasurementCache
    found_here: Future[FoundHere]
    first_bytes: int
    tries: bool
    follows_trainer: bool

    def measure(self, cancellation: Cancellation, left: Callable[[], Left]) -> Measurements | None:
        """The engine of the node; None where it tries none, or does not run the network. Part of a ``Stage``."""
        # Whether the node runs it is asked while it tries engines: on a thin link each answer queues behind samples.
        is_worth, made = self._is_worth_sending(left), None
        shipping = Shipping(self.beside, self.network, cancellation, first_bytes=self.first_bytes, is_worth=is_worth)
        begin_at_node = partial(self._begin, shipping)
        try:
            if shipping.is_sent() and self.tries:
                made = self._trial(cancellation, left, begin_at_node)
        finally:
            begin_at_node()
        return made if shipping.is_run() else None

    @property
    def _line(self) -> Route:
        return Route(self.context.cuts[-1].number)

    def _is_worth_sending(self, left: Callable[[], Left]) -> Callable[[float], bool | None]:
        given = (self.both_sides, self._line, self.found_here, left, self.network.row_s)
        return partial(pays_for_upload, *given)

    def _begin(self, shipping: Shipping, max_waiting: int | None = None) -> None:
        if shipping.is_run():
            self.both_sides.open(self._line, max_waiting=max_waiting)

    def _trial(
        self, cancellation: Cancellation, left: Callable[[], Left], begin_at_node: Callable[..., None]
    ) -> Measurements | None:
        found = FoundHere()
        if self.follows_trainer:
            begin_at_node(max_waiting=_FEW_RUNS * ROWS)
            found = _when_known(self.found_here, cancellation)
        # The weights may have been long on their way; the trainer goes on with its share meanwhile.
        if not pays_for_trial(left(), self.context.settings.trial_s, found):
            return None
        self.both_sides.close(self._line)  # what is asked for now would wait for the trial
        with suppress(OverBudget), doing_after(_LONG_TRIAL_S, begin_at_node):  # it is told with the answer
            self.context.asking.on_event(PhaseStarted(name="trying an engine"))
            made = self.network.engine(self.context, cancellation, left().samples)
            self.kept.put(made)
            self.engine.choice = made.choice
            self.both_sides.begin_again(self._line, made.choice.samples_per_s)
            return made
        return None


def pays_for_upload(
    both_sides: BothSides,
    line: Route,
    found_here: Future[FoundHere],
    left: Callable[[], Left],
    row_s: float | None,
    needed_s: float,
) -> bool | None:
    """Whether weights are sent; None where that depends on an engine that the trainer has not found yet.

    What does not pay beside eager torch pays less beside a faster engine: nothing waits for the node then.

    Args:
        both_sides: router of the job, which is told whether to expect that the way to the node opens.
        line: the way of samples whose frozen layers the node runs.
        found_here: result of the trainer's trial, once there is one.
        left: function that gives the rest of the job.
        row_s: seconds that the trainer takes for a row in eager PyTorch at most; None where nobody knows.
        needed_s: seconds that the weights take on the link.
    """
    here = both_sides.observed_speed(Route(0)) or (found_here.result().samples_per_s if found_here.done() else 0.0)
    here = here or (0.0 if row_s is None else 1 / row_s)
    if not here:
        return None
    pays = is_worth_sending(needed_s=needed_s, samples_left=left().samples, samples_per_s=here)
    if pays and not found_here.done():
        return None
    if pays != both_sides.has_choice:
        both_sides.close(line, is_expected=pays)
    return pays


def rows_before_trial(device_batch: int, row_s: float | None, samples: int) -> int:
    """Rows that the trainer runs in eager torch before it tries engines.

    Args:
        device_batch: rows of the loop's first batches, for which it waits.
        row_s: seconds that a row takes there; None where nobody knows.
        samples: samples of the job, of which the node computes half.
    """
    if row_s is None or device_batch * row_s <= _SLOW_BATCH_S:
        return device_batch
    return 0 if is_worth_trying(samples_left=samples // 2, samples_per_s=1 / row_s) else device_batch


def pays_for_trial(left: Left, trial_s: float | None, found: FoundHere) -> bool:
    """Whether a node that has got the weights tries an engine, before it computes its share of what is left.

    Args:
        left: rest of the job.
        trial_s: seconds that the user gives trials; None for as many as pay.
        found: result of the trial at a trainer like the node; an empty one where it is another machine.
    """
    if trial_s is not None:
        return True
    speed_up, per_s = found.speed_up, left.samples_per_s or found.samples_per_s or None
    if speed_up is not None:
        per_s = found.samples_per_s / speed_up  # as the node does without an engine
    return per_s is None or is_worth_trying(samples_left=left.samples // 2, samples_per_s=per_s, speed_up=speed_up)


def _when_known(found_here: Future[FoundHere], cancellation: Cancellation) -> FoundHere:
    """What the trainer has found, as soon as it has.

    Raises:
        Unavailable: The job is over.
    """
    while not found_here.done():
        cancellation.check()
        wait([found_here], _LOOK_S)
    return found_here.result()


def _soon(context: JobContext, measuring: Measuring) -> Measurements | None:
    """The node's engine, where it is found in a moment, so that all samples have it; else None."""
    context.asking.on_event(PhaseStarted(name="trying an engine"))
    match measuring.begin(wait_s=_SOON_S):
        case Measurements() as found:
            return found
        case MeasurementFailed() as failed:
            context.asking.on_event(failed)
    return None


def _engine(context: JobContext, network: "PartitionedModel", kept: MeasurementCache) -> Stage:
    """The engine of the node, which is worth little time."""

    def measure(cancellation: Cancellation, left: Callable[[], Left]) -> Measurements:
        made = network.engine(context, cancellation, left().samples)
        kept.put(made)
        return made

    return Stage(is_worth=is_worth_trying, measure=measure)


def _plan(
    context: JobContext,
    network: "PartitionedModel",
    nodes: Sequence[str],
    lacking: set[str],
    kept: MeasurementCache,
    both_sides: BothSides | None,
) -> Stage:
    """All that a plan needs, where the sides do not share their cores.

    As long as no link keeps work from a side, both are busy, and no plan gives more than they do.
    """

    def measure(*_: object) -> Measurements:
        made = network.measurements(context, nodes, lacking)
        kept.put(made)
        return made

    def is_worth(*, samples_left: int, samples_per_s: float) -> bool:
        gains = both_sides is None or both_sides.is_bound
        return gains and is_worth_measuring(samples_left=samples_left, samples_per_s=samples_per_s)

    return Stage(is_worth=is_worth, measure=measure)
