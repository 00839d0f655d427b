"""Holds connections of untrusted clients within limits of bytes, number and time, from the first byte to the last.

A connection sends heads and announced bodies; whatever else comes on it is let by within limits, and never parsed.
"""

import asyncio
import json
import logging
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Generic, Protocol, TypeVar, cast

from httptools import HttpParserError, HttpParserUpgrade
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from frostline.core.system import connection_slots, give_back_freed
from frostline.core.tokens import site_of
from frostline.core.units import log_named

__all__ = (
    "LOG",
    "ConnectionLimits",
    "ConnectionTable",
    "Guarded",
    "GuardedProtocol",
    "Guards",
    "SeldomLog",
    "inside_url",
    "is_stopping",
    "limits_of",
    "place_of",
    "recognise",
    "tenant_of_request",
)


C = TypeVar("C", bound=Hashable)

# So many connections leave tens of megabytes to the C library once no more than a part of them is left.
_MANY, _FEW = 256, 4
# Seconds until these are given back: so often at most, for a node needs some of its memory again.
_RESTS_AFTER_S = 10.0
_MAX_CONNECTIONS = 4096
# Browsers send all cookies that they have for `localhost`, whichever port set them.
_MAX_HEAD_BYTES = 32 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Limits of connections, whoever asks.

    Attributes:
        head_s: seconds within which a request's head must be complete, from its start or from the connection's, and
            within which the next one must begin on a connection on which no known tenant has asked.
        head_bytes: maximum size of a head.
        head_fields: maximum number of fields in a head.
        max_waiting: maximum number of requests that wait on a connection for answers to those before them.
        unread_s: seconds in which what still comes behind the last answer of a connection is let by, so that a reset
            does not overtake the answer.
        unread_bytes: maximum number of bytes that are let by. Clients send bodies of up to 1 MiB unasked.
        half_s: seconds for an answer to begin where its client sends no more: it may read on, or be gone.
        unsent_s: seconds in which a reader must take all that was written to it, or ``unsent_bytes``.
        unsent_bytes: see ``unsent_s``.
        min_bytes_per_s: rate at which an answer must be taken as a whole, but for ``unsent_s`` in all: what an answer
            holds is given back after that.
        max_unknown: maximum number of connections older than ``young_s`` without a request of a known tenant.
        young_s: seconds for which a new connection is not closed because of ``max_unknown``, since many trainers may
            begin at once.
        max_connections: maximum number of connections.
    """

    head_s: float = 10.0
    head_bytes: int = _MAX_HEAD_BYTES
    head_fields: int = 128
    max_waiting: int = 8
    unread_s: float = 5.0
    unread_bytes: int = 2 << 20
    half_s: float = 2.0
    unsent_s: float = 30.0
    unsent_bytes: int = 32 << 10
    min_bytes_per_s: int = 4 << 10
    max_unknown: int = 1024
    young_s: float = 1.0
    max_connections: int = _MAX_CONNECTIONS


def limits_of(descriptors: int) -> ConnectionLimits:
    """The limits of a process that may open so many files and sockets.

    Args:
        descriptors: maximum number of descriptors; a negative number means no limit.
    """
    if descriptors < 0:
        return ConnectionLimits()
    maximum = connection_slots(_MAX_CONNECTIONS, descriptors)
    return ConnectionLimits(max_unknown=max(1, maximum // 4), max_connections=maximum)


class ConnectionTable(Generic[C]):
    """The connections of a node: unknown, working, or idle after an answer to a known tenant. Not safe for threads."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        # Each dictionary is in the order in which connections entered that state; unknown ones with time and place.
        self._unknown: dict[C, tuple[float, str]] = {}
        self._unknown_of: dict[str, dict[C, None]] = {}
        self._tenants: dict[C, str] = {}
        self._idle: dict[str, dict[C, None]] = {}
        self._working: dict[str, dict[C, None]] = {}
        self._most = 0

    def __len__(self) -> int:
        return len(self._unknown) + len(self._tenants)

    def enter(self, connection: C, now_s: float, place: str = "") -> C | None:
        """Admit a connection.

        Args:
            connection: new connection.
            now_s: seconds of a monotonic clock.
            place: address that it comes from.

        Returns:
            The connection that must be closed for it: the oldest unknown one of the place that has most of them, else
            one of the tenant that has most: the one that has been idle longest, else the one that began to work last,
            where it has others; else the new one itself; None if there is space.
        """
        gone: C | None = None
        if len(self) >= self._limits.max_connections:
            gone = self._crowding() or self._of_largest_tenant() or connection
        elif len(self._unknown) >= self._limits.max_unknown:
            oldest = self._crowding()
            is_young = oldest is None or now_s - self._unknown[oldest][0] < self._limits.young_s
            gone = None if is_young else oldest
        if gone is not None:
            self.leave(gone)
        if gone is not connection:
            self._unknown[connection] = now_s, place
            self._unknown_of.setdefault(place, {})[connection] = None
        self._most = max(self._most, len(self))
        return gone

    def are_over(self) -> bool:
        """Whether there were many connections of which few are left; asked again, whether there were since."""
        if self._most < _MANY or _FEW * len(self) > self._most:
            return False
        self._most = len(self)
        return True

    def _crowding(self) -> C | None:
        """The oldest unknown connection of the place with most of them, so that one place shuts no other out."""
        if not self._unknown:
            return None
        most = max(map(len, self._unknown_of.values()))
        firsts = (next(iter(those)) for those in self._unknown_of.values() if len(those) == most)
        return min(firsts, key=lambda connection: self._unknown[connection][0])

    def _of_largest_tenant(self) -> C | None:
        """A connection of the tenant with most of them, so that no tenant shuts others out by bodies that do not come.

        What is under way for longer, such as a training, stays.
        """
        counts = Counter(self._tenants.values())
        if not counts:
            return None
        [(tenant, count)] = counts.most_common(1)
        if tenant in self._idle:
            return next(iter(self._idle[tenant]))
        return next(reversed(self._working[tenant])) if count > 1 else None

    def note_tenant(self, connection: C, tenant: str) -> None:
        """Note that a known tenant has asked on this connection."""
        if connection in self._unknown or connection in self._idle.get(self._tenants.get(connection, ""), ()):
            self.leave(connection)
            self._tenants[connection] = tenant
            self._working.setdefault(tenant, {})[connection] = None

    def note_answer(self, connection: C) -> None:
        """Note that its request was answered; an unknown connection stays unknown."""
        tenant = self._tenants.get(connection, "")
        if connection in self._working.get(tenant, ()):
            self.leave(connection)
            self._tenants[connection] = tenant
            self._idle.setdefault(tenant, {})[connection] = None

    def leave(self, connection: C) -> None:
        """Remove a connection that is closed, or about to be. Calling it again does nothing."""
        if connection in self._unknown:
            _, place = self._unknown.pop(connection)
            _remove(self._unknown_of, place, connection)
        elif connection in self._tenants:
            tenant = self._tenants.pop(connection)
            _remove(self._idle, tenant, connection)
            _remove(self._working, tenant, connection)


