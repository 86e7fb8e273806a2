"""From what a client sent to what workers are sent: validated, rendered, tokenized, and, once placed, hashed."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from typing import NamedTuple, TypeVar

import msgspec

from pdserve.common import clock
from pdserve.common.block_hash import BlockHasher, placement_hash
from pdserve.common.errors import InvalidRequest, Overloaded
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.generation_request import (
    MAX_TIMEOUT_S,
    GenerationRequest,
    verify_data_parallel_rank,
    verify_priority_is_used,
)
from pdserve.common.request.multimodal import MultiModalFeatureSpec, hashed_spans
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.router.admission.fair_threads import FairThreads
from pdserve.router.admission.held_bytes import HeldBytes
from pdserve.router.requests.fields.service_tier import used_tier
from pdserve.router.requests.remote_images import RemoteImages
from pdserve.router.tenants.client import ANYBODY, CacheGroup, Client
from pdserve.router.tenants.tenant_digest import tenant_digest
from pdserve.router.workers.worker import RemoteWorker
from pdserve.text.audio.audio_processor import AudioProcessor
from pdserve.text.best_of import for_engines
from pdserve.text.images.chat_images import without_images
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.prompt import ChatInput, EmbedsInput, Prompt, TextInput, TokenInput, TranscriptInput
from pdserve.text.prompt_preparer import ModelLimits, PromptPreparer, PromptRequest
from pdserve.text.prompt_room import PromptRoom
from pdserve.text.tokenization.tokenizer import Tokenizer

_TOKENIZER_THREADS = 2
MAX_ASIDE = 256
"""Calls that may wait for the thread of `in_background_pool`, at most."""
SHORT_CHARS = 1024
"""Characters of a prompt that is tokenized in the event loop, at most, which takes a fraction of a millisecond."""
_SHORT_MESSAGES = 8
_SEED_BITS = 63
T = TypeVar("T")


class ClientRequest(PromptRequest, kw_only=True, gc=False):
    """One prompt, as a front end understood it: what the workers get, and what only the router needs."""

    constraint_field: str = "structured_outputs"
    """The client's name of the field that asks for a form, for error messages."""
    max_tool_calls: int | None = None
    """Calls in an answer at most, where tools are given; None for no limit."""
    returns_token_ids: bool = False
    """The client gets the token ids of prompt and output."""
    data_parallel_rank: int | None = None
    """Rank of the decode workers that it prefers."""
    service_tier: str | None = None
    """The tier that the client asks for; of a request that runs, the one that it got. None: none is asked for."""
    flex_id: str = ""
    """Id of the client's request in `Admission`, if its tier is flex."""
    client: Client = ANYBODY
    cache: CacheGroup = CacheGroup()

    def verify_client(self) -> None:
        super().verify_client()
        verify_data_parallel_rank(self.data_parallel_rank)

    def owned(self, client: Client, cache: CacheGroup, scheduling_policy: str) -> ClientRequest:
        """A copy as its owner may run it, with a tier and priority in the range of the key.

        cache: tenants whose cached prefixes it may use.
        scheduling_policy: the router's. Raises: InvalidRequest for a priority that is out of range, or has no effect here.
        """
        priority = client.allowed_priority(self.priority)
        verify_priority_is_used(self.priority, scheduling_policy)
        tier, priority = used_tier(self.service_tier, priority, client, scheduling_policy)
        return msgspec.structs.replace(self, client=client, cache=cache, service_tier=tier, priority=priority)


class CallFields(NamedTuple):
    """Fields of a `ClientRequest` that come from the client's call, whatever it asks for."""

    timeout_s: float
    trace_headers: dict[str, str]
    client_request_id: str
    data_parallel_rank: int | None = None
    lora_name: str = ""

    def with_rank(self, rank: int | None) -> CallFields:
        """With the rank of the client's body. Raises: InvalidRequest if the call itself has another."""
        if rank is not None and self.data_parallel_rank not in (None, rank):
            raise InvalidRequest(
                f"data_parallel_rank is {rank}, and the header X-data-parallel-rank {self.data_parallel_rank}",
                "data_parallel_rank",
            )
        return self if rank is None else self._replace(data_parallel_rank=rank)


class ServedLimits(ModelLimits, frozen=True):
    """Limits that every live worker can serve."""

    @classmethod
    def of(cls, workers: Iterable[RemoteWorker]) -> ServedLimits | None:
        """The smallest of each; None without workers."""
        identities = [worker.identity for worker in workers]
        if not identities:
            return None
        return cls(
            min(i.max_model_len for i in identities),
            min(i.vocab_size for i in identities),
            min(i.hidden_size for i in identities),
            min(i.max_logprobs for i in identities),
            min(i.max_n_sequences for i in identities),
            max(i.decoder_prompt_len for i in identities),
        )


