"""The offline API refuses by name, value and limit, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.errors import ConfigError, InvalidRequest, PromptTooLong
from pdserve.llm import LLM, SamplingParams
from tests.support.engine.llm_requests import core_of
from tests.support.models.oracle import Oracle

GOOD = "The miller"
CHAT = [{"role": "user", "content": "hi"}]

BAD_PROMPTS: list[tuple[Any, str, str]] = [
    ("", "prompt", "prompt is empty"),
    ({"prompt_token_ids": []}, "prompt_token_ids", "prompt_token_ids is empty"),
    ([5, 320], "prompt", r"prompt\[1\] is 320, outside the vocabulary of 320 tokens"),
    ([5, -1], "prompt", r"prompt\[1\] is -1"),
    ({"prompt_token_ids": [5, "6"]}, "prompt_token_ids", r"prompt_token_ids\[1\] is '6'"),
    ({"prompt": 5}, "prompt", "prompt must be a string, not int"),
    ({"prompt": GOOD, "prompt_token_ids": [5]}, "prompt", "one of 'prompt', 'prompt_token_ids' and 'prompt_embeds'"),
    ({"text": GOOD}, "prompt", r"this one has \['text'\]"),
    ({"prompt": GOOD, "cache_salt": 1}, "cache_salt", "cache_salt must be a string, not int"),
    ({"prompt": GOOD, "cache_salt": "x" * 257}, "cache_salt", "257 characters, at most 256"),
    ("\ud800", "prompt", "lone surrogate"),
    ("x" * 99_999, "prompt", "prompt has at least [0-9]+ tokens; the model's length is 256"),
    ([5] * 256, "prompt", "256 tokens; the model's length is 256"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("prompt", "field", "message"), BAD_PROMPTS, ids=lambda value: repr(value)[:30])
def test_a_wrong_prompt_is_named_alone_and_among_many(llm: LLM, prompt: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        llm.generate(prompt, use_tqdm=False)
    assert caught.value.field == field
    with pytest.raises(InvalidRequest, match=message) as among:
        llm.generate([GOOD, prompt, GOOD], use_tqdm=False)
    assert among.value.field == field
    assert among.value.message.startswith("prompts[1]: ")
    assert type(among.value) is type(caught.value)
    assert nothing_was_done(llm)


BAD_PARAMS: list[tuple[Any, str, str]] = [
    (SamplingParams(temperature=-1.0), "temperature", "not -1.0"),
    (SamplingParams(temperature="hot"), "temperature", "temperature is 'hot': Expected `float`"),  # type: ignore[arg-type]
    (SamplingParams(top_p=0.0), "top_p", "above 0 and at most 1"),
    (SamplingParams(max_tokens=0), "max_tokens", "at least 1"),
    (SamplingParams(max_tokens=1.5), "max_tokens", "Expected `int . null`"),  # type: ignore[arg-type]
    (SamplingParams(max_tokens=1000), "max_tokens", "so max_tokens at most 2"),
    (SamplingParams(stop=5), "stop", "stop is 5"),  # type: ignore[arg-type]
    (SamplingParams(stop=("",)), "stop", "1 to 256 characters"),
    (SamplingParams(stop_token_ids=(320,)), "stop_token_ids", "outside the vocabulary"),
    (SamplingParams(bad_words=("",)), "bad_words", "bad_words"),
    (SamplingParams(seed=2**63), "seed", "64-bit"),
    ({"temperature": 0}, "sampling_params", "not dict"),
    ([SamplingParams()] * 2, "sampling_params", "2 entries, one for each of 1 prompts"),
]


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"priority": "high"}, "priority", "priority must be int or a list of them, not str|priority has 4 entries"),
    ({"priority": [1, 2]}, "priority", "2 entries, one for each of 1 prompts"),
    ({"priority": ["1"]}, "priority", "priority is '1': Expected `int`"),
    ({"priority": True}, "priority", "priority is True: Expected `int`"),
    ({"priority": 2**31}, "priority", "priority must be from -2147483648 to 2147483647, not 2147483648"),
    ({"trace_headers": "00-1"}, "trace_headers", "trace_headers is '00-1': Expected `object`"),
    ({"trace_headers": {"traceparent": 1}}, "trace_headers", "Expected `str`"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("fields", "field", "message"), BAD_FIELDS, ids=repr)
def test_wrong_fields_beside_a_prompt_are_named(llm: LLM, fields: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        llm.generate(GOOD, use_tqdm=False, **fields)
    assert caught.value.field == field
    assert nothing_was_done(llm)


@pytest.mark.few(1)
@pytest.mark.parametrize(("params", "field", "message"), BAD_PARAMS, ids=lambda value: repr(value)[:30])
def test_wrong_sampling_parameters_are_named(llm: LLM, params: Any, field: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        llm.generate(GOOD, params, use_tqdm=False)
    assert caught.value.field == field
    assert nothing_was_done(llm)


def test_one_wrong_entry_of_many_parameters_is_named(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match=r"prompts\[1\]: min_p must be") as caught:
        llm.generate([GOOD, GOOD], [SamplingParams(), SamplingParams(min_p=2)], use_tqdm=False)
    assert caught.value.field == "min_p"
    assert nothing_was_done(llm)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ("hi", "messages must be a list of messages, not str"),
        ([{"content": "hi"}], r"messages\[0\].role"),
        ([*CHAT, {"role": "user", "content": [{"type": "image_url"}]}], r"messages\[1\].content\[0\] has type"),
        ([CHAT, []], r"conversations\[1\]: messages must hold at least one message"),
        ([CHAT, "hi"], r"conversations\[1\]: messages must be a list"),
    ],
)
def test_wrong_messages_are_named(llm: LLM, messages: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        llm.chat(messages, use_tqdm=False)
    assert caught.value.field == "messages"
    assert nothing_was_done(llm)


def test_prompts_that_are_no_sequence_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="prompts must be a prompt or a list of them, not int"):
        llm.generate(5, use_tqdm=False)  # type: ignore[arg-type]


def test_a_prompt_that_is_too_long_is_its_own_error(llm: LLM) -> None:
    with pytest.raises(PromptTooLong):
        llm.generate([5] * 300, use_tqdm=False)


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0, at least 1"),
        ({"block_size": "16"}, r"Expected `int`, got `str` - at `\$.block_size`"),
        ({"num_blocks": 1}, "num_blocks is 1, at least 2"),
        ({"num_blocks": None, "kv_cache_mib": 0}, "kv_cache_mib is 0"),
        ({"max_model_len": 5000}, "max_model_len is 5000, the model supports at most 4096"),
        ({"max_model_len": 1000}, "max_model_len is 1000, the pool holds 512 tokens"),
        ({"max_model_len": 1}, "max_model_len is 1, at least 2"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
        ({"num_threads": 0}, "num_threads is 0"),
        (
            {"quantization": "int8", "device": "cuda"},
            "quantization is 'int8', which runs on a CPU only, and device is 'cuda'",
        ),
        (
            {"quantization": "fp8"},
            "quantization is 'fp8', which runs on a GPU only, and device is 'cpu'",
        ),
        ({"dtype": "float8"}, r"Invalid enum value 'float8' - at `\$.dtype`"),
        ({"attention_backend": "mine"}, "attention_backend is 'mine', which is not installed; there are auto, torch"),
        (
            {"port": 8000},
            "unknown option 'port'; there are model, seed, engine_process, disable_log_stats, stat_loggers, dtype",
        ),
    ],
)
def test_wrong_options_are_named(make_llm: Callable[..., LLM], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_llm(**options)


@pytest.mark.slow
def test_max_model_len_may_reach_what_the_rotary_scaling_was_made_for(tiny_checkpoints: Callable[..., Path]) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    folder = tiny_checkpoints("qwen3", max_position_embeddings=160, rope_parameters=rope)
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 256}
    with LLM(folder, **options) as llm, pytest.raises(PromptTooLong, match="the model's length is 160"):
        llm.generate([5] * 160, use_tqdm=False)
    with LLM(folder, max_model_len=512, **options) as llm:
        [answer] = llm.generate([5] * 500, SamplingParams(max_tokens=12, ignore_eos=True), use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == 12
    with pytest.raises(ConfigError, match="max_model_len is 513, the model supports at most 512"):
        LLM(folder, max_model_len=513, **options)


@pytest.mark.slow
def test_longrope_beyond_its_original_length_answers_as_transformers(tiny_checkpoints: Callable[..., Path]) -> None:
    rope = {
        "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + n for n in range(8)],
        "original_max_position_embeddings": 40,
    }  # fmt: skip
    folder = tiny_checkpoints("llama", max_position_embeddings=160, rope_parameters=rope)
    options: dict[str, Any] = {"block_size": 4, "num_blocks": 64}
    prompt = [5 + n % 90 for n in range(120)]
    with LLM(folder, **options) as llm, pytest.raises(PromptTooLong, match="the model's length is 40"):
        llm.generate(prompt, use_tqdm=False)
    with LLM(folder, max_model_len=160, max_num_batched_tokens=30, **options) as llm:
        for _ in range(2):  # the second time from the prefix cache
            [answer] = llm.generate(
                prompt, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True), use_tqdm=False
            )
            Oracle(folder).check(prompt, answer.outputs[0].token_ids)
            assert len(answer.outputs[0].token_ids) == 40


def test_a_folder_that_is_no_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        LLM(tmp_path / "missing")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        LLM(tmp_path)


def nothing_was_done(llm: LLM) -> bool:
    core = core_of(llm)
    return core.heartbeat.tick == 0 and not core.scheduler.requests
