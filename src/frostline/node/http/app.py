"""The node over HTTP: its routes, requests read within limits, answers sent while they are made, and metrics."""

import asyncio
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from itertools import accumulate
from typing import Annotated, Any, TypedDict, TypeVar

import anyio
from anyio import CancelScope, CapacityLimiter, create_task_group, to_thread
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from frostline.core import FeatureBatch
from frostline.core.declared import Count, Digest, Matching, Within
from frostline.core.errors import (
    AccessDenied,
    AnswerDamaged,
    BadRequest,
    EngineNotReady,
    Forbidden,
    FrostlineError,
    NodeUnreachable,
    ObjectNotFound,
    OverBudget,
    Overloaded,
    StoreError,
    StoreUnavailable,
    Unavailable,
    UnknownName,
    UnknownPrefix,
    UnknownTraining,
    UnsafeArtifact,
)
from frostline.core.units import metric_name
from frostline.node.http.connection_guard import recognise
from frostline.node.http.description import (
    BINARY,
    Body,
    DescribedRoute,
    Endpoint,
    Parameter,
    describe,
    first_of_page,
    openapi_route,
    page_parameter,
)
from frostline.node.http.operations import LINES, ListingRoutes, TrainingRoutes
from frostline.node.http.pages import EVENTS, AnswerInPieces, Dashboard, LiveAnswers
from frostline.node.http.requests import (
    METRICS_TYPE,
    REFUSALS,
    BodyReader,
    MadeOnce,
    Turns,
    address_of,
    announced_bytes,
    body_length,
    check_parameters,
    error_response,
    json_bytes,
    json_response,
    log_refusal,
    parsed_json,
    run_while_connected,
)
from frostline.node.pipeline import BatchStream, Embeddings, answer_body, gather_embeddings, max_numbers
from frostline.node.prefixes import Upload
from frostline.node.service import Node
from frostline.node.statistics import BOUNDS_S, NodeStatistics, Totals
from frostline.node.tenants import Account, Admission, ChangedTenant, TenantChange, tenant_to_json
from frostline.preprocess.spec import preprocess_schema
from frostline.profiles import Profile
from frostline.wire import pieces
from frostline.wire.framing import MEDIA_TYPE, Encoder
from frostline.wire.listings import ListingRequest
from frostline.wire.messages import (
    MAX_PATCH_BYTES,
    PROTOCOL_HEADER,
    EmbeddingRequest,
    FeatureRequest,
    Health,
    ProfileRequest,
    check_protocol,
)

__all__ = (
    "FeatureResponse",
    "describe_node",
    "make_app",
    "metrics_text",
)


# Seconds without a byte taken after which a reader has gone; the memory of its answer is then freed.
_SILENCE_S = 30.0
# Seconds in which a reader may take the reason why its answer was ended for others.
_REVOKED_S = 1.0

Part = bytes | memoryview


