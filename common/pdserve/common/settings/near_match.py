"""`near_match`: the known names that a misspelt one resembles, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

_MOST = 3


def near_match(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'NAME'?` with up to 3 known names, the nearest first, or an empty text if none resembles it."""
    # settings are written with either; a name that begins another is the same to its author
    written, names = _plain(name), {_plain(one): one for one in sorted(known)}
    near = get_close_matches(written, names, n=_MOST, cutoff=0.7)
    near = near or [one for one in names if len(written) > 3 and (one.startswith(written) or one.endswith(written))]
    return f", did you mean {' or '.join(repr(names[one]) for one in near[:_MOST])}?" if near else ""


def _plain(name: str) -> str:
    """The name of the setting, also of an option or a variable."""
    return name.lower().replace("-", "_").strip("_").removeprefix("pdserve_")
