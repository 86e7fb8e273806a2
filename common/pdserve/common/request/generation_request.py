"""`GenerationRequest`: the one carrier of a request's fields, from a front end or `LLM` to the engines."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec

from pdserve.common import clock
from pdserve.common.block_hash import DIGEST_BYTES, request_extras
from pdserve.common.errors import InvalidRequest, PromptTooLong
from pdserve.common.request.multimodal import MultiModalFeatureSpec, images_extras
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.prompt_embeds import PromptEmbeds
from pdserve.common.request.sampling_params import SamplingParams

MAX_DATA_PARALLEL_RANK = 2**16 - 1
MAX_PRIORITY = 2**31 - 1
"""Largest value of the wire format."""
MAX_CLIENT_REQUEST_ID_CHARS = 256
MAX_TENANT_BYTES = 16
MAX_REQUEST_ID_CHARS = 128
"""A router's own ids have 36 at most."""
MAX_EOS_TOKEN_IDS = 1024
MAX_TIMEOUT_S = 86_400.0
"""Longest deadline."""
LORA_NAME = re.compile(r"[A-Za-z0-9][\w./:@-]{0,127}", re.ASCII)
LORA_NAME_RULE = "1 to 128 letters, digits or `_./:@-`, the first a letter or digit,"
LORA_FINGERPRINT = re.compile(r"[0-9a-f]{32}")
MAX_SPECULATIVE_TOKENS = 32
"""Tokens of a sequence that may be drafted per step: each costs a row of logits."""
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**32)]
"""Checked as it is decoded; the vocabulary is the engine's to compare."""


def verify_request_id(request_id: str) -> None:
    """Check the router's id of a request, which engines, logs and spans repeat. Raises: InvalidRequest."""
    if not (0 < len(request_id) <= MAX_REQUEST_ID_CHARS and request_id.isascii() and request_id.isprintable()):
        raise InvalidRequest(
            f"request.request_id is {request_id[:40]!r} of {len(request_id)} characters, 1 to {MAX_REQUEST_ID_CHARS} "
            "printable ASCII characters are needed",
            "request_id",
        )


def verify_priority(priority: int) -> None:
    """Raises: InvalidRequest."""
    if not -MAX_PRIORITY - 1 <= priority <= MAX_PRIORITY:
        raise InvalidRequest(f"priority must be from {-MAX_PRIORITY - 1} to {MAX_PRIORITY}, not {priority}", "priority")


def verify_data_parallel_rank(rank: int | None, field: str = "data_parallel_rank") -> None:
    """field: the client's name of the field. Raises: InvalidRequest."""
    if rank is not None and not 0 <= rank <= MAX_DATA_PARALLEL_RANK:
        raise InvalidRequest(f"{field} must be from 0 to {MAX_DATA_PARALLEL_RANK}, not {rank}", field)


def verify_speculative_tokens(speculative_tokens: int | None) -> None:
    """Raises: InvalidRequest."""
    if speculative_tokens is not None and not 0 <= speculative_tokens <= MAX_SPECULATIVE_TOKENS:
        raise InvalidRequest(
            f"speculative_tokens must be from 0 to {MAX_SPECULATIVE_TOKENS}, not {speculative_tokens}",
            "speculative_tokens",
        )


def verify_priority_is_used(priority: int, scheduling_policy: str) -> None:
    """scheduling_policy: the workers' setting. Raises: InvalidRequest for a priority without effect."""
    if priority and scheduling_policy == "fcfs":
        raise InvalidRequest(
            f"priority is {priority}, and requests run in order of arrival here (scheduling_policy is fcfs)", "priority"
        )


def verify_client_request_id(client_request_id: str, field: str = "client_request_id") -> None:
    """Check the client's id of its request: it goes into spans, so it is short and one line.

    field: the client's name of the field. Raises: InvalidRequest.
    """
    if len(client_request_id) > MAX_CLIENT_REQUEST_ID_CHARS:
        raise InvalidRequest(
            f"{field} has {len(client_request_id)} characters, at most {MAX_CLIENT_REQUEST_ID_CHARS} are allowed",
            field,
        )
    if not client_request_id.isprintable():
        place = next(place for place, char in enumerate(client_request_id) if not char.isprintable())
        raise InvalidRequest(
            f"{field} has U+{ord(client_request_id[place]):04X} at character {place}, "
            "only printable characters are allowed",
            field,
        )


