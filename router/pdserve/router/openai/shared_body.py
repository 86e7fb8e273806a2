"""`SharedBody`: fields of completions, chat completions and responses, and their meaning in a `ClientRequest`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.sampling_params import SamplingParams, clamped_logit_bias
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.router.bodies.request_body import shown
from pdserve.router.requests.fields.output_constraint import OutputConstraint
from pdserve.router.requests.fields.service_tier import verify_service_tier
from pdserve.router.requests.preparation import CallFields


class SharedBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A new field that these endpoints share is one here, and has its meaning in `sampling` or `request_fields`."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    # extensions with vLLM's names
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool | None = None
    structured_outputs: StructuredOutputsParams | None = None
    cache_salt: str | None = None
    priority: int | None = None
    data_parallel_rank: int | None = None
    """Rank of the decode workers that it prefers, if the header `X-data-parallel-rank` does not name it."""
    speculative_tokens: int | None = None
    """Tokens to draft per step, at most; default: the worker's setting, which is also the limit."""
    service_tier: str | None = None
    # accepted, and without effect
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Most likely tokens to report with each; None for no log-probabilities."""
        return None

    def sampling(self, defaults: Mapping[str, float | int], form: OutputConstraint) -> SamplingParams:
        """Absent fields take `defaults`, then those of `SamplingParams`.

        `Preparation` checks other limits than numbers of entries, because it knows the lengths.
        """
        given: dict[str, Any] = dict(defaults)
        given |= {name: value for name in _SAMPLING if (value := getattr(self, name, None)) is not None}
        if self.stop is not None:
            given["stop"] = _stop_strings(self.stop)
        if self.logit_bias is not None:
            given["logit_bias"] = _logit_biases(self.logit_bias)
        for name in _LISTS:
            if (values := getattr(self, name, None)) is not None:
                given[name] = tuple(values)
        return SamplingParams(structured_outputs=form.params, logprobs=self.num_logprobs, **given)

    def request_fields(self, call: CallFields) -> dict[str, Any]:
        """Fields of each `ClientRequest` other than the prompt and its parameters. Raises: InvalidRequest."""
        verify_service_tier(self.service_tier, self.priority)
        return {
            "cache_salt": self.cache_salt or None,
            "priority": self.priority or 0,
            "service_tier": self.service_tier,
            "speculative_tokens": self.speculative_tokens,
            **call.with_rank(self.data_parallel_rank)._asdict(),
        }


def _stop_strings(stop: str | list[str]) -> tuple[str, ...]:
    """Nothing but empty strings are none, as forms of clients send them."""
    given = (stop,) if isinstance(stop, str) else tuple(stop)
    return given if any(given) else ()


def _logit_biases(biases: Mapping[str, float]) -> dict[int, float]:
    """Raises: InvalidRequest."""
    for key in biases:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest(f"logit_bias has the key {shown(key)}, but its keys are token ids", "logit_bias")
    return clamped_logit_bias({int(key): bias for key, bias in biases.items()})


_TOKEN_ID = re.compile(r"-?[0-9]{1,18}")
_LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words", "logits_processors")
_CONVERTED = {*_LISTS, "stop", "logit_bias", "structured_outputs", "max_tokens", "logprobs"}
"""Fields of `SamplingParams` that have another type or meaning in a body; all others have their names and values."""
_SAMPLING = tuple(name for name in SamplingParams.__struct_fields__ if name not in _CONVERTED)
