"""The node over HTTP: the routes, and reading requests within limits."""

import json
import math
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from importlib.resources import files
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from frostline.errors import BadRequest, OverBudget
from frostline.node.http.dashboard import Dashboard
from frostline.node.http.listing_routes import ListingRoutes
from frostline.node.http.live import LiveAnswers
from frostline.node.http.messages import (
    METRICS_TYPE,
    REFUSALS,
    BodyReader,
    announced,
    body_length,
    json_response,
    run_while_connected,
)
from frostline.node.http.metrics import metrics_text
from frostline.node.http.protocol import recognise
from frostline.node.http.streaming import FeatureResponse
from frostline.node.http.training_routes import TrainingRoutes
from frostline.node.request.embeddings import answer_body, gathered, max_numbers
from frostline.node.request.pipeline import BatchStream
from frostline.node.scheduling.admission import Admission
from frostline.node.scheduling.statistics import NodeStatistics
from frostline.node.scheduling.tenant_limits import tenant_to_json
from frostline.node.scheduling.tenants import Account
from frostline.node.service.node import Node
from frostline.node.weights.uploads import Upload
from frostline.wire import pieces
from frostline.wire.embeddings import EmbeddingRequest
from frostline.wire.messages import FeatureRequest, ProfileRequest
from frostline.wire.patches import MAX_PATCH_BYTES

__all__ = ("make_app",)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_LOOKERS = 2

T = TypeVar("T")


def make_app(node: Node, routes: Sequence[Route] = ()) -> Starlette:
    """Make the ASGI application of a node, which the caller closes.

    Args:
        node: node to serve.
        routes: further routes, such as its control plane.
    """
    service = _Service(node)
    return Starlette(
        routes=[
            Route("/", Dashboard().page, methods=["GET"]),
            Route("/v1/prefixes/{digest}", service.prefix, methods=["HEAD", "PUT"]),
            Route("/v1/pieces", service.pieces, methods=["POST"]),
            Route("/v1/features", service.features, methods=["POST"]),
            Route("/v1/profiles", service.profile, methods=["POST"]),
            Route("/v1/embeddings", service.embeddings, methods=["POST"]),
            Route("/v1/listings", service.listings.begin, methods=["POST"]),
            Route("/v1/trainings", service.trainings.begin, methods=["POST"]),
            Route("/v1/trainings/{id}", service.trainings.one, methods=["GET", "DELETE"]),
            Route("/v1/health", service.health, methods=["GET"]),
            Route("/v1/statistics", service.statistics, methods=["GET"]),
            Route("/v1/tenants/{name}", service.tenant, methods=["PATCH"]),
            Route("/v1/metrics", service.metrics, methods=["GET"]),
            Route("/v1/openapi.json", service.openapi, methods=["GET"]),
            *routes,
        ],
        exception_handlers=REFUSALS,
    )


