"""`metrics`: the values of a Prometheus page."""

from __future__ import annotations

import httpx


async def metrics(http: httpx.AsyncClient, url: str) -> dict[str, float]:
    """Name with labels, as the page has it -> value. Raises: httpx.HTTPError."""
    lines = (await http.get(url)).raise_for_status().text.splitlines()
    pairs = (line.rpartition(" ") for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}
