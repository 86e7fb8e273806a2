"""`ServiceLimits`, `RouterLimits`, `WorkerLimits`: bounds that an operator rarely turns, in the table `[limits]` of a file.

On the command line and in the environment they have names as other settings have: `--max-connections`, `PDSERVE_MAX_CONNECTIONS`.
"""

from __future__ import annotations

from typing import ClassVar

from pdserve.common.errors import ConfigError
from pdserve.common.image_processor_config import ImageLimits
from pdserve.common.protocol import MAX_MESSAGE_BYTES
from pdserve.common.request.multimodal import MAX_IMAGE_BYTES, MAX_IMAGES
from pdserve.common.request.sampling_params import MAX_LOGPROBS, MAX_SEQUENCES, MOST_LOGPROBS, MOST_SEQUENCES
from pdserve.common.settings.checked import Checked
from pdserve.common.worker_identity import MAX_ROLE_DWELL_S

MAX_LORA_RANK = 512
_LEAST_REQUEST_BYTES = 1024
_MOST_IMAGE_PIXELS = 1 << 28
_MOST_LORAS = 1 << 16
_MOST_RECORD_FILES = 1000
_MOST_WAITING = 1 << 24
MOST_MIB = 1 << 24
"""Values beyond any machine's, for which memory would be asked before anything is served."""


