"""Examines a whole set-up: machine, nodes, data, network and link, and says what to change."""

import http.client
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import chain, product
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from frostline.client.http import HttpTransport
from frostline.control.reporter import ControlLink
from frostline.control.settings import NO_CONTROL
from frostline.core import Skipped
from frostline.core.config import (
    LoaderSettings,
    cache_folder,
    check_variables,
    default_node_memory_bytes,
    devices_of,
    environment,
)
from frostline.core.errors import FrostlineError, SampleError
from frostline.core.events import Event, MeasurementFailed, Observer, SetupWarning, WeightsLoaded
from frostline.core.files import make_private_folder
from frostline.core.system import __version__, max_open_files, usable_cores, usable_memory_bytes
from frostline.core.units import in_bytes, in_samples_per_s, in_seconds
from frostline.datasets import Dataset
from frostline.datasets.dataset import reader_of
from frostline.io_service.client import SCHEME, IoTransport
from frostline.jobs.loader_factory import mixed_splits
from frostline.planning import Link, Situation, make_plan
from frostline.preprocess import imagenet
from frostline.preprocess.apply import check_readable
from frostline.stores.protocols import PREFIX, Buffer, Waits
from frostline.stores.urls import is_within
from frostline.training.settings import RANDOM, JobSettings
from frostline.training.start import target_declaration
from frostline.transport import Transport
from frostline.wire.connection import Connections
from frostline.wire.messages import FeatureRequest, common_protocol
from frostline.wire.node_lists import listed_nodes
from frostline.wire.tls import client_context

__all__ = (
    "FINE",
    "PROBLEM",
    "WARNING",
    "ExaminedSetup",
    "Finding",
    "attempt",
    "connections_needed",
    "examine",
    "examine_devices",
    "examine_environment",
    "examine_link",
    "examine_machine",
    "max_receive_buffer",
    "skew_of",
    "worst_level",
)


FINE = "fine"
WARNING = "warning"
PROBLEM = "problem"
LEVELS = (FINE, WARNING, PROBLEM)
"""From nothing to do to something that stops a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        part: the part of the set-up that was looked at, such as ``data`` or ``node http://store:7070``.
        level: ``fine``, ``warning`` or ``problem``.
        says: the finding, in one sentence.
        mend: the change that helps; None where the sentence says it, or there is nothing to change.
    """

    part: str
    level: str
    says: str
    mend: str | None = None

    def to_json(self) -> dict[str, Any]:
        """A dictionary of plain values."""
        return asdict(self)


def worst_level(findings: Iterable[Finding]) -> str:
    """The worst level of all findings; ``fine`` where there are none."""
    return max((finding.level for finding in findings), key=LEVELS.index, default=FINE)


def attempt(
    part: str, examined: Callable[[], Iterable[Finding]], *, mend: str | None = None, level: str = PROBLEM
) -> Iterator[Finding]:
    """Run a check; an error that Frostline puts into a sentence ends it and is a finding like any other.

    Args:
        part: the part of the set-up that is looked at.
        examined: function that gives the findings of one thing that is examined.
        mend: the change that helps where it fails and the error does not say.
        level: level of that finding.
    """
    try:
        yield from examined()
    except FrostlineError as error:
        yield Finding(part=part, level=level, says=str(error), mend=mend)


_GIB = 1 << 30
_MIN_CACHE_BYTES = _GIB
# As many as a window's connections, a node's readers and the files of an environment together.
_MIN_FILES = 1024


def examine_machine(root: Path = Path("/")) -> Iterator[Finding]:
    """What a job finds on this machine.

    Args:
        root: folder in which ``proc``, ``sys`` and ``dev`` lie.
    """
    yield from _processors(root)
    yield from _open_files()
    yield from _accelerator(root)
    yield from _cache()


def examine_devices(device: str) -> Iterator[Finding]:
    """Whether each of some devices is there, as the ``device`` of a node names them.

    Args:
        device: the device, such as ``cuda:0,cuda:1``.

    Raises:
        SettingError: The setting names no device, one twice, or devices of several kinds.
    """
    devices_of(device)
    for name in device.split(","):
        yield _device(name)


