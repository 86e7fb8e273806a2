"""`error_response`: an error in OpenAI's shape; `json_response`: any other content."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from pdserve.common.errors import PdServeError
from pdserve.router.openai.response_writer import error_body, error_headers

JSON = "application/json"


def error_response(error: PdServeError, headers: Mapping[str, str] | None = None) -> Response:
    """An error in OpenAI's shape."""
    return Response(
        error_body(error), error.http_status, headers={**(headers or {}), **error_headers(error)}, media_type=JSON
    )


def json_response(content: object, status: int = 200) -> Response:
    """A JSON response."""
    return Response(msgspec.json.encode(content), status, media_type=JSON)
