"""Prompts that clients send as embeddings: a safetensors file with one tensor, as bytes or base64."""

from __future__ import annotations

import base64
import binascii

from pdserve.common.errors import InvalidRequest
from pdserve.common.protocol import MAX_MESSAGE_BYTES
from pdserve.common.request.prompt_embeds import from_safetensors
from pdserve.text.prompt import EmbedsInput

MAX_PROMPT_EMBEDS_BYTES = MAX_MESSAGE_BYTES * 3 // 4
"""Limit of one prompt: its numbers travel to a worker in one message, with other fields; and as base64 in one body."""
_BASE64_CHARS = 4 * -(-MAX_PROMPT_EMBEDS_BYTES // 3)


def read_embeds(data: bytes, field: str, max_tokens: int) -> EmbedsInput:
    """field: the client's name of it. max_tokens: of a prompt; 0: embeddings are refused. Raises: InvalidRequest, PromptTooLong."""
    _verify_allowed(field, max_tokens)
    if len(data) > MAX_PROMPT_EMBEDS_BYTES:
        raise _too_large(f"{len(data)} bytes", field)
    return EmbedsInput(from_safetensors(data, field, max_tokens))


def read_base64_embeds(text: str, field: str, max_tokens: int) -> EmbedsInput:
    """The same from base64, whose length is checked before it is decoded."""
    _verify_allowed(field, max_tokens)
    if len(text) > _BASE64_CHARS:
        raise _too_large(f"{len(text)} characters of base64", field)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"{field} is not base64: {error}", field) from None
    return read_embeds(data, field, max_tokens)


def _verify_allowed(field: str, max_tokens: int) -> None:
    if not max_tokens:
        raise InvalidRequest(f"{field} is given, and this router takes no embeddings (enable_prompt_embeds)", field)


def _too_large(given: str, field: str) -> InvalidRequest:
    return InvalidRequest(f"{field} has {given}, at most {MAX_PROMPT_EMBEDS_BYTES} bytes are possible", field)