def _remove(groups: dict[str, dict[C, None]], name: str, connection: C) -> None:
    """Remove a connection from its group, and the group with the last one."""
    group = groups.get(name, {})
    group.pop(connection, None)
    if not group:
        groups.pop(name, None)


LOG = log_named("frostline.node")
"""The log of a server: what it refused and closed."""

# Minimum seconds between two log lines with the same text.
_LOG_S = 60.0
_RECOGNISED = "frostline.recognised"
_STOPPING = "frostline.stopping"
_TENANT = "frostline.tenant"
_INSIDE = "frostline.inside"


# Pieces of data of one asker, most of them requests, that are looked at in a round of the event loop.
_IN_A_ROUND = 8


class Rounds:
    """Gives each asker a part of each round of the event loop, so that nobody waits for all that another sends.

    Used only in the event loop's thread.

    Args:
        most: pieces of data of one asker that are looked at in a round.
    """

    def __init__(self, most: int = _IN_A_ROUND) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()
        self._waiting: dict[str, deque[Callable[[], None]]] = {}
        self._is_begun = False

    def take(self, asker: str) -> bool:
        """Take a place in this round, and return whether there was one and nothing else of the asker waits."""
        if asker in self._waiting or self._taken[asker] >= self._most:
            return False
        self._taken[asker] += 1
        self._begin()
        return True

    def wait(self, asker: str, go_on: Callable[[], None]) -> None:
        """Have a function called in one of the next rounds, behind what else of the asker waits."""
        self._waiting.setdefault(asker, deque()).append(go_on)
        self._begin()

    def _begin(self) -> None:
        if not self._is_begun:
            self._is_begun = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_begun = False
        self._taken.clear()
        for asker, waiting in list(self._waiting.items()):
            self._taken[asker] = min(self._most, len(waiting))
            for _ in range(self._taken[asker]):
                waiting.popleft()()
            if not waiting:
                del self._waiting[asker]
        if self._taken:
            self._begin()