@dataclass(frozen=True, slots=True, eq=False)
class FeatureResponse:
    """An ASGI application that sends one answer.

    An error before the first batch becomes an HTTP response of its own. A later error is written to the stream, which
    then has no end mark, and the connection is broken, so that it never looks like a complete answer.

    Attributes:
        answer: stream of batches; it is always closed at the end.
        threads: limiter of the threads that wait for batches.
        deadline_s: seconds that the client waits for the next batch; a later one is cancelled, and its memory freed.
    """

    answer: BatchStream
    threads: CapacityLimiter
    deadline_s: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send everything, or stop when the client disconnects."""
        try:
            async with create_task_group() as group:
                group.start_soon(self._watch, receive, group.cancel_scope)
                revoked = asyncio.Event()
                self.answer.on_revoke(partial(asyncio.get_running_loop().call_soon_threadsafe, revoked.set))
                group.start_soon(self._end_revoked, revoked, group.cancel_scope)
                await self._send_all(scope, receive, send)
                group.cancel_scope.cancel()
        finally:
            if not self.answer.has_ended:
                with CancelScope(shield=True):
                    await to_thread.run_sync(self.answer.close, limiter=self.threads)

    async def _watch(self, receive: Receive, scope: CancelScope) -> None:
        """When the client disconnects, close the answer, which also frees the thread that waits for a batch."""
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()
        with CancelScope(shield=True):
            await to_thread.run_sync(self.answer.close, limiter=self.threads)

    async def _end_revoked(self, revoked: asyncio.Event, scope: CancelScope) -> None:
        """End an answer that others wait for: its client is told why, unless it is too slow to be told."""
        await revoked.wait()
        await anyio.sleep(_REVOKED_S)
        scope.cancel()

    async def _send_all(self, scope: Scope, receive: Receive, send: Send) -> None:
        encoder = Encoder()
        try:
            parts = await self._next(encoder)
        except FrostlineError as error:
            log_refusal(scope["path"], error)
            await error_response(error)(scope, receive, send)
            return
        if parts is None:  # it was cancelled before its first batch
            why = f"no batch was ready within your deadline of {self.deadline_s:g} s" if self.answer.is_expired else ""
            await error_response(Unavailable(why or "the node is stopping"))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", MEDIA_TYPE.encode())]})
        with suppress(TimeoutError):
            await self._send_batches(send, encoder, parts)

    async def _send_batches(self, send: Send, encoder: Encoder, parts: Iterable[Part] | None) -> None:
        """Send batches to the end. If this returns before the last piece, the server breaks the connection."""
        while parts is not None:
            await _send_parts(send, parts)
            del parts  # so that their memory is freed with the next batch
            try:
                parts = await self._next(encoder)
            except FrostlineError as error:
                log_refusal("/v1/features", error)
                await _send_parts(send, encoder.fail(error))
                return
        if self.answer.is_complete:
            await _send_parts(send, [encoder.finish()])
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _next(self, encoder: Encoder) -> Iterable[Part] | None:
        async with create_task_group() as group:
            if self.deadline_s < math.inf:
                group.start_soon(self._expire)
            made = await to_thread.run_sync(_encoded, self.answer, encoder, limiter=self.threads)
            group.cancel_scope.cancel()
        if isinstance(made, FrostlineError):
            raise made
        return made

    async def _expire(self) -> None:
        """Cancel the answer at the deadline, which also frees the thread that waits for a batch."""
        await anyio.sleep(self.deadline_s)
        with CancelScope(shield=True):
            await to_thread.run_sync(self.answer.expire, limiter=self.threads)


def _encoded(answer: BatchStream, encoder: Encoder) -> Iterable[Part] | FrostlineError | None:
    """Encode the next batch; an error is returned as a value, because a task group would wrap it."""
    try:
        batch: FeatureBatch | None = next(answer, None)
    except FrostlineError as error:
        return error
    return None if batch is None else encoder.encode(batch)


async def _send_parts(send: Send, parts: Iterable[Part]) -> None:
    for part in parts:
        message: dict[str, Any] = {"type": "http.response.body", "body": part, "more_body": True}
        with anyio.fail_after(_SILENCE_S):
            await send(message)


def metrics_text(statistics: NodeStatistics) -> bytes:
    """Render statistics as Prometheus text; names of seconds and bytes follow its conventions."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Statistics(statistics))
    return generate_latest(registry)


_GAUGES = (
    *("uptime_s", "requests_in_progress", "prefixes", "waiting_for_device", "devices_in_service"),
    "slowed_addresses",
)


