"""The control plane over HTTP: who asks, what they say within limits, and what is answered."""

import hashlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from frostline.control.messages import ControlAnswer, StageReport
from frostline.control.metrics import metrics_text
from frostline.control.settings import EVERY_TENANT
from frostline.control.state import ControlState
from frostline.control.store import RecordWriter
from frostline.control.view import view_of
from frostline.errors import BadRequest, OverBudget, Unauthenticated
from frostline.node.http.dashboard import Dashboard
from frostline.node.http.messages import METRICS_TYPE, REFUSALS, BodyReader, body_length, json_response
from frostline.node.http.protocol import recognise

__all__ = ("ControlPlane", "make_control_app", "stage_routes")

_MAX_BODY_BYTES = 16 << 10
_MIN_BYTES_PER_S = 1 << 10


class ControlPlane:
    """The state with its file and its clock. Safe for threads.

    Args:
        state: the state.
        store: file of its records.
        clock: returns seconds since 1970.
    """

    def __init__(self, state: ControlState, store: RecordWriter, clock: Callable[[], float] = time.time) -> None:
        self._state = state
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._tenants = {tenant.token_sha256: tenant for tenant in state.settings.tenants}
        self._seeing = {tenant.name for tenant in state.settings.tenants if tenant.sees_all}

    def receive(self, tenant: str, report: StageReport) -> ControlAnswer:
        """See ``ControlState.receive``; what it changed is on disk when this returns."""
        with self._lock:
            answer = self._state.receive(tenant, report, self._clock())
            self._store.write(self._state.touched())
            return answer

    def view(self, tenant: str) -> dict[str, Any]:
        """What a tenant may see, as plain values."""
        sees_all = not self._tenants or tenant in self._seeing
        with self._lock:
            return view_of(self._state, None if sees_all else tenant, self._clock())

    def identify(self, token: str | None) -> str:
        """The name of the tenant that a token belongs to.

        Raises:
            Unauthenticated: No tenant has it.
        """
        if not self._tenants:
            return EVERY_TENANT
        if token is None:
            raise Unauthenticated(
                "this control plane knows its tenants: set FROSTLINE_TOKEN to the token you were given"
            )
        tenant = self._tenants.get(hashlib.sha256(token.encode()).hexdigest())
        if tenant is None:
            raise Unauthenticated("this control plane does not know that token: see FROSTLINE_TOKEN")
        return tenant.name


def make_control_app(plane: ControlPlane) -> Starlette:
    """Make the ASGI application of a control plane, whose file the caller closes."""
    service = _Routes(plane)
    return Starlette(
        routes=[
            Route("/", Dashboard("frostline.control").page, methods=["GET"]),
            Route("/v1/stages", service.stages, methods=["POST"]),
            Route("/v1/view", service.view, methods=["GET"]),
            Route("/v1/metrics", service.metrics, methods=["GET"]),
            Route("/v1/health", service.health, methods=["GET"]),
        ],
        exception_handlers=REFUSALS,
    )


def stage_routes(plane: ControlPlane) -> list[Route]:
    """Make the routes by which stages report and are seen, for an application that has others."""
    service = _Routes(plane)
    return [
        Route("/v1/stages", service.stages, methods=["POST"]),
        Route("/v1/view", service.view, methods=["GET"]),
    ]


class _Routes:
    """The endpoints. Decisions are made one after another, in one thread beside the event loop."""

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._thread = CapacityLimiter(1)
        self._body_reader = BodyReader(_MIN_BYTES_PER_S)

    async def stages(self, request: Request) -> Response:
        tenant = self._asker(request)
        if body_length(request) > _MAX_BODY_BYTES:
            raise OverBudget(f"a report has at most {_MAX_BODY_BYTES:,} bytes")
        report = StageReport.from_json(_parsed(await self._body_reader.whole(request)))
        answer = await to_thread.run_sync(self._plane.receive, tenant, report, limiter=self._thread)
        return json_response(answer.to_json())

    async def view(self, request: Request) -> Response:
        tenant = self._asker(request)
        return json_response(await to_thread.run_sync(self._plane.view, tenant, limiter=self._thread))

    async def metrics(self, request: Request) -> Response:
        tenant = self._asker(request)
        view = await to_thread.run_sync(self._plane.view, tenant, limiter=self._thread)
        return Response(metrics_text(view), media_type=METRICS_TYPE)

    async def health(self, request: Request) -> Response:
        self._asker(request)
        return json_response({"state": "ready"})

    def _asker(self, request: Request) -> str:
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        tenant = self._plane.identify(token.strip() if kind.lower() == "bearer" else None)
        recognise(request.scope.get("state", {}))
        return tenant


def _parsed(body: bytearray) -> object:
    try:
        value: object = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from error
    return value