class Guarded(Hashable, Protocol):
    """A connection that may be closed for another."""

    def turn_away(self) -> None:
        """Close it to make space for another."""


class Guards:
    """The state that the connections of one server share. Used only in its event loop's thread.

    Args:
        limits: limits of the connections.

    Attributes:
        is_stopping: True if the server ends, so that answers that go on for ever are to end too.
        inside: URL at which processes of its own ask it; empty where they ask it as others do.
        rounds: part of the event loop that each asker has.
        log: log that takes the place of uvicorn's.
    """

    def __init__(self, limits: ConnectionLimits) -> None:
        self.limits = limits
        self.is_stopping = False
        self.inside = ""
        self.rounds = Rounds()
        self.connections: ConnectionTable[Guarded] = ConnectionTable(limits)
        self.log = SeldomLog(LOG)
        self._rests: asyncio.TimerHandle | None = None

    def note_end(self) -> None:
        """A connection has ended; where that was one of many, memory is given back a while later."""
        if self._rests is None and self.connections.are_over():
            self._rests = asyncio.get_running_loop().call_later(_RESTS_AFTER_S, self._rest)

    def _rest(self) -> None:
        self._rests = None
        asyncio.get_running_loop().run_in_executor(None, give_back_freed)

    def say(self, what: str) -> None:
        """Log what was done with a connection; see ``SeldomLog``."""
        self.log.warning(what)


class SeldomLog(logging.LoggerAdapter[logging.Logger]):
    """Logs the same message, whatever fills it, at once and then at most once a minute with a count.

    Whoever reaches a port can cause a line for each request.

    Args:
        logger: logger that takes the lines.
        clock: seconds of a monotonic clock.
    """

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(logger)
        self._clock = clock
        self._counts: dict[tuple[str, str], int] = {}
        self._said_at_s: dict[tuple[str, str], float] = {}

    @property
    def level(self) -> int:
        """The level of the logger, which uvicorn asks for."""
        return self.logger.level

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message, or count it; what is logged at all is no question of its count."""
        if not self.isEnabledFor(level):
            return
        what, now_s = str(msg).rstrip(), self._clock()
        key = (what, _place_of(kwargs.get("exc_info")))
        self._counts[key] = self._counts.get(key, 0) + 1
        if now_s >= self._said_at_s.get(key, -_LOG_S) + _LOG_S:
            self._said_at_s[key] = now_s
            self.logger.log(level, f"{what} (%d since the last such line)", *args, self._counts.pop(key), **kwargs)


def _place_of(error: object) -> str:
    """What an error is and where it was raised, by which errors are told apart; empty for none."""
    if not isinstance(error, BaseException):
        return ""
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    return f"{type(error).__name__} {frames[0].filename}:{frames[0].lineno}" if frames else type(error).__name__


class _Unheard(Exception):
    """Ends the parser's work: nothing behind this place is read."""