class _Statistics(Collector):
    def __init__(self, statistics: NodeStatistics) -> None:
        self._statistics = statistics

    def collect(self) -> Iterator[Metric]:
        for name, value in asdict(self._statistics.totals).items():
            yield CounterMetricFamily(f"frostline_node_{metric_name(name)}", f"{name} since the start", value=value)
        yield CounterMetricFamily("frostline_node_cpu_seconds", "cpu_s since the start", value=self._statistics.cpu_s)
        wrong = self._statistics.wrong_tokens
        yield CounterMetricFamily("frostline_node_wrong_tokens", "wrong tokens since the start", value=wrong)
        for name in _GAUGES:
            value = getattr(self._statistics, name)
            yield GaugeMetricFamily(f"frostline_node_{metric_name(name)}", f"{name} now", value=value)
        yield from self._memory()
        yield self._stages()
        yield from self._tenants()
        yield from self._decoders()

    def _stages(self) -> Metric:
        family = HistogramMetricFamily("frostline_node_stage_seconds", "latencies by stage", labels=["stage"])
        bounds = [*map(str, BOUNDS_S), "+Inf"]
        for stage, latency in self._statistics.latencies.items():
            family.add_metric([stage], list(zip(bounds, accumulate(latency.counts), strict=True)), latency.seconds)
        return family

    def _tenants(self) -> Iterator[Metric]:
        tenants = self._statistics.tenants
        for field in fields(Totals):
            plain = f"frostline_node_tenant_{metric_name(field.name)}"
            counter = CounterMetricFamily(plain, f"{field.name} of a tenant since the start", labels=["tenant"])
            for tenant, statistics in tenants.items():
                counter.add_metric([tenant], getattr(statistics.totals, field.name))
            yield counter
        for name in ("weight", "requests_in_progress", "work_bytes", "weight_bytes"):
            gauge = GaugeMetricFamily(f"frostline_node_tenant_{name}", f"{name} of a tenant", labels=["tenant"])
            for tenant, statistics in tenants.items():
                gauge.add_metric([tenant], getattr(statistics, name))
            yield gauge
        yield from self._cache()

    def _cache(self) -> Iterator[Metric]:
        disk, shared = self._statistics.cache, self._statistics.shared_cache
        if disk is not None:  # the node itself counts hits and misses
            counted = {name: value for name, value in asdict(disk).items() if name not in ("hits", "misses")}
            yield from _figures("cache", counted, gauges=("bytes", "budget_bytes"))
        if (tier := self._statistics.local_tier) is not None:
            yield from _figures("local_tier", asdict(tier), gauges=("bytes", "budget_bytes"))
        if shared is not None:
            yield from _figures("shared_cache", asdict(shared), gauges=("bytes", "budget_bytes", "indexed_rows"))

    def _decoders(self) -> Iterator[Metric]:
        decoders = self._statistics.decoders
        if decoders is None:
            return
        confined = GaugeMetricFamily("frostline_node_decoders_confined", "1 where it holds them", labels=["protection"])
        for name in ("Landlock", "seccomp"):
            confined.add_metric([name.lower()], name in decoders.confined_by)
        yield confined
        yield CounterMetricFamily("frostline_node_decoders_started", "decoders that began", value=decoders.started)
        ended = CounterMetricFamily("frostline_node_decoders_ended", "decoders that ended by cause", labels=["cause"])
        for cause, count in decoders.ended.items():
            ended.add_metric([cause], count)
        yield ended

    def _memory(self) -> Iterator[Metric]:
        for name in ("total_bytes", "reserved_bytes", "peak_bytes", "waiting"):
            family = GaugeMetricFamily(f"frostline_node_memory_{name}", f"{name} of a share", labels=["share"])
            for share, pool in self._statistics.memory.items():
                family.add_metric([share], getattr(pool, name))
            yield family


def _figures(what: str, values: Mapping[str, float], *, gauges: Collection[str]) -> Iterator[Metric]:
    for name, value in values.items():
        family = GaugeMetricFamily if name in gauges else CounterMetricFamily
        yield family(f"frostline_node_{what}_{name}", f"{name} of the {what.replace('_', ' ')}", value=value)


# Parameters in the addresses of requests.
_PARAMETERS = {"/v1/statistics": ("tenants",), "/v1/trainings": ("prefix",)}
_LOOKERS = 2
# Seconds within which the folders that are served are listed; a disk that takes longer hangs.
_LISTED_WITHIN_S = 1.0
_HANGS = "a folder that it serves cannot be listed in time"

