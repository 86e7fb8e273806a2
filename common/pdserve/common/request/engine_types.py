"""Values in the two queues of an engine: requests in, outputs out. No torch, no network."""

from __future__ import annotations

import enum

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.audio import placed
from pdserve.common.request.block_source import BlockSource
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.common.request.encoder_prompt import EncoderPrompt
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.multimodal import MultiModalFeatureSpec
from pdserve.common.request.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """The reason for a sequence's end, as clients see it."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(GenerationRequest, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """A `GenerationRequest`, and the fields that only an engine and its process need.

    `request_id` is unique per attempt, so that a late event of one attempt never meets the next.
    """

    sequence_stem: str = ""
    """Begins the ids of the request's sequences (`sequence_id`); empty: `request_id`."""
    arrival_time: float = 0.0
    """`clock.monotonic()` of this process when the request arrived, seconds."""
    block_hashes: list[bytes] = msgspec.field(default_factory=list)
    """Keyed chained hashes of the full blocks of prompt and earlier output, 24 bytes each."""
    remote_prefill: bool = False
    """KV is received from another worker: the request waits in `WAITING_FOR_REMOTE_KVS` until it has landed."""
    transfer_source: bool = False
    """A transfer will read this request's blocks: they are published as they become final and pinned while wanted."""
    without_draft_head: bool = False
    """The transfer moves no blocks of a draft head, since source and receiver do not have the same one."""
    wanted_from: int | None = None
    """Source side, if `Want` has arrived already: the first block index that the receiver lacks."""
    block_source: BlockSource | None = None
    """Has blocks of the prompt: those that are missing here are read from there, and the rest is computed."""
    fetches_only: bool = False
    """It ends when blocks have come from `block_source`, or will not come: nothing is computed."""
    resumable: bool = False
    """A session: the end of a turn is not its end; it waits in `WAITING_FOR_STREAMING_REQ` for a `StreamingUpdate`."""
    prefill_here: bool = False
    """Prefill here a prompt of any length, because no prefill worker is live."""
    local_prefill_tokens: int | None = None
    """Most uncached tokens for which prefilling here is faster, by the router's estimate; None: its choice is final."""
    eos_token_id: int | None = None
    """vLLM's field, for callers with one EOS token: it becomes the first of `eos_token_ids`."""
    encoder_prompt: EncoderPrompt | None = None
    """The part of `prompt_token_ids` that the encoder reads; None: the model has none."""

    def __post_init__(self) -> None:
        if self.eos_token_id is not None and self.eos_token_id not in self.eos_token_ids:
            self.eos_token_ids = (self.eos_token_id, *self.eos_token_ids)

    @property
    def sent_prompt_token_ids(self) -> list[int]:
        """The prompt as the router sent it: without what an encoder's layout adds."""
        encoder = self.encoder_prompt
        if encoder is None:
            return self.prompt_token_ids
        return (
            self.prompt_token_ids[encoder.num_slots :]
            if encoder.is_audio
            else self.prompt_token_ids[: encoder.num_tokens]
        )

    @property
    def sent_mm_features(self) -> list[MultiModalFeatureSpec]:
        """Images and sound where the router has placed them: sound nowhere."""
        return placed(self.mm_features, 0) if self.encoder_prompt is not None else self.mm_features

    @property
    def num_sent_tokens(self) -> int:
        """Tokens of prompt and earlier output, as the router sent them."""
        return len(self.sent_prompt_token_ids) + len(self.output_token_ids)

    def sequence_id(self, index: int) -> str:
        """Id of one of the request's sequences in the engine; that of the first is the request's."""
        return self.request_id if index == self.index else f"{self.sequence_stem or self.request_id}.{index}"

    def verify_supported(self) -> None:
        """Refuse combinations that no engine serves. Raises: InvalidRequest naming the field."""
        if self.resumable and (self.remote_prefill or self.transfer_source):
            raise InvalidRequest("resumable is set, but KV of a session is never transferred", "resumable")
        if self.block_source is not None and (self.resumable or self.remote_prefill):
            kind = "KV of a session is never transferred" if self.resumable else "the whole prompt is received"
            raise InvalidRequest(f"block_source is given, but {kind}", "block_source")
        if self.fetches_only and self.block_source is None:
            raise InvalidRequest("fetches_only is set, and there is no block_source", "block_source")
        if self.resumable and self.pooling_params is not None:
            raise InvalidRequest("resumable is set, but an embedding ends with its prompt", "resumable")
        self.verify_embeds_alone()
        if self.resumable and self.prompt_embeds is not None:
            raise InvalidRequest("prompt_embeds is given, and a session's prompt is token ids", "prompt_embeds")
        if self.mm_features and (self.resumable or self.pooling_params is not None):
            kind = "a session" if self.resumable else "an embedding"
            raise InvalidRequest(
                f"multi_modal_data is given, and the prompt of {kind} has no images", "multi_modal_data"
            )
        if self.resumable and self.n > 1:
            raise InvalidRequest(f"n is {self.n}, but a session has one sequence", "n")

    def verify_without_transfers(self) -> None:
        """Refuse what only an engine with transfers serves. Raises: InvalidRequest naming the field."""
        for field in ("remote_prefill", "transfer_source", "block_source"):
            if getattr(self, field):
                raise InvalidRequest(
                    f"{field} is given, and this engine has no transfers: only workers have them", field
                )