class GuardedProtocol(HttpToolsProtocol):
    """One connection, made by uvicorn; asyncio and the parser call its methods.

    Whatever is no head and no announced body is let by within limits of bytes and time, and is not parsed.

    Args:
        config: uvicorn's argument.
        server_state: uvicorn's argument.
        app_state: uvicorn's argument.
        guards: state shared with the other connections.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        guards: Guards,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._guards = guards
        self._limits = guards.limits
        self.logger = guards.log  # type: ignore[assignment]
        self._is_known = False
        # Who shares the event loop with others: the tenant that asked last, or the address.
        self._asker = ""
        # What came and waits for its turn; nothing more is read meanwhile.
        self._put_off = b""
        self._is_at_end = False
        self._head_bytes = 0
        self._is_in_head = True
        # Why the parser was ended: a status line, and what was wrong.
        self._refusal: tuple[HTTPStatus, str] | None = None
        # No answer is begun any more: what comes is let by until the connection is closed.
        self._is_ending = False
        self._unread_bytes = 0
        self._unsent_bytes = 0
        self._answering: RequestResponseCycle | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._end_timer: asyncio.TimerHandle | None = None
        self._unsent_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See ``asyncio.BaseProtocol``."""
        super().connection_made(transport)
        self._begin_head()
        place = place_of(self.client)
        self._asker = f"from {place}"
        gone = self._guards.connections.enter(self, self.loop.time(), place)
        if gone is not None:
            gone.turn_away()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.BaseProtocol``."""
        self._end_head()
        for timer in (self._end_timer, self._unsent_timer):
            if timer is not None:
                timer.cancel()
        self._guards.connections.leave(self)
        if self._answering is not None:  # uvicorn tells the last request alone
            self._answering.disconnected = True
            self._answering.message_event.set()
        self.pipeline.clear()
        super().connection_lost(exc)
        self._guards.note_end()

    def turn_away(self) -> None:
        """Close it to make space for another."""
        self._guards.say("closed a connection in favour of another: too many are open")
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or not cycle.response_complete or self._is_ending or not self._is_known:
            self.transport.abort()
            return
        self.transport.close()  # which first sends what is left of its last answer
        self._end_timer = self.loop.call_later(self._limits.young_s, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        if self._is_ending or self._is_last():
            self._let_by(len(data))
        elif self._put_off or not self._guards.rounds.take(self._asker):
            self._put_it_off(data)
        else:
            self._look_at(data)

    def _put_it_off(self, data: bytes) -> None:
        """Keep what came until it is its asker's turn, and read nothing more meanwhile."""
        self._unset_keepalive_if_required()
        if not self._put_off:
            self.transport.pause_reading()
            self._guards.rounds.wait(self._asker, self._go_on)
        self._put_off += data

    def _go_on(self) -> None:
        data, self._put_off = self._put_off, b""
        if self.transport.is_closing():
            return
        if not self.flow.read_paused:
            self.transport.resume_reading()
        if self._is_ending or self._is_last():
            self._let_by(len(data))
        else:
            self._look_at(data)
        if self._is_at_end and not self.eof_received():
            self.transport.close()

    def _look_at(self, data: bytes) -> None:
        if self._is_in_head:
            self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade:
            self._guards.say("answered a request to change to another protocol as if it had not asked")
        except HttpParserError:
            if not self._is_last():
                self._refuse(*(self._refusal or (HTTPStatus.BAD_REQUEST, "closed a connection that sent no HTTP")))
        else:
            if self._is_in_head and self._is_head_too_large():
                self._refuse(*self._too_large())

    def eof_received(self) -> bool:  # type: ignore[override]
        """See ``asyncio.Protocol``; the answer to a whole request has a moment: its client may read on, or be gone.

        Who goes while an answer comes is gone.
        """
        if self._put_off:  # its end is looked at behind it
            self._is_at_end = True
            return True
        cycle: RequestResponseCycle | None = self.cycle
        if self._is_ending or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        begun = self._answering
        if begun is not None and begun.response_started and not begun.response_complete:
            return False
        cycle.keep_alive = False
        self._end_timer = self.loop.call_later(self._limits.half_s, self.transport.close)
        return True

    def on_message_begin(self) -> None:
        """See ``httptools``."""
        if self._is_last():
            raise _Unheard
        super().on_message_begin()
        self.scope["state"] |= {
            _RECOGNISED: self._recognised,
            _STOPPING: self._is_stopping,
            _INSIDE: self._guards.inside,
        }
        if not self._is_in_head:
            self._begin_head()

    def on_headers_complete(self) -> None:
        """See ``httptools``."""
        self._end_head()
        self._refusal = self._refused_head()
        if self._refusal is not None:
            raise _Unheard
        super().on_headers_complete()
        self.cycle.keep_alive = self.cycle.keep_alive and not self.parser.should_upgrade()
        # So that its end is this connection's to decide.
        self.cycle.transport = cast("asyncio.Transport", _AnswerTransport(self, self.cycle))

    def on_response_complete(self) -> None:
        """See ``uvicorn``."""
        self._guards.connections.note_answer(self)
        if self._is_ending:
            return
        kept_s: float = self.config.timeout_keep_alive if self._is_known else self._limits.head_s
        self.timeout_keep_alive = kept_s  # type: ignore[assignment]  # of any seconds that a timer takes
        super().on_response_complete()

    def pause_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        super().pause_writing()
        self._watch_unsent()

    def resume_writing(self) -> None:
        """See ``asyncio.BaseProtocol``."""
        super().resume_writing()
        if self._unsent_timer is not None and not self.transport.is_closing():
            self._unsent_timer.cancel()
            self._unsent_timer = None

    def end(self, *, is_more_coming: bool, is_whole: bool = True) -> None:
        """Close it behind the last answer, and let by what is on its way: a reset could overtake the answer.

        Of an answer that broke off nobody needs what its reader has not taken, and nothing else counts its memory.
        """
        if not is_whole and self.flow.write_paused:
            self.transport.abort()
            return
        if self._is_ending:
            return
        self._is_ending = True
        self.pipeline.clear()
        if not is_more_coming and not self._unread_bytes:
            self._close()
            return
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._end_timer = self.loop.call_later(self._limits.unread_s, self._close)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle

        async def answered(scope: Scope, receive: Receive, send: Send) -> None:
            left_s = self._limits.unsent_s

            async def sent(message: Message) -> None:
                nonlocal left_s
                if message["type"] == "http.response.start" and cycle.more_body:
                    cycle.keep_alive = False  # nobody reads the rest of its body
                if not self.flow.write_paused:
                    await send(message)
                else:
                    began_s = self.loop.time()
                    late = self.loop.call_later(max(0.0, left_s), self._end_slow)
                    try:
                        await send(message)
                    finally:
                        late.cancel()
                    left_s -= self.loop.time() - began_s
                left_s += len(message.get("body", b"")) / self._limits.min_bytes_per_s

            await app(scope, receive, sent)

        super()._start_asgi_task(cycle, cast("Any", answered))

    def _end_slow(self) -> None:
        """End a connection whose reader takes an answer so slowly that it may never end."""
        self._guards.say("closed a connection whose reader took an answer too slowly")
        self.transport.abort()

    def _is_last(self) -> bool:
        """Whether the request that came last is whole and the last on this connection."""
        cycle: RequestResponseCycle | None = self.cycle
        return cycle is not None and not cycle.keep_alive and not cycle.more_body

    def _let_by(self, nbytes: int) -> None:
        self._unread_bytes += nbytes
        if self._unread_bytes > self._limits.unread_bytes:
            self._guards.say(f"closed a connection that sent over {self._limits.unread_bytes} bytes that nobody reads")
            self.transport.abort()

    def _refused_head(self) -> tuple[HTTPStatus, str] | None:
        """Why a request is refused by its head alone: as what no route takes."""
        if self._is_head_too_large():
            return self._too_large()
        if any(name == b"transfer-encoding" for name, _ in self.headers):
            return HTTPStatus.LENGTH_REQUIRED, "refused a body in chunks: its length must be announced"
        if len(self.pipeline) >= self._limits.max_waiting:
            most = self._limits.max_waiting
            return HTTPStatus.TOO_MANY_REQUESTS, f"closed a connection on which over {most} requests waited"
        return None

    def _is_head_too_large(self) -> bool:
        """Whether what came of a head is too much; of a whole one, behind which more may have come, its own bytes."""
        nbytes, fields = self._head_bytes, self.headers or ()
        if not self._is_in_head:
            nbytes = len(self.url) + sum(len(name) + len(value) for name, value in fields)
        return nbytes > self._limits.head_bytes or len(fields) > self._limits.head_fields

    def _too_large(self) -> tuple[HTTPStatus, str]:
        nbytes, count = self._limits.head_bytes, self._limits.head_fields
        what = f"closed a connection whose head had over {nbytes} bytes or {count} fields"
        return HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, what

    def _recognised(self, tenant: str) -> None:
        self._is_known = True
        self._asker = f"tenant {tenant}"
        self._guards.connections.note_tenant(self, tenant)

    def _is_stopping(self) -> bool:
        return self._guards.is_stopping

    def _begin_head(self) -> None:
        self._is_in_head, self._head_bytes = True, 0
        self._head_timer = self.loop.call_later(self._limits.head_s, self._late)

    def _end_head(self) -> None:
        self._is_in_head = False
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        if self.flow.read_paused or self._put_off:  # what is late has come, and waits to be read
            self._head_timer = self.loop.call_later(self._limits.head_s, self._late)
            return
        what = f"closed a connection that sent no whole head within {self._limits.head_s:g} s"
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, what)

    def _refuse(self, status: HTTPStatus, what: str) -> None:
        """Answer where no other answer is under way, and close it."""
        if self._is_ending or self.transport.is_closing():
            return
        self._end_head()
        self._guards.say(what)
        cycle: RequestResponseCycle | None = self.cycle
        if cycle is None or cycle.response_complete:
            self.transport.write(_refusal(status, what))
            self.end(is_more_coming=True)
        else:
            self.transport.abort()

    def _close(self) -> None:
        self.transport.close()
        self._watch_unsent()

    def _watch_unsent(self) -> None:
        if self._unsent_timer is not None:
            self._unsent_timer.cancel()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        if self._unsent_bytes:
            self._unsent_timer = self.loop.call_later(self._limits.unsent_s, self._look_at_unsent)

    def _look_at_unsent(self) -> None:
        left = self.transport.get_write_buffer_size()
        if left and self._unsent_bytes - left < self._limits.unsent_bytes:
            self._guards.say("closed a connection whose reader took no answer")
            self.transport.abort()
        else:
            self._watch_unsent()


