"""A model that computes no numbers for some tokens: those requests end with an error, their batch mates do not notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.engine.scheduler.kv_messages import HoldReturned, Settled
from pdserve.models.model_inputs import ModelInputs
from tests.support.engine.engine_harness import Harness

BAD = 7
"""The token after which hidden states are `value`."""
GOOD_PROMPT = list(range(40, 75))
BAD_PROMPT = [*GOOD_PROMPT, BAD]


class BadToken:
    """A decoder that fails on one token, as numbers beyond a dtype's range do."""

    def __init__(self, decoder: Any, value: float) -> None:
        self._decoder, self._value = decoder, value
        self.hidden_size = decoder.hidden_size
        self.dtype = decoder.dtype
        self.attention_specs = decoder.attention_specs
        self.compute_logits = decoder.compute_logits
        self.embed_input_ids = decoder.embed_input_ids
        self.classifier = decoder.classifier

    def forward(self, inputs: ModelInputs) -> Tensor:
        hidden: Tensor = self._decoder.forward(replace(inputs, output_rows=None)).clone()
        hidden[inputs.token_ids == BAD] = self._value
        return inputs.read_rows(hidden)


@pytest.fixture(params=[torch.nan, torch.inf, -torch.inf])
def engine(
    request: pytest.FixtureRequest, make_real_engine: Callable[..., Harness], tiny_checkpoints: Callable[..., Path]
) -> Harness:
    harness = make_real_engine(tiny_checkpoints("llama"), max_num_batched_tokens=64)
    harness.runner._model = BadToken(harness.runner._model, request.param)
    return harness


def _failed(engine: Harness, request_id: str, what: str) -> None:
    answer = engine.answers[request_id]
    assert (answer.finish_reason, answer.error_code, answer.token_ids) == (FinishReason.ERROR, "internal_error", [])
    assert (
        answer.error_message == f"the model's {what} are not finite (NaN or infinity) for this prompt in torch.float32"
    )


@pytest.mark.few(5)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_without_logits_ends_alone(engine: Harness, temperature: float) -> None:
    params = {"temperature": temperature, "seed": 3, "top_p": 0.9}
    alone = engine.add(GOOD_PROMPT, params=params)
    engine.run()
    bad = engine.add(BAD_PROMPT, params=params)
    mate = engine.add(GOOD_PROMPT, params=params)
    engine.run()
    _failed(engine, bad, "logits")
    assert engine.answers[mate].token_ids == engine.answers[alone].token_ids


def test_all_sequences_of_a_request_end(engine: Harness) -> None:
    request = engine.add(BAD_PROMPT, params={"temperature": 1.0, "seed": 1, "n": 3}, n=3)
    engine.run()
    for index in range(3):
        assert engine.answers[f"{request}/{index}"].finish_reason is FinishReason.ERROR


def test_it_ends_where_the_model_fails_in_the_middle_of_an_answer(engine: Harness) -> None:
    params = {"temperature": 0.0, "max_tokens": 9, "allowed_token_ids": (BAD,)}
    request = engine.add(GOOD_PROMPT, params=params)
    engine.run()
    answer = engine.answers[request]
    assert (answer.token_ids, answer.finish_reason) == ([BAD], FinishReason.ERROR)


def test_prompt_logprobs_without_numbers_end_a_request_in_any_chunk(engine: Harness) -> None:
    prompt = [BAD, *GOOD_PROMPT, *GOOD_PROMPT, *GOOD_PROMPT]
    request = engine.add(prompt, params={"prompt_logprobs": 1})
    engine.run()
    _failed(engine, request, "prompt log-probabilities")


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "pooling", [PoolingParams(), PoolingParams(normalize=False), PoolingParams(pooling_type="mean")]
)
def test_embeddings_without_numbers_are_none(engine: Harness, pooling: PoolingParams) -> None:
    bad = engine.add(BAD_PROMPT, pooling_params=pooling)
    good = engine.add(GOOD_PROMPT, pooling_params=pooling)
    engine.run()
    _failed(engine, bad, "embeddings")
    assert engine.answers[bad].pooling_output is None
    assert engine.answers[good].pooling_output is not None


def test_a_source_ends_and_its_blocks_come_back(engine: Harness) -> None:
    """Prefill for another worker: the blocks that it has published are held until that worker returns them."""
    request = engine.add(BAD_PROMPT, transfer_source=True, wanted_from=0, params={"max_tokens": 9})
    engine.run()
    _failed(engine, request, "logits")
    for message in engine.outbox.take():
        if isinstance(message, Settled):
            engine.core.apply(HoldReturned(request, message.hold))
    assert engine.scheduler.pool.num_in_use == 0
