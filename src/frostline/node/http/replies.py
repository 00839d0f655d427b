"""HTTP answers that hold plain JSON: values, and errors by the table of ``wire.refusals``."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from frostline.errors import FrostlineError
from frostline.wire.refusals import error_to_json, retry_after, status_of

__all__ = ("error_reply", "json_reply")


def json_reply(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A value as JSON."""
    body = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def error_reply(error: FrostlineError) -> Response:
    """The answer that an error means to a client."""
    return json_reply(error_to_json(error), status=status_of(error), headers=retry_after(error))
