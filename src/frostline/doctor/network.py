"""Looks at a whole set-up as a job makes it: builds and cuts the network, and measures both sides and the link."""

from collections.abc import Iterator

from frostline.core.units import in_samples_per_s
from frostline.doctor.findings import FINE, PROBLEM, WARNING, Finding
from frostline.doctor.link import examine_link, max_receive_buffer
from frostline.events import Event, MeasurementFailed, Observer, SetupWarning, WeightsLoaded
from frostline.planning import Situation, make_plan
from frostline.training.settings import RANDOM, JobSettings

__all__ = ("examine_network",)


def examine_network(settings: JobSettings, observe: Observer) -> Iterator[Finding]:
    """What a job finds that is made of all parts together.

    Args:
        settings: settings of the job.
        observe: told what happens meanwhile.

    Raises:
        UserError: what the user can put right.
        Refused: the node will not do it.
        Unavailable: there is no node at ``near``.
    """
    from frostline.training.setup import measured_first, set_up  # imports PyTorch, which may be what is missing

    heard: list[Finding] = []

    def listen(event: Event) -> None:
        heard.extend(_heard(event, settings))
        observe(event)

    with set_up(measured_first(settings), listen) as setup:
        yield from dict.fromkeys(heard)
        yield Finding(
            part="network",
            level=FINE,
            says=f"{settings.model} can be cut; its frost line lies behind {setup.job.frost_line.name}",
        )
        fallback = setup.job.fallback
        if fallback is not None and all(finding.says != fallback for finding in heard):
            yield Finding(part="network", level=WARNING, says=f"it is not cut as it stands: {fallback}")
        if not any(parameter.requires_grad for parameter in setup.job.head.parameters()):
            yield Finding(
                part="network",
                level=PROBLEM,
                says="the whole network is frozen, so there is nothing to train",
                mend="freeze less of it (--until)",
            )
        situation = setup.job.situation
    if situation is not None:
        yield from examine_link(situation.link, max_receive_buffer())
        yield _expected(situation)


def _heard(event: Event, settings: JobSettings) -> Iterator[Finding]:
    match event:
        case WeightsLoaded() if settings.weights == RANDOM:
            yield Finding(
                part="network",
                level=WARNING,
                says=f"the frozen layers of {event.model} have random weights, which learned nothing",
                mend="leave --weights random out, or name a file of trained weights",
            )
        case SetupWarning() | MeasurementFailed():
            yield Finding(part="network", level=WARNING, says=event.reason)
        case _:
            pass


def _expected(situation: Situation) -> Finding:
    if situation.refused is not None:
        return Finding(part="plan", level=PROBLEM, says=f"the node does not run the network: {situation.refused}")
    plan = make_plan(situation)
    return Finding(
        part="plan",
        level=FINE,
        says=f"{in_samples_per_s(plan.mean_samples_per_s)} to expect, held back by {plan.bottleneck}",
    )
