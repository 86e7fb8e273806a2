"""`RunningBatch`: the sequences that have a place in the batch; `BatchBuilder`: one step's part of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter

from pdserve.engine.config import EncoderConfig
from pdserve.engine.request import Request
from pdserve.engine.scheduler.encoder_scheduling import EncoderScheduling
from pdserve.engine.scheduler.lora_slots import LoraSlots
from pdserve.engine.scheduler_output import NewRequestData, SchedulerOutput
from pdserve.engine.structured_outputs.grammar import Grammar


class RunningBatch(Mapping[str, Request]):
    """request_id -> sequence; also records sequences that left, until they are reported to the model runner."""

    def __init__(self, max_loras: int = 0, encoder: EncoderConfig | None = None) -> None:
        """max_loras: slots for adapters. encoder: None for a model without images."""
        self.lora_slots = LoraSlots(max_loras)
        self.encoder = EncoderScheduling(encoder)
        self._requests: dict[str, Request] = {}
        self._forking: dict[str, Request] = {}
        """Sequences that will fork here after their prompt."""
        self._left: list[str] = []

    def __getitem__(self, request_id: str) -> Request:
        return self._requests[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    def enter(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self.lora_slots.enter(request.core.lora_fingerprint)
        if request.num_forks:
            self._forking[request.request_id] = request

    def new_request_data(
        self, request: Request, block_ids: list[list[int]], num_speculative_tokens: int = 0
    ) -> NewRequestData:
        """All data that the runner needs of a sequence that enters the batch. block_ids: its block tables, per KV cache group."""
        return NewRequestData(
            req_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            num_computed_tokens=request.num_computed_tokens,
            block_ids=block_ids,
            sampling_params=request.sampling_params,
            pooling_params=request.core.pooling_params,
            has_prompt_embeds=request.core.prompt_embeds is not None,
            prompt_embeds=request.core.prompt_embeds if request.lacks_prompt else None,
            eos_token_ids=request.core.eos_token_ids,
            index=request.index,
            lora_slot=self.lora_slots.slot(request.core.lora_fingerprint),
            num_sequences=request.num_sequences,
            collects_prompt_logprobs=request.collects_prompt_logprobs,
            num_speculative_tokens=num_speculative_tokens,
            mm_features=request.core.mm_features,
            encoder_prompt=request.core.encoder_prompt,
        )

    def leave(self, request: Request) -> None:
        """Remove a sequence; no effect if it is not in the batch."""
        self._forking.pop(request.request_id, None)
        if self._requests.pop(request.request_id, None) is not None:
            self.lora_slots.leave(request.core.lora_fingerprint)
            self.encoder.free(request)
            self._left.append(request.request_id)

    def take_finished_ids(self) -> list[str]:
        """Ids of sequences that left since the last call."""
        left, self._left = self._left, []
        return left

    def requeue_finished_ids(self, left: list[str]) -> None:
        """Report these ids with the next step, since the runner did not get this one."""
        self._left = left + self._left

    def by_phase(self) -> tuple[list[Request], list[Request], list[Request]]:
        """Sequences that compute one token per step, others, and sources without `Want`; the first two by priority.

        Sources without `Want` that have one token to compute are in the first list.
        """
        decoding: list[Request] = []
        prefilling: list[Request] = []
        running_ahead: list[Request] = []
        for request in self._requests.values():
            num_tokens = len(request.token_ids) - request.num_computed_tokens
            if num_tokens == 1:
                decoding.append(request)
            elif num_tokens > 1:
                (running_ahead if request.is_unwanted_source else prefilling).append(request)
        decoding.sort(key=_priority)
        prefilling.sort(key=_priority)
        return decoding, prefilling, running_ahead

    def with_grammars(self) -> list[tuple[Request, Grammar]]:
        """Sequences whose output has a grammar."""
        return [(request, request.grammar) for request in self._requests.values() if request.grammar is not None]

    def unwanted_sources(self) -> list[Request]:
        """Sources without `Want`."""
        return [request for request in self._requests.values() if request.is_unwanted_source]

    @property
    def num_growing(self) -> int:
        """Number of sequences that may each need a further block: the running ones and their future forks."""
        return len(self._requests) + sum(request.num_forks for request in self._forking.values())

    @property
    def num_uncomputed_tokens(self) -> int:
        requests = self._requests.values()
        return sum([len(request.token_ids) - request.num_computed_tokens for request in requests])

    def victim(self) -> Request | None:
        """The sequence to preempt: sources without `Want` first, then by lowest priority, least lost work, latest arrival.

        Never a source with `Want`; None if no other sequence runs.
        """
        return max(
            (request for request in self._requests.values() if not request.is_pinned_source),
            key=lambda request: (
                request.is_unwanted_source,
                request.priority,
                -request.num_computed_tokens,
                request.arrival,
            ),
            default=None,
        )


_priority = attrgetter("priority")


class BatchBuilder:
    """The scheduled sequences of one step, and its remaining token budget."""

    def __init__(self, max_num_batched_tokens: int) -> None:
        self.budget = max_num_batched_tokens
        """Tokens that may still be scheduled."""
        self.output = SchedulerOutput()
        self.new_requests: list[Request] = []
        """Sequences that enter the batch in this step."""
        self.num_drafts = 0
        self.preempted = False
        """True if a sequence was preempted in this step, since blocks ran out."""

    def put(self, request: Request, num_tokens: int) -> None:
        """Schedule the sequence's next `num_tokens` tokens."""
        self.output.num_scheduled_tokens[request.request_id] = num_tokens
        self.budget -= num_tokens

    def put_drafts(self, request: Request, drafts: list[int]) -> None:
        """Schedule drafts after the sequence's tokens, which are scheduled already."""
        self.output.scheduled_spec_decode_tokens[request.request_id] = drafts
        self.output.num_scheduled_tokens[request.request_id] += len(drafts)
        self.budget -= len(drafts)
        self.num_drafts += len(drafts)

    def schedule_new(self, request: Request, num_tokens: int) -> None:
        """Schedule a sequence that enters the batch in this step."""
        self.new_requests.append(request)
        self.put(request, num_tokens)

    def unschedule(self, request: Request) -> None:
        """Remove a preempted sequence; no effect if it is not scheduled."""
        self.preempted = True
        self.budget += self.output.num_scheduled_tokens.pop(request.request_id, 0)
        self.output.scheduled_cached_reqs.new_block_ids.pop(request.request_id, None)
        self.num_drafts -= len(self.output.scheduled_spec_decode_tokens.pop(request.request_id, ()))
        if request in self.new_requests:
            self.new_requests.remove(request)
