"""Settings: one frozen class a component, checked for type; every default says why it is what it is.

Refuses values of another type than their name asks for, in one sentence that names it.
"""

import math
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime
from functools import partial
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from platformdirs import user_cache_path

from frostline.core.errors import SettingError
from frostline.core.system import usable_cores, usable_memory_bytes

__all__ = (
    "ACTIONS",
    "BATCHING",
    "CHANGED",
    "TUNING",
    "IoSettings",
    "LoaderSettings",
    "NodeSettings",
    "ServerTls",
    "TenantSettings",
    "TlsFiles",
    "TokenHolder",
    "cache_folder",
    "check_arguments",
    "check_different_tokens",
    "check_fields",
    "check_hosts",
    "check_minimums",
    "check_type",
    "default_node_memory_bytes",
    "devices_of",
    "environment",
    "io_socket",
    "with_ends",
)


_MEANT: Mapping[type, tuple[type, ...]] = {int: (Integral,), float: (Real,), str: (str, PathLike)}
_WORDS: Mapping[type, str] = {
    bool: "True or False",
    float: "a number",
    int: "a whole number",
    NoneType: "None",
    str: "a text",
}
_SHOWN = (bool, Integral, Real, str)


def check_type(name: str, value: object, *kinds: type) -> None:
    """Make sure that a value is of one of these types.

    NumPy's numbers are numbers, a whole number is a number, ``True`` is none, and a path is a text.

    Raises:
        SettingError: the value is of another type.
    """
    if not any(_is(value, kind) for kind in kinds):
        came = repr(value) if isinstance(value, _SHOWN) else type(value).__name__
        raise SettingError(f"{name} takes {' or '.join(_WORDS.get(kind, kind.__name__) for kind in kinds)}, not {came}")