T = TypeVar("T")


_BUSY = (OverBudget, Overloaded, Unavailable, NodeUnreachable, AnswerDamaged, StoreUnavailable)
_OF_DATA = (*_BUSY, AccessDenied, Forbidden, UnknownPrefix, ObjectNotFound, StoreError)
_HTML = {"text/html": ""}
_IN_PIECES = (
    "The file without pieces that the node holds: the length of a list in eight bytes (little-endian), the list as "
    "JSON, [[start, stop, sha256], ...] in the order of the file, and the bytes of the file outside of these."
)
_STREAM = (
    "An uncompressed Arrow IPC stream of record batches, in the order of the request. Columns: `id` (int64), and "
    "`features_0` and on (arrow.fixed_shape_tensor; truth values as uint8 with `frostline.dtype` in the field's "
    "metadata) or, at cut 0, `encoded` (large_binary). A batch's custom metadata may hold `frostline.skipped`, a JSON "
    "list of [id, object, reason, changed], for samples that could not be read; `changed` is true for those whose "
    "object is not what it was when it was listed, or is gone. Where a codec is asked for, each field's metadata "
    "holds `frostline.codec`, `frostline.shape` (of a sample, as JSON) and `frostline.dtype`; values are narrower "
    "(bf16 as uint16; int8 with `features_0_scale` beside it) or, where rows are packed one by one, large_binary; and "
    "a batch's metadata may hold `frostline.error`, the relative error of its worst sample. A batch that is packed "
    "otherwise than the one before it begins another stream: a batch without rows and with `frostline.next` ends the "
    "first. Where the request fails after its first batch, a last batch without rows holds the error in "
    "`frostline.failure`, the stream has no end mark, and the connection is closed."
)
_LISTED = (
    "Lines of JSON while the node lists: `event` `phase` with `name`, `counted` with `done` and `total`; empty lines "
    "come while nothing happens. The last has `event` `failed`, with `error` and `message`; or `event` `listed`, with "
    "`digest` of the listing, `samples`, `nbytes` and `sha256` of the manifest, `is_known` where its client has that "
    "file, names of `splits` and `splits_sha256`, `applied` of a ready form, and `found`. Behind it come the manifest "
    "as Parquet, unless it is known, and for each split a bitmap of the samples, the lowest bit of a byte first. The "
    "listing ends when the connection does."
)
_HEAD = (
    "A safetensors file: tensors of the head, and columns of the samples with their labels; its metadata holds the "
    "graphs and the recipe as JSON."
)
_TRAINED = (
    "Lines of JSON, one an event, as they happen; empty lines come while nothing does. The first has `event` "
    "`started` and `id`. The others are events of a job (`StepFinished` with `loss`, `Evaluated` with `scores`, and "
    "so on), with floats that JSON does not know as text. The last has `event` `trained`, with `is_whole` (false "
    "where the training was asked to end), `head_s`, and `bytes` and `digest` (SHA-256) of the tensors to fetch; or "
    "`event` `failed`, with `error` and `message`. The training ends when the connection does."
)
_IN_PATH = Parameter(name="digest", place="path", said="SHA-256 of the prefix in hexadecimal.", kind=Digest)
_BEHIND = Parameter(
    name="prefix",
    place="query",
    said="SHA-256 of the frozen part, which the node holds and keeps while the training runs.",
    kind=Digest,
    is_needed=True,
)
_WHOLE_LENGTH = Parameter(
    name=pieces.LENGTH_HEADER, place="header", said="Bytes of the whole file, where the body is in pieces.", kind=Count
)
_DEADLINE = Parameter(
    name="Frostline-Deadline",
    place="header",
    said="Seconds that the client waits for the next part of the answer; what was not made by then is given up.",
    kind=Annotated[float, Within(0, 1_000_000, is_above=True)],
)
_TRAINING = Parameter(
    name="id",
    place="path",
    said="Name of the training, as its first event says it.",
    kind=Annotated[str, Matching("[0-9a-f]{32}", "32 small hexadecimal digits")],
)
_TENANT = Parameter(
    name="name",
    place="path",
    said="Name of the tenant.",
    kind=Annotated[str, Matching("[A-Za-z0-9_.-]{1,64}", "the name of a tenant")],
)


