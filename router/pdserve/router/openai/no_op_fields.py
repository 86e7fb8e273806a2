"""OpenAI and vLLM API fields that have no effect here, and those accepted only with values that have no effect."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.request_body import shown

_TEXT_ALONE = "this model reads and writes only text"
_FILES_OF_MODEL = "images are processed as the model's files specify"
IGNORED = (
    "user",
    "safety_identifier",
    "metadata",
    "store",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "prediction",
    "session_id",
    "stream_interval",
    "mm_payload",
    "return_mm_kwargs",
    "return_token_offsets",
    "routed_experts_prompt_start",
)
"""Fields that are accepted with any value of their type, since none can change the text of the answer."""
NO_OP: Mapping[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "suffix": ("",),
    "watermarking": (False,),
    "thinking_token_budget": (),
    "logprob_token_ids": ([],),
    "repetition_detection": (),
    "return_prompt_text": (False,),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "vllm_xargs": ({},),
    "chat_template": (),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "moderation": (),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "verbosity": ("medium",),
}
"""Field -> values that have no effect, in addition to null and an absent field."""
REASONS: Mapping[str, str] = {
    "beam_width": "with use_beam_search, the number of beams is best_of, or n",
    "logprob_token_ids": "logprobs returns the most likely tokens",
    "return_prompt_text": "return_token_ids returns the prompt's tokens",
    "kv_transfer_params": "the router itself pairs prefill and decode",
    "ec_transfer_params": _TEXT_ALONE,
    "vllm_xargs": "pass plug-ins and their arguments in logits_processors",
    "chat_template": "the template in the model's folder is always used",
    "media_io_kwargs": _FILES_OF_MODEL,
    "mm_processor_kwargs": _FILES_OF_MODEL,
    "modalities": _TEXT_ALONE,
    "audio": _TEXT_ALONE,
    "background": "a response is generated while its client waits",
    "conversation": "previous_response_id continues a conversation",
    "prompt": "no prompts are stored here; send instructions and input",
    "truncation": "a conversation that is too long is refused",
    "functions": "to call functions, use tools",
    "function_call": "to call functions, use tools",
}


RESPONSES_IGNORED = (
    "user",
    "safety_identifier",
    "max_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
)
"""`IGNORED` for `/v1/responses`."""
RESPONSES_NO_OP: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "moderation": (),
    "truncation": ("disabled",),
    "text.verbosity": ("medium",),
    "reasoning.summary": ("auto",),
    "reasoning.generate_summary": ("auto",),
}
"""`NO_OP` for `/v1/responses`; a dot separates an object from its field."""
SCORE_NO_OP: Mapping[str, tuple[Any, ...]] = {"encoding_format": ("float",)}
"""`NO_OP` for `/v1/score`."""


def verify_neutral(body: object, table: Mapping[str, tuple[Any, ...]] = NO_OP) -> None:
    """Verify that no field in `table` has an effect. Raises: InvalidRequest for the first field with a value not listed there."""
    for field, neutral in table.items():
        value = body
        for name in field.split("."):
            value = getattr(value, name, None)
        if value is None or value in neutral:
            continue
        only = (
            f", but only {' or '.join(map(json.dumps, neutral))} is supported" if neutral else ": it is not supported"
        )
        reason = f"; {REASONS[field]}" if field in REASONS else ""
        raise InvalidRequest(f"{field} is {shown(value)}{only}{reason}", field)
