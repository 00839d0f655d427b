"""Pages for people: each is one file that asks its own server for figures, once or with an event each second.

Answers with JSON once, or with an event each second, made once for all viewers who may see the same.
"""

import base64
import hashlib
import json
import math
import re
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from importlib.resources import files
from typing import Any, Generic, TypeVar

import anyio
from anyio import create_task_group
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from frostline.core.errors import FrostlineError, Overloaded
from frostline.node.http.connection_guard import is_stopping
from frostline.node.http.requests import json_response

__all__ = (
    "MAX_VIEWERS",
    "Dashboard",
    "LiveAnswers",
)


class Dashboard:
    """Gives a page, which holds no figures: whoever may not read the statistics sees none.

    Args:
        package: package with its ``dashboard.html``, which names the styles and the scripts that all pages share.

    Attributes:
        text: page as it is sent.
    """

    def __init__(self, package: str = "frostline.node") -> None:
        shared = files("frostline.node")
        self.text = files(package).joinpath("dashboard.html").read_text(encoding="utf-8")
        for name in ("page.css", "jobs.css", "page.js", "jobs.js"):
            part = shared.joinpath(name).read_text(encoding="utf-8")
            self.text = self.text.replace(f"/* {name} */\n", part)
        self._headers = {
            "Content-Security-Policy": _policy(self.text),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-cache",
        }

    async def page(self, _: Request) -> Response:
        """Answer with the page."""
        return Response(self.text, media_type="text/html; charset=utf-8", headers=self._headers)


def _policy(page: str) -> str:
    """Allow this script, this style and requests to the server itself."""
    script, style = (_digest_of(page, tag) for tag in ("script", "style"))
    return (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digest_of(page: str, tag: str) -> str:
    found = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    assert found, f"the page has a {tag}"
    return f"'sha256-{base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()}'"


_EVENT_STREAM = "text/event-stream"
"""The media type of an answer that goes on."""

MAX_VIEWERS = 16
"""Viewers of a server that are sent events. Each holds one connection, of at least a hundred that servers have."""

_PERIOD_S = 1.0
# Seconds without a byte taken after which a viewer has gone.
_SILENCE_S = 30.0

R = TypeVar("R", bound=Hashable)


class LiveAnswers(Generic[R]):
    """Gives what viewers with some rights may see. Used only in the event loop's thread.

    Args:
        made: returns it, as plain values.
        max_viewers: maximum number of viewers that are sent events at once.
        period_s: seconds between two events.
    """

    def __init__(
        self, made: Callable[[R], Awaitable[Any]], max_viewers: int = MAX_VIEWERS, period_s: float = _PERIOD_S
    ) -> None:
        self._made = made
        self._max_viewers = max_viewers
        self._period_s = period_s
        self._views: dict[R, _View] = {}
        self._viewers = 0

    @property
    def viewers(self) -> int:
        """The number of viewers that are sent events now."""
        return self._viewers

    def is_full(self) -> bool:
        """Whether no further viewer is sent events."""
        return self._viewers >= self._max_viewers

    async def answer(self, request: Request, rights: R) -> ASGIApp:
        """The answer for whoever has these rights: an event each second where it accepts that, else JSON.

        Who accepts JSON too gets that where there are too many viewers, and asks again.

        Args:
            request: request, whose ``Accept`` is looked at.
            rights: rights of who asks; equal ones see the same.

        Raises:
            Overloaded: It accepts events alone, and there are too many viewers.
        """
        accepted = request.headers.get("accept", "")
        if _EVENT_STREAM in accepted and not self.is_full():
            self._viewers += 1
            return _Events(self, rights)
        if _EVENT_STREAM in accepted and "application/json" not in accepted:
            sentence = f"{self._viewers} viewers are sent events already: ask for JSON each second instead"
            raise Overloaded(sentence, retry_after_s=self._period_s)
        return json_response(await self._made(rights))

    async def send(self, rights: R, send: Send, is_ending: Callable[[], bool]) -> None:
        """Send an event each second until the server ends; see ``answer``."""
        view = self._views.setdefault(rights, _View())
        view.viewers += 1
        try:
            made_s = -math.inf
            while not is_ending():
                made_s, event = await self._next(view, rights, made_s)
                with anyio.fail_after(_SILENCE_S):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        finally:
            view.viewers -= 1
            if not view.viewers:
                self._views.pop(rights, None)

    def leave(self) -> None:
        """Count a viewer as gone."""
        self._viewers -= 1

    async def _next(self, view: "_View", rights: R, after_s: float) -> tuple[float, bytes]:
        """Wait until a second after ``after_s``, and take what another viewer has had made since, or have it made."""
        await anyio.sleep(max(0.0, after_s + self._period_s - anyio.current_time()))
        async with view.lock:
            if view.made_s <= after_s or anyio.current_time() - view.made_s >= self._period_s:
                body = json.dumps(await self._made(rights), allow_nan=False, separators=(",", ":"))
                view.made_s, view.event = anyio.current_time(), b"data: " + body.encode() + b"\n\n"
            return view.made_s, view.event


class _View:
    """What viewers with equal rights were sent last."""

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.viewers = 0
        self.made_s = -math.inf
        self.event = b""


class _Events(Generic[R]):
    """An ASGI application that sends events until its viewer disconnects."""

    def __init__(self, live: LiveAnswers[R], rights: R) -> None:
        self._live = live
        self._rights = rights

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with create_task_group() as group:
                group.start_soon(_until_gone, receive, group.cancel_scope)
                await self._send(scope.get("state", {}), send)
                group.cancel_scope.cancel()
        finally:
            self._live.leave()

    async def _send(self, state: dict[str, Any], send: Send) -> None:
        """Send events. If this returns before the last piece, the server breaks the connection."""
        headers = [(b"content-type", _EVENT_STREAM.encode()), (b"cache-control", b"no-store")]
        with suppress(FrostlineError, TimeoutError):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._live.send(self._rights, send, lambda: is_stopping(state))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
