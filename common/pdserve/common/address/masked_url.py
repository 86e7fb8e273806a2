"""`masked_url`: a URL without its secrets, for logs."""

from __future__ import annotations

from urllib.parse import urlsplit

_MASK = "***"


def masked_url(url: str) -> str:
    """The URL with `***` in place of user, password, query and fragment, each of which may be a secret.

    `***` alone for text that cannot be taken apart: any piece of it may be part of a password.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        return _MASK
    if not parts.scheme or not host:
        return _MASK
    place = f"[{host}]" if ":" in host else host
    if port is not None:
        place = f"{place}:{port}"
    if "@" in parts.netloc:
        place = f"{_MASK}@{place}"
    rest = f"?{_MASK}" if parts.query or parts.fragment else ""
    return f"{parts.scheme}://{place}{parts.path}{rest}"
