"""What crosses the two queues of an engine: requests in, outputs out. Plain values, no torch, no network."""

from __future__ import annotations

import enum

import msgspec

from pdserve.common.sampling_params import SamplingParams


class FinishReason(enum.IntEnum):
    """Why a sequence ended; the four that a client can see."""

    STOP = 0
    LENGTH = 1
    ABORT = 2
    ERROR = 3

    def __str__(self) -> str:
        return self.name.lower()


class EngineCoreRequest(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """One sequence, as an engine is asked to continue it.

    request_id is `request.attempt.index`: unique per attempt, so that a late event can never meet a later life.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    """`time.monotonic()` of this process when the request came in, seconds."""
    block_hashes: list[bytes] = []
    """Keyed chained hashes of the prompt's full blocks, 16 bytes each."""
    hash_root: bytes = b""
    """What the first block's hash is chained to; decides which cache entries this request may meet."""
    remote_prefill: bool = False
    """KV comes from another worker: the request waits in `WAITING_FOR_REMOTE_KVS` until it has landed."""
    transfer_source: bool = False
    """A transfer will read this request's blocks: they are published as they become final and pinned while wanted."""
    wanted_from: int | None = None
    """Source side, when the transfer is wanted already: the first block index the receiver lacks."""
    prefill_here: bool = False
    """Prefill in this engine whatever the length: no prefill worker lives."""
    local_prefill_tokens: int | None = None
    """Up to so many uncached tokens prefilling here pays, by the router's estimate; None: its choice stands."""
    priority: int = 0
    cache_salt: str | None = None
    index: int = 0
    """Which of the request's n sequences this is; enters the noise."""
    trace_headers: dict[str, str] = {}


class LogprobsLists(msgspec.Struct, array_like=True, gc=False):
    """Log-probabilities of a run of tokens, by the logits as the model gave them. One entry a token in each list."""

    logprob_token_ids: list[list[int]]
    """The sampled token, then the most likely ones, best first."""
    logprobs: list[list[float]]
    """Of these."""
    sampled_token_ranks: list[int]
    """1 is the most likely."""

    def __len__(self) -> int:
        return len(self.sampled_token_ranks)

    def part(self, start: int, end: int | None = None) -> LogprobsLists:
        """Of some of the tokens."""
        place = slice(start, end)
        return LogprobsLists(self.logprob_token_ids[place], self.logprobs[place], self.sampled_token_ranks[place])

    def followed_by(self, then: LogprobsLists) -> LogprobsLists:
        """Of two runs, one after the other."""
        return LogprobsLists(
            self.logprob_token_ids + then.logprob_token_ids,
            self.logprobs + then.logprobs,
            self.sampled_token_ranks + then.sampled_token_ranks,
        )


class EngineCoreOutput(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """What one step did for one sequence."""

    request_id: str
    new_token_ids: list[int] = []
    first_position: int = 0
    """Output position of the first new token; position 0 is the first token after the prompt."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop token id or string that ended it; None for EOS, length, abort and error."""
    num_cached_tokens: int = 0
    """Prompt tokens that needed no computing here."""
    prefills_locally: bool = False
    """Receiving side: the cache has so much that the rest is computed here; nothing is awaited from the source."""
    transfer_unwanted: bool = False
    """Source side: it ended before anybody wanted its blocks; nobody holds them any more."""
    error_code: str = ""
    error_message: str = ""
    moments: dict[str, float] = {}
    """Moments of `common/timeline.py` that this output completes, `time.monotonic()` seconds of this process."""
    prefill_chunks: list[tuple[float, int]] = []
    """With the first output: when each chunk of the prompt was computed, `time.monotonic()` seconds, and its tokens."""
    new_logprobs: LogprobsLists | None = None
    """Of the new tokens, where the request asks for them."""
    num_preemptions: int = 0
    """How often the sequence lost its blocks, so far."""


class SchedulerStats(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """The engine at the end of a step."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
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


class EngineCoreOutputs(msgspec.Struct, kw_only=True, array_like=True, omit_defaults=True, gc=False):
    """Everything one step has to say."""

    outputs: list[EngineCoreOutput] = []
    scheduler_stats: SchedulerStats | None = None
    timestamp: float = 0.0
    blocks_stored: list[bytes] = []
    """Hashes of blocks that the prefix cache knows since this step."""
    blocks_removed: list[bytes] = []
    """Hashes of blocks that it knows no more."""
