"""The control plane over HTTP: who asks, what they say within limits, what is answered, and its metrics."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from frostline.control.changes import ControlChanges, ControlEvent, EventLines
from frostline.control.messages import ControlAnswer, ControlView, StageReport
from frostline.control.settings import EVERY_TENANT, ControlTenant
from frostline.control.state import ControlState, StageRecord, ViewPage, job_of, tenant_of, view_of
from frostline.control.store import RecordWriter
from frostline.core.audit import AuditLog
from frostline.core.errors import Forbidden, OverBudget, Overloaded, SettingError
from frostline.core.tokens import FollowedFile, TokenTable
from frostline.core.units import log_named
from frostline.node.http.connection_guard import recognise
from frostline.node.http.description import Body, DescribedRoute, Endpoint, first_of_page, page_parameter
from frostline.node.http.pages import EVENTS, Dashboard, LiveAnswers
from frostline.node.http.requests import (
    METRICS_TYPE,
    REFUSALS,
    BodyReader,
    Turns,
    address_of,
    body_length,
    check_parameters,
    json_bytes,
    json_response,
    parsed_json,
)
from frostline.wire.messages import MAX_PATCH_BYTES

__all__ = (
    "ControlPlane",
    "Rights",
    "make_control_app",
    "metrics_text",
    "stage_routes",
    "steady_clock",
)


def steady_clock(
    wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
) -> Callable[[], float]:
    """Return a clock of seconds since 1970 that only grows, as if nobody set the machine's clock from now on.

    Set forward, every lease would be over at once, and amounts that are in use given to others; set back, the amounts
    of who has gone would be kept for as long.

    Args:
        wall: clock that returns seconds since 1970, and may jump.
        monotonic: clock that returns seconds that only grow.
    """
    began_s = wall() - monotonic()
    return lambda: began_s + monotonic()


def metrics_text(view: ControlView) -> bytes:
    """Render what a tenant may see as Prometheus text.

    Args:
        view: the view as ``control.state.view_of`` gives it.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_View(view))
    return generate_latest(registry)


class _View(Collector):
    def __init__(self, view: ControlView) -> None:
        self._view = view

    def collect(self) -> Iterator[Metric]:
        stages, jobs = self._view["stages"], self._view["jobs"]
        yield _gauges("capacity", "what there is", ["resource"], _amounts(self._view["capacity"]))
        held = _amounts(self._view["held"] or {})
        yield _gauges("held", "what all stages may use", ["resource"], held)
        shares = [
            ([stage["tenant"], stage["job"], stage["stage"], resource], amount)
            for stage in stages
            for (resource,), amount in _amounts(stage["in_force"])
        ]
        yield _gauges("share", "what a stage may use", ["tenant", "job", "stage", "resource"], shares)
        silent = [([stage["tenant"], stage["job"], stage["stage"]], stage["silent_s"]) for stage in stages]
        yield _gauges("silent_seconds", "time since a stage was heard", ["tenant", "job", "stage"], silent)
        moved = CounterMetricFamily("frostline_control_moved_bytes", "bytes of a job", labels=["tenant", "job"])
        for job in jobs:
            moved.add_metric([job["tenant"], job["job"]], job["moved_bytes"])
        yield moved
        samples = CounterMetricFamily("frostline_control_samples", "samples of a job", labels=["tenant", "job"])
        told = [([job["tenant"], job["job"]], job["activity"]) for job in jobs if job["activity"] is not None]
        for labels, activity in told:
            samples.add_metric(labels, activity["samples"])
        yield samples
        stalls = [(labels, activity["stall_share"]) for labels, activity in told]
        yield _gauges("stall_share", "time that a job waited", ["tenant", "job"], stalls)
        spared = [(labels, activity["saved"]["bytes"]) for labels, activity in told]
        yield _gauges("saved_bytes", "bytes that did not cross", ["tenant", "job"], spared)
        notices = [([job["tenant"], job["job"]], float(len(job["notices"]))) for job in jobs]
        yield _gauges("notices", "what a job was told that cannot be", ["tenant", "job"], notices)


