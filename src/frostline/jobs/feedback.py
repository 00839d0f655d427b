"""Lets a job that runs follow what was measured beside it: another engine, another plan."""

from frostline.events import EngineChanged, Event
from frostline.jobs.findings import Findings
from frostline.jobs.router import Pilot
from frostline.loaders.epoch.fetch import Fetcher
from frostline.planning import make_plan

__all__ = ("follow",)


def follow(found: Findings, fetcher: Fetcher, pilot: Pilot) -> list[Event]:
    """Use what was found for all that was not asked for yet, and tell what has changed.

    Args:
        found: The node's engine, and where both sides were measured what a plan is made from.
        fetcher: Of the job.
        pilot: Of the job.
    """
    changes: list[Event] = []
    before, engine = fetcher.engine.choice, found.choice
    fetcher.engine.choice = engine
    fetcher.unfit.clear()
    if engine.engine != before.engine:
        changes.append(
            EngineChanged(
                at_s=pilot.age_s,
                before=before.engine,
                after=engine.engine,
                error=engine.error,
                samples_per_s=engine.samples_per_s,
            )
        )
    if found.situation is not None:
        replanned = pilot.measured(found.situation, make_plan(found.situation))
        changes += [] if replanned is None else [replanned]
    return changes