class StreamingUpdate(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """Input of a session's next turn, with its parameters."""

    request_id: str
    prompt_token_ids: list[int]
    """Appended to everything that the session has so far, its output included."""
    sampling_params: SamplingParams
    """Parameters of this turn only: `max_tokens`, penalties and positions count from its first output token."""
    arrival_time: float = 0.0
    """`clock.monotonic()` of this process, seconds."""
    num_kept_output_tokens: int | None = None
    """Output tokens of the turn before that stand, where a stop string ended its text; the others are dropped. None: all."""


class EngineCoreEventType(enum.IntEnum):
    """Events of a sequence in the scheduler."""

    QUEUED = 1
    SCHEDULED = 2
    PREEMPTED = 3


class EngineCoreEvent(msgspec.Struct, array_like=True, gc=False):
    """An event and its time."""

    type: EngineCoreEventType
    timestamp: float
    """`clock.monotonic()` seconds of the engine's process."""


class LogprobsLists(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """Log-probabilities of a run of tokens, by the logits of the model. One entry per token in each list."""

    logprob_token_ids: list[list[int]]
    """The sampled token, then the most likely ones, best first."""
    logprobs: list[list[float]]
    """Log-probabilities of these tokens."""
    sampled_token_ranks: list[int]
    """1 is the most likely."""

    def __len__(self) -> int:
        return len(self.sampled_token_ranks)

    def part(self, start: int, end: int | None = None) -> LogprobsLists:
        """Entries of the tokens from `start` to `end`."""
        place = slice(start, end)
        return LogprobsLists(self.logprob_token_ids[place], self.logprobs[place], self.sampled_token_ranks[place])

    def followed_by(self, then: LogprobsLists) -> LogprobsLists:
        """Entries of two runs, one after the other."""
        return LogprobsLists(
            self.logprob_token_ids + then.logprob_token_ids,
            self.logprobs + then.logprobs,
            self.sampled_token_ranks + then.sampled_token_ranks,
        )


class Migration(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the worker that continues a sequence is to receive."""

    num_tokens: int
    """Tokens with KV, those of an encoder's layout included: all but the last."""
    num_sent_tokens: int
    """Of these, those of the prompt as the router sent it and of the output."""
    token_id: int
    """The last token, whose KV is still to be computed."""
    request_digest: bytes
    """Of a request for the tokens with KV."""
    without_draft_head: bool
    """True if the blocks of a draft head are not moved."""


class EngineCoreOutput(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """The result of one step for one sequence."""

    request_id: str
    """Id of the request to which the sequence belongs."""
    new_token_ids: list[int] = []
    first_position: int = 0
    """Output position of the first new token; position 0 is the first token after the prompt."""
    finish_reason: FinishReason | None = None
    awaits_input: bool = False
    """With a finish reason: it ended a turn; the session continues."""
    stop_reason: int | str | None = None
    """The stop token id or string that ended it; None for EOS, length, abort and error."""
    num_cached_tokens: int = 0
    """Prompt tokens that needed no computing here."""
    prefills_locally: bool = False
    """Receiving side: the cache has so much that the rest is computed here; the source is not needed."""
    transfer_unwanted: bool = False
    """Source side: the request ended before `Want`; its blocks are not held any more."""
    error_code: str = ""
    error_message: str = ""
    moments: dict[str, float] = {}
    """Moments of `common/timeline.py` that this output completes, `clock.monotonic()` seconds of this process."""
    prefill_chunks: list[tuple[float, int]] = []
    """With the first output: when each chunk of the prompt was computed, `clock.monotonic()` seconds, and its tokens."""
    new_logprobs: LogprobsLists | None = None
    """Log-probabilities of the new tokens, if the request asks for them."""
    prompt_logprobs: LogprobsLists | None = None
    """With the first token: log-probabilities of every prompt token but the first, if the request asks for them; of a session's
    later turn, those of its own input."""
    first_prompt_position: int = 1
    """Position of the first of `prompt_logprobs`, in all tokens of the sequence."""
    num_preemptions: int = 0
    """Number of preemptions of the sequence so far."""
    events: list[EngineCoreEvent] = []
    """Events of the sequence since its last output."""
    pooling_output: list[float] | None = None
    """The prompt's embedding, in the last output of a request with `pooling_params`."""
    index: int = 0
    """Index of the sequence in the request."""
    error_field: str = ""
    """The field that an `InvalidRequest` names."""
    uncached_tokens: int = 0
    """Prompt tokens that are not cached here, where the error is `NeedsPrefill`."""
    num_draft_tokens: int = 0
    """Drafts of the sequence that were computed so far."""
    num_accepted_tokens: int = 0
    """Drafts among them that equalled the sampled token."""
    migration: Migration | None = None
    """Of the last output of a sequence that another worker continues."""
    cached_tokens: CachedTokens | None = None
    """With the first output of a sequence or a turn: `num_cached_tokens` by source."""

    @property
    def finished(self) -> bool:
        """True if it is the sequence's last output; false for the last one of a session's turn."""
        return self.finish_reason is not None and not self.awaits_input


class ModelRunnerStats(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """One step of the model runner. Seconds are of the device: on a GPU between events, on a CPU by the clock."""

    num_reqs: int = 0
    """Sequences in the step."""
    num_tokens: int = 0
    prepare_s: float = 0.0
    """From the step's begin to its inputs on the device: block copies, changes of the batch, inputs."""
    forward_s: float = 0.0
    """The decoder's layers; on a CPU also the tokens' embeddings."""
    sample_s: float = 0.0
    """Logits, masks and tokens; on a GPU from the decoder's end."""
    layer_s: list[float] = []
    """Seconds of each layer, if `collect_layer_times` is set; the first begins after the embeddings, the last ends with the
    decoder. Empty for a replayed graph."""

    @property
    def execution_s(self) -> float:
        """Seconds of all stages."""
        return self.prepare_s + self.forward_s + self.sample_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens computed per second of the step; 0 for a step without time."""
        return self.num_tokens / self.execution_s if self.execution_s else 0.0


class SpecDecodingStats(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """Drafts since the start, by vLLM's names."""

    num_spec_tokens: int = 0
    """Tokens of a sequence that are drafted per step, at most."""
    num_drafts: int = 0
    """Times that a sequence was computed with drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    """Drafts that equalled the sampled token."""
    num_accepted_tokens_per_pos: list[int] = []
    """The same by their place in the draft."""

    def observe(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        """Count one sequence's drafts of one step."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self.num_accepted_tokens += num_accepted_tokens
        for place in range(num_accepted_tokens):
            self.num_accepted_tokens_per_pos[place] += 1


class SchedulerStats(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """State of the engine at the end of a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    """Sequences that wait for a place in a step, or for their grammar."""
    num_remote_kv_reqs: int = 0
    num_blocks_total: int = 0
    num_blocks_free: int = 0
    num_blocks_cached: int = 0
    num_blocks_in_use: int = 0
    num_blocks_quarantined: int = 0
    num_preemptions: int = 0
    num_waiting_tokens: int = 0
    """Prompt tokens still to compute, waiting and running."""
    num_computed_prompt_tokens: int = 0
    """Prompt tokens computed here since start."""
    prefill_s: float = 0.0
    """Time of the steps that computed them, seconds."""
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_added_reqs: int = 0
    """Requests that the scheduler has taken in since start."""
    num_grammar_reqs: int = 0
    """The part of `num_waiting_reqs` that waits for a grammar; some of it may wait for remote KV, too."""
    num_idle_sessions: int = 0
    """Streaming sessions between two turns."""
    num_steps: int = 0
    """Steps since start that computed something."""
    num_scheduled_tokens: int = 0
    """Tokens of these steps."""
    scheduling_s: float = 0.0
    """Seconds of scheduling them, since start."""
    update_s: float = 0.0
    """Seconds from their results to their outputs, since start."""
    num_dropped_events: int = 0
    """Late, repeated and unknown events and requests, since start; they have no other effect."""
    spec_decoding_stats: SpecDecodingStats | None = None
    """None without speculation."""
    external_prefix_cache_queries: int = 0
    """Prompt tokens looked up in the host-memory tier since start: those that the pool did not have."""
    external_prefix_cache_hits: int = 0
    """The part of them that the tier had."""
    peer_prefix_cache_queries: int = 0
    """Prompt tokens whose blocks were asked for at another worker since start: those that pool and tier did not have."""
    peer_prefix_cache_hits: int = 0
    """The part of them whose blocks came from there."""
    num_host_blocks_total: tuple[int, ...] = ()
    """Blocks that the tier holds, by shape; empty without one."""
    num_host_blocks_used: tuple[int, ...] = ()
    num_host_blocks_stored: int = 0
    """Blocks copied into the tier since start."""
    num_host_blocks_loaded: int = 0
    """Blocks copied back."""
    num_host_blocks_evicted: int = 0
    """Blocks that lost their place in the tier to others."""
    store_prefix_cache_hits: int = 0
    """Prompt tokens since start whose blocks neither pool nor tier had, and which came from the store below."""
    num_store_blocks: int = 0
    """Blocks that are known to be in the store."""
    num_store_blocks_written: int = 0
    """Blocks written to it since start."""
    num_store_blocks_found: int = 0
    """Blocks that lookups found in a store that workers share."""
    num_store_blocks_read: int = 0
    num_store_blocks_failed: int = 0
    """Blocks that could not be read, or were not what had been written; their tokens were computed."""
    num_store_blocks_lost: int = 0
    """Blocks that it gave up for others, or could not keep."""
    loaded_loras: tuple[str, ...] = ()
    """Fingerprints of the adapters that have a slot, least recently used first."""
    num_lora_loads: int = 0
    """Adapters that got a slot since start; one that lost its slot and got another counts again."""
    num_lora_evictions: int = 0
    """Adapters that lost their slot to another one."""
    num_received_tokens: int = 0
    """Tokens of prompts and earlier output since start whose blocks came from the worker that had computed them for this one."""

    @property
    def prompt_tokens_by_source(self) -> dict[str, int]:
        """Source -> prompt tokens since start; the sources are `PROMPT_TOKEN_SOURCES`."""
        cached = CachedTokens(
            pool=self.prefix_cache_hits,
            host=self.external_prefix_cache_hits,
            store=self.store_prefix_cache_hits,
            peer=self.peer_prefix_cache_hits,
        )
        others = {"transfer": self.num_received_tokens, "computed": self.num_computed_prompt_tokens}
        return cached.by_source() | others

    @property
    def kv_cache_usage(self) -> float:
        """Part of the pool's blocks that are in use, from 0 to 1."""
        return self.num_blocks_in_use / self.num_blocks_total if self.num_blocks_total else 0.0

    @property
    def num_capacity_reqs(self) -> int:
        """Sequences that wait for blocks or for a place in a step."""
        return self.num_waiting_reqs - self.num_grammar_reqs


class EngineCoreOutputs(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False, tag=True):
    """All results of one step."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    blocks_stored: list[bytes] = []
    """Hashes of blocks that entered the prefix cache in this step."""
    blocks_removed: list[bytes] = []
    """Hashes of blocks that left it."""
    finished_req_ids: list[str] = []
    """Requests whose last sequence ended in this step."""
    model_runner_stats: ModelRunnerStats | None = None
    """None if the step computed nothing."""

    @property
    def has_results(self) -> bool:
        """True if there is more than the engine's state: the step computed something, or ended a request."""
        return bool(self.outputs or self.blocks_stored or self.blocks_removed or self.model_runner_stats is not None)
