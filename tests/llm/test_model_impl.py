"""`model_impl`: a model by its own code in `transformers`, through the whole engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.llm import LLM, PoolingParams
from tests.support.engine.llm_requests import core_of, greedy, prompts_of, sampled
from tests.support.models.any_family import make_any_family
from tests.support.models.checkpoints import save_tokenizer
from tests.support.models.oracle import Oracle

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 128, "max_model_len": 200, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def starcoder2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family without code of ours, with sliding windows."""
    folder = tmp_path_factory.mktemp("starcoder2")
    make_any_family(folder, "starcoder2")
    save_tokenizer(folder)
    return folder


def ask(folder: Path, prompts: Any, params: Any, **options: Any) -> list[list[int]]:
    with LLM(folder, **(OPTIONS | options)) as llm:
        answers = llm.generate(prompts, params, use_tqdm=False)
        core_of(llm).scheduler.check(idle=True)
        return [answer.outputs[0].token_ids for answer in answers]


@pytest.mark.slow
def test_i1_answers_are_those_of_transformers_in_a_pool_that_preempts(starcoder2: Path) -> None:
    prompts, oracle = prompts_of([1, 4, 17, 90, 40]), Oracle(starcoder2)
    params = [greedy(max_tokens=40)] * len(prompts)
    with LLM(starcoder2, **(OPTIONS | {"num_blocks": 50})) as llm:
        for _ in range(2):  # the second time with a prefix cache
            answers = llm.generate(prompts, params, use_tqdm=False)
            for prompt, answer in zip(prompts, answers, strict=True):
                oracle.check(prompt, answer.outputs[0].token_ids)
        assert core_of(llm).scheduler.num_preemptions > 0
        core_of(llm).scheduler.check(idle=True)


@pytest.mark.slow
def test_i5_a_seeded_answer_is_the_same_alone_and_in_a_batch(starcoder2: Path) -> None:
    prompts = prompts_of([3, 9, 30])
    params = [sampled(seed=seed, logprobs=2) for seed in range(3)]
    together = ask(starcoder2, prompts, params)
    assert together == [ask(starcoder2, [prompt], [each])[0] for prompt, each in zip(prompts, params, strict=True)]


def test_embeddings_are_the_hidden_states_of_transformers(starcoder2: Path) -> None:
    oracle = Oracle(starcoder2)
    with LLM(starcoder2, **OPTIONS) as llm:
        for output in llm.embed(prompts_of([3, 70]), PoolingParams(normalize=False), use_tqdm=False):
            expected = oracle.hidden_states(output.prompt_token_ids)[-1]
            assert float((torch.tensor(output.outputs.embedding) - expected).abs().max()) < 1e-4
        core_of(llm).scheduler.check(idle=True)


def test_drafts_change_no_answer(starcoder2: Path) -> None:
    prompts, oracle = [[5, 6, 7, 8] * 10, *prompts_of([30])], Oracle(starcoder2)
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    answers = ask(starcoder2, prompts, greedy(max_tokens=20), speculative_config=drafts)
    for prompt, answer in zip(prompts, answers, strict=True):
        oracle.check(prompt, answer)


def test_a_native_family_answers_alike_by_both(tiny_checkpoints: Callable[..., Path]) -> None:
    folder = tiny_checkpoints("llama")
    prompts = prompts_of([5, 33])
    native, theirs = (
        ask(folder, prompts, greedy(max_tokens=12), model_impl=each) for each in ("native", "transformers")
    )
    assert native == theirs


def test_workers_with_different_code_have_different_fingerprints(tiny_checkpoints: Callable[..., Path]) -> None:
    fingerprints = set()
    for model_impl in ("auto", "native", "transformers"):
        with LLM(tiny_checkpoints("llama"), **OPTIONS, model_impl=model_impl) as llm:
            assert llm._engine is not None
            fingerprints.add(llm._engine.client.info.model_fingerprint)
    assert len(fingerprints) == 2


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"quantization": "int8"},
            "quantization is 'int8', and Starcoder2ForCausalLM is computed by the code of transformers",
        ),
        (
            {"enable_lora": True},
            "enable_lora is true, and Starcoder2ForCausalLM is computed by the code of transformers",
        ),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2, and Starcoder2ForCausalLM is computed by the code"),
        ({"model_impl": "native"}, "architecture Starcoder2ForCausalLM; supported: "),
        ({"model_impl": "vllm"}, r"Invalid enum value 'vllm' - at `\$.model_impl`"),
        ({"max_model_len": 300}, "max_model_len is 300, the model supports at most 256"),
    ],
)
def test_what_it_does_not_do_is_refused(starcoder2: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        LLM(starcoder2, **(OPTIONS | options))