def verify_lora(name: str, fingerprint: str) -> None:
    """Check the adapter that a peer names: both are given, or neither. Raises: InvalidRequest."""
    if not name and not fingerprint:
        return
    if not LORA_NAME.fullmatch(name):
        raise InvalidRequest(f"request.lora_name is {name[:80]!r}, {LORA_NAME_RULE} are needed", "lora_name")
    if not LORA_FINGERPRINT.fullmatch(fingerprint):
        raise InvalidRequest(
            f"request.lora_fingerprint is {fingerprint[:40]!r}, 32 hex digits are needed", "lora_fingerprint"
        )


class GenerationRequest(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False):
    """A prompt and what is asked of it. Front ends parse into it, the router completes it, engines get it.

    It travels as a map (`request_bytes.py`): a field with its default value is left out.
    """

    request_id: str = ""
    """The router's name of the request; in an engine unique per attempt."""
    prompt_token_ids: list[TokenId] = []
    prompt_embeds: PromptEmbeds | None = None
    """The prompt as embeddings; `prompt_token_ids` then has a placeholder for each."""
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    """No effect if `pooling_params` is given."""
    pooling_params: PoolingParams | None = None
    """An embedding of the prompt is requested and no token: the request ends with its prompt."""
    output_token_ids: list[TokenId] = []
    """Output that the sequence has from earlier attempts: it is computed with the prompt, and counts as output."""
    index: int = 0
    """Index of the first sequence; part of the noise's input."""
    n: int = 1
    """Number of sequences that continue this prompt, from `index` on: it is computed once, then they fork."""
    eos_token_ids: tuple[TokenId, ...] = ()
    hash_root: bytes = b""
    """Input of the first block's hash; decides which cache entries this request may use."""
    request_digest: bytes = b""
    """Covers root and tokens; services compute and compare it."""
    cache_salt: str | None = None
    """The client's salt. Does not travel, since its effect is in `hash_root`."""
    timeout_s: float = 0.0
    """Seconds until the request fails, from its arrival at this process."""
    deadline: float = 0.0
    """`clock.monotonic()` of this process at which the request fails, seconds; 0: none. Travels as `timeout_s`."""
    priority: int = 0
    """Lower runs first, if `scheduling_policy` is `priority`."""
    tenant: bytes = b""
    """Opaque digest of the tenant: waiting for resources of an engine takes turns by it; b"" where there is one tenant."""
    trace_headers: dict[str, str] = {}
    """W3C trace context."""
    client_request_id: str = ""
    """The client's id of the request, for spans."""
    speculative_tokens: int | None = None
    """Tokens of a sequence that may be drafted per step, at most; 0: none; None: the worker's setting, which is also the limit."""
    num_kept_output_tokens: int | None = None
    """Session's later turn: output tokens of the turn before that stand, where a stop string ended its text; None: all."""
    lora_name: str = ""
    """Name of the LoRA adapter; "": the base model without an adapter."""
    lora_fingerprint: str = ""
    """Fingerprint of that adapter's content, which is an input of `hash_root`, too."""
    mm_features: list[MultiModalFeatureSpec] = []
    """Images of the prompt, in the order of their places."""
    ignorable: tuple[str, ...] = ()
    """Names of fields that an older worker may ignore; it refuses all other unknown fields."""

    def carried(self) -> dict[str, Any]:
        """Field -> value, for the carrier's fields only: what one form of a request gives to the next."""
        return {name: getattr(self, name) for name in GenerationRequest.__struct_fields__}

    @property
    def embeds_digest(self) -> bytes:
        """Digest of the prompt's embeddings; empty for token ids."""
        return b"" if self.prompt_embeds is None else self.prompt_embeds.digest

    @property
    def digest_extras(self) -> bytes:
        """What the request digest covers besides root and tokens: adapter, embeddings, images and sound."""
        return request_extras(self.lora_fingerprint, self.embeds_digest) + images_extras(self.mm_features)

    @property
    def known_prompt_token_ids(self) -> list[int]:
        """The prompt's token ids; empty for embeddings."""
        return self.prompt_token_ids if self.prompt_embeds is None else []

    @property
    def given_token_ids(self) -> list[int]:
        """Tokens computed before the first new one: the prompt, and the output of the resumed sequence."""
        return self.prompt_token_ids + self.output_token_ids if self.output_token_ids else self.prompt_token_ids

    @property
    def is_resumed(self) -> bool:
        """True if it continues one sequence that an earlier attempt began."""
        return bool(self.output_token_ids) or self.n < self.sampling_params.n

    @property
    def remaining_s(self) -> float:
        """Seconds left of the deadline; not below 0."""
        return max(0.0, self.deadline - clock.monotonic())

    def verify_client(self) -> None:
        """Check what a client gives besides the prompt and its parameters, by the client's names. Raises: InvalidRequest."""
        verify_priority(self.priority)
        verify_client_request_id(self.client_request_id)
        verify_speculative_tokens(self.speculative_tokens)
        self.verify_embeds_alone()

    def verify_embeds_alone(self) -> None:
        """Refuse what needs the tokens of a prompt that is embeddings. Raises: InvalidRequest."""
        if self.prompt_embeds is None:
            return
        if self.pooling_params is not None:
            raise InvalidRequest("prompt_embeds is given, and pooling takes token ids", "prompt_embeds")
        if self.sampling_params.prompt_logprobs is not None:
            raise InvalidRequest(
                f"prompt_logprobs is {self.sampling_params.prompt_logprobs}, and the tokens of prompt_embeds are not known",
                "prompt_logprobs",
            )

    def verify_received(self, max_model_len: int) -> None:
        """Check a peer's request; the sampling parameters are checked by the engine.

        Raises: InvalidRequest, PromptTooLong; a router never sends such a request, an attacker may.
        """
        verify_request_id(self.request_id)
        if not self.prompt_token_ids:
            raise InvalidRequest("request.prompt_token_ids is empty", "prompt_token_ids")
        verify_num_given(len(self.prompt_token_ids) + len(self.output_token_ids), max_model_len)
        if self.pooling_params is not None:
            if self.output_token_ids:
                raise InvalidRequest(
                    "request.output_token_ids is given, and an embedding has no output to go on from",
                    "output_token_ids",
                )
            if self.sampling_params != SamplingParams():
                raise InvalidRequest(
                    "request.sampling_params is given, and an embedding samples nothing", "sampling_params"
                )
        num = self.sampling_params.n
        if not 0 <= self.index < num:
            raise InvalidRequest(f"request.index is {self.index}, below n ({num}) is needed", "index")
        if not 0 < self.n <= num - self.index:
            raise InvalidRequest(f"request.n is {self.n}, 1 to {num - self.index} is needed", "n")
        for field in ("hash_root", "request_digest"):
            if (size := len(getattr(self, field))) != DIGEST_BYTES:
                raise InvalidRequest(f"request.{field} has {size} bytes, {DIGEST_BYTES} are needed", field)
        if not 0 < self.timeout_s <= MAX_TIMEOUT_S:
            raise InvalidRequest(
                f"request.timeout_s is {self.timeout_s}, above 0 and at most {MAX_TIMEOUT_S:g} is needed", "timeout_s"
            )
        self.verify_client()
        if self.mm_features and self.pooling_params is not None:
            raise InvalidRequest(
                "request.mm_features is given, and the prompt of an embedding has no images", "mm_features"
            )
        verify_lora(self.lora_name, self.lora_fingerprint)
        if len(self.tenant) > MAX_TENANT_BYTES:
            raise InvalidRequest(
                f"request.tenant has {len(self.tenant)} bytes, at most {MAX_TENANT_BYTES} are allowed", "tenant"
            )


def verify_num_given(num_tokens: int, max_model_len: int) -> None:
    """Check the length of prompt and earlier output. Raises: PromptTooLong."""
    if num_tokens > max_model_len:
        raise PromptTooLong(
            f"request.prompt_token_ids and request.output_token_ids have {num_tokens} tokens, "
            f"max_model_len is {max_model_len}",
            "prompt_token_ids",
        )