class ServiceLimits(Checked, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of every service."""

    group: ClassVar[str] = "Limits of every service"

    max_logprobs: int = MAX_LOGPROBS
    """Most likely tokens per position for which a request may ask, 0 to 1024; the smallest of router and workers counts."""
    max_n_sequences: int = MAX_SEQUENCES
    """Largest `n` or `best_of` of a request, 1 to 256; the smallest of router and workers counts."""

    def verify(self) -> None:
        """Raises: ConfigError naming the limit, its value and the allowed values."""
        self._verify_between(0, MOST_LOGPROBS, "max_logprobs")
        self._verify_between(1, MOST_SEQUENCES, "max_n_sequences")


class RouterLimits(ServiceLimits, frozen=True, kw_only=True):
    """Limits of the router."""

    group: ClassVar[str] = "Limits of the router"

    max_attempts: int = 3
    """Placements of one request, at most."""
    request_timeout_s: float = 600.0
    """Longest deadline of a request, seconds; default of a request without one."""
    max_queued_requests: int = 1024
    """Sequences that wait in the router for a place; further requests are refused (429)."""
    max_running_requests: int | None = None
    """Sequences that workers serve at once; default: as many as the live workers can hold, with their prompts' blocks."""
    queue_timeout_s: float = 30.0
    """Longest wait for a place, seconds; refused at once (429) when the expected wait is longer."""
    role_dwell_s: float = 30.0
    """With `role_switch`: least seconds between two changes of role that the router asks for, and after one of others; at most a
    day."""
    max_requests_per_key: int | None = None
    """Sequences of one tenant in the router at once, where its key has no `max_sequences`; default: no limit."""
    max_request_bytes: int | None = None
    """Bytes of one request, a JSON body or a gRPC message; default: 1 MiB, and 8 bytes per token of the model's length;
    with `enable_prompt_embeds`, and for a model with images, 16 MiB."""
    max_body_bytes_in_flight: int | None = None
    """Bytes of requests in reading at the same time, outside of admission; default: 64 MiB, or 16 requests at the limit."""
    max_prompt_embeds_bytes: int = 64 << 20
    """Bytes of prompt embeddings in the router at once; more are refused (429)."""
    max_image_pixels: int = 1 << 25
    """Pixels of an image before it is resized: decoded, it has 3 or 4 bytes per pixel, in each of two threads. See
    docs/images.md."""
    max_images_per_prompt: int = 16
    """Images of a prompt."""
    max_held_image_bytes: int = 256 << 20
    """Bytes of resized images, 3 per pixel, of all requests under way; more are refused (429)."""
    image_fetch_timeout_s: float = 5.0
    """Seconds for fetching all images of a prompt."""
    max_answer_bytes: int = 32 << 20
    """Bytes of a response that is not streamed: 256 per log-probability and 4 per token in addition to its text."""
    max_unread_bytes: int = 1 << 20
    """Text that a client has not read before its request is cancelled, bytes."""
    max_connections: int | None = None
    """Connections of each front end at a time; default: half of the descriptors beyond 128, at most 8192."""
    max_connections_per_address: int | None = None
    """Connections of each front end from one IPv4 address or one /64 of IPv6; default: half of `max_connections`."""
    max_stored_responses_per_tenant: int = 1024
    """Responses of `/v1/responses` that are kept for `previous_response_id`, the newest; 0 keeps none. See
    docs/openai.md#stored-responses."""
    max_stored_bytes_per_tenant: int = 64 << 20
    """Bytes of one tenant's stored responses; each has its whole conversation."""
    max_stored_response_bytes: int = 8 << 20
    """Bytes of one stored response with its conversation; a larger one is not stored."""
    max_stored_bytes: int = 512 << 20
    """Bytes of stored responses in this router's memory, of all tenants; with `redis` they are there instead."""
    max_stored_response_age_s: float = 86_400.0
    """Seconds after which a stored response is dropped."""
    max_record_files: int = 8
    """Files of `record`, the current one included; the oldest is deleted."""

    def images(self) -> ImageLimits:
        """Limits of a prompt's images, which travel in one message to a worker."""
        return ImageLimits(self.max_image_pixels, self.max_images_per_prompt, MAX_IMAGE_BYTES)

    def verify(self) -> None:
        super().verify()
        self._verify_least(1, "max_attempts", "max_queued_requests", "max_unread_bytes", "max_answer_bytes")
        self._verify_least(1, "max_running_requests", "max_requests_per_key", "max_prompt_embeds_bytes")
        self._verify_least(1, "max_connections", "max_connections_per_address")
        self._verify_between(_LEAST_REQUEST_BYTES, MAX_MESSAGE_BYTES, "max_request_bytes")
        self._verify_between(1, _MOST_IMAGE_PIXELS, "max_image_pixels")
        self._verify_between(1, MAX_IMAGES, "max_images_per_prompt")
        self._verify_between(1, _MOST_RECORD_FILES, "max_record_files")
        self._verify_least(0, "max_held_image_bytes", "max_stored_response_bytes")
        self._verify_least(0, "max_stored_responses_per_tenant", "max_stored_bytes_per_tenant", "max_stored_bytes")
        self._verify_seconds(
            "request_timeout_s", "queue_timeout_s", "image_fetch_timeout_s", "max_stored_response_age_s", "role_dwell_s"
        )
        if self.role_dwell_s > MAX_ROLE_DWELL_S:
            raise ConfigError(f"role_dwell_s is {self.role_dwell_s}, at most {MAX_ROLE_DWELL_S:g} seconds are possible")
        in_flight, least = self.max_body_bytes_in_flight, self.max_request_bytes or _LEAST_REQUEST_BYTES
        if in_flight is not None and in_flight < least:
            raise ConfigError(
                f"max_body_bytes_in_flight is {in_flight}, at least one request ({least} bytes) is needed"
            )


class WorkerLimits(ServiceLimits, frozen=True, kw_only=True):
    """Limits of prefill and decode workers."""

    group: ClassVar[str] = "Limits of workers"

    max_waiting: int | None = None
    """Requests that wait for a place in a step, or for remote KV; more are refused, and routers place them elsewhere;
    default: 4 * `max_num_seqs`."""
    max_local_prefill_tokens: int | None = None
    """Longest uncached prompt that decode prefills itself, tokens; default: no limit."""
    long_prefill_token_threshold: int = 0
    """Tokens of one prompt computed in a step; 0: no limit but `max_num_batched_tokens`."""
    run_ahead_share: float = 0.5
    """Part of the pool in which prefill may compute sources without `Want`."""
    kv_ring_mib: int = 256
    """On a GPU: memory per connector in which received blocks are verified, before they are moved into the pool."""
    max_loras: int = 1
    """Different adapters in one step: slots on the device. See docs/lora.md."""
    max_lora_rank: int = 16
    """Largest rank of an adapter, at most 512; a slot has room for it."""
    max_cpu_loras: int | None = None
    """Adapters kept in main memory; others are read again when they are used; default: `max_loras`."""
    max_sessions: int = 64
    """On a decode worker: streaming sessions open at once; more are refused."""
    session_idle_timeout_s: float = 60.0
    """On a decode worker: seconds that a session waits for its client's next turn before it ends."""
    grammar_timeout_s: float = 10.0
    """CPU time for a grammar of `structured_outputs` to be compiled, seconds; requests wait three times as long, and before
    that once as long for its turn."""
    grammar_token_s: float = 0.05
    """CPU time for a grammar to accept a token and find the next mask, seconds; its process is killed after 5 times it."""
    grammar_request_s: float = 1.0
    """The same for all tokens of a request's sequences together, seconds, plus 5 ms per token."""
    grammar_memory_mib: int = 2048
    """Address space that the process of a grammar may take in addition to its initial one."""
    grammar_whitespace_chars: int = 16
    """White space characters in a row that JSON of a grammar may have; 0: no limit. Equal on all workers."""
    grammar_string_chars: int | None = None
    """Characters of a string in JSON of a grammar whose schema has no limit; 0: no limit. Equal on all workers. Default: 64 for the
    bundled models, else 0. See docs/parameters.md#structured-outputs."""
    engine_stuck_exit_s: float = 60.0
    """Seconds without progress of the engine after which its worker logs all stacks and exits with status 1; 0: never."""
    attach_timeout_s: float = 10.0
    """Seconds for a control stream of a transfer to be opened."""
    lease_grace_s: float = 3.0
    """Seconds for which a source keeps blocks after the control stream broke."""
    lease_max_s: float = 600.0
    """Seconds for which a source keeps blocks at all."""

    def verify(self) -> None:
        super().verify()
        self._verify_least(1, "max_waiting", "kv_ring_mib", "max_loras", "grammar_memory_mib")
        self._verify_least(0, "long_prefill_token_threshold", "max_sessions")
        self._verify_least(0, "grammar_whitespace_chars", "grammar_string_chars")
        self._verify_most(_MOST_LORAS, "max_loras", "max_cpu_loras")
        self._verify_most(_MOST_WAITING, "max_waiting")
        self._verify_most(MOST_MIB, "kv_ring_mib", "grammar_memory_mib")
        self._verify_between(1, MAX_LORA_RANK, "max_lora_rank")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ConfigError(f"max_cpu_loras is {self.max_cpu_loras}, at least max_loras ({self.max_loras}) is needed")
        if not 0 < self.run_ahead_share <= 1:
            raise ConfigError(f"run_ahead_share is {self.run_ahead_share}, above 0 and at most 1 is needed")
        if not 0 < self.session_idle_timeout_s < float("inf"):
            raise ConfigError(
                f"session_idle_timeout_s is {self.session_idle_timeout_s}, a number of seconds above 0 is needed"
            )
        self._verify_seconds("grammar_timeout_s", "grammar_token_s", "grammar_request_s", "engine_stuck_exit_s")
        self._verify_seconds("attach_timeout_s", "lease_grace_s", "lease_max_s")