def _device(name: str) -> Finding:
    kind, _, digits = name.partition(":")
    number = int(digits or 0)
    cores = len(usable_cores())
    if kind == "cpu":
        if number < cores:
            return Finding(part=f"device {name}", level=FINE, says=f"the processor, {cores} cores of which may be used")
        return Finding(
            part=f"device {name}",
            level=WARNING,
            says=f"parts of the processor have a core each at least, and there are {cores}",
            mend=f"name cpu:0 to cpu:{cores - 1}, or cpu alone",
        )
    import torch

    there = torch.cuda.device_count()
    if number < there:
        free, total = torch.cuda.mem_get_info(number)
        says = f"{torch.cuda.get_device_name(number)}, {in_bytes(free)} of {in_bytes(total)} free"
        return Finding(part=f"device {name}", level=FINE, says=says)
    known = ", ".join(f"cuda:{found}" for found in range(there))
    return Finding(
        part=f"device {name}",
        level=PROBLEM,
        says=f"it is not there: PyTorch sees {known or 'no accelerator'}",
        mend=f"name what is there (--device {known.replace(' ', '') or 'cpu'}), or look why it is not (nvidia-smi)",
    )


def _processors(root: Path) -> Iterator[Finding]:
    cores, memory = len(usable_cores()), usable_memory_bytes(root)
    says = f"{cores} processor cores and {in_bytes(memory)} of memory may be used"
    free = _available_bytes(root)
    needed = default_node_memory_bytes()
    if free is not None and free < needed:
        yield Finding(
            part="machine",
            level=WARNING,
            says=f"{says}, of which {in_bytes(free)} are free, and a node takes up to {in_bytes(needed)}",
            mend=f"end what else runs here, or give a node less (--memory {free // 2 // (1 << 20)}MiB)",
        )
    elif cores == 1:
        yield Finding(
            part="machine",
            level=WARNING,
            says=f"{says}: node and training loop would share one core",
            mend="run a node elsewhere (frostline serve, then --near), or give this process more cores",
        )
    else:
        yield Finding(part="machine", level=FINE, says=says)


