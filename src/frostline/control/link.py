"""The way from a stage to its control plane over HTTP."""

import json
import os
import socket
from urllib.parse import parse_qs, urlsplit

from frostline.control.messages import ControlAnswer, StageReport, checked_job
from frostline.errors import BadRequest, SettingError
from frostline.wire.http.exchange import Exchange, Message
from frostline.wire.http.pool import Connections, address_of
from frostline.wire.refusals import error_from_answer

__all__ = ("ControlLink",)

# Longest silence of a control plane before a report counts as lost; a job's first request waits no longer for it.
_DEADLINE_S = 1.0
_OK = 200
_MAX_ANSWER_BYTES = 64 << 10


class ControlLink:
    """The way to a control plane, and the name of the job there.

    Args:
        url: such as ``http://store-1:7075?job=night``; without a name the job is the process group on this host.
        token: token that identifies the job's tenant; None where the control plane knows none.

    Raises:
        SettingError: The URL is none.
    """

    def __init__(self, url: str, token: str | None) -> None:
        parts = urlsplit(url)
        named = parse_qs(parts.query).get("job", [f"{socket.gethostname()}-{os.getpgrp()}"])
        base = parts._replace(query="", fragment="").geturl()
        host, port = address_of(base)
        self._url = base
        self._identity = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._connections = Connections(host, port, deadline_s=_DEADLINE_S, max_idle=1)
        try:
            self.job = checked_job(named[0])
        except BadRequest as error:
            raise SettingError(f"control={url!r}: {error}") from error

    def send(self, report: StageReport) -> ControlAnswer:
        """Send a report.

        Raises:
            FrostlineError: It was not answered, or refused.
        """
        body = json.dumps(report.to_json()).encode()
        exchange = Exchange(self._connections, self._url)
        message = Message(method="POST", path="/v1/stages", body=body, headers=self._identity, may_repeat=True)
        status = exchange.send(message)
        answer = bytes(exchange.read(_MAX_ANSWER_BYTES))
        exchange.end()
        if status != _OK:
            raise error_from_answer(status, answer)
        try:
            return ControlAnswer.from_json(json.loads(answer))
        except (ValueError, RecursionError) as error:
            raise BadRequest(f"{self._url} does not answer as a control plane does: {error}") from error

    def close(self) -> None:
        """Close the connection."""
        self._connections.drop_idle()