class HeldPrefix(TypedDict):
    """A prefix that is held."""

    digest: Digest


class HeldPieces(TypedDict):
    """Pieces of prefixes that are held."""

    held: list[Digest]


class NamedTraining(TypedDict):
    """A training."""

    id: str


class Readiness(TypedDict):
    """Whether requests may come.

    Attributes:
        ready: true where they may.
        why: the reason why not; empty where they may.
    """

    ready: bool
    why: str


def make_app(node: Node, routes: Sequence[Route] = ()) -> Starlette:
    """Make the ASGI application of a node, which the caller closes.

    Args:
        node: node to serve.
        routes: routes beside its own, such as those of its control plane.
    """
    service = _Service(node)
    app = Starlette(routes=[*_routes(service), *routes], exception_handlers=REFUSALS)
    app.state.audit = node.audit
    return app


def _routes(service: "_Service") -> Iterator[Route]:
    """The node's own routes, and what each does."""
    yield DescribedRoute(
        "/",
        Dashboard().page,
        get=Endpoint(
            name="dashboard",
            summary="A page for people, which shows the statistics and the jobs, and needs no token itself.",
            answers={200: Body(said="HTML that asks for statistics, health and jobs.", others=_HTML)},
            is_open=True,
        ),
    )
    yield DescribedRoute(
        "/v1/prefixes/{digest}",
        service.prefix,
        head=Endpoint(
            name="hasPrefix",
            summary="Tell whether a prefix is held.",
            parameters=(_IN_PATH,),
            answers={200: Body(said="It is held."), 404: Body(said="It is not.")},
        ),
        put=Endpoint(
            name="putPrefix",
            summary="Upload a prefix: a safetensors file whose metadata holds the graph. Idempotent.",
            parameters=(_IN_PATH, _WHOLE_LENGTH),
            body=Body(said="The file.", others={BINARY: "", pieces.MEDIA_TYPE: _IN_PIECES}),
            answers={
                200: Body(said="It was held already.", kind=HeldPrefix),
                201: Body(said="It is held now.", kind=HeldPrefix),
            },
            refusals=(Forbidden, UnknownPrefix, UnsafeArtifact, *_BUSY),
        ),
    )
    yield DescribedRoute(
        "/v1/pieces",
        service.pieces,
        post=Endpoint(
            name="heldPieces",
            summary="Tell which pieces of prefixes are held: bytes of single weights, that the same tenant uploaded.",
            body=Body(said="SHA-256 of the bytes of each.", kind=pieces.Names),
            answers={200: Body(said="Those of them that are held; they may be evicted later.", kind=HeldPieces)},
            refusals=(Forbidden, *_BUSY),
        ),
    )
    yield DescribedRoute(
        "/v1/features",
        service.features,
        post=Endpoint(
            name="getFeatures",
            summary="Compute activations of samples at a cut, or send them encoded (cut 0) or decoded (cut 1).",
            parameters=(_DEADLINE,),
            body=Body(said="Samples and the cut at which they are wanted.", kind=FeatureRequest),
            answers={200: Body(said=_STREAM, others={MEDIA_TYPE: ""})},
            refusals=(*_OF_DATA, EngineNotReady),
        ),
    )
    yield DescribedRoute(
        "/v1/profiles",
        service.profile,
        post=Endpoint(
            name="measure",
            summary="Measure reading, decoding, every cut of the prefix and some codecs on the first samples.",
            parameters=(_DEADLINE,),
            body=Body(said="Samples, and what to measure. Trials of engines take minutes.", kind=ProfileRequest),
            answers={200: Body(said="The costs of each cut on this node.", kind=Profile)},
            refusals=_OF_DATA,
        ),
    )
    yield DescribedRoute(
        "/v1/embeddings",
        service.embeddings,
        post=Endpoint(
            name="embed",
            summary="Run the frozen part of a held network on texts or images that come with the request.",
            parameters=(_DEADLINE,),
            body=Body(said="Texts where the network came with a tokenizer, else images.", kind=EmbeddingRequest),
            answers={200: Body(said="One embedding an input, in their order.", kind=Embeddings)},
            refusals=_OF_DATA,
        ),
    )
    yield DescribedRoute(
        "/v1/listings",
        service.listings.begin,
        post=Endpoint(
            name="list",
            summary="List a data set under a root of the node, and send its manifest.",
            body=Body(said="The data to list, and the manifests that need not be sent.", kind=ListingRequest),
            answers={200: Body(said=_LISTED, others={BINARY: ""})},
            refusals=(Forbidden, *_BUSY),
        ),
    )
    yield DescribedRoute(
        "/v1/trainings",
        service.trainings.begin,
        post=Endpoint(
            name="train",
            summary="Train a head beside the node, in a process of its own; only where the node allows it.",
            parameters=(_BEHIND,),
            body=Body(said=_HEAD, others={BINARY: ""}),
            answers={200: Body(said=_TRAINED, others={LINES: ""})},
            refusals=(Forbidden, UnknownPrefix, UnsafeArtifact, *_BUSY),
        ),
    )
    yield DescribedRoute(
        "/v1/trainings/{id}",
        service.trainings.fetch_or_stop,
        get=Endpoint(
            name="getTrained",
            summary="Fetch the result, once the training has ended. The last few are kept.",
            parameters=(_TRAINING,),
            answers={200: Body(said="A safetensors file of trained parameters and buffers.", others={BINARY: ""})},
            refusals=(Forbidden, UnknownTraining, Overloaded),
        ),
        delete=Endpoint(
            name="endTraining",
            summary="Ask a training to end after the step that it is in; or, where it has ended, forget what it left.",
            parameters=(_TRAINING,),
            answers={
                200: Body(said="It had ended; what it left is forgotten.", kind=NamedTraining),
                202: Body(said="It ends; its last events still come.", kind=NamedTraining),
            },
            refusals=(Forbidden, UnknownTraining),
        ),
    )
    yield DescribedRoute(
        "/v1/health",
        service.health,
        get=Endpoint(
            name="health", summary="Say what the node is.", answers={200: Body(said="It serves.", kind=Health)}
        ),
    )
    yield DescribedRoute(
        "/v1/ready",
        service.ready,
        get=Endpoint(
            name="ready",
            summary="Say to everybody whether requests may come.",
            answers={
                200: Body(said="They may.", kind=Readiness),
                503: Body(said="It stops, is full, or its store is in trouble.", kind=Readiness),
            },
            is_open=True,
        ),
    )
    yield DescribedRoute(
        "/v1/statistics",
        service.statistics,
        get=Endpoint(
            name="statistics",
            summary="Tell what the node did and holds.",
            parameters=(page_parameter("tenants", "next"),),
            answers={200: Body(said="The state now.", kind=NodeStatistics, others=EVENTS)},
            refusals=(Overloaded,),
        ),
    )
    yield DescribedRoute(
        "/v1/tenants/{name}",
        service.tenant,
        patch=Endpoint(
            name="changeTenant",
            summary="Change a tenant's weight and quotas until the node ends, as a tenant that may.",
            parameters=(_TENANT,),
            body=Body(said="The fields to change; a quota of null is no bound but the node's own.", kind=TenantChange),
            answers={200: Body(said="The tenant as it is now.", kind=ChangedTenant)},
            refusals=(Forbidden, UnknownName, OverBudget),
        ),
    )
    yield DescribedRoute(
        "/v1/metrics",
        service.metrics,
        get=Endpoint(
            name="metrics",
            summary="The same for Prometheus.",
            answers={200: Body(said="Its text format.", others={"text/plain": ""})},
            refusals=(Overloaded,),
        ),
    )
    yield openapi_route(describe_node)


