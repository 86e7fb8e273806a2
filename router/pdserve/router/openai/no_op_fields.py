"""Fields of OpenAI's and vLLM's APIs without effect, and those accepted only with values that have no effect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.request_body import shown

_BEAM_SEARCH = "beam search is not served; the Python API has it as LLM.beam_search"
_TEXT_ALONE = "this model reads and writes text alone"
IGNORED = (
    "user",
    "safety_identifier",
    "metadata",
    "store",
    "service_tier",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prediction",
)
"""Fields that are accepted with any value of their type, since none can change the text of the answer."""
NO_OP: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "beam_width": (1,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
}
"""Field -> values without effect, beside null and absence."""
REASONS: Mapping[str, str] = {
    "use_beam_search": _BEAM_SEARCH,
    "beam_width": _BEAM_SEARCH,
    "length_penalty": _BEAM_SEARCH,
    "early_stopping": _BEAM_SEARCH,
    "modalities": _TEXT_ALONE,
    "audio": _TEXT_ALONE,
    "functions": "functions are called with tools",
    "function_call": "functions are called with tools",
}


def verify_neutral(body: object) -> None:
    """Raises: InvalidRequest for the first field with another value."""
    for field, neutral in NO_OP.items():
        value = getattr(body, field, None)
        if value is None or value in neutral:
            continue
        only = (
            f", but only {' or '.join(map(json.dumps, neutral))} is supported" if neutral else ": it is not supported"
        )
        reason = f"; {REASONS[field]}" if field in REASONS else ""
        raise InvalidRequest(f"{field} is {shown(value)}{only}{reason}", field)
