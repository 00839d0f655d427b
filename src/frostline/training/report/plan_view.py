"""What a page shows of a plan: the ways that samples take, the prices of the resources, and the table of the cuts."""

from dataclasses import dataclass

from frostline.planning import Candidate, Plan, table
from frostline.profiles import Trial
from frostline.training.report.plan_plots import cuts_plot

__all__ = ("PlanView",)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """One of the mixture's ways."""

    share: float
    candidate: Candidate
    shade: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Price:
    """What ten percent more of a resource would give, as a share."""

    resource: str
    gain: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Row:
    cells: tuple[str, ...]
    is_chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanView:
    """A plan, as a template takes it.

    Attributes:
        plan: all of it.
        ways: of the mixture, the largest share first.
        prices: the dearest resource first; empty where nothing bounds the rate.
        columns: of the table.
        rows: of the table.
        figure: SVG of all cuts.
        wire_bytes: of an average sample.
        encoded: the candidate that ships the encoded sample.
        trials: of the node's engines up to the frost line, the fastest first; those that did not run come last.
    """

    plan: Plan
    ways: tuple[_Way, ...]
    prices: tuple[_Price, ...]
    columns: tuple[str, ...]
    rows: tuple[_Row, ...]
    figure: str
    wire_bytes: float
    encoded: Candidate
    trials: tuple[Trial, ...]

    @classmethod
    def of(cls, plan: Plan, *, memory_bytes: int | None = None, every: bool = False) -> "PlanView":
        """Gather what is shown of a plan.

        Args:
            plan: to show.
            memory_bytes: the node's budget, where it is known.
            every: a row for every codec of every cut.
        """
        by_route = {candidate.route: candidate for candidate in plan.candidates}
        made, in_use = table(plan, every=every), {one.route for one in plan.mixture}
        is_bound = any(price for _, price in plan.prices)
        ways = tuple(
            _Way(share=one.share, candidate=by_route[one.route], shade=max(1 - 0.3 * place, 0.25))
            for place, one in enumerate(plan.mixture)
        )
        return cls(
            plan=plan,
            ways=ways,
            prices=tuple(_Price(resource=name, gain=price / 10) for name, price in plan.prices if is_bound),
            columns=made.columns,
            rows=tuple(
                _Row(cells=cells, is_chosen=candidate.route in in_use)
                for cells, candidate in zip(made.rows, made.candidates, strict=True)
            ),
            figure=cuts_plot(plan, memory_bytes=memory_bytes),
            wire_bytes=sum(way.share * way.candidate.wire_bytes_per_sample for way in ways),
            encoded=next(candidate for candidate in plan.candidates if candidate.cut == 0),
            trials=_trials(plan),
        )


def _trials(plan: Plan) -> tuple[Trial, ...]:
    line = max((trial.cut for trial in plan.trials), default=0)
    here = [trial for trial in plan.trials if trial.cut == line]
    return tuple(sorted(here, key=lambda one: (one.samples_per_s is None, -(one.samples_per_s or 0.0))))