def describe_node(app: Starlette) -> dict[str, Any]:
    """The description of a node's application in OpenAPI 3.1."""
    return describe("Frostline node", app.routes, {"Preprocess": preprocess_schema()})


class _Service:
    """The endpoints. Blocking calls run in threads; there are enough that no request waits for one."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # A request may use two threads: one waits for its next batch while another closes it.
        self._threads = CapacityLimiter(2 * node.settings.max_requests + 8)
        # Requests for statistics need no admission, so they have threads of their own.
        self._lookers = Turns(_LOOKERS)
        self._readiness = MadeOnce(self._why_not_ready)
        self._listers = CapacityLimiter(_LOOKERS)
        self._body_reader = BodyReader(node.settings.min_bytes_per_s)
        self.trainings = TrainingRoutes(
            node.trainings,
            self._threads,
            ask=self._asker,
            length=body_length,
            chunks=self._body_reader.chunks,
            audit=node.audit,
        )
        self.listings = ListingRoutes(node, self._threads, ask=self._asker, body_reader=self._body_reader)
        self._live = LiveAnswers(self._viewed)
        self._metrics = LiveAnswers(self._measured, 0, media_type=METRICS_TYPE)

    async def health(self, request: Request) -> Response:
        return json_response(self._node.health(self._asker(request)).to_json())

    async def ready(self, request: Request) -> Response:
        """Say to everybody whether requests may come, and why not: 503 for whoever shares them out."""
        check_parameters(request)
        why = await self._readiness.get()  # for which nobody needs a token
        return json_response({"ready": not why, "why": why}, status=503 if why else 200)

    async def statistics(self, request: Request) -> ASGIApp:
        def seen() -> tuple[Account, int]:
            return self._asker(request), first_of_page(request, "tenants")

        return await self._live.answer(request, asked := seen(), asked[0], again=seen)

    async def tenant(self, request: Request) -> Response:
        asker = self._asker(request)
        if body_length(request) > MAX_PATCH_BYTES:
            raise OverBudget(f"a change has at most {MAX_PATCH_BYTES:,} bytes")
        body = parsed_json(await self._body_reader.read_whole(request))
        change = partial(self._node.change_tenant, asker, request.path_params["name"], body)
        return json_response(tenant_to_json(await self._lookers.run(asker, change)))

    async def metrics(self, request: Request) -> ASGIApp:
        return await self._metrics.answer(request, self._asker(request))

    async def prefix(self, request: Request) -> Response:
        account = self._asker(request)
        digest = _digest(request)
        is_held = self._node.holds_prefix(digest)
        if request.method == "HEAD":
            return Response(status_code=200 if is_held else 404)
        if is_held:
            return json_response({"digest": digest})
        is_in_pieces = request.headers.get("content-type") == pieces.MEDIA_TYPE
        length = announced_bytes(request, pieces.LENGTH_HEADER) if is_in_pieces else body_length(request)
        with self._node.upload(digest, length, account, is_in_pieces=is_in_pieces) as upload:
            await self._receive(request, upload)
            await self._run(upload.finish)
        self._node.audit.note("upload", tenant=account.name, prefix=digest, address=address_of(request))
        return json_response({"digest": digest}, status=201)

    async def pieces(self, request: Request) -> Response:
        account, length = self._asker(request), body_length(request)
        if length > pieces.MAX_LIST_BYTES:
            raise BadRequest(f"a list of pieces has at most {pieces.MAX_LIST_BYTES} bytes")
        with self._node.admit(length, account):
            names = pieces.names_from_json(await self._body_reader.read_whole(request))
            held = await self._run(self._node.held_pieces, account)
        return json_response({"held": [name for name in names if name in held]})

    async def features(self, request: Request) -> ASGIApp:
        account, deadline_s = self._asker(request), _deadline_s(request)
        admission = self._node.admit(body_length(request), account)
        try:
            answer = await self._run(self._answered, await self._body_reader.read_whole(request), admission)
        except BaseException:
            admission.close()
            raise
        return FeatureResponse(answer, self._threads, deadline_s)

    async def embeddings(self, request: Request) -> ASGIApp:
        account, deadline_s = self._asker(request), _deadline_s(request)
        # Its memory stays reserved until its reader has all of the answer, that of the answer with it.
        admission = self._node.admit(body_length(request) + max_numbers(self._node.settings.memory_bytes), account)
        try:
            body = await self._body_reader.read_whole(request)
            wanted = await self._run(lambda: EmbeddingRequest.from_json(parsed_json(body)))
            answer, inputs = await self._run(self._node.embeddings, wanted, admission)

            def computed() -> bytes:
                with closing(answer):
                    return answer_body(wanted, gather_embeddings(answer), inputs.tokens)

            made = await run_while_connected(request.receive, computed, answer.close, self._threads, deadline_s)
        except BaseException:
            admission.close()
            raise
        return AnswerInPieces(body=made, media_type="application/json", end=admission.close)

    async def profile(self, request: Request) -> Response:
        account, deadline_s = self._asker(request), _deadline_s(request)
        with self._node.admit(body_length(request), account) as admission:
            body = await self._body_reader.read_whole(request)
            wanted = await self._run(lambda: ProfileRequest.from_json(parsed_json(body)))
            admission.read()
            scope = self._node.cancel_scope()
            measure = partial(self._node.profile, wanted, admission, scope)
            profile = await run_while_connected(request.receive, measure, scope.cancel, self._threads, deadline_s)
        return json_response(profile.to_json())

    async def _viewed(self, asked: tuple[Account, int]) -> bytes:
        """The state of the node, read in a thread because the cache reads a file, which a slow disk could delay."""
        return await self._lookers.run(asked[0], lambda: json_bytes(self._node.statistics(*asked).to_json()))

    async def _measured(self, account: Account) -> bytes:
        return await self._lookers.run(account, lambda: metrics_text(self._node.statistics(account)))

    async def _why_not_ready(self) -> str:
        with anyio.move_on_after(_LISTED_WITHIN_S):
            return await to_thread.run_sync(self._node.not_ready, limiter=self._listers, abandon_on_cancel=True)
        return _HANGS

    def _asker(self, request: Request) -> Account:
        """The account that asks, identified before anything else is read.

        Raises:
            Refused: The request is of a protocol that this node does not speak.
        """
        check_parameters(request, _PARAMETERS.get(request.url.path, ()))
        check_protocol(request.headers.get(PROTOCOL_HEADER.lower(), ""))
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        account = self._node.identify(token.strip() if kind.lower() == "bearer" else None, address_of(request))
        recognise(request.scope.setdefault("state", {}), account.name)
        return account

    def _answered(self, body: bytearray, admission: Admission) -> BatchStream:
        """Parse a message within the memory of its admission, and begin to answer it."""
        answer = self._node.features(FeatureRequest.from_json(parsed_json(body)), admission)
        admission.read()
        return answer

    async def _receive(self, request: Request, upload: Upload) -> None:
        await self._run(upload.begin)
        async for chunk in self._body_reader.chunks(request):
            upload.write(chunk)

    async def _run(self, call: Callable[..., T], *args: Any) -> T:
        return await to_thread.run_sync(call, *args, limiter=self._threads)


def _digest(request: Request) -> str:
    digest: str = request.path_params["digest"]
    if not re.fullmatch("[0-9a-f]{64}", digest):
        raise BadRequest("a prefix is named by its SHA-256 in 64 lower-case hexadecimal digits")
    return digest


def _deadline_s(request: Request) -> float:
    """The seconds that the client waits for the next part of the answer."""
    said = request.headers.get("frostline-deadline", "")
    if not said:
        return math.inf
    try:
        deadline_s = float(said)
    except ValueError:
        deadline_s = math.nan
    if not 0 < deadline_s < math.inf:
        raise BadRequest("Frostline-Deadline must be a number of seconds above 0")
    return deadline_s
