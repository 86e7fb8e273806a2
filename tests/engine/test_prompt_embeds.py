"""Prompts as embeddings in one engine and through prefill and decode, where only prefill has the numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.prompt_embeds import PromptEmbeds
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.sampling.penalties import PenaltyTable
from tests.support.engine.engine_harness import Harness
from tests.support.engine.engine_pair import Pair
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.family_checkpoints import cases, make_family
from tests.support.models.oracle import Oracle


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


def fields_of(oracle: Oracle, prompt: list[int]) -> dict[str, Any]:
    """The prompt as embeddings, under a root of its own."""
    with torch.inference_mode():
        rows = oracle._model.get_input_embeddings()(torch.tensor(prompt))
    embeds = PromptEmbeds.of(len(prompt), rows.shape[1], "float32", rows.numpy().tobytes())
    return {"prompt": embeds.placeholders(), "prompt_embeds": embeds, "salt": embeds.digest.hex()}


@pytest.mark.parametrize("chunk", [7, 512])
def test_chunks_beside_prompts_of_tokens(make_real_engine: Any, folder: Path, oracle: Oracle, chunk: int) -> None:
    engine = make_real_engine(folder, max_num_batched_tokens=chunk)
    prompts = [prompt_of(length) for length in (1, 16, 45)]
    asked = {}
    for prompt in prompts:
        asked[engine.add(**fields_of(oracle, prompt), params={"max_tokens": 12})] = prompt
        asked[engine.add(prompt, params={"max_tokens": 12})] = prompt
    engine.run()
    for request_id, prompt in asked.items():
        oracle.check(prompt, engine.answers[request_id].token_ids)


def test_a_resumed_sequence(make_real_engine: Any, folder: Path, oracle: Oracle) -> None:
    """Output of earlier attempts is computed by its tokens, behind the embeddings."""
    engine = make_real_engine(folder, max_num_batched_tokens=16)
    prompt = prompt_of(30)
    whole = oracle.greedy(prompt, 20)
    answer = engine.ask(**fields_of(oracle, prompt), output=whole[:9], params={"max_tokens": 20, "ignore_eos": True})
    assert whole[:9] + answer.token_ids == whole


def test_with_the_multiplier_of_the_embedding(make_real_engine: Any, tmp_path: Path) -> None:
    make_family(tmp_path, "gemma3_text", cases("gemma3_text")[0])
    oracle, prompt = Oracle(tmp_path), prompt_of(25)
    answer = make_real_engine(tmp_path).ask(**fields_of(oracle, prompt), params={"max_tokens": 8})
    oracle.check(prompt, answer.token_ids)


def test_i1_through_prefill_and_decode(make_real_engine: Any, folder: Path, oracle: Oracle) -> None:
    """D evicts what it cannot compute again, and P computes it once more."""
    d = make_real_engine(folder, block_size=4, num_blocks=20, max_model_len=64)
    pair = Pair(make_real_engine(folder, block_size=4, num_blocks=64, max_num_batched_tokens=20), d)
    prompts = {f"r{n}": prompt_of(n) for n in (9, 10, 12, 13)}
    for request_id, prompt in prompts.items():
        pair.add(**fields_of(oracle, prompt), request_id=request_id, params={"max_tokens": 24})
    pair.run()
    for request_id, prompt in prompts.items():
        oracle.check(prompt, pair.answer(request_id).token_ids)
    assert any(len(attempts) > 1 for attempts in pair.attempts.values()), "nothing was evicted"


def test_n_sequences_through_prefill_and_decode(make_real_engine: Any, folder: Path, oracle: Oracle) -> None:
    prompt, params = prompt_of(21), {"max_tokens": 8, "temperature": 1.0, "seed": 4, "n": 3}
    one = make_real_engine(folder)
    expected = [answer.token_ids for answer in one.ask_many(prompt, 3, params=params)]
    pair = Pair(make_real_engine(folder), make_real_engine(folder))
    pair.add(**fields_of(oracle, prompt), request_id="wide", params=params, n=3)
    pair.run()
    assert [pair.answer("wide", index).token_ids for index in range(3)] == expected


def test_refusals(make_real_engine: Any, folder: Path, oracle: Oracle) -> None:
    engine: Harness = make_real_engine(folder)
    given = fields_of(oracle, [5, 6, 7])
    embeds = given["prompt_embeds"]
    refused: list[tuple[dict[str, Any], str]] = [
        ({"prompt": [0, 0]}, "prompt_embeds has 3 rows, and prompt_token_ids 2 tokens"),
        ({"prompt_embeds": embeds.without_data()}, "prompt_embeds has no data, and the prompt is to be computed here"),
        ({"resumable": True}, "prompt_embeds is given, and a session's prompt is token ids"),
        ({"params": {"prompt_logprobs": 1}}, "prompt_logprobs is 1, and the tokens of prompt_embeds are not known"),
        ({"pooling_params": PoolingParams()}, "prompt_embeds is given, and pooling takes token ids"),
    ]
    for changes, message in refused:
        with pytest.raises(InvalidRequest, match=message):
            engine.request(**(given | changes))
    with pytest.raises(InvalidRequest, match="prompt_embeds is given, and enable_prompt_embeds is false here"):
        make_real_engine(folder, enable_prompt_embeds=False).request(**given)


def huge(dtype: str, value: float, count: int, hidden_size: int) -> dict[str, Any]:
    """Three rows whose first `count` numbers are `value`."""
    rows = torch.full((3, hidden_size), 0.01)
    rows.view(-1)[:count] = value
    rows = rows.to(getattr(torch, dtype))
    assert rows.isfinite().all()
    embeds = PromptEmbeds.of(3, hidden_size, dtype, rows.view(torch.uint8).numpy().tobytes())  # type: ignore[arg-type]
    return {"prompt": embeds.placeholders(), "prompt_embeds": embeds, "salt": embeds.digest.hex()}


HUGE = [("float32", 3.4e38), ("float32", -3.4e38), ("float32", 1e25), ("bfloat16", 3.3e38), ("bfloat16", -1e30)]


@pytest.mark.few(4)
@pytest.mark.diagonal
@pytest.mark.parametrize(("dtype", "value"), HUGE)
@pytest.mark.parametrize("all_numbers", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_huge_numbers_are_the_clients(
    make_real_engine: Any, folder: Path, oracle: Oracle, dtype: str, value: float, all_numbers: bool, n: int
) -> None:
    """Finite numbers that overflow in the model end their own request, as its mistake; others are served beside it."""
    engine: Harness = make_real_engine(folder)
    hidden_size = fields_of(oracle, [5])["prompt_embeds"].hidden_size
    given = huge(dtype, value, 3 * hidden_size if all_numbers else 2, hidden_size)
    failing = engine.add(**given, params={"max_tokens": 3, "temperature": 0.5, "n": n}, n=n)
    other = engine.add(prompt_of(20), params={"max_tokens": 3})
    engine.run()
    oracle.check(prompt_of(20), engine.answers[other].token_ids)
    ends = [engine.answers[f"{failing}/{index}" if n > 1 else failing] for index in range(n)]
    for answer in ends:
        if abs(value) < 1e38 and answer.finish_reason is FinishReason.LENGTH:
            continue  # the norms have made something of it
        assert (answer.finish_reason, answer.error_code) == (FinishReason.ERROR, "invalid_request"), answer
        assert answer.error_message.startswith("prompt_embeds has numbers that the model cannot compute with")
        assert "the model's logits are not finite" in answer.error_message


def test_placeholders_are_not_penalised() -> None:
    table, token_ids = PenaltyTable(2), np.array([[0, 0, 7], [4, 5, 7]])
    for row in (0, 1):
        table.set(row, SamplingParams(repetition_penalty=1.5), knows_prompt=row == 1)
    penalties = table.of_step(np.array([0, 1]), np.array([3, 3]), token_ids, np.array([2, 2]))
    assert penalties is not None
    assert penalties.repeated is not None
    found = list(zip(penalties.repeated.rows.tolist(), penalties.repeated.token_ids.tolist(), strict=True))
    assert found == [(0, 7), (1, 4), (1, 5), (1, 7)]
