"""vLLM's data structures of requests and outputs, made and read as code for vLLM does."""

from __future__ import annotations

import time

import msgspec
import pytest

from pdserve.common.request.engine_types import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    SchedulerStats,
)
from pdserve.llm import LLM, CompletionOutput, RequestOutput, RequestOutputKind, SamplingParams
from tests.support.engine.llm_requests import TEXT


def test_an_engine_request() -> None:
    request = EngineCoreRequest(
        request_id="req-001",
        prompt_token_ids=[1, 15043, 29892, 920],
        sampling_params=SamplingParams(temperature=0.7, max_tokens=100),
        pooling_params=None,
        eos_token_id=2,
        arrival_time=time.time(),
        cache_salt=None,
        priority=0,
        trace_headers={"traceparent": f"00-{'1' * 32}-{'2' * 16}-01"},
    )
    assert (request.eos_token_id, request.eos_token_ids) == (2, (2,))
    encoded = msgspec.msgpack.encode(request)
    assert isinstance(msgspec.msgpack.decode(encoded), list)  # array_like: no field names
    assert msgspec.msgpack.decode(encoded, type=EngineCoreRequest) == request
    assert len(encoded) < len(msgspec.json.encode({name: getattr(request, name) for name in ("trace_headers",)})) + 400


def test_engine_outputs() -> None:
    running = EngineCoreOutput(request_id="req-001", new_token_ids=[3186])
    ended = EngineCoreOutput(request_id="req-002", new_token_ids=[2], finish_reason=FinishReason.STOP, stop_reason="\n")
    outputs = EngineCoreOutputs(
        outputs=[running, ended],
        scheduler_stats=SchedulerStats(num_running_reqs=1, num_blocks_total=4, num_blocks_in_use=1),
        finished_req_ids=["req-002"],
    )
    assert [output.finished for output in outputs.outputs] == [False, True]
    assert [str(output.finish_reason) for output in outputs.outputs if output.finished] == ["stop"]
    assert outputs.scheduler_stats is not None
    assert outputs.scheduler_stats.kv_cache_usage == 0.25
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(outputs), type=EngineCoreOutputs) == outputs
    assert [str(reason) for reason in FinishReason] == ["stop", "length", "abort", "error"]


def test_sampling_params_of_the_user() -> None:
    params = SamplingParams(
        n=2,
        best_of=3,
        presence_penalty=0.1,
        frequency_penalty=0.1,
        repetition_penalty=1.1,
        temperature=0.8,
        top_p=0.95,
        top_k=-1,
        min_p=0.0,
        seed=42,
        stop="\n\n",  # type: ignore[arg-type]
        stop_token_ids=[2],  # type: ignore[arg-type]
        bad_words=["spam"],  # type: ignore[arg-type]
        include_stop_str_in_output=False,
        ignore_eos=False,
        max_tokens=None,
        min_tokens=0,
        logprobs=5,
        prompt_logprobs=None,
        detokenize=True,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        logits_processors=None,  # type: ignore[arg-type]
        logit_bias=None,  # type: ignore[arg-type]
        allowed_token_ids=None,
        output_kind=RequestOutputKind.FINAL_ONLY,
        structured_outputs=None,
    )
    assert (params.stop, params.num_sequences, params.logits_processors) == (("\n\n",), 3, ())
    copy = params.clone()
    copy.temperature = 0.0
    assert (params.temperature, copy.greedy) == (0.8, True)
    for field in ("use_beam_search", "length_penalty", "early_stopping"):
        with pytest.raises(TypeError, match=field):
            SamplingParams(**{field: 1})  # type: ignore[arg-type]


def test_the_users_loop_over_outputs(llm: LLM) -> None:
    prompts = [TEXT, "The water goes"]
    params = SamplingParams(temperature=0.8, top_p=0.95, n=2, logprobs=1, seed=1, max_tokens=5)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for output in outputs:
        assert isinstance(output, RequestOutput)
        assert output.finished
        assert output.prompt_token_ids
        for place, completion in enumerate(output.outputs):
            assert isinstance(completion, CompletionOutput)
            assert completion.index == place
            assert completion.logprobs is not None
            chosen = [known[token] for token, known in zip(completion.token_ids, completion.logprobs, strict=True)]
            assert completion.cumulative_logprob == pytest.approx(sum(one.logprob for one in chosen))
            assert completion.finished()
            assert completion.finish_reason in ("stop", "length")
    assert [output.get_final_output() for output in outputs] == [output.outputs[0] for output in outputs]