class HashedRequest(NamedTuple):
    """A request that is ready to be placed on workers of one layout."""

    request: GenerationRequest
    placement_hashes: list[bytes]
    """8 bytes for each full block of what is given, by which workers publish them."""
    last_hash: bytes
    """Hash of the last full block; the root's without one."""


class Preparation:
    """Holds the tokenizer and its threads; `close` it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        deployment_key: DeploymentKey,
        model_len: int,
        images: ImageProcessor | None = None,
        max_held_image_bytes: int = 0,
        remote_images: RemoteImages | None = None,
        audio: AudioProcessor | None = None,
    ) -> None:
        """model_len: the model's length in tokens, which bounds texts before a worker is known. images: of a model with images;
        max_held_image_bytes: see `RouterSettings`. remote_images: None if images are only data URLs; the caller closes it. audio:
        of a model that writes what is said."""
        self._preparer = PromptPreparer(tokenizer, images, audio)
        self.audio = audio
        self._remote_images = remote_images
        self._held_images = HeldBytes(
            max_held_image_bytes,
            "images or sound of {asked} bytes, and those of other requests have {held} of {limit} bytes (max_held_image_bytes)",
        )
        self.tokenizer = tokenizer
        self._model_len = model_len
        self._key = deployment_key
        self._threads = FairThreads(_TOKENIZER_THREADS, "tokenizer")
        self._aside = FairThreads(1, "tokenizer-aside")

    def close(self) -> None:
        for threads in (self._threads, self._aside):
            threads.close()

    async def in_background_pool(self, call: Callable[[], T], client: Client = ANYBODY) -> T:
        """Result of `call`, from a thread that no generation waits for; calls run one after the other.

        A call that is cancelled while it waits is never made. Raises: what `call` raises; Overloaded when too
        many wait, or as many of one tenant as others could still have.
        """
        num_waiting, num_own = self._aside.num_waiting, self._aside.num_waiting_of(client.tenant)
        if num_waiting >= MAX_ASIDE or (client.tenant and num_own >= MAX_ASIDE - num_waiting):
            raise Overloaded(
                f"{num_waiting} texts wait to be tokenized or detokenized, {num_own} of them of this tenant; at most "
                f"{MAX_ASIDE} may"
            )
        return await self._aside.run(client.tenant, call)

    async def tokenize(
        self, request: ClientRequest, limits: ServedLimits | None = None, num_before: int = 0
    ) -> list[int]:
        """The prompt's token ids; its images or sound become the request's `mm_features`, within `holding_images`.

        num_before: as in `complete`. Raises: InvalidRequest, at once for a text that cannot fit into `limits`; Overloaded when
        images of other requests have the room.
        """
        if self.audio is not None and not isinstance(request.prompt, TranscriptInput):
            raise InvalidRequest(
                f"{request.field} is given without sound, and this model writes what is said: /v1/audio/transcriptions takes it, "
                "over gRPC the field audio",
                request.field,
            )
        room = limits.room if limits is not None else PromptRoom(self._model_len)
        prompt, field = request.prompt, request.field
        if isinstance(prompt, TokenInput | EmbedsInput):
            return self._preparer.encode(request, room, num_before).token_ids
        images = self._preparer.images if request.pooling_params is None else None
        async with AsyncExitStack() as fetched:
            files: Mapping[str, bytes] = {}
            if self._remote_images is not None and images is not None and isinstance(prompt, ChatInput):
                sources = await self._threads.run(request.client.tenant, lambda: without_images(prompt.messages)[1])
                images.verify_number(sources, field)
                files = await fetched.enter_async_context(self._remote_images.fetched(sources, field))
            if images is None and not self._threads.num_waiting and _is_short(prompt):
                # the way to a thread and back costs more
                encoded = self._preparer.encode(request, room, num_before)
            else:
                encoded = await self._threads.run(
                    request.client.tenant, lambda: self._preparer.encode(request, room, num_before, files)
                )
        if encoded.features:
            self._held_images.take(_num_image_bytes(encoded.features))
            request.mm_features = list(encoded.features)
        if isinstance(prompt, TranscriptInput):
            # the samples are there, so the file's bytes are not kept, too
            request.prompt = msgspec.structs.replace(prompt, file=b"")
        return encoded.token_ids

    @contextmanager
    def holding_images(self, request: ClientRequest) -> Iterator[None]:
        """Context of a request; at its end the images are dropped."""
        try:
            yield
        finally:
            self._held_images.give_back(_num_image_bytes(request.mm_features))
            request.mm_features = []

    async def bad_words(self, request: ClientRequest) -> tuple[tuple[int, ...], ...]:
        """Token sequences for the client's `bad_words`. Raises: InvalidRequest."""
        params = request.sampling_params
        if not params.bad_words:
            return ()
        return await self._threads.run(request.client.tenant, lambda: self._preparer.bad_words(params))

    def complete(
        self,
        request_id: str,
        request: ClientRequest,
        token_ids: list[int],
        limits: ServedLimits,
        bad_words: tuple[tuple[int, ...], ...] = (),
        num_before: int = 0,
    ) -> GenerationRequest:
        """Fill in what the client left open. Raises: InvalidRequest naming the field, its value and its limit.

        num_before: tokens of a session that precede these.
        """
        if request.mm_features and (num_before or request.beams is not None):
            kind = "a beam search" if request.beams is not None else "a session"
            raise InvalidRequest(f"{request.field} has images, and the prompt of {kind} has none", request.field)
        # the front end has verified the form once for all prompts of the body
        completed = self._preparer.complete(request, token_ids, limits, bad_words, num_before, form=False)
        sampling = for_engines(completed.sampling_params)
        if sampling.seed is None:
            sampling = msgspec.structs.replace(sampling, seed=secrets.randbits(_SEED_BITS))
        completed.sampling_params, completed.n = sampling, sampling.n
        return self._of_router(request_id, request, completed)

    def complete_embedding(
        self, request_id: str, request: ClientRequest, token_ids: list[int], limits: ServedLimits
    ) -> GenerationRequest:
        """Raises: InvalidRequest naming the field, its value and its limit."""
        return self._of_router(request_id, request, self._preparer.complete_pooling(request, token_ids, limits))

    def _of_router(self, request_id: str, request: ClientRequest, completed: GenerationRequest) -> GenerationRequest:
        """With the fields that the router sets in every kind of request."""
        completed.request_id = request_id
        completed.eos_token_ids = self.tokenizer.eos_token_ids
        completed.tenant = tenant_digest(self._key, request.client.tenant)
        completed.deadline = clock.monotonic() + min(request.timeout_s, MAX_TIMEOUT_S)
        if request.speculative_tokens is not None:
            completed.ignorable = ("speculative_tokens",)  # it changes no text
        return completed

    def hashed(
        self, request: GenerationRequest, cache: CacheGroup, layout: KvLayout, prompt: HashedRequest | None = None
    ) -> HashedRequest:
        """The request for workers with blocks of this layout. prompt: the same request without output, if it has been hashed."""
        hasher = BlockHasher(self._key, layout.block_size)
        if prompt is None:
            root = last = hasher.root(
                layout.model_fingerprint,
                request.cache_salt,
                request.lora_fingerprint,
                tenant=cache.name,
                embeds_digest=request.embeds_digest,
            )
            placed: list[bytes] = []
        else:
            root, last, placed = prompt.request.hash_root, prompt.last_hash, prompt.placement_hashes
        token_ids = request.given_token_ids[len(placed) * layout.block_size :]
        hashes = hasher.extend(last, token_ids, hashed_spans(request.mm_features, len(placed) * layout.block_size))
        digest = hasher.request_digest(last, hashes, token_ids, request.digest_extras)
        return HashedRequest(
            msgspec.structs.replace(request, hash_root=root, request_digest=digest),
            [*placed, *map(placement_hash, hashes)],
            hashes[-1] if hashes else last,
        )


def _num_image_bytes(features: Iterable[MultiModalFeatureSpec]) -> int:
    return sum(len(feature.data) for feature in features)


def _is_short(prompt: Prompt) -> bool:
    """True for a text, or a chat of only plain texts, of at most `SHORT_CHARS` characters."""
    if isinstance(prompt, TextInput):
        return len(prompt.text) <= SHORT_CHARS
    if not isinstance(prompt, ChatInput) or prompt.tools or prompt.template_variables:
        return False
    if len(prompt.messages) > _SHORT_MESSAGES:
        return False
    values = [value for message in prompt.messages for value in message.values()]
    return all(isinstance(value, str) for value in values) and sum(map(len, values)) <= SHORT_CHARS
