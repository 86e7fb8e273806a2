"""`page_response`: an HTML page that loads nothing from elsewhere, with the policy that holds it to that."""

from __future__ import annotations

import base64
import hashlib
import re

from starlette.responses import Response

_POLICY = (
    "default-src 'none'",
    "connect-src 'self'",
    "img-src data:",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "base-uri 'none'",
)
"""The page may request this router, and contain icons as data URLs."""


def page_response(page: str) -> Response:
    """A page whose style and script are its own: browsers run and apply only what has their hashes. May be sent many times."""
    own = [
        f"{tag}-src 'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
        for tag in ("style", "script")
        for content in re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    ]
    headers = {
        "content-security-policy": "; ".join([*_POLICY, *own]),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }
    return Response(page, media_type="text/html", headers=headers)
