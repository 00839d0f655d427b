"""Pages for people: each is one file that asks its own server for figures, once or with an event each second."""

import base64
import gzip
import hashlib
import math
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, Generic, TypeVar

import anyio
from anyio import create_task_group, to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from frostline.core.errors import FrostlineError, Overloaded
from frostline.node.http.connection_guard import is_stopping

__all__ = (
    "EVENTS",
    "MAX_VIEWERS",
    "AnswerInPieces",
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

EVENTS = {
    _EVENT_STREAM: "The same each second as the data of an event, for requests that accept it; JSON once where they "
    "accept that too and there are too many viewers."
}
"""That media type, and what comes in it, for a description."""

MAX_VIEWERS = 16
"""Viewers of a server that are sent events, beside one of each tenant that has none. Each holds one connection."""

_PERIOD_S = 1.0
# Answers that are being sent at once, and those of one tenant. Each has a few megabytes at most.
_MAX_ANSWERS = 32
_MAX_OF_ASKER = 16
_PIECE = 64 << 10
# Of gzip: figures shrink tenfold with the fastest.
_LEVEL = 1
# Seconds without a byte taken after which a viewer has gone.
_SILENCE_S = 30.0

R = TypeVar("R", bound=Hashable)


class LiveAnswers(Generic[R]):
    """Gives what viewers with some rights may see. Used only in the event loop's thread.

    What is asked for while it is made for somebody with the same rights is made once more for all who wait, and
    compressed once. Answers that nobody reads are few, and end.

    Args:
        made: function that returns the answer as it is sent; called off the event loop, since the answer may be large.
        max_viewers: maximum number of viewers that are sent events at once.
        period_s: seconds between two events.
        media_type: media type of what it returns.
    """

    def __init__(
        self,
        made: Callable[[R], Awaitable[bytes]],
        max_viewers: int = MAX_VIEWERS,
        period_s: float = _PERIOD_S,
        *,
        media_type: str = "application/json",
    ) -> None:
        self._made = made
        self._media_type = media_type
        self._answers: Counter[Hashable] = Counter()
        self._max_viewers = max_viewers
        self._period_s = period_s
        self._views: dict[R, _View] = {}
        self._viewers: Counter[Hashable] = Counter()

    @property
    def viewers(self) -> int:
        """The number of viewers that are sent events now."""
        return self._viewers.total()

    def is_full(self, asker: Hashable) -> bool:
        """Whether no further viewer of a tenant is sent events: each has one, whatever others have."""
        is_first = bool(self._max_viewers) and not self._viewers[asker]
        return self.viewers >= self._max_viewers and not is_first

    async def answer(
        self, request: Request, rights: R, asker: Hashable = None, *, again: Callable[[], R] | None = None
    ) -> ASGIApp:
        """The answer for whoever has these rights: an event each second where it accepts that, else JSON.

        Who accepts JSON too gets that where there are too many viewers, and asks again.

        Args:
            request: request, whose ``Accept`` is looked at.
            rights: rights of who asks; equal ones see the same.
            asker: tenant whose viewers and answers are counted together; by default all who have these rights.
            again: function that gives the rights that who asked has now, or raises; events end once these are others.

        Raises:
            Overloaded: Too many viewers or answers are open already, or the client accepts nothing but events.
        """
        accepted = request.headers.get("accept", "")
        asker = rights if asker is None else asker
        if _EVENT_STREAM in accepted and not self.is_full(asker):
            self._viewers[asker] += 1
            return _Events(self, rights, again or (lambda: rights), partial(self._leave, asker))
        if _EVENT_STREAM in accepted and "application/json" not in accepted:
            sentence = f"{self.viewers} viewers are sent events already: ask for JSON each second instead"
            raise Overloaded(sentence, retry_after_s=self._period_s)
        most = _MAX_OF_ASKER if self._answers.total() < _MAX_ANSWERS else 1  # which nobody takes from anybody
        if self._answers[asker] >= most:
            sentence = "too many answers of this kind are still being read: ask again later"
            raise Overloaded(sentence, retry_after_s=self._period_s)
        view = self._views.setdefault(rights, _View())
        view.viewers += 1
        self._answers[asker] += 1
        is_compressed = _accepts_gzip(request)
        try:
            body = await self._fresh(view, rights, is_compressed=is_compressed)
        except BaseException:
            self._read(view, rights, asker)
            raise
        end = partial(self._read, view, rights, asker)
        return AnswerInPieces(body=body, media_type=self._media_type, is_compressed=is_compressed, end=end)

    def _read(self, view: "_View", rights: R, asker: Hashable) -> None:
        """An answer was read, or given up."""
        self._answers -= Counter({asker: 1})
        self._left(view, rights)

    async def _fresh(self, view: "_View", rights: R, *, is_compressed: bool) -> bytes:
        """What was begun to be made since now, by this request or another."""
        asked_s = anyio.current_time()
        async with view.lock:
            if view.begun_s < asked_s:
                view.begun_s, view.body, view.compressed = anyio.current_time(), b"", b""
                view.body = await self._made(rights)
            if is_compressed and not view.compressed:
                view.compressed = await to_thread.run_sync(gzip.compress, view.body, _LEVEL)
            return view.compressed if is_compressed else view.body

    def _left(self, view: "_View", rights: R) -> None:
        view.viewers -= 1
        if not view.viewers:
            self._views.pop(rights, None)

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
            self._left(view, rights)

    def _leave(self, asker: Hashable) -> None:
        """Count a viewer as gone."""
        self._viewers -= Counter({asker: 1})

    async def _next(self, view: "_View", rights: R, after_s: float) -> tuple[float, bytes]:
        """Wait until a second after ``after_s``, and take what another viewer has had made since, or have it made."""
        await anyio.sleep(max(0.0, after_s + self._period_s - anyio.current_time()))
        async with view.lock:
            if view.made_s <= after_s or anyio.current_time() - view.made_s >= self._period_s:
                body = await self._made(rights)
                view.made_s, view.event = anyio.current_time(), b"data: " + body + b"\n\n"
            return view.made_s, view.event


class _View:
    """What viewers with equal rights were sent last."""

    def __init__(self) -> None:
        self.lock = anyio.Lock()
        self.viewers = 0
        self.made_s = -math.inf
        self.event = b""
        self.begun_s = -math.inf
        self.body = self.compressed = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerInPieces:
    """ASGI application that sends one answer in pieces, and gives up where its reader takes none of them for long.

    Attributes:
        body: bytes of the answer, which other answers may share.
        media_type: media type of the answer.
        end: function that is called once it was sent or given up.
        is_compressed: True if ``body`` is compressed by gzip.
    """

    body: bytes
    media_type: str
    end: Callable[[], None]
    is_compressed: bool = False

    async def __call__(self, _: Scope, __: Receive, send: Send) -> None:
        """Send it. If this returns before the last piece, the server breaks the connection."""
        length = len(self.body)
        headers = {"content-type": self.media_type, "content-length": str(length), "vary": "accept-encoding"}
        coding = {"content-encoding": "gzip"} if self.is_compressed else {}
        named = [(name.encode(), value.encode()) for name, value in {**headers, **coding}.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": named})
            for start in range(0, length, _PIECE):
                is_more = start + _PIECE < length
                piece = {"body": memoryview(self.body)[start : start + _PIECE], "more_body": is_more}
                with anyio.fail_after(_SILENCE_S):
                    await send({"type": "http.response.body", **piece})
        except TimeoutError:
            return
        finally:
            self.end()


def _accepts_gzip(request: Request) -> bool:
    codings = request.headers.get("accept-encoding", "").lower().split(",")
    return any(coding.partition(";")[0].strip() == "gzip" and not coding.strip().endswith("q=0") for coding in codings)


class _Events(Generic[R]):
    """An ASGI application that sends events until its viewer disconnects, or may see this no more."""

    def __init__(self, live: LiveAnswers[R], rights: R, again: Callable[[], R], leave: Callable[[], None]) -> None:
        self._live = live
        self._rights = rights
        self._again = again
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with create_task_group() as group:
                group.start_soon(_until_gone, receive, group.cancel_scope)
                await self._send(scope.get("state", {}), send)
                group.cancel_scope.cancel()
        finally:
            self._leave()

    async def _send(self, state: dict[str, Any], send: Send) -> None:
        """Send events. If this returns before the last piece, the server breaks the connection."""
        headers = [(b"content-type", _EVENT_STREAM.encode()), (b"cache-control", b"no-store")]
        with suppress(FrostlineError, TimeoutError):
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._live.send(self._rights, send, lambda: is_stopping(state) or not self._may_see())
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _may_see(self) -> bool:
        """Whether a token that was valid at the beginning still is, and its tenant may see the same."""
        try:
            return self._again() == self._rights
        except FrostlineError:
            return False


async def _until_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
