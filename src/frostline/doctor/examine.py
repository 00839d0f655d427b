"""Examines a whole set-up, part after part, each only where the parts that it needs are in order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from frostline.config import LoaderSettings
from frostline.datasets import Dataset
from frostline.doctor.data import examine_data
from frostline.doctor.findings import PROBLEM, Finding, attempt
from frostline.doctor.machine import examine_devices, examine_machine
from frostline.doctor.node import examine_node
from frostline.errors import FrostlineError
from frostline.events import Observer
from frostline.training.settings import JobSettings
from frostline.training.start import declared_of
from frostline.wire.http.node_lists import listed_nodes

__all__ = ("ExaminedSetup", "examine")

_RETRY_FOR_S = 5.0
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedSetup:
    """The set-up to examine.

    Attributes:
        nodes: URLs of the nodes, or of lists of them.
        data: settings of a job on the data, whose network is looked at only where ``has_network`` says so; None looks
            at no data.
        has_network: whether the network of ``data`` is examined too.
        loader: settings of the job's loader.
        devices: devices that are to be there, as a node's ``device`` names them; None asks for none.
    """

    nodes: Sequence[str] = ()
    data: JobSettings | None = None
    has_network: bool = False
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    devices: str | None = None


def examine(subject: ExaminedSetup, observe: Observer) -> Iterator[Finding]:
    """What is found, as it is found.

    Args:
        subject: set-up to examine.
        observe: told what happens meanwhile.
    """
    yield from examine_machine()
    if subject.devices is not None:
        yield from attempt("device", partial(examine_devices, subject.devices))
    hasty = replace(subject.loader, retry_for_s=_RETRY_FOR_S, deadline_s=_DEADLINE_S)
    can_go_on = True
    url = None if subject.data is None else subject.data.data
    for finding in _nodes(subject.nodes, hasty, url):
        can_go_on &= finding.level != PROBLEM
        yield finding
    if subject.data is None or not can_go_on:
        return
    job = replace(subject.data, loader=hasty)
    for finding in attempt("data", partial(_data, job, observe)):
        can_go_on &= finding.level != PROBLEM
        yield finding
    if subject.has_network and can_go_on:
        from frostline.doctor.network import examine_network  # imports PyTorch, which takes seconds

        yield from attempt("network", partial(examine_network, job, observe))


def _nodes(addresses: Sequence[str], settings: LoaderSettings, data: str | None) -> Iterator[Finding]:
    for address in addresses:
        try:
            urls = listed_nodes((address,))
        except FrostlineError as error:
            yield Finding(part=f"node {address}", level=PROBLEM, says=str(error))
            continue
        for url in urls:
            yield from attempt(
                f"node {url}",
                partial(examine_node, url, settings, data),
                mend="start it there (frostline serve --data-root URL), or mend the address or FROSTLINE_TOKEN",
            )


def _data(job: JobSettings, observe: Observer) -> Iterator[Finding]:
    yield from examine_data(
        Dataset(
            job.data,
            format=job.format,
            column=job.column,
            targets=declared_of(job),
            near=job.listed_by,
            token=None if job.loader.token == LoaderSettings().token else job.loader.token,
            observe=observe,
        )
    )
