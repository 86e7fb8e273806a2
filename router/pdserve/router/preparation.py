"""From what a client sent to what workers are sent: validated, rendered, tokenized, and, once placed, hashed."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import InvalidRequest, PromptTooLong
from pdserve.common.kv_layout import KvLayout
from pdserve.common.prepared_request import PreparedRequest
from pdserve.common.sampling_params import SamplingParams, verify_token_ids
from pdserve.router.worker import Worker
from pdserve.text.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""Of a completion; a chat may use what the model's length leaves."""
MAX_CACHE_SALT_CHARS = 256
MAX_TIMEOUT_S = 86_400.0
"""Workers take no longer deadline."""
_TOKENIZER_THREADS = 2
_SEED_BITS = 63


class TextInput(msgspec.Struct, frozen=True):
    text: str


class ChatInput(msgspec.Struct, frozen=True):
    messages: Sequence[dict[str, Any]]


class TokenInput(msgspec.Struct, frozen=True):
    token_ids: list[int]


class ClientRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, as a front end understood it."""

    prompt: TextInput | ChatInput | TokenInput
    field: str
    """What the client calls the prompt: for messages."""
    sampling: SamplingParams
    """Its `max_tokens` does not count."""
    max_tokens: int | None = None
    """None: the default of the prompt's kind."""
    max_tokens_field: str = "max_tokens"
    cache_salt: str | None = None
    timeout_s: float
    trace_headers: dict[str, str] = {}


class Limits(msgspec.Struct, frozen=True):
    """What every live worker can serve."""

    max_model_len: int
    vocab_size: int

    @classmethod
    def of(cls, workers: Iterable[Worker]) -> Limits | None:
        """The smallest of each; None without workers."""
        identities = [worker.identity for worker in workers]
        if not identities:
            return None
        return cls(min(i.max_model_len for i in identities), min(i.vocab_size for i in identities))


class TokenizedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A valid request that only lacks its hashes, which depend on the workers' blocks."""

    request_id: str
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str | None
    deadline: float
    trace_headers: dict[str, str]


class Preparation:
    """Holds the tokenizer and its threads; `close` it."""

    def __init__(self, tokenizer: Tokenizer, deployment_key: bytes) -> None:
        self.tokenizer = tokenizer
        self._key = deployment_key
        self._threads = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="tokenizer")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def tokenize(self, request: ClientRequest) -> list[int]:
        """The prompt's token ids. Raises: InvalidRequest."""
        prompt = request.prompt
        if isinstance(prompt, TokenInput):
            token_ids = prompt.token_ids
        else:
            token_ids = await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, prompt)
        if not token_ids:
            raise InvalidRequest(f"{request.field} is empty, at least one token is needed", request.field)
        return token_ids

    def complete(
        self, request_id: str, request: ClientRequest, token_ids: list[int], limits: Limits
    ) -> TokenizedRequest:
        """Fill in what the client left open. Raises: InvalidRequest naming the field, its value and its limit."""
        if isinstance(request.prompt, TokenInput):
            verify_token_ids(request.field, token_ids, limits.vocab_size)
        if request.cache_salt is not None and len(request.cache_salt) > MAX_CACHE_SALT_CHARS:
            raise InvalidRequest(
                f"cache_salt has {len(request.cache_salt)} characters, at most {MAX_CACHE_SALT_CHARS} are allowed",
                "cache_salt",
            )
        sampling = msgspec.structs.replace(
            request.sampling,
            max_tokens=_max_tokens(request, len(token_ids), limits.max_model_len),
            seed=secrets.randbits(_SEED_BITS) if request.sampling.seed is None else request.sampling.seed,
        )
        sampling.verify(limits.vocab_size)
        return TokenizedRequest(
            request_id=request_id,
            token_ids=token_ids,
            sampling=sampling,
            cache_salt=request.cache_salt,
            deadline=time.monotonic() + min(request.timeout_s, MAX_TIMEOUT_S),
            trace_headers=request.trace_headers,
        )

    def hashed(self, request: TokenizedRequest, layout: KvLayout) -> PreparedRequest:
        """The request for workers with these blocks."""
        hasher = BlockHasher(self._key, layout.block_size)
        root = hasher.root(layout.model_fingerprint, request.cache_salt)
        hashes = hasher.extend(root, request.token_ids)
        return PreparedRequest(
            request_id=request.request_id,
            prompt_token_ids=request.token_ids,
            sampling_params=request.sampling,
            eos_token_ids=self.tokenizer.eos_token_ids,
            block_hashes=hashes,
            hash_root=root,
            request_digest=hasher.request_digest(root, hashes, request.token_ids),
            deadline=request.deadline,
            trace_headers=request.trace_headers,
        )

    def _encode(self, prompt: TextInput | ChatInput) -> list[int]:
        if isinstance(prompt, ChatInput):
            text = self.tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True)
            return self.tokenizer.encode(text, add_special_tokens=False)
        if not prompt.text:
            return []
        return self.tokenizer.encode(prompt.text, add_special_tokens=True)


def _max_tokens(request: ClientRequest, num_tokens: int, max_model_len: int) -> int:
    left = max_model_len - num_tokens
    if left < 1:
        raise PromptTooLong(
            f"{request.field} has {num_tokens} tokens; the model's length is {max_model_len} tokens, "
            "prompt and output together, and at least one must be left for the output",
            request.field,
        )
    if request.max_tokens is None:
        return left if isinstance(request.prompt, ChatInput) else min(left, DEFAULT_MAX_TOKENS)
    if request.max_tokens > left:
        raise InvalidRequest(
            f"{request.max_tokens_field} is {request.max_tokens} and {request.field} has {num_tokens} tokens; together "
            f"they may be at most {max_model_len}, so {request.max_tokens_field} at most {left}",
            request.max_tokens_field,
        )
    return request.max_tokens
