"""`Inference`: what both front ends serve: the model, and generations over the fleet."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from itertools import accumulate

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.pooling_params import PoolingParams, verify_generates
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.worker_identity import WorkerRole
from pdserve.router.admission.admission import Admission
from pdserve.router.admission.held_bytes import HeldBytes
from pdserve.router.admission.place import AdmissionLimits, Capacity, capacity_of
from pdserve.router.attempts.crash_guard import Company, DenyList
from pdserve.router.bodies.client_bodies import ClientBodies
from pdserve.router.placement.prefix_index import PrefixIndex
from pdserve.router.placement.rebalancing import Rebalancing
from pdserve.router.placement.role_switching import RoleSwitching
from pdserve.router.placement.worker_selector import WorkerSelector, pooling_workers
from pdserve.router.requests.cache_moves import CacheMoves
from pdserve.router.requests.client_stream import ClientStream
from pdserve.router.requests.fields.request_limits import MAX_EMBEDDING_INPUTS, MAX_EMBEDDING_NUMBERS, MAX_PROMPTS
from pdserve.router.requests.fields.service_tier import FLEX
from pdserve.router.requests.generation import Generation
from pdserve.router.requests.preparation import ClientRequest, Preparation, ServedLimits
from pdserve.router.requests.request_services import RequestServices
from pdserve.router.requests.served_models import ServedModels
from pdserve.router.requests.session import ClientSession, SessionPromptTask
from pdserve.router.requests.tasks.beam_task import BeamPromptTask
from pdserve.router.requests.tasks.embedding_task import Embedding, EmbeddingInput
from pdserve.router.requests.tasks.placed_task import WAIT_FOR_WORKER_S
from pdserve.router.requests.tasks.prompt_task import PromptTask
from pdserve.router.telemetry.request_trace import RequestTrace
from pdserve.router.telemetry.router_telemetry import RouterTelemetry
from pdserve.router.tenants.api_keys import ApiKeys
from pdserve.router.tenants.client import ANYBODY, CacheGroup, Client
from pdserve.router.workers.fleet import Fleet
from pdserve.text.parsers.answer_parsers import AnswerParsers
from pdserve.text.prompt import ChatInput
from pdserve.text.tokenization.tokenizer import Tokenizer

_RUNS_AT_ONCE = 256
"""Inputs of an embedding that are set up in one callback of the event loop."""


class Inference:
    """One model behind both front ends."""

    def __init__(
        self,
        models: tuple[str, ...],
        settings: RouterSettings,
        fleet: Fleet,
        preparation: Preparation,
        index: PrefixIndex,
        bodies: ClientBodies,
    ) -> None:
        """models: names of the model for clients. index: is informed of the blocks that workers hold."""
        self.models = ServedModels(models, fleet)
        self.settings = settings
        self.bodies = bodies
        self.fleet = fleet
        self.keys = ApiKeys.from_settings(settings)
        limits = AdmissionLimits.of(settings)
        self.admission = Admission(limits, self._capacity, num_tenants=lambda: self.keys.num_tenants)
        self._held_embeds = HeldBytes(
            settings.limits.max_prompt_embeds_bytes,
            "prompt_embeds has {asked} bytes, and requests in the router keep {held} of at most {limit} "
            "(max_prompt_embeds_bytes)",
        )
        self._cache_groups = settings.cache_groups()
        fleet.listeners.append(self.admission.recheck)
        self.selector = WorkerSelector(fleet, index, settings)
        self.preparation = preparation
        self.parsers = AnswerParsers.of(preparation.tokenizer, settings.tool_call_parser, settings.reasoning_parser)
        self.rebalancing = Rebalancing(settings.rebalance, lambda: fleet.workers(WorkerRole.DECODE))
        self.role_switching = RoleSwitching(fleet.workers, settings.limits.role_dwell_s)
        self.cache_moves = CacheMoves(fleet, self.selector, preparation)
        company = Company()
        company.on_left = fleet.look_again
        self._services = RequestServices(
            self.fleet,
            self.models,
            self.selector,
            self.admission,
            preparation,
            DenyList(),
            company,
            self.rebalancing,
            self.cache_moves,
            settings,
        )
        self.telemetry = RouterTelemetry(
            settings,
            self.models.base,
            lambda: self.admission.num_requests,
            fleet.counts,
            lambda: len(index),
            self.selector.moves,
            lambda: self.role_switching.num_changes,
        )

        self.keys.on_failure = self.telemetry.audit.failed_authentication
        self.keys.on_change = lambda: self.telemetry.key_metrics.keep([entry.name for entry in self.keys.entries])

    @property
    def tokenizer(self) -> Tokenizer:
        return self.preparation.tokenizer

    @property
    def healthy(self) -> bool:
        """True if some request could be served now."""
        return not self.admission.closed and (self.selector.has_workers() or self.num_labels() > 0)

    def limits(self) -> ServedLimits | None:
        """None until a worker is known."""
        return ServedLimits.of(worker for role in WorkerRole for worker in self.fleet.workers(role))

    def model_fingerprint(self) -> str:
        """The first live worker's model fingerprint; empty until one is known."""
        workers = [worker for role in WorkerRole for worker in self.fleet.workers(role)]
        return workers[0].identity.layout.model_fingerprint if workers else ""

    def hidden_size(self) -> int:
        """Numbers in an embedding; 0 until a worker is known that computes any."""
        return max((worker.identity.hidden_size for worker in self.fleet.workers(WorkerRole.PREFILL)), default=0)

    def num_labels(self) -> int:
        """Labels of the model's classification head; 0 if it has none, and until a prefill worker is known."""
        return max((worker.identity.num_labels for worker in self.fleet.workers(WorkerRole.PREFILL)), default=0)

    async def scores_by_head(self) -> bool:
        """True if scores are those of a classification head; False if they are cosines of embeddings.

        Waits for the first prefill worker, `WAIT_FOR_WORKER_S` at most; without one it is False.
        """

        def known() -> bool | None:
            return self.num_labels() > 0 if self.fleet.workers(WorkerRole.PREFILL) else None

        are_expected = self.fleet.counts()[WorkerRole.PREFILL.value]["addresses"]
        return bool(await self.fleet.wait_for_worker(known, WAIT_FOR_WORKER_S if are_expected else 0.0))

    def _verify_pooling(self, pooling: PoolingParams) -> None:
        """Raises: InvalidRequest naming a task that the model lacks; nothing is known before the first prefill worker."""
        workers = self.fleet.workers(WorkerRole.PREFILL)
        has_kind = any(worker.identity.hidden_size or worker.identity.num_labels for worker in workers)
        if has_kind and not pooling_workers(workers, pooling):
            pooling.verify_task(self.num_labels())

    def _capacity(self) -> Capacity:
        prefill, decode = self.fleet.workers(WorkerRole.PREFILL), self.fleet.workers(WorkerRole.DECODE)
        return capacity_of(prefill, decode, self.settings)

    def _cache_group(self, client: Client) -> CacheGroup:
        """The group of tenants whose cached prefixes the client's requests may use."""
        if not client.tenant:
            return CacheGroup()
        group = self._cache_groups.get(client.tenant) or self._cache_groups.get("*")
        return CacheGroup(client.tenant) if group is None else CacheGroup(group, is_shared=group != client.tenant)

    def generation(self, requests: Sequence[ClientRequest], *, stream: bool, client: Client = ANYBODY) -> Generation:
        """A generation with n choices per request; it starts when its context is entered.

        client: the owner, for limits per API key. stream: whether the client reads incrementally; otherwise only
        `max_tokens` bounds unread output.
        Raises: InvalidRequest for too many prompts or sequences.
        """
        if not 0 < len(requests) <= MAX_PROMPTS:
            raise InvalidRequest(f"prompt has {len(requests)} entries, 1 to {MAX_PROMPTS} are allowed", "prompt")
        verify_generates(self.num_labels())
        for request in requests:
            self._verify_numbers(request)
            sampling = request.sampling_params
            if stream and requests[0].beams is not None:
                raise InvalidRequest(
                    "use_beam_search is true: the best beams are known only at the end, so stream must be false",
                    "use_beam_search",
                )
            if stream and sampling.num_sequences > sampling.n:
                raise InvalidRequest(
                    f"best_of is {sampling.best_of} and n is {sampling.n}: the best are known only at the end, "
                    "so stream must be false",
                    "best_of",
                )
        if requests[0].beams is not None and requests[0].prompt_embeds is not None:
            raise InvalidRequest(
                "use_beam_search is true, and beams begin with token ids, not with prompt_embeds", "use_beam_search"
            )
        cache = self._cache_group(client)
        requests = [request.owned(client, cache, self.settings.scheduling_policy) for request in requests]
        request_id = uuid.uuid4().hex
        record = self._trace(request_id, requests[0], requests[0].client_request_id, client)
        for request in requests:
            request.trace_headers = record.headers
            if request.service_tier == FLEX:
                request.flex_id = request_id
        first_choices = accumulate((request.sampling_params.n for request in requests[:-1]), initial=0)
        client_stream = self._client_stream(
            len(requests), stream=stream, returns_token_ids=requests[0].returns_token_ids
        )
        runs = [
            (PromptTask if request.beams is None else BeamPromptTask)(
                request_id if len(requests) == 1 else f"{request_id}-{place}",
                first_choice,
                request,
                client_stream,
                self._services,
                record,
            )
            for place, (first_choice, request) in enumerate(zip(first_choices, requests, strict=True))
        ]
        num_bytes = sum(len(request.prompt_embeds.data) for request in requests if request.prompt_embeds is not None)
        return Generation(
            request_id, client_stream, runs, self.admission, record, client, self._held_embeds.holding(num_bytes)
        )

    def _verify_numbers(self, request: ClientRequest) -> None:
        """Hold what is asked per position and per prompt against this router's settings and those of the workers that are here.

        Raises: InvalidRequest naming the client's field, its value and the smaller limit.
        """
        sampling, limits, settings = request.sampling_params, self.limits(), self.settings
        most_logprobs, most_sequences = settings.limits.max_logprobs, settings.limits.max_n_sequences
        if limits is not None:
            most_logprobs = min(most_logprobs, limits.max_logprobs)
            most_sequences = min(most_sequences, limits.max_n_sequences)
        sampling.verify_sequences(most_sequences)
        sampling.verify_logprobs(most_logprobs, request.logprobs_field)

    def _trace(self, request_id: str, request: ClientRequest, client_request_id: str, client: Client) -> RequestTrace:
        """Begin the trace of a generation. request: its first prompt's."""
        return self.telemetry.request(
            request_id,
            request.trace_headers,
            "chat" if isinstance(request.prompt, ChatInput) else "text_completion",
            client_request_id,
            client,
            sampling=request.sampling_params,
            max_tokens=request.max_tokens,
            lora_name=request.lora_name,
        )

    def session(self, session_id: str, client: Client = ANYBODY) -> ClientSession:
        """A session that counts for its client's limits until it is closed. Raises: Overloaded, Draining."""
        return ClientSession(session_id, self.admission.open_session(client))

    def _client_stream(self, num_runs: int, *, stream: bool, returns_token_ids: bool = False) -> ClientStream:
        settings = self.settings
        return ClientStream(
            num_runs,
            settings.limits.max_unread_bytes if stream else settings.limits.max_answer_bytes,
            whole=not stream,
            returns_token_ids=returns_token_ids,
            flush_s=settings.stream_flush_ms / 1000,
        )

    def turn(
        self,
        session: ClientSession,
        request_id: str,
        request: ClientRequest,
        *,
        stream: bool,
        client: Client = ANYBODY,
    ) -> Generation:
        """A session's next turn, as a generation of its own. request_id: the session's.

        Raises: InvalidRequest where decode workers may not prefill.
        """
        if self.settings.local_prefill == "never":
            raise InvalidRequest("sessions are prefilled by decode workers, and local_prefill is never here")
        self._verify_numbers(request)
        verify_generates(self.num_labels())
        if request.prompt_embeds is not None:
            raise InvalidRequest("embeds is given, and a session's prompt is token ids", "embeds")
        if not session.token_ids:
            session.lora_name = request.lora_name
        request = request.owned(client, self._cache_group(client), self.settings.scheduling_policy)
        # the id of the first turn names every turn
        client_request_id = session.client_request_id = session.client_request_id or request.client_request_id
        record = self._trace(request_id, request, client_request_id, client)
        request.trace_headers = record.headers
        client_stream = self._client_stream(1, stream=stream)
        run = SessionPromptTask(session, request_id, request, client_stream, self._services, record)
        return Generation(request_id, client_stream, [run], self.admission, record, client)

    def verify_embedding_size(self, pooling: PoolingParams, num_inputs: int, field: str) -> None:
        """Raises: InvalidRequest for more numbers than an answer has room for. field: the client's name of the inputs."""
        num_numbers = pooling.num_values(self.hidden_size(), self.num_labels()) * num_inputs
        if num_numbers > MAX_EMBEDDING_NUMBERS:
            raise InvalidRequest(
                f"{field} has {num_inputs} entries: {'embeddings' if pooling.is_embedding else 'classes'} of {num_numbers} numbers "
                f"do not fit into one message, {MAX_EMBEDDING_NUMBERS} do",
                field,
            )

    async def embedding(
        self,
        requests: Sequence[ClientRequest],
        *,
        field: str,
        client: Client = ANYBODY,
        operation: str = "embeddings",
    ) -> Embedding:
        """Embeddings, or what else `pooling_params` ask for, one per request; they start when its `results` are awaited.

        field: what the client calls the list of its inputs. client: whose it is, for limits per API key. operation: for traces.
        Raises: InvalidRequest for too many inputs.
        """
        # without a classification head each pair costs two embeddings, so the limit doubles
        limit = MAX_EMBEDDING_INPUTS * (2 if operation in ("score", "rerank") else 1)
        if not 0 < len(requests) <= limit:
            raise InvalidRequest(f"{field} has {len(requests)} entries, 1 to {limit} are allowed", field)
        if (pooling := requests[0].pooling_params) is not None:
            self._verify_pooling(pooling)
            self.verify_embedding_size(pooling, len(requests), field)
        request_id = uuid.uuid4().hex
        record = self.telemetry.request(
            request_id,
            requests[0].trace_headers,
            operation,
            requests[0].client_request_id,
            client,
            lora_name=requests[0].lora_name,
        )
        cache = self._cache_group(client)
        inputs: list[EmbeddingInput] = []
        try:
            for place, request in enumerate(requests):
                if place and not place % _RUNS_AT_ONCE:
                    await asyncio.sleep(0)
                request = msgspec.structs.replace(request, trace_headers=record.headers, client=client, cache=cache)
                run_id = request_id if len(requests) == 1 else f"{request_id}-{place}"
                inputs.append(EmbeddingInput(run_id, request, record))
        except asyncio.CancelledError:
            record.end()
            raise
        return Embedding(request_id, inputs, self._services, self.admission, record, client)