def _amounts(amounts: Mapping[str, float]) -> list[tuple[list[str], float]]:
    return [([resource], amount) for resource, amount in amounts.items()]


def _gauges(name: str, meaning: str, labels: list[str], values: list[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(f"frostline_control_{name}", meaning, labels=labels)
    for label_values, value in values:
        family.add_metric(label_values, value)
    return family


_MAX_BODY_BYTES = 16 << 10
_MIN_BYTES_PER_S = 1 << 10
_LOG = log_named("frostline.control")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What somebody may see and do.

    Attributes:
        tenant: tenant whose stages are seen; None for those of all.
        may_change: True if weights, jobs and capacities may be changed.
    """

    tenant: str | None
    may_change: bool


class ControlPlane:
    """The state with its file and its clock. Safe for threads.

    Events are logged as ``control_event``: every change, and of what stages do as much as ``EventLines`` admits.

    Args:
        state: the state.
        store: file of its records.
        clock: clock that returns seconds since 1970; None takes a ``steady_clock``.
        audit: log of who changed what and was refused; None keeps none.
    """

    def __init__(
        self,
        state: ControlState,
        store: RecordWriter,
        clock: Callable[[], float] | None = None,
        audit: AuditLog | None = None,
    ) -> None:
        self.audit = audit or AuditLog(None)
        self._state = state
        self._store = store
        self._clock = clock or steady_clock()
        self._lock = threading.Lock()
        self._touched: dict[tuple[str, str], StageRecord | None] = {}
        self._unsaved: dict[int, ControlEvent | None] = {}
        self._changes: ControlChanges | None = None
        self._lines = EventLines()
        self._is_open = not state.settings.tenants
        self._tokens = TokenTable("this control plane", state.settings.tenants)
        self._file: FollowedFile | None = None
        self._give_rights(state.settings.tenants)

    def _give_rights(self, tenants: Sequence[ControlTenant]) -> None:
        self._seeing = {tenant.name for tenant in tenants if tenant.sees_all}
        self._changing = {tenant.name for tenant in tenants if tenant.may_change}

    def renew(self, tenants: Sequence[ControlTenant]) -> None:
        """Know these tenants from now on. What jobs of those that left hold stays theirs until they fall silent.

        Raises:
            SettingError: The list of tenants is empty, or does not fit the other settings.
        """
        if self._is_open or not tenants:
            raise SettingError(
                "while a control plane runs it neither gets its first tenants nor loses its last one: start it again"
            )
        with self._lock:
            self._state.renew_tenants(tuple(tenants))
            self._give_rights(tenants)
            self._tokens.renew(tenants)
        self.audit.write_change("tenants renewed", tenants=[tenant.name for tenant in tenants])

    def follow(self, file: FollowedFile) -> None:
        """Look at a file, which has ``renew`` called where it has changed, before anybody is identified."""
        self._file = file

    def receive(self, tenant: str, report: StageReport) -> ControlAnswer:
        """See ``ControlState.receive``; what it changed is on disk when this returns."""
        with self._lock:
            answer = self._state.receive(tenant, report, self._clock())
            self._keep()
            return answer

    def rights(self, tenant: str) -> Rights:
        """What a tenant may see and do; those with the same see the same."""
        sees_all = self._is_open or tenant in self._seeing
        return Rights(tenant=None if sees_all else tenant, may_change=tenant in self._changing)

    def view(self, rights: Rights, page: ViewPage) -> ControlView:
        """What somebody with such rights may see, as plain values."""
        with self._lock:
            return view_of(self._state, rights.tenant, self._clock(), may_change=rights.may_change, page=page)

    def change_capacity(self, by: str, body: object) -> dict[str, Any]:
        """Change what there is, and return it; on disk when this returns.

        Args:
            by: name of the tenant that asks.
            body: a PATCH, as JSON gave it.

        Raises:
            Forbidden: The tenant may change nothing.
            Refused: The change makes no sense; see ``ControlState``.
        """
        with self._changed(by) as now_s:
            self._state.change_capacity(by, body, now_s)
            capacity = self._state.settings.capacity.to_json()
            return {"capacity": capacity, "changed": sorted(self._state.changes.capacity)}

    def change_tenant(self, by: str, name: str, body: object) -> dict[str, Any]:
        """Change a tenant, and return it; see ``change_capacity``."""
        with self._changed(by) as now_s:
            self._state.change_tenant(by, name, body, now_s)
            return tenant_of(self._state, name)

    def change_job(self, by: str, tenant: str, job: str, body: object) -> dict[str, Any]:
        """Change a job, and return it; see ``change_capacity``."""
        with self._changed(by) as now_s:
            self._state.change_job(by, tenant, job, body, now_s)
            return job_of(self._state, (tenant, job))

    @contextmanager
    def _changed(self, by: str) -> Iterator[float]:
        if self._is_open:
            raise Forbidden("this control plane has no tenants, so nobody may change it: see may_change of [[tenant]]")
        if by not in self._changing:
            raise Forbidden(f"tenant {by} may change nothing here: its [[tenant]] has no may_change = true")
        with self._lock:
            before = self._state.changes
            yield self._clock()
            self._keep(self._state.changes if self._state.changes != before else None)

    def _keep(self, changes: ControlChanges | None = None) -> None:
        # What the disk did not take is written with what comes next.
        self._touched |= self._state.take_touched()
        self._unsaved |= self._state.events.take_unsaved()
        self._changes = changes or self._changes
        self._store.write(self._touched, self._unsaved, self._changes)
        events = self._unsaved
        self._touched, self._unsaved, self._changes = {}, {}, None
        for event in filter(None, events.values()):
            if event.kind == "changed":
                self.audit.write_change("change", **{**event.to_json(), "tenant": event.tenant or "all"})
                self._log(event, 0)
            elif (left_out := self._lines.admit(event.tenant, time.monotonic())) is not None:
                self._log(event, left_out)

    def _log(self, event: ControlEvent, left_out: int) -> None:
        told = {**event.to_json(), "tenant": event.tenant or "all"}
        _LOG.info("control_event", extra={"fields": {**told, "left_out": left_out} if left_out else told})

    def identify(self, token: str | None, address: str = "") -> str:
        """The name of the tenant that a token belongs to; see ``TokenTable.owner`` for the arguments and errors."""
        if self._is_open:
            return EVERY_TENANT
        if self._file is not None:
            self._file.look()
        return self._tokens.owner(token, address)


def make_control_app(plane: ControlPlane) -> Starlette:
    """Make the ASGI application of a control plane, whose file the caller closes."""
    service = _Routes(plane)
    app = Starlette(
        routes=[
            Route("/", Dashboard("frostline.control").page, methods=["GET"]),
            *_stage_routes(service),
            Route("/v1/capacity", service.capacity, methods=["PATCH"]),
            Route("/v1/tenants/{tenant}", service.tenant, methods=["PATCH"]),
            Route("/v1/jobs/{tenant}/{job}", service.job, methods=["PATCH"]),
            Route("/v1/metrics", service.metrics, methods=["GET"]),
            Route("/v1/health", service.health, methods=["GET"]),
        ],
        exception_handlers=REFUSALS,
    )
    app.state.audit = plane.audit
    return app


def stage_routes(plane: ControlPlane) -> list[Route]:
    """Make the routes by which stages report and are seen, also for an application that has others."""
    return _stage_routes(_Routes(plane))


def _stage_routes(service: "_Routes") -> list[Route]:
    return [
        DescribedRoute(
            "/v1/stages",
            service.stages,
            post=Endpoint(
                name="report",
                summary="Report a stage of a job, such as its window, and be answered what it keeps to.",
                body=Body(said="A report of at most 16 KiB; the latest by `sequence` counts.", kind=StageReport),
                answers={200: Body(said="The settings to keep to from now on.", kind=ControlAnswer)},
                refusals=(OverBudget, Overloaded),
            ),
        ),
        DescribedRoute(
            "/v1/view",
            service.view,
            get=Endpoint(
                name="view",
                summary="Tell which jobs of the tenant there are, what they do and saved, and what stages may use.",
                parameters=(page_parameter("jobs", "next"), page_parameter("stages", "next")),
                answers={200: Body(said="The state as far as the asker may see it.", kind=ControlView, others=EVENTS)},
                refusals=(Overloaded,),
            ),
        ),
    ]


class _Routes:
    """The endpoints. Decisions are made one after another, in one thread beside the event loop.

    Views are made in another one: stages that report do not queue behind whoever looks.
    """

    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane
        self._deciding = Turns(1)
        self._looking = Turns(1)
        self._body_reader = BodyReader(_MIN_BYTES_PER_S)
        self._live = LiveAnswers(self._viewed)
        self._metrics = LiveAnswers(self._measured, 0, media_type=METRICS_TYPE)

    async def stages(self, request: Request) -> Response:
        tenant = self._asker(request)
        report = StageReport.from_json(await self._body(request, _MAX_BODY_BYTES, "report"))
        answer = await self._deciding.run(tenant, partial(self._plane.receive, tenant, report))
        return json_response(answer.to_json())

    async def view(self, request: Request) -> ASGIApp:
        def seen() -> tuple[Rights, ViewPage]:
            return self._plane.rights(self._asker(request, ("jobs", "stages"))), _page(request)

        asked = seen()
        return await self._live.answer(request, asked, asked[0], again=seen)

    async def capacity(self, request: Request) -> Response:
        return await self._change(request, self._plane.change_capacity)

    async def tenant(self, request: Request) -> Response:
        return await self._change(request, self._plane.change_tenant, request.path_params["tenant"])

    async def job(self, request: Request) -> Response:
        names = request.path_params["tenant"], request.path_params["job"]
        return await self._change(request, self._plane.change_job, *names)

    async def metrics(self, request: Request) -> ASGIApp:
        return await self._metrics.answer(request, self._plane.rights(self._asker(request)))

    async def _viewed(self, asked: tuple[Rights, ViewPage]) -> bytes:
        return await self._looking.run(asked[0], lambda: json_bytes(self._plane.view(*asked)))

    async def _measured(self, rights: Rights) -> bytes:
        whole = ViewPage(rows=sys.maxsize)
        return await self._looking.run(rights, lambda: metrics_text(self._plane.view(rights, whole)))

    async def _change(self, request: Request, change: Callable[..., dict[str, Any]], *names: str) -> Response:
        by = self._asker(request)
        body = await self._body(request, MAX_PATCH_BYTES, "change")
        return json_response(await self._deciding.run(by, partial(change, by, *names, body)))

    async def _body(self, request: Request, max_bytes: int, what: str) -> object:
        if body_length(request) > max_bytes:
            raise OverBudget(f"a {what} has at most {max_bytes:,} bytes")
        return parsed_json(await self._body_reader.read_whole(request))

    async def health(self, request: Request) -> Response:
        self._asker(request)
        return json_response({"state": "ready"})

    def _asker(self, request: Request, parameters: tuple[str, ...] = ()) -> str:
        check_parameters(request, parameters)
        kind, _, token = request.headers.get("authorization", "").partition(" ")
        tenant = self._plane.identify(token.strip() if kind.lower() == "bearer" else None, address_of(request))
        recognise(request.scope.setdefault("state", {}), tenant)
        return tenant


def _page(request: Request) -> ViewPage:
    return ViewPage(jobs=first_of_page(request, "jobs"), stages=first_of_page(request, "stages"))
