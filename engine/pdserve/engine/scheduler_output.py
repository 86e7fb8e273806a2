"""Values that scheduler and model runner exchange, by vLLM's names: one step's work, and its result.

Their fields are plain values, so an executor may send them to another process; `tests/engine/test_scheduler_output.py` encodes and
decodes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pdserve.common.errors import PdServeError, from_code
from pdserve.common.request.encoder_prompt import EncoderPrompt
from pdserve.common.request.engine_types import LogprobsLists, ModelRunnerStats
from pdserve.common.request.multimodal import MultiModalFeatureSpec
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.prompt_embeds import PromptEmbeds
from pdserve.common.request.sampling_params import SamplingParams

NO_TOKEN = -1
"""Sampled token id if a sequence's rules allow no token."""


class NewRequestData(msgspec.Struct, kw_only=True):
    """A sequence that enters the batch, for the first time or after preemption."""

    req_id: str
    token_ids: list[int]
    """Prompt, then output."""
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[list[int]]
    """Whole block table, per KV cache group."""
    sampling_params: SamplingParams
    pooling_params: PoolingParams | None = None
    has_prompt_embeds: bool = False
    """True if the prompt's token ids are placeholders of embeddings."""
    prompt_embeds: PromptEmbeds | None = None
    """With the flag before: the embeddings, if some of them are still to be computed."""
    eos_token_ids: tuple[int, ...] = ()
    index: int = 0
    """Sequence index, which selects the noise of sampling."""
    lora_slot: int = -1
    """Slot of its LoRA adapter; -1: none."""
    num_sequences: int = 1
    """Number of tokens to sample at the end of the prompt, one for each sequence that continues it."""
    collects_prompt_logprobs: bool = False
    num_speculative_tokens: int = 0
    """Tokens to draft after each step, at most."""
    mm_features: list[MultiModalFeatureSpec] = []
    """Images of the prompt."""
    encoder_prompt: EncoderPrompt | None = None
    """The part of the prompt that the encoder reads; None: the model has none."""


class CachedRequestData(msgspec.Struct):
    """Changes of sequences that are already in the batch."""

    new_block_ids: dict[str, list[list[int]]] = {}
    """req_id -> by KV cache group, blocks added to its table."""


class LoraLoad(msgspec.Struct):
    """An adapter that replaces what a slot holds, before the step computes."""

    slot: int
    fingerprint: str
    folder: str = ""
    """The folder from which ranks above 0 read it; "" at rank 0, which has the folders."""


class SchedulerOutput(msgspec.Struct):
    """One step's work."""

    scheduled_new_reqs: list[NewRequestData] = []
    scheduled_cached_reqs: CachedRequestData = msgspec.field(default_factory=CachedRequestData)
    num_scheduled_tokens: dict[str, int] = {}
    """req_id -> tokens to compute, at least 1 each."""
    scheduled_spec_decode_tokens: dict[str, list[int]] = {}
    """req_id -> drafts that are computed after its last known token; `num_scheduled_tokens` counts them."""
    tentative_req_ids: list[str] = []
    """Of a model with states, the sequences whose tokens may turn out not to stand: those with drafts, and those whose mask may be
    late. Their states are written when the step's result is read."""
    finished_req_ids: list[str] = []
    """Sequences that left the batch since the last step: finished or preempted."""
    block_copies: list[list[tuple[int, int]]] = []
    """(from, to) rows of the pool, by shape of blocks: copied before the step computes, for sequences that begin within a block;
    empty when there are none."""
    scheduled_encoder_inputs: list[MultiModalFeatureSpec] = []
    """Images to encode before the step computes; the output is kept by its identifier."""
    free_encoder_mm_hashes: list[str] = []
    """Identifiers of outputs to drop before that."""
    lora_loads: list[LoraLoad] = []
    kv_stores: list[list[tuple[int, int]]] = []
    """(row of the pool, slot of the host-memory tier), by shape of blocks: copied before anything else of the step, and before
    `kv_loads`; empty when there are none."""
    kv_loads: dict[int, list[list[tuple[int, int]]]] = {}
    """Load id -> by shape of blocks, (slot, row of the pool): copied during this step and later ones. No step touches these blocks
    before the executor has reported the id."""
    kv_reads: dict[int, list[tuple[bytes, int, int]]] = {}
    """Load id, which is also in `kv_loads` -> (name, shape, row of the pool) of the blocks that the load reads from the store."""
    kv_writes: dict[int, tuple[bytes, tuple[int, int]]] = {}
    """Copy id -> name and (shape, slot) of a block in host memory that is written to the store after `kv_stores`, and during later
    steps. The slot keeps the block until the executor has reported the id."""
    kv_lookups: dict[int, list[bytes]] = {}
    """Copy id -> names of blocks that a store below host memory may have, which other workers share."""
    kv_clear: bool = False
    """Clear the store before these writes and lookups."""

    @property
    def has_copies(self) -> bool:
        """True if blocks are copied between tiers, or looked up there."""
        return bool(self.kv_stores or self.kv_loads or self.kv_writes or self.kv_lookups or self.kv_clear)

    @property
    def total_num_scheduled_tokens(self) -> int:
        """Tokens that the step computes."""
        return sum(self.num_scheduled_tokens.values())

    def num_drafts(self, req_id: str) -> int:
        """Drafts among the sequence's scheduled tokens."""
        return len(self.scheduled_spec_decode_tokens.get(req_id, ()))