def _available_bytes(root: Path) -> int | None:
    """What could be taken now without swapping, as Linux reckons; None where nobody says."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = next((line.split() for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found[1]) << 10


def _open_files() -> Iterator[Finding]:
    soft = max_open_files()
    if 0 <= soft < _MIN_FILES:
        yield Finding(
            part="machine",
            level=WARNING,
            says=f"a process may have {soft} files and connections open, and a wide window takes hundreds",
            mend=f"ulimit -n {4 * _MIN_FILES}",
        )


def _accelerator(root: Path) -> Iterator[Finding]:
    try:
        import torch
    except ImportError:
        yield Finding(
            part="pytorch",
            level=PROBLEM,
            says="PyTorch is not installed, and no network can be trained or cut without it",
            mend="pip install torch, as the page for your accelerator at pytorch.org says",
        )
        return
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        says = (
            f"PyTorch {torch.__version__} on {torch.cuda.get_device_name()}, {in_bytes(free)} of {in_bytes(total)} free"
        )
        yield Finding(part="accelerator", level=FINE, says=says)
    elif (root / "dev/nvidia0").exists():
        why = "without CUDA" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}, which cannot use it"
        yield Finding(
            part="accelerator",
            level=PROBLEM,
            says=f"this machine has an NVIDIA accelerator, and PyTorch {torch.__version__} is built {why}",
            mend="install the build of PyTorch for your driver, as the selector at pytorch.org says",
        )
    else:
        yield Finding(
            part="accelerator", level=FINE, says=f"PyTorch {torch.__version__}; networks run on the processor"
        )


def _cache() -> Iterator[Finding]:
    folder = cache_folder()
    try:
        make_private_folder(folder)
        with (folder / f".examined-{id(folder)}").open("xb") as file:
            file.write(b"\0")
        Path(file.name).unlink()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Finding(
            part="cache folder",
            level=PROBLEM,
            says=f"nothing can be kept in {folder}: {error.strerror}",
            mend="free space or mend its permissions, or name another folder (XDG_CACHE_HOME)",
        )
        return
    if free < _MIN_CACHE_BYTES:
        yield Finding(
            part="cache folder",
            level=WARNING,
            says=f"{in_bytes(free)} are free for {folder}, where features and manifests are kept",
            mend="free space, or name a folder on another disk (XDG_CACHE_HOME)",
        )
    else:
        yield Finding(part="cache folder", level=FINE, says=f"{in_bytes(free)} are free for {folder}")


_FOLDERS = ("TMPDIR", "TEMP", "TMP")


def examine_environment(settings: LoaderSettings, *, has_nodes: bool) -> Iterator[Finding]:
    """What the environment makes of a job, as far as it says anything.

    Args:
        settings: settings of the job's loader, which has from there what nobody else said.
        has_nodes: nodes are named, so that a job asks no I/O service.
    """
    yield from _temporary()
    stores = partial(_variables, lambda: Waits.of(environment(PREFIX)))
    others = partial(_variables, partial(check_variables, (PREFIX, "FROSTLINE_CQL_")))
    yield from attempt("stores", stores, mend="mend or unset that variable")
    yield from attempt("environment", others, mend="correct its name", level=WARNING)
    certificates = partial(_variables, lambda: client_context(settings.tls))
    yield from attempt("certificates", certificates, mend="mend or unset that variable", level=WARNING)
    if settings.control is not None and settings.control != NO_CONTROL:
        part = f"control plane {settings.control}"
        mend = "start it (frostline control), mend FROSTLINE_CONTROL, or unset it"
        yield from attempt(part, partial(_control_plane, part, settings.control, settings), mend=mend)
    if settings.io is not None and not has_nodes:
        part = f"I/O service {settings.io}"
        mend = "start it (frostline io), mend FROSTLINE_IO, or unset it"
        yield from attempt(part, partial(_io_service, part, settings.io, settings), mend=mend)


def _temporary() -> Iterator[Finding]:
    """Whether temporary files can be written where the environment says; Python takes another folder without a word."""
    for name in _FOLDERS:
        said = os.environ.get(name)
        if not said:
            continue
        try:
            with tempfile.TemporaryFile(dir=said) as file:
                file.write(b"\0")
        except OSError as error:
            says, mend = f"nothing can be written to {said}, which {name} names", f"make that folder, or unset {name}"
            yield Finding(part="temporary files", level=PROBLEM, says=f"{says}: {error.strerror}", mend=mend)
    try:
        folder = Path(tempfile.gettempdir())
    except OSError as error:
        says = f"there is no folder for temporary files: {error.strerror}"
        yield Finding(part="temporary files", level=PROBLEM, says=says, mend="name one (TMPDIR)")
        return
    if (free := shutil.disk_usage(folder).free) < _MIN_CACHE_BYTES:
        says = f"{in_bytes(free)} are free for temporary files in {folder}"
        yield Finding(part="temporary files", level=WARNING, says=says, mend="free space, or name another (TMPDIR)")


def _variables(check: Callable[[], object]) -> Iterable[Finding]:
    check()  # which refuses what makes no sense
    return ()


def _control_plane(part: str, url: str, settings: LoaderSettings) -> Iterator[Finding]:
    link = ControlLink(url, settings.token, settings.tls)
    try:
        link.check()
    finally:
        link.close()
    yield Finding(part=part, level=FINE, says="it answers, and a job keeps to the shares that it gives")


def _io_service(part: str, url: str, settings: LoaderSettings) -> Iterator[Finding]:
    with closing(IoTransport(url, settings)) as transport:
        transport.service_statistics()
    yield Finding(part=part, level=FINE, says="it answers, and reads for jobs that name no node")


_ASKED = 7
_NODE_DEADLINE_S, _NODES_AT_ONCE = 10.0, 32
# Object stores refuse requests whose time differs by more than 15 minutes; much less makes logs hard to read.
_MAX_SKEW_S = 900.0
_NOTED_SKEW_S = 30.0


def _examine_node(url: str, settings: LoaderSettings, data: str | None = None) -> Iterator[Finding]:
    """What a job finds at a node.

    Args:
        url: URL of the node.
        settings: settings of the job's loader.
        data: URL of the data that it is to serve; None asks for none.

    Raises:
        NodeUnreachable: No node answers at the address.
        Refused: the node does not know this user.
    """
    part = f"node {url}"
    transport = HttpTransport(url, settings)
    try:
        health = transport.health()
        if common_protocol(health.protocol) is None:
            yield Finding(
                part=part,
                level=PROBLEM,
                says=f"it runs Frostline {health.version}, which has no protocol in common with {__version__}",
                mend="bring both to one version",
            )
            return
        round_trip_s = _round_trip_s(transport)
        transport.node_statistics()  # which only those whom it knows may read
    finally:
        transport.close()
    yield Finding(
        part=part,
        level=FINE,
        says=f"{health.hardware}, {in_bytes(health.memory_bytes)} of memory, round trip {in_seconds(round_trip_s)}; "
        f"samples are decoded {health.decoding or 'as it does not say'}",
    )
    if health.trouble:
        mend = "wait until it is ready, or look at its log and its stores"
        yield Finding(part=part, level=PROBLEM, says=f"it is not ready: {health.trouble}", mend=mend)
    if data is not None and not any(is_within(data, root) for root in health.roots):
        yield Finding(
            part=part,
            level=PROBLEM,
            says=f"it serves {', '.join(health.roots)}, and not {data}",
            mend=f"start it with --data-root {data} too",
        )
    yield from skew_of(part, _clock_of(url, settings), datetime.now(UTC))


def _round_trip_s(transport: Transport) -> float:
    """The median of some small requests, over a connection that is open."""
    seconds = []
    for _ in range(_ASKED):
        started = time.perf_counter()
        transport.health()
        seconds.append(time.perf_counter() - started)
    return median(seconds)


def _clock_of(url: str, settings: LoaderSettings) -> datetime | None:
    """The time of day at a node, by the date of an answer; None where it says none."""
    connection = Connections(url, deadline_s=_NODE_DEADLINE_S, max_idle=0, tls=settings.tls).make_connection()
    try:
        connection.request("GET", "/v1/health")
        said = connection.getresponse().headers.get("Date")
        return None if said is None else parsedate_to_datetime(said)
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()


def skew_of(part: str, there: datetime | None, here: datetime) -> Iterator[Finding]:
    """What two clocks say of each other.

    Args:
        part: the place where the other clock is.
        there: the time that it shows; None where it does not.
        here: the time of this machine.
    """
    if there is None:
        return
    seconds = abs((there - here).total_seconds())
    if seconds > _NOTED_SKEW_S:
        yield Finding(
            part=part,
            level=PROBLEM if seconds > _MAX_SKEW_S else WARNING,
            says=f"its clock and this machine's differ by {in_seconds(seconds)}; object stores refuse 15 minutes",
            mend="set both by NTP (timedatectl set-ntp true)",
        )


_LOOKED_AT = 16
_AT_ONCE = 8


def _examine_data(data: Dataset) -> Iterator[Finding]:
    """What a job finds in a data set."""
    nbytes = int(data.samples.lengths.astype(np.int64).sum())
    says = f"{len(data)} samples of {len(data.classes)} classes, {in_bytes(nbytes)}, at {data.url}"
    yield Finding(part="data", level=FINE, says=says)
    yield from _classes(data)
    if (why := mixed_splits(data)) is not None:
        yield Finding(part="data", level=WARNING, says=why)
    if data.manifest.applied is None and not data.source.near:
        yield from _some_read(data)


def _classes(data: Dataset) -> Iterator[Finding]:
    counts = data.selection.per_label
    if data.classes and (bare := counts.get(-1, 0)):
        says, mend = f"{bare} of {len(data)} samples have no label", "leave them out (--where 'label is not None')"
        yield Finding(part="data", level=WARNING, says=says, mend=mend)
    if len(data.classes) == 1:
        mend = "give the folder that has one folder a class, or name what is learned (--targets COLUMN)"
        says = f"all samples with a label are of one class, {data.classes[0]!r}"
        yield Finding(part="data", level=WARNING, says=says, mend=mend)
        return
    rare = [data.classes[label] for label, count in counts.items() if count == 1 and label >= 0]
    if rare:
        says = f"{len(rare)} classes have one sample each, {rare[0]!r} among them: none is left to score"
        yield Finding(part="data", level=WARNING, says=says, mend="add samples, or leave them out (--where)")


def _some_read(data: Dataset) -> Iterator[Finding]:
    """Read a few samples, evenly from the whole set, and decode them."""
    rows = np.unique(np.linspace(0, len(data) - 1, _LOOKED_AT).astype(np.int64))
    part = data.take(rows)
    broken, nbytes, started = [], 0, time.perf_counter()
    reader = reader_of(part, maximum=_AT_ONCE)
    names = list(part.names)
    for row, found in reader.read(part.samples.take(np.arange(len(part))), names):
        if (why := _why_broken(found)) is not None:
            broken.append(f"{names[row]}: {why}")
        elif not isinstance(found, Skipped):
            nbytes += len(found)
    seconds = time.perf_counter() - started
    if broken:
        level = PROBLEM if len(broken) > len(part) // 4 else WARNING
        yield Finding(
            part="samples",
            level=level,
            says=f"{len(broken)} of {len(part)} samples cannot be read, such as {broken[0]}",
            mend="find all of them (frostline index --check), mend them, or raise --max-skipped-fraction",
        )
    else:
        yield Finding(
            part="samples",
            level=FINE,
            says=f"{len(part)} of them, {in_bytes(nbytes)}, were read and decoded in {in_seconds(seconds)}",
        )


def _why_broken(found: Buffer | Skipped) -> str | None:
    if isinstance(found, Skipped):
        return found.reason
    try:
        check_readable(found)
    except SampleError as error:
        return str(error)
    return None


_RETRY_FOR_S = 5.0
_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedSetup:
    """The set-up to examine.

    Attributes:
        nodes: URLs of the nodes, or of lists of them.
        data: settings of a job on the data, whose network is looked at only where ``has_network`` says so; None looks
            at no data.
        has_network: True if the network of ``data`` is examined too.
        loader: settings of the job's loader.
        devices: devices that are to be there, as a node's ``device`` names them; None asks for none.
    """

    nodes: Sequence[str] = ()
    data: JobSettings | None = None
    has_network: bool = False
    loader: LoaderSettings = field(default_factory=LoaderSettings)
    devices: str | None = None


def examine(subject: ExaminedSetup, on_event: Observer) -> Iterator[Finding]:
    """What is found, as it is found."""
    yield from examine_machine()
    if subject.devices is not None:
        yield from attempt("device", partial(examine_devices, subject.devices))
    hasty = replace(subject.loader, retry_for_s=_RETRY_FOR_S, deadline_s=_DEADLINE_S)
    can_go_on = True
    url = None if subject.data is None else subject.data.data
    nodes: list[str] = []
    around = examine_environment(hasty, has_nodes=bool(subject.nodes))
    for finding in chain(around, _nodes(subject.nodes, hasty, url, nodes)):
        can_go_on &= finding.level != PROBLEM
        yield finding
    if subject.data is None or not can_go_on:
        return
    job = replace(subject.data, loader=hasty, near=next(iter(nodes), None), also_near=tuple(nodes[1:]))
    found: list[Dataset] = []
    for finding in chain(attempt("data", partial(_data, job, on_event, found)), _served(nodes, hasty, found)):
        can_go_on &= finding.level != PROBLEM
        yield finding
    if subject.has_network and can_go_on:
        yield from attempt("network", partial(_examine_network, job, on_event))


def _nodes(addresses: Sequence[str], settings: LoaderSettings, data: str | None, good: list[str]) -> Iterator[Finding]:
    """What is found at nodes; those with which a job can run are put into ``good``."""
    settings = replace(settings, deadline_s=_NODE_DEADLINE_S)
    asked: dict[str, Iterator[Finding]] = {}
    for address in addresses:
        if address.startswith(SCHEME):
            examine, mend = partial(_io_service, f"node {address}", address, settings), "start it (frostline io)"
            asked[address] = attempt(f"node {address}", examine, mend=mend)
            continue
        try:
            urls = listed_nodes((address,))
        except FrostlineError as error:
            yield Finding(part=f"node {address}", level=PROBLEM, says=str(error))
            continue
        if not urls:
            mend = "start nodes, or mend the list"
            yield Finding(part=f"node {address}", level=PROBLEM, says="this list names no node", mend=mend)
        mend = "start it there (frostline serve --data-root URL), or mend the address or FROSTLINE_TOKEN"
        for url in urls:
            asked[url] = attempt(f"node {url}", partial(_examine_node, url, settings, data), mend=mend)
    found = _all_at_once(asked)
    good += [url for url, findings in found.items() if worst_level(findings) != PROBLEM]
    yield from _softened(found, good)


def _all_at_once(asked: Mapping[str, Iterator[Finding]]) -> dict[str, list[Finding]]:
    """The findings at some nodes, of which those that hang let nobody wait for longer than one of them does."""
    with ThreadPoolExecutor(_NODES_AT_ONCE, "frostline-examine") as threads:
        return dict(zip(asked, threads.map(list, asked.values()), strict=True))


def _softened(found: Mapping[str, Sequence[Finding]], good: Sequence[str]) -> Iterator[Finding]:
    """Findings at nodes, of which those stop no job that others are in order for."""
    for finding in (finding for findings in found.values() for finding in findings):
        if finding.level == PROBLEM and good:
            says = f"{finding.says}; a job leaves it out, and has {len(good)} of {len(found)} nodes"
            yield replace(finding, level=WARNING, says=says)
        else:
            yield finding


def _served(nodes: Sequence[str], settings: LoaderSettings, found: Sequence[Dataset]) -> Iterator[Finding]:
    """Ask each node for a sample of the data, as it is stored."""
    said = _all_at_once(
        {
            url: attempt(f"node {url}", partial(_one_sample, url, settings, data), mend=_UNREADABLE)
            for url, data in product(nodes, found)
        }
    )
    yield from _softened(said, [url for url, findings in said.items() if worst_level(findings) != PROBLEM])


_UNREADABLE = "look at that place on its machine: its mount, its rights and its credentials"


def _one_sample(url: str, settings: LoaderSettings, data: Dataset) -> Iterator[Finding]:
    sample = data.samples.take(np.arange(1))
    reading, preprocess = data.manifest.reading, imagenet(224).to_json()
    request = FeatureRequest(data=data.url, samples=sample, prefix=None, cut=0, preprocess=preprocess, reading=reading)
    reach = IoTransport if url.startswith(SCHEME) else HttpTransport
    with closing(reach(url, settings)) as transport:
        batches = list(transport.features(request))
    lost = [skipped for batch in batches for skipped in batch.skipped]
    name = data.names[0]
    if lost:
        says = f"it cannot read {name} of {data.url}: {lost[0].reason}"
        yield Finding(part=f"node {url}", level=PROBLEM, says=says, mend=_UNREADABLE)
    else:
        yield Finding(part=f"node {url}", level=FINE, says=f"it read {name}, {in_bytes(int(sample.lengths[0]))}")


def _data(job: JobSettings, on_event: Observer, found: list[Dataset]) -> Iterator[Finding]:
    """What is found in the data, which is put into ``found`` once it is listed."""
    data = Dataset(
        job.data,
        format=job.format,
        column=job.column,
        file_column=job.file_column,
        label=job.label,
        targets=target_declaration(job),
        relist=job.relist,
        near=job.listed_by,
        token=None if job.loader.token == LoaderSettings().token else job.loader.token,
        on_event=on_event,
    )
    yield from _examine_data(data)
    found.append(data)


# Linux keeps half of a socket's buffer for its own bookkeeping (tcp(7), tcp_adv_win_scale).
_USABLE = 0.5
# As many as a window begins with: more take seconds until they are found.
_FIRST_CONNECTIONS = 8


def max_receive_buffer(root: Path = Path("/")) -> int | None:
    """The largest buffer that this machine gives a connection, in bytes; None where the system does not say.

    Args:
        root: folder in which ``proc`` lies.
    """
    try:
        return int((root / "proc/sys/net/ipv4/tcp_rmem").read_text().split()[2])
    except (OSError, ValueError, IndexError):
        return None


def connections_needed(link: Link, buffer_bytes: int) -> int:
    """How many connections a link needs to be full, each with at most its buffer under way: bandwidth times delay."""
    if math.isinf(link.bytes_per_s):
        return 1
    return max(1, math.ceil(link.bytes_per_s * link.round_trip_s / (_USABLE * buffer_bytes)))


def examine_link(link: Link, buffer_bytes: int | None) -> Iterator[Finding]:
    """What a link carries, and what keeps it from more.

    Args:
        link: link as it was measured.
        buffer_bytes: the largest receive buffer of a connection; None where it is not known.
    """
    if math.isinf(link.bytes_per_s):
        return
    says = f"{in_bytes(link.bytes_per_s)}/s at a round trip of {in_seconds(link.round_trip_s)}"
    needed = 1 if buffer_bytes is None else connections_needed(link, buffer_bytes)
    if needed <= _FIRST_CONNECTIONS:
        yield Finding(part="link", level=FINE, says=says)
        return
    product = link.bytes_per_s * link.round_trip_s
    yield Finding(
        part="link",
        level=WARNING,
        says=f"{says}: {in_bytes(product)} are under way when it is full, and a connection's buffer is at most "
        f"{in_bytes(buffer_bytes or 0)}, so that it takes {needed} connections",
        mend=f"sysctl -w net.ipv4.tcp_rmem='4096 131072 {_next_power(2 * product)}', and tcp_wmem at the node",
    )


def _next_power(value: float) -> int:
    return 1 << max(0, math.ceil(math.log2(max(1.0, value))))


def _examine_network(settings: JobSettings, on_event: Observer) -> Iterator[Finding]:
    """What a job finds that is made of all parts together.

    Raises:
        UserError: The user can mend what is wrong: data, network, node or settings.
        Refused: the node will not do it.
        Unavailable: there is no node at ``near``.
    """
    from frostline.training.setup import measure_first, set_up  # imports PyTorch, which may be what is missing

    heard: list[Finding] = []

    def listen(event: Event) -> None:
        heard.extend(_heard(event, settings))
        on_event(event)

    with set_up(measure_first(settings), listen) as setup:
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