def _refusal(status: HTTPStatus, what: str) -> bytes:
    body = json.dumps({"error": "Refused", "message": what})
    head = (f"HTTP/1.1 {status.value} {status.phrase}", "connection: close", "content-type: application/json")
    return "\r\n".join((*head, f"content-length: {len(body)}", "", body)).encode()


class _AnswerTransport:
    """What an answer is written to: its end may be the connection's."""

    def __init__(self, connection: GuardedProtocol, cycle: RequestResponseCycle) -> None:
        self._connection = connection
        self._cycle = cycle
        self.write = cycle.transport.write
        self.is_closing = cycle.transport.is_closing

    def close(self) -> None:
        self._connection.end(is_more_coming=self._cycle.more_body, is_whole=self._cycle.response_complete)


def place_of(client: tuple[str, int] | None) -> str:
    """The address that connections are counted by; see ``tokens.site_of``."""
    return "" if client is None else site_of(client[0])


def recognise(state: dict[str, Any], tenant: str) -> None:
    """Tell a request's connection, through the state in its ASGI scope, that a known tenant has asked, and which."""
    state[_TENANT] = tenant
    recognised: Callable[[str], None] | None = state.get(_RECOGNISED)
    if recognised is not None:
        recognised(tenant)


def tenant_of_request(state: dict[str, Any]) -> str:
    """The tenant that has asked, from the state in a request's ASGI scope; empty where nobody knows."""
    return str(state.get(_TENANT, ""))


def inside_url(state: dict[str, Any]) -> str:
    """The URL at which processes of its own ask a server, from the state in a request's ASGI scope; empty for none."""
    return str(state.get(_INSIDE, ""))


def is_stopping(state: dict[str, Any]) -> bool:
    """Whether the server of a request is about to end, from the state in the request's ASGI scope."""
    stopping: Callable[[], bool] | None = state.get(_STOPPING)
    return stopping is not None and stopping()