class _Service:
    """The endpoints. Blocking calls run in threads; there are enough that no request waits for one."""

    def __init__(self, node: Node) -> None:
        self._node = node
        # A request may use two threads: one waits for its next batch while another closes it.
        self._threads = CapacityLimiter(2 * node.settings.max_requests + 8)
        # Requests for statistics need no admission, so they have threads of their own.
        self._lookers = CapacityLimiter(_LOOKERS)
        self._body_reader = BodyReader(node.settings.min_bytes_per_s)
        self.trainings = TrainingRoutes(
            node.trainings, self._threads, ask=self._asker, length=body_length, chunks=self._body_reader.chunks
        )
        self.listings = ListingRoutes(node, self._threads, ask=self._asker, body_reader=self._body_reader)
        self._live = LiveAnswers(self._viewed)
        self._openapi = files("frostline.node").joinpath("openapi.json").read_bytes()

    async def health(self, request: Request) -> Response:
        return json_response(self._node.health(self._asker(request)).to_json())

    async def statistics(self, request: Request) -> ASGIApp:
        return await self._live.answer(request, self._asker(request))

    async def tenant(self, request: Request) -> Response:
        asker = self._asker(request)
        if body_length(request) > MAX_PATCH_BYTES:
            raise OverBudget(f"a change has at most {MAX_PATCH_BYTES:,} bytes")
        body = _parsed(await self._body_reader.whole(request), lambda value: value)
        change = partial(self._node.change_tenant, asker, request.path_params["name"], body)
        return json_response(tenant_to_json(await to_thread.run_sync(change, limiter=self._lookers)))

    async def metrics(self, request: Request) -> Response:
        statistics = await self._looked_up(self._asker(request))
        return Response(metrics_text(statistics), media_type=METRICS_TYPE)

    async def openapi(self, _: Request) -> Response:
        return Response(self._openapi, media_type="application/json")

    async def prefix(self, request: Request) -> Response:
        account = self._asker(request)
        digest = _digest(request)
        is_held = self._node.holds_prefix(digest)
        if request.method == "HEAD":
            return Response(status_code=200 if is_held else 404)
        if is_held:
            return json_response({"digest": digest})
        is_in_pieces = request.headers.get("content-type") == pieces.MEDIA_TYPE
        length = announced(request, pieces.LENGTH_HEADER) if is_in_pieces else body_length(request)
        with self._node.upload(digest, length, account, is_in_pieces=is_in_pieces) as upload:
            await self._receive(request, upload)
            await self._run(upload.finish)
        return json_response({"digest": digest}, status=201)

    async def pieces(self, request: Request) -> Response:
        account, length = self._asker(request), body_length(request)
        if length > pieces.MAX_LIST_BYTES:
            raise BadRequest(f"a list of pieces has at most {pieces.MAX_LIST_BYTES} bytes")
        with self._node.admit(length, account):
            names = pieces.names_from_json(await self._body_reader.whole(request))
            held = await self._run(self._node.held_pieces, account)
        return json_response({"held": [name for name in names if name in held]})

    async def features(self, request: Request) -> ASGIApp:
        account, deadline_s = self._asker(request), _deadline_s(request)
        admission = self._node.admit(body_length(request), account)
        try:
            answer = await self._run(self._answered, await self._body_reader.whole(request), admission)
        except BaseException:
            admission.close()
            raise
        return FeatureResponse(answer, self._threads, deadline_s)

    async def embeddings(self, request: Request) -> Response:
        account, deadline_s = self._asker(request), _deadline_s(request)
        # Its memory stays reserved to the end, that of the answer with it.
        with self._node.admit(
            body_length(request) + max_numbers(self._node.settings.memory_bytes), account
        ) as admission:
            wanted = await self._run(_parsed, await self._body_reader.whole(request), EmbeddingRequest.from_json)
            answer, inputs = await self._run(self._node.embeddings, wanted, admission)

            def computed() -> bytes:
                with closing(answer):
                    return answer_body(wanted, gathered(answer), inputs.tokens)

            body = await run_while_connected(request.receive, computed, answer.close, self._threads, deadline_s)
        return Response(body, media_type="application/json")

    async def profile(self, request: Request) -> Response:
        account, deadline_s = self._asker(request), _deadline_s(request)
        with self._node.admit(body_length(request), account) as admission:
            wanted = await self._run(_parsed, await self._body_reader.whole(request), ProfileRequest.from_json)
            admission.read()
            scope = self._node.cancel_scope()
            measure = partial(self._node.profile, wanted, admission, scope)
            profile = await run_while_connected(request.receive, measure, scope.cancel, self._threads, deadline_s)
        return json_response(profile.to_json())

    async def _viewed(self, account: Account) -> dict[str, Any]:
        return (await self._looked_up(account)).to_json()

    async def _looked_up(self, account: Account) -> NodeStatistics:
        """The state of the node, read in a thread because the cache reads a file, which a slow disk could delay."""
        return await to_thread.run_sync(self._node.statistics, account, limiter=self._lookers)

    def _asker(self, request: Request) -> Account:
        """The account that asks, identified before anything else is read."""
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        account = self._node.identify(token.strip() if kind.lower() == "bearer" else None)
        recognise(request.scope.get("state", {}))
        return account

    def _answered(self, body: bytearray, admission: Admission) -> BatchStream:
        """Parse a message within the memory of its admission, and begin to answer it."""
        answer = self._node.features(_parsed(body, FeatureRequest.from_json), admission)
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
    if not _DIGEST.fullmatch(digest):
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


def _parsed(body: bytearray, read: Callable[[object], T]) -> T:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return read(value)
