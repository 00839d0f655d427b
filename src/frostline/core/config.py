"""Settings: one frozen class a component, checked for type; every default says why it is what it is."""

import math
import os
import re
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import datetime
from functools import partial
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from platformdirs import user_cache_path

from frostline.core.errors import SettingError
from frostline.core.hints import add_field_hints, suggest_names
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
    "check_variables",
    "default_node_memory_bytes",
    "devices_of",
    "environment",
    "io_socket",
    "refuse_variables",
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
        takes = " or ".join(_WORDS.get(kind, kind.__name__) for kind in kinds)
        made = [kind.__name__ for kind in kinds if is_dataclass(kind)]
        given = [f"{name}=..." for name in value] if isinstance(value, dict) else []
        write = f": write {made[0]}({', '.join(given)})" if made and given else ""
        raise SettingError(f"{name} takes {takes}, not {describe_value(value)}{write}")


def describe_value(value: object) -> str:
    """A value in the sentence that refuses it: numbers and texts as they are written, all else by its type."""
    return repr(value) if isinstance(value, _SHOWN) else type(value).__name__


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
        SettingError: The value is outside of that range.
    """
    if not 0 < value <= 1:
        raise SettingError(f"{name} must be above 0 and at most 1, not {value}")


def _check_whole_eights(name: str, value: int) -> None:
    """Make sure that a number of rows is a multiple of 8.

    Raises:
        SettingError: The number is not such a multiple.
    """
    if value < 8 or value % 8:
        raise SettingError(f"{name} must be a multiple of 8, not {value}")


def devices_of(device: str) -> tuple[str, ...]:
    """The devices that a setting names with commas, in torch's words; numbered parts of the processor are all ``cpu``.

    Args:
        device: the device, such as ``cpu``, ``cuda`` or ``cuda:0,cuda:1``.

    Raises:
        SettingError: The setting names no device, one twice, or devices of several kinds.
    """
    names = device.split(",")
    kinds = {name.partition(":")[0] for name in names}
    pattern = r"(cpu|cuda):\d+" if len(names) > 1 else r"cpu|cuda(:\d+)?"
    is_clear = all(re.fullmatch(pattern, name) for name in names) and len(kinds) == 1 and len(set(names)) == len(names)
    if not is_clear:
        raise SettingError(f"device must be cpu, cuda or cuda:N, or several such as cuda:0,cuda:1; not {device!r}")
    return ("cpu",) * len(names) if kinds == {"cpu"} else tuple(names)


_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30
_DISK_BYTES = 10 * _GIB  # of features, at a trainer

BATCHING = ("fair", "hapi", "fixed")
"""Rules by which a node forms batches: its own, and two to compare it with."""

CHANGED = ("skip", "rebuild", "refuse")
"""What a job does about objects that are not what they were when they were listed; see ``datasets.Dataset``."""

MANIFEST_LOCATIONS = ("auto", "data")
"""Where manifests and splits are kept; see ``datasets.Dataset``."""

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
    """The TLS files of a client: which servers it trusts, and the certificate by which servers know it.

    A changed file is used from the next connection on.

    Attributes:
        ca: PEM file of the certificate authorities to trust, by default the file that ``FROSTLINE_TLS_CA`` names. None
            trusts those of the system.
        cert: PEM file of the client's certificate and any intermediate ones, for servers that require one; by default
            the file that ``FROSTLINE_TLS_CERT`` names. None sends no certificate.
        key: PEM file of the certificate's private key, which other users must not be able to read; by default the file
            that ``FROSTLINE_TLS_KEY`` names. None means that ``cert`` contains the key.
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
    """The TLS files of a server. A changed file is used from the next connection on.

    Attributes:
        cert: PEM file of the server's certificate and any intermediate ones.
        key: PEM file of the certificate's private key, which other users must not be able to read. None means that
            ``cert`` contains the key.
        client_ca: PEM file of certificate authorities: every client must then have a certificate of one of them. If the
            file has revocation lists, it must have one for each authority. None requires no client certificates.
    """

    cert: str
    key: str | None = None
    client_ca: str | None = None

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenHolder:
    """Someone who is identified by a token, or by an old and a new one while the token is being changed.

    Attributes:
        name: the name shown in statistics and messages.
        token_sha256: SHA-256 of the token, 64 lower-case hexadecimal digits; the token itself is not stored.
        expires_at_s: time at which the token expires, in seconds since 1970. None means never.
        next_token_sha256: SHA-256 of the new token, which is valid too. None means that there is none.
        next_expires_at_s: time at which the new token expires, in seconds since 1970. None means never.
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
        SettingError: Two tenants have the same name or token.
    """
    names = [holder.name for holder in holders]
    tokens = [digest for holder in holders for digest, _ in holder.tokens]
    for what, found in (("names", names), ("tokens", tokens)):
        if len(set(found)) < len(found):
            raise SettingError(f"tenants must have different {what}")


