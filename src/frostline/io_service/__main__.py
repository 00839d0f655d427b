"""Runs an I/O service for ``io_service.start``, for as long as its parent holds its stdin."""

import json
import os
import sys
from typing import Any

from frostline.core.config import IoSettings, NodeSettings
from frostline.core.errors import UserError
from frostline.core.processes import answer_starter
from frostline.engines.machine import end_at_once
from frostline.io_service.handler import Upstream
from frostline.io_service.service import IoService
from frostline.io_service.start import listen_at

__all__ = ("main",)


def main(argument: str) -> int:
    """Run a service as described by a JSON object: ``url``, ``upstream``, ``settings``.

    Prints one line of JSON: ``url`` where it listens, or ``error`` and ``message`` where it cannot.
    """
    wanted = json.loads(argument)
    try:
        with (
            _upstream(wanted["upstream"]).connect() as upstream,
            listen_at(wanted["url"]) as listening,
            IoService(upstream, IoSettings(**wanted["settings"]), listening),
        ):
            answer_starter({"url": wanted["url"]})
            while os.read(sys.stdin.fileno(), 1024):
                pass
    except UserError as error:
        answer_starter({"error": type(error).__name__, "message": str(error)})
        return 2
    return 0


def _upstream(value: dict[str, Any]) -> Upstream:
    engines = value["node"]["engines"]
    lists = {"tenants": (), "allowed_hosts": (), "tls": None, "engines": engines and tuple(engines)}
    node = {**value["node"], **lists}
    return Upstream(near=tuple(value["near"]), roots=tuple(value["roots"]), node=NodeSettings(**node))


if __name__ == "__main__":
    end_at_once()
    raise SystemExit(main(sys.stdin.readline()))
