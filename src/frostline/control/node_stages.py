"""Has each tenant of a node keep to its share of the computing and memory that the control plane divides."""

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from frostline.control.amounts import Amounts
from frostline.control.link import ControlLink
from frostline.control.messages import checked_job
from frostline.control.reporter import ControlReporter, Measured
from frostline.errors import BadRequest, SettingError
from frostline.node import Node
from frostline.node.scheduling.tenant_limits import TenantLimits

__all__ = ("NodeTenantStage", "keeping_to", "node_reporter")

# A tenant that is not held back may come to want half as much again before it is asked next.
_AMPLE = 1.5
# Of each device, a tenant that is idle still wants this part, so that it has one of what nobody asks for.
_IDLE = 0.01


class NodeTenantStage:
    """One tenant of a node as a stage of kind ``node``.

    Args:
        job: name of the job that it is in the control plane.
        limits: limits of the tenant, and its use.
        clock: monotonic seconds.
    """

    kind = "node"

    def __init__(self, job: str, limits: TenantLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.job = job
        self._limits = limits
        self._clock = clock
        self._since_s = clock()
        self._device_s = limits.usage().device_s

    def measure(self, *, is_first: bool) -> Measured:
        """Its device seconds since the last report, and what it holds of the memory for work."""
        usage, now_s = self._limits.usage(), self._clock()
        passed_s = now_s - self._since_s
        per_s = 0.0 if passed_s <= 0 else (usage.device_s - self._device_s) / passed_s
        self._since_s, self._device_s = now_s, usage.device_s
        most = float(usage.devices)
        wanted = most if is_first or usage.is_held_back else min(most, max(_IDLE * most, _AMPLE * per_s))
        return Measured(
            demand=Amounts(
                compute_s_per_s=wanted,
                bytes_per_s=0.0,
                requests_per_s=0.0,
                requests=0.0,
                memory_bytes=float(usage.max_work_bytes),
            ),
            used=Amounts(compute_s_per_s=per_s, memory_bytes=float(usage.work_bytes)),
        )

    def keep_to(self, share: Amounts) -> None:
        """Bind the tenant to this share."""
        self._limits.bound(device_s_per_s=share.compute_s_per_s, work_bytes=share.memory_bytes)


def node_reporter(node: Node, link: ControlLink, clock: Callable[[], float] = time.monotonic) -> ControlReporter:
    """Make what has a node keep to a control plane; the caller begins and closes it.

    A node is one tenant of the control plane, and each of its own tenants is a job there, of the tenant's name. A node
    without tenants is one job.

    Args:
        node: node, which runs.
        link: way to the control plane, which is closed with the reporter.
        clock: monotonic seconds.

    Raises:
        SettingError: A tenant's name cannot be a job's.
    """
    try:
        stages = [
            NodeTenantStage(checked_job(limits.name) if node.settings.tenants else link.job, limits, clock)
            for limits in node.limits()
        ]
    except BadRequest as error:
        raise SettingError(f"a tenant of this node cannot be a job of the control plane: {error}") from error
    return ControlReporter(link, stages, clock)


@contextmanager
def keeping_to(node: Node, link: ControlLink | None) -> Iterator[None]:
    """Have a node keep to its control plane meanwhile, where there is one.

    Args:
        node: node, which runs.
        link: way to the control plane, which is closed at the end; None leaves the node alone.

    Raises:
        SettingError: A tenant's name cannot be a job's.
    """
    if link is None:
        yield
        return
    with closing(node_reporter(node, link)) as reporter:
        reporter.begin()
        yield