ACTIONS = ("read", "compute", "upload", "list", "train")
"""What a tenant may be allowed to do: have samples sent, networks run on them, and networks sent; list data; train."""


@add_field_hints
@dataclass(frozen=True, slots=True, kw_only=True)
class TenantSettings(TokenHolder):
    """One tenant of a node: its identity, its rights and its quotas. A quota of None is limited by the node alone.

    Attributes:
        weight: share of the node relative to other tenants, above 0: busy tenants get the device's seconds in
            proportion to their weights.
        requests: maximum requests running or waiting at once, uploads included; one more is refused with 429.
        work_bytes: maximum bytes of memory for samples being processed and answers not yet sent.
        device_s_per_s: maximum seconds of the device per second on average; a request beyond is refused with 429.
        weight_bytes: maximum bytes of the networks in memory that the tenant uploaded, and of the engines made for it.
            None allows half of the memory for weights if there are several tenants.
        roots: URLs below which the tenant may read data. None allows all data that the node serves.
        actions: the actions of ``ACTIONS`` that the tenant may perform. None allows all that the node offers.
        prefixes: SHA-256 of each frozen network that the tenant may upload, run and train a head on. None allows any.
        sees_all: True lets the tenant read the statistics of the other tenants.
        may_change: True lets the tenant change weights and quotas of all tenants while the node runs; it needs
            ``sees_all``.
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


@add_field_hints
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NodeSettings:
    """Resources and limits of a node.

    Attributes:
        memory_bytes: maximum bytes for weights, samples being processed and answers not yet sent; never exceeded, and
            not allocated in advance. Default: a quarter of the memory of the machine or container, but 6 GiB, or half
            of it, if it is small. Raise it if the node refuses requests as over budget; lower it if several nodes share
            a machine.
        decode_threads: number of threads that decode images; by default the number of usable cores.
        read_threads: samples requested at once from a store that is not on this machine; more hides a longer round
            trip. Tables of CQL ignore it and have as many in flight as memory allows. With the default, decoding is the
            bottleneck on two cores (``docs/decisions/0031``).
        store_deadline_s: maximum seconds without an answer from a store, and maximum seconds of retrying a read, if
            ``FROSTLINE_STORE_TIMEOUT_S`` and ``FROSTLINE_STORE_RETRY_FOR_S`` are not smaller. Default: no limit. A
            node in a job's process gets the ``deadline_s`` of the job.
        hedge_quantile: share, above 0 and up to 1, of earlier reads of similar size. A read that takes longer than this
            share of them, and that somebody waits for, is sent a second time; 1 sends none twice. For a node in a
            job's process the larger of this value and the job's counts.
        compute_threads: threads of the engine within one operation; by default the number of usable cores.
        device: device that runs the frozen layers, in PyTorch's words, such as ``cpu`` or ``cuda:1``. Several, such as
            ``cuda:0,cuda:1``, share the work.
        device_batch: samples in one forward pass of the frozen layers, a multiple of 8.
        max_requests: maximum requests running or waiting at once, uploads included; one more is refused with 429. Up to
            half of these slots are kept for tenants that have no request.
        min_bytes_per_s: minimum upload rate in bytes per second. An upload that takes a minute longer than at this rate
            is aborted, and frees its slot and memory. Lower it for slower links.
        batching: rule that forms device batches from waiting samples. ``fair`` fills batches across requests and
            tenants and divides the device by the tenants' weights; ``hapi`` and ``fixed`` are for comparison.
        tenants: the tenants that may use the node. If empty, everyone may, as one tenant.
        trial_s: maximum seconds for trying engines on one network, which is done once per hardware; 0 tries none.
        trial_niceness: niceness added to the processes that try engines (nice(2)). 5 leaves them a quarter of a core
            that the node is using too. Set 0 if nobody waits for the node's other work, as a job does for its own node:
            the faster engine is then found sooner.
        trials_in_process: True tries quickly built engines in the node's own process. Use it only for a node that
            serves a single job: an engine that crashes ends the node, which the job then starts again.
        engines: names of the engines that may be tried. None allows all (``engines.catalog``).
        cache_folder: folder that keeps features for later epochs, jobs and tenants; several nodes on one machine may
            share it. None keeps none on disk.
        cache_bytes: maximum bytes of the features in ``cache_folder``.
        local_tier: folder that keeps encoded samples of stores that are not on this machine, such as S3 or tables, so
            that a second epoch does not read them again; processes on one machine may share it. None is a folder in
            the user's cache folder.
        local_tier_bytes: maximum bytes of the samples in ``local_tier``; 0 keeps none. None is a quarter of the free
            disk space, at most 50 GiB, and nothing if that is little.
        shared_cache: URL below which features are kept for all nodes with the same setting. None keeps none there.
        shared_cache_bytes: maximum bytes below ``shared_cache``, of all nodes together; features that nobody used for
            an hour are deleted to free space.
        shared_cache_wait_s: maximum seconds to wait for a batch's features from ``shared_cache`` before they are
            computed; set it to about the time that computing a batch takes.
        allow_anonymous: True lets a node without tenants listen on addresses other than loopback: whoever can reach it
            may use it.
        weight_folders: folders or files of pretrained weights (safetensors or PyTorch). A client whose network has a
            tensor of these files need not upload it. Clients can find out which tensors are there.
        allowed_hosts: host names, with their subdomains, by which a node without tenants may be addressed, besides IP
            addresses and ``localhost``; web pages from these hosts may call it. All others are refused, so that no
            other site can read the node through a user's browser.
        tls: certificate and key of the node. None serves plain HTTP.
        follow_links: True lets symbolic links in folders lead outside the data roots. A node in a job's process always
            follows them, because it reads for its own user only.
        max_graph_nodes: maximum operations of an uploaded network; the default is ten times those of a ViT-B/16.
        max_graph_values: maximum tensors that one run of an uploaded network makes, with each part of a split counted.
        max_check_s: maximum processor seconds for checking an uploaded network; ViT-B/16 takes one.
        max_run_s: maximum estimated seconds of running eight samples up to the frost line; raise it for very large
            networks.
        max_operation_s: maximum estimated seconds of any single operation in such a run. Between two operations a run
            can be cancelled and another tenant can go first, so this is about how long others wait. VGG-16
            takes 0.7 s on one core; ResNet-18 in bfloat16 takes 0.9 s on a processor without instructions for it.
        allow_training: True lets clients train heads beside the node (policy ``all_in_store``).
        training_memory_bytes: bytes of memory of each process that trains, in addition to ``memory_bytes``; PyTorch
            itself takes about 0.3 GiB of it.
        trainings: maximum trainings at once; one more is refused with 429.
        listing_memory_bytes: bytes of memory of each process that lists data for a client, in addition to
            ``memory_bytes``; there is one per tenant. Listing a million images in class folders took 0.6 GiB
            (``docs/decisions/0063``).
        max_listed: maximum samples in a data set that the node lists for a client.
        max_manifest_bytes: maximum bytes of a manifest that the node sends to a client.
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
    """Resources of the I/O service that jobs on one machine share.

    Attributes:
        memory_bytes: maximum bytes for cached samples and samples in flight, of all jobs together. Raise it if jobs
            that read the same data have few cache hits (``frostline io --status``).
        window_bytes: maximum bytes, of ``memory_bytes``, for samples that were requested and not used yet, shared
            fairly between jobs; each job may always have one request in flight. The rest is the cache. 0, the default,
            is a quarter of the memory.
        max_connections: maximum connections at once; each request in flight takes one, and a thread. No more than leave
            256 of the files that the process may have open, or half of few.
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


@add_field_hints
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class LoaderSettings:
    """How a job's loader requests features: how much at once, what it keeps, and when it gives up.

    Attributes:
        requests_in_flight: number of requests in flight at once. More hides a longer round trip and keeps every
            resource of a mixed plan busy. None starts with 8 and finds the number while the job runs.
        max_requests: maximum requests in flight at once if their number is found; each takes a thread, a connection and
            one of the node's places (64 by default).
        tuning: rule that finds the number of requests and bytes in flight if ``requests_in_flight`` is None. ``auto``
            raises them while the training loop waits and a higher number is faster, and lowers them where fewer are
            enough; ``fixed`` keeps the first values; ``prisma`` is for comparison. No rule changes samples or order.
        samples_per_request: samples in one request. Keep it equal to the node's ``device_batch``, so that device
            batches are full. Without a network the first requests have fewer, unless ``ramp`` is False.
        window_bytes: maximum bytes of samples that were requested and not yet handed out; raise it for a long, fast
            link. The next batch and the one being filled are not counted. If this process decodes the samples, those
            being decoded are not counted either: one request per core and one more, with up to 2 MiB of pixels each.
        cache_bytes: bytes of the trainer's memory for features that are kept between epochs; 0 keeps none.
        cache_folder: folder at the trainer that also keeps features on disk, for later epochs and later jobs, which
            then need not request them; jobs on one machine may share it. None is a folder in the user's cache folder
            where a network's features come from nodes on other machines and all have space there; else none are kept.
        cache_disk_bytes: maximum bytes of the features in ``cache_folder``; 0 keeps none on disk. None is 10 GiB, and
            in the user's cache folder at most a quarter of the free disk space.
        cached_augmentations: number N of random augmentations cached per sample: epoch ``e`` uses number ``e mod N``. 0
            draws new ones in each epoch and caches none.
        max_reorder: number of positions by which a sample may overtake the earliest one that has not arrived. 0 keeps
            the order; None hands out whatever has arrived. Every sample still comes once per epoch. Jobs with several
            ranks, worker processes or replays always keep the order.
        hedge_quantile: share, above 0 and up to 1, of earlier requests. A request that takes longer than this share of
            them is sent a second time, so 0.95 repeats at most 5 % of the requests; 1 repeats none.
        ramp: True starts with the samples of two requests and requests more with each answer. False sends all allowed
            requests at once, which can cause packet loss on a long link and a queue at the node.
        retry_for_s: seconds for which a sample is requested again while its node does not answer, before the job stops.
        deadline_s: seconds without data after which a connection counts as broken; also for the store, if the node is
            in this process.
        device_batch: samples in one forward pass of the frozen layers that run at the trainer, a multiple of 8. Keep it
            equal to the node's, so that features are the same bits wherever they are computed.
        trainer_memory_bytes: maximum bytes that frozen layers may take at the trainer; cuts that need more are not
            planned. None is the free memory of the trainer's accelerator, or the memory that this process may use.
        max_skipped_fraction: share of a data set's samples, from 0 to 1, that may be unreadable before the job stops. A
            job and its worker processes count together, each rank separately.
        allow_nonfinite: True continues if the frozen layers give Inf or NaN for a sample: the loop gets the features as
            they are; the sample is counted and not cached. False stops the job at the first such sample and names it.
        replan: True changes the plan while the job runs if measurements show another one to be 15 % faster.
        trial_s: maximum seconds for trying engines at the job's node, even if the job does not win them back; 0 tries
            none and uses what is known. None tries those that save the job more time than they take, and any
            that take less than a twentieth of it.
        measure_first: True measures both sides and the link, and tries engines, before the first batch. False begins at
            once, with the measurements of an earlier job on the same network, data and machines if there are any, and
            measures while it runs if that pays.
        pin_memory: True puts batches into page-locked memory, from which a GPU copies while the loop continues, as in
            PyTorch's ``DataLoader``. None does so if the model is on such a GPU.
        io: address of the I/O service that jobs on this machine share, such as
            ``unix:///run/user/1000/frostline/io.sock``; used by jobs that name no node. Default: ``FROSTLINE_IO``.
        control: address of the control plane that divides the store between jobs, such as
            ``http://store-1:7075?job=night``. Default: ``FROSTLINE_CONTROL``. None reports to the job's first node,
            ``"none"`` to nobody.
        token: token that identifies the job to its nodes; never shown or logged. Default: ``FROSTLINE_TOKEN``. None
            sends none, for nodes without tenants.
        tls: TLS files for nodes and control planes at ``https://``: the authorities to trust and the job's certificate.
    """

    requests_in_flight: int | None = None
    max_requests: int = 64
    tuning: str = "auto"
    samples_per_request: int = 32
    window_bytes: int = 256 * _MIB
    cache_bytes: int = 1 * _GIB
    cache_folder: str | None = None
    cache_disk_bytes: int | None = None
    cached_augmentations: int = 0
    max_reorder: int | None = 0
    hedge_quantile: float = 0.95
    ramp: bool = True
    retry_for_s: float = 60.0
    deadline_s: float = 120.0
    device_batch: int = 32
    trainer_memory_bytes: int | None = None
    max_skipped_fraction: float = 0.01
    allow_nonfinite: bool = False
    replan: bool = True
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
        check_minimums(self, requests_in_flight=1, max_requests=1, samples_per_request=1, window_bytes=1, max_reorder=0)
        check_minimums(
            self,
            trainer_memory_bytes=1,
            cache_bytes=0,
            cache_disk_bytes=0,
            cached_augmentations=0,
            retry_for_s=0,
            deadline_s=1e-3,
            trial_s=0,
        )
        if self.tuning not in TUNING:
            raise SettingError(f"tuning must be one of {', '.join(TUNING)}, not {self.tuning!r}")
        _check_quantile("hedge_quantile", self.hedge_quantile)
        _check_whole_eights("device_batch", self.device_batch)
        if not 0 <= self.max_skipped_fraction <= 1:
            raise SettingError(f"max_skipped_fraction is a share between 0 and 1, not {self.max_skipped_fraction}")
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

    @property
    def max_disk_bytes(self) -> int:
        """Bytes of features that may be kept on disk; 0 where none are."""
        if self.cache_folder is None:
            return 0
        return _DISK_BYTES if self.cache_disk_bytes is None else self.cache_disk_bytes

    def max_skipped(self, samples: int) -> int:
        """The number of so many samples that may be unreadable before the job stops."""
        return math.ceil(self.max_skipped_fraction * samples)


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


_OWN = "FROSTLINE_"
# The fields of settings say which of them reads each.
_READ = tuple(f"{_OWN}{name}" for name in ("CONTROL", "IO", "TLS_CA", "TLS_CERT", "TLS_KEY", "TOKEN"))


def refuse_variables(environment: Mapping[str, str], prefix: str, known: Iterable[str]) -> None:
    """Make sure that all variables whose names begin so are read: one that is misspelt would be left out unseen.

    Raises:
        SettingError: one is not; the sentence names it.
    """
    names = sorted(known)
    unknown = next((name for name in sorted(environment) if name.startswith(prefix) and name not in names), None)
    if unknown is not None:
        hint = suggest_names(unknown, names) or f": there are {', '.join(names)}"
        raise SettingError(f"nothing reads the variable {unknown[:60]}{hint}")


def check_variables(prefixes: Iterable[str]) -> None:
    """Make sure that all variables of Frostline's are read; see ``refuse_variables``.

    Args:
        prefixes: beginnings of names that are checked by whoever reads them.
    """
    others = tuple(prefixes)
    found = {name: value for name, value in environment(_OWN).items() if not name.startswith(others)}
    refuse_variables(found, _OWN, _READ)


def _changes(settings: Any) -> str:
    """A class with the values that differ from its defaults; secret ones are not shown."""
    default = type(settings)()
    shown = [each.name for each in fields(settings) if each.repr]
    values = [(name, getattr(settings, name)) for name in shown]
    changed = [f"{name}={value!r}" for name, value in values if value != getattr(default, name)]
    return f"{type(settings).__name__}({', '.join(changed)})"
