"""`near_match`: the known name that a misspelt one resembles, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near_match(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'NAME'?` with the known name that resembles it most, or an empty text if none does."""
    # settings are written with either; a name that begins another is the same to its author
    written, names = name.lower().replace("-", "_"), {one.lower(): one for one in sorted(known)}
    near = get_close_matches(written, names, n=1, cutoff=0.7)
    near = near or [one for one in names if len(written) > 3 and (one.startswith(written) or one.endswith(written))]
    return f", did you mean {names[near[0]]!r}?" if near else ""
