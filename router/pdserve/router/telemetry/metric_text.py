"""Metrics in Prometheus' text format, as a client may see them."""

from __future__ import annotations

import re


def without_label(name: str, text: bytes) -> bytes:
    """Prometheus' text format without the series that have a label of this name."""
    # quotes in values are escaped, so that no value looks like a label
    series = re.compile(rb"[{,]" + name.encode() + rb'="')
    return b"".join(line for line in text.splitlines(keepends=True) if line.startswith(b"#") or not series.search(line))
