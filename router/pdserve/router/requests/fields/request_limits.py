"""Limits on the number of entries in one client request that belong to the front ends, not to the sampler."""

from __future__ import annotations

from pdserve.common.protocol import MAX_MESSAGE_BYTES

MAX_PROMPTS = 128
"""Prompts in one request."""
MAX_EMBEDDING_INPUTS = 2048
"""Inputs in one request for embeddings; OpenAI's limit."""
MAX_EMBEDDING_NUMBERS = MAX_MESSAGE_BYTES // 4 - 16_384
"""In the embeddings of one answer: a gRPC message takes 4 bytes for each, and some for what is around them."""
MAX_MESSAGES = 4096
"""Messages of a chat."""
MAX_METADATA = 16
"""Pairs of a chat's `metadata`; OpenAI's limit."""
MAX_ALLOWED_TOKEN_IDS = 1 << 19
"""Entries of `allowed_token_ids`, counted once for each prompt of the request: each call of each prompt carries them."""
