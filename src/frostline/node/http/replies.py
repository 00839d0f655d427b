"""HTTP responses with plain JSON: values, and errors by the table of ``wire.refusals``."""

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from frostline.errors import FrostlineError
from frostline.wire.refusals import error_to_json, retry_after, status_of

__all__ = ("error_response", "json_response")


def json_response(value: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Make a response with a value as JSON."""
    body = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(body, status_code=status, headers=headers, media_type="application/json")


def error_response(error: FrostlineError) -> Response:
    """Make the response for an error."""
    return json_response(error_to_json(error), status=status_of(error), headers=retry_after(error))