def check_arguments(given: Mapping[str, Any], taken: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    """The same arguments, whole numbers as Python's own.

    Args:
        given: the arguments by name; ``None`` is left to whoever takes it.
        taken: the types of those that are looked at.

    Raises:
        SettingError: a value is of another type.
    """
    for name, kinds in taken.items():
        if name in given:
            check_type(name, given[name], *kinds)
    return {name: int(value) if _is(value, int) else value for name, value in given.items()}


def check_fields(settings: Any) -> None:
    """Make sure that the fields of a data class that hold numbers, texts and switches do so; secret ones are not shown.

    Raises:
        SettingError: a field holds a value of another type.
    """
    for setting in fields(settings):
        kinds = get_args(setting.type) or (setting.type,)
        if setting.repr and all(kind in _WORDS for kind in kinds):
            check_type(setting.name, getattr(settings, setting.name), *kinds)


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind in (bool, object)
    return isinstance(value, _MEANT.get(kind, (kind,)))


def check_minimums(settings: object, **minimums: float) -> None:
    """Make sure that fields are no less than they may be; None stands for no value.

    Args:
        settings: Owner of the fields.
        **minimums: The least value of each field, by its name.

    Raises:
        SettingError: A field is less.
    """
    for name, minimum in minimums.items():
        value = getattr(settings, name)
        if value is not None and value < minimum:
            raise SettingError(f"{name} must be at least {minimum}, not {value}")


def _check_quantile(name: str, value: float) -> None:
    """Make sure that a value is above 0 and at most 1.

    Raises:
        SettingError: It is not.
    """
    if not 0 < value <= 1:
        raise SettingError(f"{name} must be above 0 and at most 1, not {value}")


def _check_whole_eights(name: str, value: int) -> None:
    """Make sure that a number of rows is a multiple of 8.

    Raises:
        SettingError: It is not.
    """
    if value < 8 or value % 8:
        raise SettingError(f"{name} must be a multiple of 8, not {value}")


def devices_of(device: str) -> tuple[str, ...]:
    """The devices that a setting names with commas, in torch's words; numbered parts of the processor are all ``cpu``.

    Args:
        device: the device, such as ``cpu``, ``cuda`` or ``cuda:0,cuda:1``.

    Raises:
        SettingError: It names none, one twice, or devices of several kinds.
    """
    names = device.split(",")
    kinds = {name.partition(":")[0] for name in names}
    pattern = r"(cpu|cuda):\d+" if len(names) > 1 else r"cpu|cuda(:\d+)?"
    is_clear = all(re.fullmatch(pattern, name) for name in names) and len(kinds) == 1 and len(set(names)) == len(names)
    if not is_clear:
        raise SettingError(f"device must be cpu, cuda or cuda:N, or several such as cuda:0,cuda:1; not {device!r}")
    return ("cpu",) * len(names) if kinds == {"cpu"} else tuple(names)


_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30

BATCHING = ("fair", "hapi", "fixed")
"""Rules by which a node forms batches: its own, and two to compare it with."""

CHANGED = ("skip", "rebuild", "refuse")
"""What a job does about objects that are not what they were when they were listed; see ``datasets.Dataset``."""

TUNING = ("auto", "fixed", "prisma")
"""Rules by which a loader's window gets its bounds: its own, none, and one to compare with."""
# As many as the window had before it was tuned: enough for a link within a building, and no storm for a small store.
_FIRST_REQUESTS = 8
_LONGEST_HOST = 253


def _variable(name: str) -> str | None:
    """What the environment says; a token stands there too, since the arguments of a process can be seen."""
    return os.environ.get(name) or None


def check_hosts(names: tuple[str, ...]) -> None:
    """Do nothing where each is a name of hosts, in small letters and without a port.

    Raises:
        SettingError: One is not.
    """
    for name in names:
        if len(name) > _LONGEST_HOST or not re.fullmatch(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*", name):
            raise SettingError(f"--allow-host takes a name such as store.example.org, without a port, not {name!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The files by which a client knows servers over TLS, and they know it.

    A file that changes counts from the next connection on.

    Attributes:
        ca: PEM file of the authorities whose servers are trusted; None trusts those of the system.
        cert: PEM file of this client's certificate, for servers that ask for one, and of those between it and its
            authority; None has none.
        key: PEM file of its private key, which other users may not read; None where it stands in ``cert``.
    """

    ca: str | None = field(default_factory=partial(_variable, "FROSTLINE_TLS_CA"))
    cert: str | None = field(default_factory=partial(_variable, "FROSTLINE_TLS_CERT"))
    key: str | None = field(default_factory=partial(_variable, "FROSTLINE_TLS_KEY"))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.key is not None and self.cert is None:
            raise SettingError("a key (FROSTLINE_TLS_KEY) needs its certificate: set FROSTLINE_TLS_CERT too")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTls:
    """The files by which a server speaks TLS. One that changes counts from the next connection on.

    Attributes:
        cert: PEM file of its certificate, and of those between it and its authority.
        key: PEM file of its private key, which other users may not read; None where it stands in ``cert``.
        client_ca: PEM file of the authorities of which every client must have a certificate; None asks for none. Where
            it holds lists of revoked certificates too, there must be one of each authority.
    """

    cert: str
    key: str | None = None
    client_ca: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHolder:
    """Somebody who is known by a token, or by two while one takes the place of the other.

    Attributes:
        name: the name in statistics and sentences.
        token_sha256: SHA-256 of its token, in small hexadecimal digits; the token itself is kept nowhere.
        expires_at_s: the time when that token runs out, in seconds since 1970; None never.
        next_token_sha256: SHA-256 of the token that takes its place, which is valid as well; None for none.
        next_expires_at_s: the time when that one runs out.
    """

    name: str
    token_sha256: str = field(repr=False)
    expires_at_s: float | None = None
    next_token_sha256: str | None = field(default=None, repr=False)
    next_expires_at_s: float | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        for field_name in ("token_sha256", "next_token_sha256"):
            digest = getattr(self, field_name)
            is_left_out = digest is None and field_name != "token_sha256"
            if not is_left_out and not re.fullmatch(r"[0-9a-f]{64}", str(digest)):
                raise SettingError(f"{field_name} of tenant {self.name} must be 64 small hexadecimal digits")

    @property
    def tokens(self) -> tuple[tuple[str, float], ...]:
        """SHA-256 of each token, and when it runs out, in seconds since 1970; infinite for never."""
        both = (self.token_sha256, self.expires_at_s), (self.next_token_sha256, self.next_expires_at_s)
        return tuple(
            (digest, math.inf if ends_at_s is None else ends_at_s) for digest, ends_at_s in both if digest is not None
        )


def with_ends(table: Mapping[str, Any]) -> dict[str, Any]:
    """A table of a TOML file whose dates of tokens, ``expires_at`` and ``next_expires_at``, are seconds since 1970.

    Raises:
        SettingError: One is no date and time with its offset.
    """
    made = dict(table)
    for name in ("expires_at", "next_expires_at"):
        ends_at = made.pop(name, None)
        if ends_at is None:
            continue
        if not isinstance(ends_at, datetime) or ends_at.tzinfo is None:
            raise SettingError(f"{name} must be a date and time with its offset, such as 2030-01-31T07:00:00Z")
        made[f"{name}_s"] = ends_at.timestamp()
    return made


def check_different_tokens(holders: Sequence[TokenHolder]) -> None:
    """Make sure that nobody has another's name or token.

    Raises:
        SettingError: Somebody has.
    """
    names = [holder.name for holder in holders]
    tokens = [digest for holder in holders for digest, _ in holder.tokens]
    for what, found in (("names", names), ("tokens", tokens)):
        if len(set(found)) < len(found):
            raise SettingError(f"tenants must have different {what}")


ACTIONS = ("read", "compute", "upload", "list", "train")
"""What a tenant may be allowed to do: have samples sent, networks run on them, and networks sent; list data; train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings(TokenHolder):
    """One tenant of a node: who it is, and what it may use. None is no bound but the node's own.

    Attributes:
        weight: weight of the tenant, above 0: busy tenants share the device's seconds in proportion to their weights.
        requests: maximum requests in work or waiting at once, uploads too; one more is refused with 429.
        work_bytes: maximum bytes of memory for samples in work and answers not yet sent.
        device_s_per_s: maximum seconds of the device per second, in the long run; a request beyond is refused with 429.
        weight_bytes: maximum bytes of the resident networks that the tenant uploaded, and of the engines that were made
            for it. None is half of the memory for weights where there are several tenants.
        roots: URLs under which it may read; None is all that the node serves.
        actions: actions of ``ACTIONS`` that it may do; None allows all that the node does.
        prefixes: SHA-256 of the prefixes that it may upload, run and train behind; None is any.
        sees_all: True if it is told the statistics of the other tenants too.
        may_change: True if it may change weights and quotas of all tenants while the node runs.
    """

    weight: float = 1.0
    requests: int | None = None
    work_bytes: int | None = None
    device_s_per_s: float | None = None
    weight_bytes: int | None = None
    roots: tuple[str, ...] | None = None
    actions: tuple[str, ...] | None = None
    prefixes: tuple[str, ...] | None = None
    sees_all: bool = False
    may_change: bool = False

    def __post_init__(self) -> None:
        TokenHolder.__post_init__(self)
        if not re.fullmatch(r"[\w.-]{1,64}", self.name):
            raise SettingError(f"a tenant's name has up to 64 letters, digits, '.', '_' and '-': not {self.name!r}")
        if not set(self.actions or ()) <= set(ACTIONS):
            raise SettingError(f"actions of tenant {self.name} are some of {', '.join(ACTIONS)}")
        if not all(re.fullmatch(r"[0-9a-f]{64}", digest) for digest in self.prefixes or ()):
            raise SettingError(f"prefixes of tenant {self.name} are digests of 64 small hexadecimal digits")
        if not 0 < self.weight < math.inf:
            raise SettingError(f"weight of tenant {self.name} must be above 0, not {self.weight}")
        for name in ("requests", "work_bytes", "device_s_per_s", "weight_bytes"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SettingError(f"{name} of tenant {self.name} must be above 0, not {value}")
        if self.may_change and not self.sees_all:
            raise SettingError(f"tenant {self.name} may change what all have, so it must see them: set sees_all too")


def default_node_memory_bytes() -> int:
    """A quarter of the memory that this process may use; on a small machine 6 GiB, and half of it at most.

    A node of 6 GiB takes in VGG-16 up to its last layer.
    """
    usable = usable_memory_bytes()
    return max(64 * _MIB, usable // 4, min(6 * _GIB, usable // 2))


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NodeSettings:
    """Resources and limits of a node.

    Attributes:
        memory_bytes: the bytes for weights, samples in work and answers not yet sent. A bound, not an allocation, and
            never exceeded: raise it when the node answers that a request is over budget, and lower it where several
            nodes share a machine.
        decode_threads: images that are decoded at once; one a core by default.
        read_threads: samples that a store away from this machine is asked for at once; more hides a longer round trip.
            A table of CQL has all in flight that there is memory for, whatever this is. The default is where decoding
            begins to count on two cores (``benchmarks/reads_ahead.py``).
        store_deadline_s: seconds that a store may be silent, and for which a read of it is tried again, where
            ``FROSTLINE_STORE_TIMEOUT_S`` and ``FROSTLINE_STORE_RETRY_FOR_S`` do not say less. A job with a node in its
            process gives it its own ``deadline_s``.
        hedge_quantile: share from 0 to 1: a read of an object that somebody waits for, and that takes longer than this
            share of those before it that were as large, is made a second time; 1 makes none twice. Of a job with a node
            in its process the larger of this and the job's own counts.
        compute_threads: threads of the engine inside one operation; one a core by default.
        device: device that runs the frozen layers, in torch's words; several with commas, such as ``cuda:0,cuda:1``,
            share the work.
        device_batch: samples in one run of a network, a multiple of 8.
        max_requests: requests in work or waiting, uploads too; one more is refused with 429. A place is kept for each
            tenant that has none, for at most half of all.
        min_bytes_per_s: minimum bytes a second of an upload: one that takes a minute longer than at this rate is given
            up, and its place and memory go to others. Lower it for links that are slower.
        batching: the way that rows that wait become device batches: ``fair`` fills runs up over requests and tenants
            and gives tenants shares by their weights; ``hapi`` and ``fixed`` are to compare it with.
        tenants: tenants that may use the node; if there are none, everybody may, as one tenant.
        trial_s: seconds for trying engines on one network, once for this hardware; 0 tries none.
        trial_niceness: niceness that trials of engines add to the node's own (nice(2)): 5 leaves them a quarter of a
            core that the node wants too. 0 where nobody else uses the node, as of one that a job starts for itself: the
            sooner it has the faster engine, the sooner all is done.
        trials_in_process: try engines that are ready in a moment in the node's own process. Only for a node that serves
            the one job that started it: an engine that crashes takes the node along, which the job then starts again.
        engines: names of the engines that may be tried; None for all that there are (``engines.catalog``).
        cache_folder: folder where features are kept for later epochs, jobs and tenants; several nodes of one machine
            may share it. None keeps none.
        cache_bytes: maximum bytes of the features in ``cache_folder``.
        local_tier: folder for encoded samples of stores that are away from this machine, such as S3 or tables, so that
            a second epoch reads nothing of them; processes of one machine may share it. None is in the user's cache
            folder.
        local_tier_bytes: maximum bytes of the samples in ``local_tier``. 0 keeps none; None is a quarter of the disk
            that is free, at most 50 GiB, and nothing where that is little.
        shared_cache: URL under which features are kept for all nodes that are given the same; None keeps none there.
        shared_cache_bytes: maximum bytes under ``shared_cache``, by all nodes; what nobody used for an hour makes room
            for others.
        shared_cache_wait_s: maximum seconds that a batch waits for features from ``shared_cache`` before they are
            computed; about what computing a batch takes.
        allow_anonymous: True if the node may listen beyond this machine without tenants: whoever can reach it may use
            it.
        weight_folders: Folders, or files, of pretrained weights in the formats of safetensors and PyTorch: whoever
            uploads a network with one of their tensors does not send it. That such a file is there can be found out so.
        allowed_hosts: Names by which the node may be asked beside addresses and ``localhost`` where it has no tenants,
            and pages of which may ask it: a page of any other site could read it through a browser of its user.
        tls: Certificate and key by which the node speaks TLS; None speaks none.
        follow_links: True lets symbolic links in folders lead out of the data roots. A node in the process of a job
            follows them, since it reads for nobody else.
        max_graph_nodes: Maximum operations of a network that is uploaded; ten times those of a ViT-B/16.
        max_graph_values: Maximum tensors that one run of an uploaded network makes, every part of a split counted.
        max_check_s: Maximum processor seconds in which an uploaded network is checked; ViT-B/16 takes one.
        max_run_s: Maximum estimated seconds of a run of eight samples to the frost line; raise it for very large
            networks.
        max_operation_s: Maximum estimated seconds of any one operation in such a run. A run can be given up, and
            another tenant's can go first, between two operations; so nobody waits much longer than that for it. VGG-16
            takes 0.7 s on one core; ResNet-18 in bfloat16 takes 0.9 s where the processor has no instructions for it.
        allow_training: True trains heads beside the node, for the policy ``all_in_store``.
        training_memory_bytes: memory of each process that trains, beside ``memory_bytes``; about 0.3 GiB of it are
            torch's.
        trainings: maximum number of trainings at once; one more is refused with 429.
        listing_memory_bytes: memory of each process that lists data for a client, beside ``memory_bytes``; one a
            tenant. A million images in class folders took 0.6 GiB (``docs/decisions/0063``).
        max_listed: maximum samples of a data set that is listed for a client.
        max_manifest_bytes: maximum bytes of a manifest that is sent to a client.
    """

    memory_bytes: int = field(default_factory=default_node_memory_bytes)
    decode_threads: int = field(default_factory=lambda: len(usable_cores()))
    read_threads: int = 64
    store_deadline_s: float = math.inf
    hedge_quantile: float = 0.95
    compute_threads: int = field(default_factory=lambda: len(usable_cores()))
    device: str = "cpu"
    device_batch: int = 32
    max_requests: int = 64
    min_bytes_per_s: int = 64 * _KIB
    batching: str = "fair"
    tenants: tuple[TenantSettings, ...] = ()
    trial_s: float = 600.0
    trial_niceness: int = 5
    trials_in_process: bool = False
    engines: tuple[str, ...] | None = None
    cache_folder: str | None = None
    cache_bytes: int = 10 * _GIB
    local_tier: str | None = None
    local_tier_bytes: int | None = None
    shared_cache: str | None = None
    shared_cache_bytes: int = 100 * _GIB
    shared_cache_wait_s: float = 1.0
    allow_anonymous: bool = False
    weight_folders: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    tls: ServerTls | None = None
    follow_links: bool = False
    max_graph_nodes: int = 4000
    max_graph_values: int = 20_000
    max_check_s: float = 20.0
    max_run_s: float = 120.0
    max_operation_s: float = 1.0
    allow_training: bool = False
    training_memory_bytes: int = 2 * _GIB
    trainings: int = 1
    listing_memory_bytes: int = 2 * _GIB
    max_listed: int = 100_000_000
    max_manifest_bytes: int = 4 * _GIB

    def __repr__(self) -> str:
        return _changes(self)

    def __post_init__(self) -> None:
        check_fields(self)
        check_minimums(self, decode_threads=1, read_threads=1, compute_threads=1, max_requests=1, min_bytes_per_s=1)
        check_minimums(self, trial_s=0, trial_niceness=0, store_deadline_s=1e-3, memory_bytes=64 * _MIB)
        check_minimums(self, max_graph_nodes=1, max_graph_values=1, max_check_s=1, max_run_s=1e-3, max_operation_s=1e-3)
        check_minimums(self, local_tier_bytes=0, shared_cache_bytes=1, shared_cache_wait_s=0)
        check_minimums(self, training_memory_bytes=512 * _MIB, trainings=1)
        check_minimums(self, listing_memory_bytes=256 * _MIB, max_listed=1, max_manifest_bytes=1)
        devices_of(self.device)
        _check_quantile("hedge_quantile", self.hedge_quantile)
        _check_whole_eights("device_batch", self.device_batch)
        if self.batching not in BATCHING:
            raise SettingError(f"batching must be one of {', '.join(BATCHING)}, not {self.batching!r}")
        check_hosts(self.allowed_hosts)
        check_different_tokens(self.tenants)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class IoSettings:
    """Resources of the I/O service that jobs of a machine share.

    Attributes:
        memory_bytes: the bytes for samples that are kept and for those under way, of all jobs together; raise it where
            jobs that read the same data find little of it (``frostline io --status``).
        window_bytes: bytes of these for samples that were asked for and not used yet, shared fairly between jobs; each
            may have one request under way whatever this is. The rest is for keeping. The default is a quarter of the
            memory.
        max_connections: maximum connections at once; each request under way takes one, and a thread.
    """

    memory_bytes: int = 2 * _GIB
    window_bytes: int = 0
    max_connections: int = 1024

    def __repr__(self) -> str:
        return _changes(self)

    def __post_init__(self) -> None:
        check_fields(self)
        check_minimums(self, memory_bytes=_MIB, window_bytes=0, max_connections=2)
        if self.window_bytes > self.memory_bytes:
            raise SettingError(f"window_bytes must be at most memory_bytes ({self.memory_bytes:,})")
        if not self.window_bytes:
            object.__setattr__(self, "window_bytes", self.memory_bytes // 4)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoaderSettings:
    """How a job's loader asks for features: how much at once, what it keeps, and when it gives up.

    Attributes:
        requests_in_flight: requests under way at once; more hides a longer round trip, and leaves none of the
            resources that a mixture uses without work. None begins with 8 and finds how many are enough.
        max_requests: maximum of requests under way at once where their number is found; each takes a thread, a
            connection and one of the node's places (64).
        tuning: the way that the window's bounds are found where ``requests_in_flight`` is None: ``auto`` asks for more
            while the training loop waits and more brings more, and for less where that is enough; ``fixed`` stays where
            it begins; ``prisma`` is to compare with. None of them changes samples or their order.
        samples_per_request: rows in one request; as many as a device batch, so that no run has rows to spare. The
            first ones have fewer where no network runs, unless ``ramp`` is False.
        window_bytes: the most bytes asked for and not yet handed out, whatever is found; raise it for a long, fast
            link. Beside it are the next batch, the one that is being filled, and, where samples are decoded behind the
            window, those that are: of one request for each core and one more, with at most 2 MiB of pixels each.
        cache_bytes: bytes of memory at the trainer for features that are kept between epochs; 0 keeps none.
        cache_folder: folder where features are kept on disk too, for later epochs and for later jobs, which then need
            no network for them; jobs of one machine may share it. None keeps none on disk.
        cache_disk_bytes: maximum bytes of the features in ``cache_folder``.
        views: random augmentations cached per sample: epoch ``e`` uses number ``e mod views``. 0 draws new ones each
            epoch, and caches none.
        slack: number of places a sample may be handed out ahead of the earliest one that is still missing; 0 keeps the
            order, None lets whatever arrived go first. Every sample comes once in its epoch all the same. Several
            ranks, worker processes and replays keep the order, whatever it is.
        hedge_quantile: share from 0 to 1: a request that is under way for longer than this share of those before it is
            made a second time, so that at most the rest of them are made twice; 1 makes none twice.
        ramp: begin with the samples of two requests and more with each answer; False sends all that are allowed at
            once, which a long link answers with losses and a node with a queue.
        retry_for_s: seconds for which a sample is asked for again while its node does not answer, before the job stops.
        deadline_s: seconds of silence on a connection after which it counts as broken, also of a store that a node in
            this process reads.
        device_batch: samples in one run of the frozen layers that are left to the trainer, a multiple of 8; keep it
            the node's, so that features are the same bits wherever they are computed.
        trainer_memory_bytes: memory that frozen layers may take at the trainer; a cut that leaves more is not planned.
            None is what the trainer's accelerator has free, or what this process may use.
        skip_allowance: share of a data set's samples that may be unreadable before the job stops. A job and its worker
            processes count together, each rank for itself.
        allow_nonfinite: go on where the frozen layers give Inf or NaN for a sample: the loop gets the row as it is, and
            it is counted and kept in no cache. Else the job stops at the first such row, and names it.
        follow: True plans again while the job runs, where what is measured says so.
        trial_s: seconds that a job allows for trials of engines at its node, whether they pay for it or not; 0 tries
            none, and takes what is known. None has those tried that save the job more time than they take, and any
            that take less than a twentieth of it.
        measure_first: measure both sides and the link, and try engines, before the job hands out anything. Else it
            begins with what an earlier job on the same network, data and machines found, or with all frozen layers at
            the node, and measures while it runs, where that pays.
        pin_memory: let batches lie in page-locked memory, from which a GPU copies while the loop goes on, as of
            PyTorch's ``DataLoader``; None does where the model is on such a GPU.
        io: address of the I/O service that jobs of this machine share, such as
            ``unix:///run/user/1000/frostline/io.sock``; used where a job names no node.
        control: address of the control plane that divides the store between jobs, such as
            ``http://store-1:7075?job=night``; None reports to the job's first node, ``"none"`` to nobody.
        token: token that identifies the job to its nodes; None where they know nobody. Never shown or logged.
        tls: files by which nodes and control planes at ``https://`` are known, and know the job.
    """

    requests_in_flight: int | None = None
    max_requests: int = 64
    tuning: str = "auto"
    samples_per_request: int = 32
    window_bytes: int = 256 * _MIB
    cache_bytes: int = 1 * _GIB
    cache_folder: str | None = None
    cache_disk_bytes: int = 10 * _GIB
    views: int = 0
    slack: int | None = 0
    hedge_quantile: float = 0.95
    ramp: bool = True
    retry_for_s: float = 60.0
    deadline_s: float = 120.0
    device_batch: int = 32
    trainer_memory_bytes: int | None = None
    skip_allowance: float = 0.01
    allow_nonfinite: bool = False
    follow: bool = True
    trial_s: float | None = None
    measure_first: bool = False
    pin_memory: bool | None = None
    io: str | None = field(default_factory=partial(_variable, "FROSTLINE_IO"))
    control: str | None = field(default_factory=partial(_variable, "FROSTLINE_CONTROL"))
    token: str | None = field(default_factory=partial(_variable, "FROSTLINE_TOKEN"), repr=False)
    tls: TlsFiles = field(default_factory=TlsFiles)

    def __repr__(self) -> str:
        return _changes(self)

    def __post_init__(self) -> None:
        check_fields(self)
        check_minimums(self, requests_in_flight=1, max_requests=1, samples_per_request=1, window_bytes=1, slack=0)
        check_minimums(self, trainer_memory_bytes=1, cache_bytes=0, views=0, retry_for_s=0, deadline_s=1e-3, trial_s=0)
        if self.tuning not in TUNING:
            raise SettingError(f"tuning must be one of {', '.join(TUNING)}, not {self.tuning!r}")
        _check_quantile("hedge_quantile", self.hedge_quantile)
        _check_whole_eights("device_batch", self.device_batch)
        if not 0 <= self.skip_allowance <= 1:
            raise SettingError(f"skip_allowance is a share between 0 and 1, not {self.skip_allowance}")
        # What it is stays out of the sentence.
        if self.token is not None and not re.fullmatch(r"[\x21-\x7e]{1,512}", self.token):
            raise SettingError("a token (FROSTLINE_TOKEN) has 1 to 512 printable ASCII characters and no blanks")

    @property
    def first_requests(self) -> int:
        """Requests under way at once to begin with."""
        return self.requests_in_flight or min(_FIRST_REQUESTS, self.max_requests)

    @property
    def last_requests(self) -> int:
        """Requests under way at once that there may ever be."""
        is_found = self.requests_in_flight is None and self.tuning != "fixed"
        return self.max_requests if is_found else self.first_requests

    @property
    def is_followed(self) -> bool:
        """Both bounds of a window follow what the loop waits for."""
        return self.requests_in_flight is None and self.tuning == "auto"

    def max_skipped(self, samples: int) -> int:
        """The number of so many samples that may be unreadable before the job stops."""
        return math.ceil(self.skip_allowance * samples)


def cache_folder() -> Path:
    """The user's cache folder for Frostline (``XDG_CACHE_HOME`` where it is set); it may not exist yet."""
    return user_cache_path("frostline")


def io_socket() -> Path:
    """Where the user's I/O service listens unless it is told otherwise (``XDG_RUNTIME_DIR`` where it is set)."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    folder = Path(runtime) / "frostline" if runtime else Path(tempfile.gettempdir()) / f"frostline-{os.geteuid()}"
    return folder / "io.sock"


def environment(prefix: str) -> dict[str, str]:
    """The environment's variables whose names begin so and that hold something; values may be secrets."""
    return {name: value for name, value in os.environ.items() if name.startswith(prefix) and value}


def _changes(settings: Any) -> str:
    """A class with the values that differ from its defaults; secret ones are not shown."""
    default = type(settings)()
    shown = [each.name for each in fields(settings) if each.repr]
    values = [(name, getattr(settings, name)) for name in shown]
    changed = [f"{name}={value!r}" for name, value in values if value != getattr(default, name)]
    return f"{type(settings).__name__}({', '.join(changed)})"
