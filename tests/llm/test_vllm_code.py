"""Code that was written for vLLM's Python API runs as it was written."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.llm import (
    LLM,
    EngineArgs,
    LLMEngine,
    PoolingParams,
    RequestOutput,
    SamplingParams,
    StructuredOutputsParams,
)
from tests.llm.conftest import TINY
from tests.support.engine.llm_requests import MESSAGES, TEXT, core_of, greedy, prompts_of
from tests.support.run.waiting import HANG_S

NOT_GIVEN = ("stop", "stop_token_ids", "logits_processors", "logit_bias", "bad_words", "allowed_token_ids", "seed")


def test_none_is_not_given(llm: LLM) -> None:
    given: dict[str, Any] = dict.fromkeys(
        [*NOT_GIVEN, "temperature", "top_p", "top_k", "min_tokens", "n", "detokenize"]
    )
    assert SamplingParams(**given) == SamplingParams()
    assert SamplingParams(logit_bias=None).logit_bias is not SamplingParams(logit_bias=None).logit_bias  # type: ignore[arg-type]
    given["temperature"] = 0.0
    answers = [
        llm.generate(TEXT, params, use_tqdm=False) for params in (SamplingParams(**given), greedy(max_tokens=16))
    ]
    assert answers[0][0].outputs[0].token_ids[:3] == answers[1][0].outputs[0].token_ids[:3]


def test_none_is_not_given_to_calls_and_engines(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(device=None, scheduling_policy=None, enforce_eager=None, max_num_seqs=None, quantization=None)
    arguments: dict[str, Any] = dict.fromkeys(
        ["priority", "trace_headers", "tokenization_kwargs", "lora_request", "prompt_token_ids", "speculative_tokens"]
    )
    [answer] = llm.generate(TEXT, greedy(), use_tqdm=False, **arguments)
    tokenization: dict[str, Any] = dict.fromkeys(["truncate_prompt_tokens", "truncation_side", "add_special_tokens"])
    arguments["tokenization_kwargs"] = tokenization
    [other] = llm.generate(TEXT, greedy(), use_tqdm=False, **arguments)
    assert answer.outputs == other.outputs
    options: dict[str, Any] = dict.fromkeys(
        ["chat_template", "add_generation_prompt", "continue_final_message", "tools", "chat_template_kwargs"]
    )
    assert llm.chat(MESSAGES, greedy(), False, **options)[0].outputs == llm.chat(MESSAGES, greedy(), False)[0].outputs
    assert PoolingParams(pooling_type=None, normalize=None, dimensions=None) == PoolingParams()  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="unknown option 'port'"):
        make_llm(port=None)


def test_a_device_is_named_or_refused(make_llm: Callable[..., LLM]) -> None:
    [answer] = make_llm(device="cpu", gpu_memory_utilization=0.5).generate(TEXT, greedy(), use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 12
    for option, message in (
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(**option)


@pytest.mark.slow
def test_more_log_probabilities_where_the_engine_is_made_for_them(make_llm: Callable[..., LLM]) -> None:
    params = greedy(max_tokens=2, logprobs=320, prompt_logprobs=100)
    [answer] = make_llm(max_logprobs=-1).generate(TEXT, params, use_tqdm=False)
    assert answer.outputs[0].logprobs is not None
    assert [len(candidates) for candidates in answer.outputs[0].logprobs] == [320, 320]
    assert answer.prompt_logprobs is not None
    assert answer.prompt_logprobs[1] is not None
    assert len(answer.prompt_logprobs[1]) in (100, 101)
    for most, asked in ((None, 21), (20, 21), (5, 6)):
        with pytest.raises(InvalidRequest, match=f"logprobs must be from 0 to {most or 20}, not {asked}"):
            make_llm(max_logprobs=most).generate(TEXT, greedy(logprobs=asked), use_tqdm=False)
    for wrong in (-2, 321, "5"):
        with pytest.raises(ConfigError, match=r"max_logprobs is .*-1 to 320, the size of the vocabulary, are possible"):
            make_llm(max_logprobs=wrong)


def test_a_refused_request_is_a_value_error(llm: LLM) -> None:
    with pytest.raises(ValueError, match="temperature must be from 0 to 100"):
        llm.generate(TEXT, SamplingParams(temperature=-1.0), use_tqdm=False)


def test_an_answer_has_metadata(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm()
    [first] = llm.generate(TEXT, greedy(), use_tqdm=False)
    [again] = llm.generate(TEXT, greedy(), use_tqdm=False)
    assert (first.metadata.cached_tokens, again.metadata.cached_tokens) == (0, again.num_cached_tokens)
    assert again.num_cached_tokens
    assert again.metadata.stats is again.metrics
    assert [event.type.name for event in again.metadata.events] == ["QUEUED", "SCHEDULED"]
    assert (again.get_final_output(), again.is_streaming()) == (again.outputs[0], False)
    assert again.lora_request is None
    [without] = make_llm(disable_log_stats=True).generate(TEXT, greedy(), use_tqdm=False)
    assert (without.metadata.stats, without.metadata.events) == (None, [])
    engine = llm.llm_engine
    engine.add_request("mine", TEXT, greedy())
    unfinished = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            assert isinstance(output, RequestOutput)
            if output.is_streaming():
                unfinished.append(output.get_final_output())
    assert unfinished
    assert set(unfinished) == {None}


def test_without_max_tokens_an_answer_takes_the_rest_of_the_models_length(llm: LLM) -> None:
    answers = llm.generate([[5] * 240, [6] * 250], greedy(max_tokens=None), use_tqdm=False)
    assert [len(answer.outputs[0].token_ids) for answer in answers] == [16, 6]
    with pytest.raises(InvalidRequest, match="max_tokens must be at least 1 and at most 4294967295, not None"):
        SamplingParams(max_tokens=None).verify()


def test_default_sampling_params_may_be_changed(llm: LLM) -> None:
    params = llm.get_default_sampling_params()
    params.max_tokens, params.temperature, params.stop = 3, 0.0, ["zzz"]  # type: ignore[assignment]
    params.ignore_eos = True
    [before] = llm.generate(TEXT, params, use_tqdm=False)
    params.max_tokens = 5
    [after] = llm.generate(TEXT, params, use_tqdm=False)
    assert [len(answer.outputs[0].token_ids) for answer in (before, after)] == [3, 5]
    params.top_p = 2.0
    with pytest.raises(InvalidRequest, match="top_p must be"):
        llm.generate(TEXT, params, use_tqdm=False)


def test_token_ids_have_a_keyword(llm: LLM) -> None:
    prompts = prompts_of([4, 9])
    expected = [answer.outputs for answer in llm.generate(prompts, greedy(), use_tqdm=False)]
    both = llm.generate(prompt_token_ids=prompts, sampling_params=greedy(), use_tqdm=False)
    [one] = llm.generate(prompt_token_ids=prompts[1], sampling_params=greedy(), use_tqdm=False)
    assert [answer.outputs for answer in both] == expected
    assert one.outputs == expected[1]
    for given in ({}, {"prompts": TEXT, "prompt_token_ids": [5]}):
        with pytest.raises(InvalidRequest, match="either prompts or prompt_token_ids is needed, and"):
            llm.generate(**given)  # type: ignore[arg-type]


def test_chat_takes_a_template_tools_and_the_beginning_of_an_answer(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(max_model_len=500)
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}{{ mark }}"
    [answer] = llm.chat(
        MESSAGES,
        greedy(),
        False,
        chat_template=template,
        chat_template_kwargs={"mark": "!"},
        add_generation_prompt=False,
    )
    assert answer.prompt == f"<user>{MESSAGES[0]['content']}!"
    begun = [*MESSAGES, {"role": "assistant", "content": "To the"}]
    [answer] = llm.chat(begun, greedy(), False, add_generation_prompt=False, continue_final_message=True)
    assert answer.prompt is not None
    assert answer.prompt.endswith("To the")
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    [answer] = llm.chat(MESSAGES, greedy(), False, tools=[tool])
    assert answer.prompt is not None
    assert "weather" in answer.prompt
    for name, value, message in (
        ("chat_template", 5, "chat_template must be str, not 5"),
        ("tools", "weather", "tools must be Sequence, not 'weather'"),
        ("continue_final_message", True, "add_generation_prompt must be false then"),
    ):
        with pytest.raises(InvalidRequest, match=message) as caught:
            llm.chat(MESSAGES, greedy(), False, **{name: value})  # type: ignore[arg-type]
        assert caught.value.field == name
    with pytest.raises(TypeError, match="unexpected keyword argument 'template'"):
        llm.chat(MESSAGES, greedy(), False, template="x")  # type: ignore[call-arg]


def test_options_of_one_device_and_no_more_are_taken(make_llm: Callable[..., LLM]) -> None:
    llm = make_llm(
        tensor_parallel_size=1,
        trust_remote_code=True,
        enforce_eager=True,
        tokenizer=None,
        disable_log_stats=True,
        grammar_whitespace_chars=0,
        grammar_timeout_s=30.0,
    )
    [answer] = llm.generate(TEXT, greedy(), use_tqdm=False)
    assert answer.metrics is None
    for option, message in (
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, only 1 is supported"),
        ({"quantization": "awq"}, r"Invalid enum value 'awq' - at `\$.quantization`"),
        ({"grammar_timeout_s": -1.0}, "grammar_timeout_s is -1.0"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_llm(**option)


@pytest.mark.slow
def test_options_of_grammars_reach_the_grammar(make_llm: Callable[..., LLM]) -> None:
    """With no character of white space allowed between values, the two spellings of a list differ in length."""
    form = StructuredOutputsParams(json={"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 3})
    # the most likely token is white space wherever the grammar allows it
    space = {token_id: 100.0 for token_id in range(320) if not make_tokenizer_text(make_llm, token_id).strip()}
    texts = []
    for chars in (1, 3):
        llm = make_llm(grammar_whitespace_chars=chars)
        params = greedy(max_tokens=60, structured_outputs=form, logit_bias=space)
        texts.append(llm.generate(TEXT, params, use_tqdm=False)[0].outputs[0].text)
    runs = [
        max(len(run) for run in text.replace("[", "1").replace("]", "1").replace(",", "1").split("1")) for text in texts
    ]
    assert runs == [1, 3]


_texts: dict[int, str] = {}


def make_tokenizer_text(make_llm: Callable[..., LLM], token_id: int) -> str:
    if not _texts:
        tokenizer = make_llm().get_tokenizer()
        _texts.update({each: tokenizer.decode([each], skip_special_tokens=False) for each in range(320)})
    return _texts[token_id]


def test_the_loop_of_vllms_engine_example(folder: Path, llm: LLM) -> None:
    test_prompts = [
        ("A robot may not injure a human being", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        (
            "What is the meaning of life?",
            SamplingParams(n=2, temperature=0.8, top_p=0.95, frequency_penalty=0.1, seed=1, max_tokens=None),
        ),
    ]
    engine = LLMEngine.from_engine_args(EngineArgs(folder, scheduling_policy="priority", **TINY))
    request_id, finished = 0, []
    before = time.time()
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(
                str(request_id), prompt, sampling_params, arrival_time=before - 1.0, priority=-request_id
            )
            request_id += 1
            assert engine.get_num_unfinished_requests() > 0
        request_outputs = engine.step()
        finished += [output for output in request_outputs if output.finished]
    assert sorted(output.request_id for output in finished) == ["0", "1", "2"]
    for output in finished:
        assert isinstance(output, RequestOutput)
        assert output.metrics is not None
        assert output.metrics.arrival_time == before - 1.0
    [first] = [output for output in finished if output.request_id == "0"]
    [alone] = llm.generate("A robot may not injure a human being", SamplingParams(temperature=0.0), use_tqdm=False)
    assert isinstance(first, RequestOutput)
    assert first.outputs[0].token_ids == alone.outputs[0].token_ids
    engine.add_request("ended", prompt_token_ids=[5, 6, 7])
    engine.abort_request("ended")
    assert engine.get_num_unfinished_requests() == 0
    assert engine.reset_prefix_cache()
    assert engine.client.utility("check_pool") is True
    engine.close()


async def test_several_requests_are_aborted_at_once(running: Callable[..., Any]) -> None:
    async with running() as llm, asyncio.timeout(HANG_S):
        await llm.check_health()
        assert (llm.is_running, llm.errored, llm.dead_error) == (True, False, None)

        async def last(name: str) -> str:
            async for answer in llm.generate(
                prompt_token_ids=[5, 6], sampling_params=greedy(max_tokens=250), request_id=name
            ):
                started.set()
                reasons[name] = answer.outputs[0].finish_reason
            return str(reasons[name])

        started = asyncio.Event()
        reasons: dict[str, str | None] = {}
        streams = [asyncio.create_task(last(name)) for name in ("a", "b", "c")]
        await started.wait()
        await llm.abort(["a", "b", "unknown"])
        assert await asyncio.gather(*streams) == ["abort", "abort", "length"]
        await llm.idle()
    with pytest.raises(Exception, match="was shut down"):
        await llm.check_health()
    assert llm.errored


def test_llm_has_its_engine(llm: LLM) -> None:
    llm.llm_engine.add_request("mine", TEXT, greedy(max_tokens=2))
    while llm.llm_engine.has_unfinished_requests():
        outputs = llm.llm_engine.step()
    assert [output.request_id for output in outputs] == ["mine"]
    core_of(llm).scheduler.check(idle=True)


def test_the_tokenizer_has_the_methods_of_transformers(llm: LLM, folder: Path) -> None:
    own, theirs = llm.get_tokenizer(), AutoTokenizer.from_pretrained(folder)
    token_ids = own.encode(TEXT)
    assert token_ids == theirs.encode(TEXT)
    assert own.decode(token_ids) == theirs.decode(token_ids)
    assert own.eos_token_id in own.eos_token_ids
    [answer] = llm.generate(prompt_token_ids=token_ids, sampling_params=greedy(), use_tqdm=False)
    assert answer.outputs == llm.generate(TEXT, greedy(), use_tqdm=False)[0].outputs