class CopyEnd(NamedTuple):
    """The end of a load or a write."""

    copy_id: int
    is_whole: bool = True
    """False if a block could not be read, or written, by each rank."""
    lost: Sequence[bytes] = ()
    """Of a load: names of blocks that could not be read, where they are known. Of a write: names that the store does not have any
    more."""


class LookupEnd(NamedTuple):
    """The end of a lookup."""

    copy_id: int
    found: Sequence[bytes] = ()
    """Of the names, those that the store has now."""
    is_answered: bool = True
    """False if the store did not answer."""


class GrammarOutput(msgspec.Struct):
    """Token masks of the sequences that this step completes and whose output has a grammar."""

    structured_output_request_ids: list[str] = []
    """A sequence with drafts stands here once per position that has a mask, in a row."""
    grammar_bitmask: list[bytes] = []
    """One mask per entry of the field before: one bit per token of the vocabulary, lowest bit first; 1 for allowed tokens."""
    late_req_ids: list[str] = []
    """Sequences without a mask yet: nothing is sampled for them in this step."""


class RequestFailure(msgspec.Struct):
    """An error that ends one request, as a value."""

    code: str
    message: str
    field: str = ""
    """The request's field at fault."""

    @classmethod
    def of(cls, error: PdServeError) -> RequestFailure:
        return cls(error.code, error.message, error.field or "")

    def error(self) -> PdServeError:
        return from_code(self.code, self.message, self.field)


class ModelRunnerOutput(msgspec.Struct):
    """One step's result."""

    req_ids: list[str] = []
    """Sequences whose last known token was computed. A prompt that n sequences continue is listed n times in a row, in the order of
    their indexes."""
    sampled_token_ids: list[list[int]] = []
    """New tokens, a list per entry of `req_ids`, with several where drafts were confirmed; `[NO_TOKEN]` if the rules allow none."""
    draft_token_ids: dict[str, list[int]] = {}
    """req_id -> drafts of the tokens after the new ones; without sequences that have none."""
    logprobs: dict[int, LogprobsLists] = {}
    """Index in `req_ids` -> log-probabilities of its new tokens, if requested."""
    failed: dict[int, RequestFailure] = {}
    """Index in `req_ids` -> error that ends the request instead of its new tokens."""
    pooler_output: dict[str, list[float]] = {}
    """req_id -> embedding, of requests whose prompt is complete."""
    prompt_logprobs: dict[str, LogprobsLists] = {}
    """req_id -> log-probabilities of the prompt tokens one position after those computed in this step, if requested."""
    held_back: list[str] = []
    """Sequences that got no token although all their tokens were computed, because their mask was late. Their last token counts as
    not computed."""
    failed_requests: dict[str, RequestFailure] = {}
    """req_id -> error that ends the sequence regardless of other results, also within its prompt."""
    failed_loras: dict[str, RequestFailure] = {}
    """Fingerprint of an adapter that could not be loaded -> error that ends the step's sequences with it."""
    compute_s: float = 0.0
    """Seconds that the device computed the step."""
    stats: ModelRunnerStats | None = None
