"""Requests and outputs of an engine are values: every field comes back from bytes as it was."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from pdserve.common.errors import InvalidRequest, NeedsPrefill
from pdserve.common.request.block_source import BlockSource
from pdserve.common.request.cached_tokens import CachedTokens
from pdserve.common.request.encoder_prompt import EncoderPrompt
from pdserve.common.request.engine_types import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    LogprobsLists,
    Migration,
    ModelRunnerStats,
    SchedulerStats,
    SpecDecodingStats,
)
from pdserve.common.request.multimodal import MultiModalFeatureSpec, PlaceholderRange
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.request.prompt_embeds import PromptEmbeds
from pdserve.common.request.sampling_params import NamedLogitsProcessor, RequestOutputKind, SamplingParams
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.output_stream import engine_error, failed_output
from pdserve.engine.scheduler_output import SchedulerOutput
from tests.support.engine.engine_harness import MakeEngine

SAMPLING = SamplingParams(
    temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, presence_penalty=1.0, frequency_penalty=-1.0, repetition_penalty=1.5,
    logit_bias={5: -100.0, 7: 1.5}, allowed_token_ids=(5, 7), bad_words=("a",), bad_words_token_ids=((1, 2), (3,)),
    seed=-(2**63), max_tokens=2**32 - 1, min_tokens=2, stop=("x", "é"), stop_token_ids=(1,),
    include_stop_str_in_output=True, ignore_eos=True, skip_special_tokens=False, spaces_between_special_tokens=False,
    logprobs=20, prompt_logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA, n=2, best_of=3,
    logits_processors=(NamedLogitsProcessor(name="ban", args={"tokens": [1], "x": None, "y": {"z": 0.5}}),),
    structured_outputs=StructuredOutputsParams(regex="a+"),
)  # fmt: skip
LOGPROBS = LogprobsLists([[1, 2], [3, 4]], [[-0.5, -1.25], [-2.0, float("-inf")]], [1, 2**40])
OTHER_FORMS = [
    StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": ["integer", "null"]}}}),
    StructuredOutputsParams(json='{"type": "string"}', disable_any_whitespace=True),
    StructuredOutputsParams(choice=["a", "b"]),
    StructuredOutputsParams(grammar='root ::= "a"'),
    StructuredOutputsParams(json_object=True, disable_additional_properties=True),
    StructuredOutputsParams(structural_tag="{}", whitespace_pattern=" "),
]


def fields_of(kind: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    """The values, one for each field, none the default."""
    for field in msgspec.structs.fields(kind):
        assert field.name in values, f"{kind.__name__}.{field.name} has no value here"
        assert values[field.name] != field.default, field.name
    return values


def copied(value: Any) -> Any:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value))


def test_sampling_params_have_every_field() -> None:
    fields_of(SamplingParams, msgspec.structs.asdict(SAMPLING))
    assert copied(SAMPLING) == SAMPLING


@pytest.mark.parametrize("form", OTHER_FORMS, ids=lambda form: str(form)[:40])
def test_every_form_of_structured_outputs(form: StructuredOutputsParams) -> None:
    request = EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(structured_outputs=form)
    )
    assert copied(request) == request


REQUEST: dict[str, Any] = {
    "request_id": "é.0.1", "sequence_stem": "é.0", "prompt_token_ids": [0, 2**31], "sampling_params": SAMPLING,
    "pooling_params": PoolingParams(normalize=False), "output_token_ids": [3], "eos_token_ids": (1, 2),
    "arrival_time": 1.5, "block_hashes": [b"\x00" * 24, b"\xff" * 24], "hash_root": b"\x80", "remote_prefill": True,
    "transfer_source": True, "without_draft_head": True, "wanted_from": 0,
    "resumable": True,
    "fetches_only": True, "prefill_here": True, "local_prefill_tokens": 0,
    "priority": -5, "tenant": b"\x01", "index": 3, "n": 4, "trace_headers": {"a": "b"},
    "client_request_id": "mine", "deadline": 2.5,
    "request_digest": b"\x02", "cache_salt": "salt", "timeout_s": 1.5, "ignorable": ("priority",), "eos_token_id": 1,
    "num_kept_output_tokens": 5, "lora_name": "sql", "lora_fingerprint": "0" * 32, "speculative_tokens": 3,
    "prompt_embeds": PromptEmbeds.of(1, 2, "float32", b"12345678"),
    "encoder_prompt": EncoderPrompt(2, 16), "block_source": BlockSource("w", 2**63, "127.0.0.1:1", 0.5),
    "mm_features": [MultiModalFeatureSpec(identifier="i", mm_position=PlaceholderRange(offset=1, length=2), grid_thw=(1, 2, 4))],
}  # fmt: skip
OUTPUT: dict[str, Any] = {
    "request_id": "r", "new_token_ids": [5, 6], "first_position": 2, "finish_reason": FinishReason.STOP,
    "awaits_input": True, "stop_reason": "stop", "num_cached_tokens": 16, "prefills_locally": True,
    "transfer_unwanted": True, "error_code": "invalid_request", "error_message": "no", "moments": {"first": 1.5},
    "prefill_chunks": [(1.5, 64)], "new_logprobs": LOGPROBS, "prompt_logprobs": LOGPROBS, "num_preemptions": 1,
    "events": [EngineCoreEvent(EngineCoreEventType.QUEUED, 1.5)], "pooling_output": [0.1, -1e-30],
    "index": 1, "error_field": "top_p", "uncached_tokens": 7, "first_prompt_position": 9, "num_draft_tokens": 8,
    "num_accepted_tokens": 3,
    "migration": Migration(5, 4, 7, b"d" * 16, True), "cached_tokens": CachedTokens(1, 2, 3, 4),
}  # fmt: skip


def test_requests_have_every_field() -> None:
    request = EngineCoreRequest(**fields_of(EngineCoreRequest, REQUEST))
    assert copied(request) == request


def test_outputs_have_every_field() -> None:
    output = EngineCoreOutput(**fields_of(EngineCoreOutput, OUTPUT))
    drafts = SpecDecodingStats(
        num_spec_tokens=2, num_drafts=3, num_draft_tokens=6, num_accepted_tokens=3, num_accepted_tokens_per_pos=[2, 1]
    )
    numbers: dict[str, Any] = {name: number + 1 for number, name in enumerate(SchedulerStats.__struct_fields__)}
    numbers |= {"num_host_blocks_total": (7, 2), "num_host_blocks_used": (5, 1)}
    stats = SchedulerStats(**numbers | {"spec_decoding_stats": drafts, "loaded_loras": ("1" * 32,)})
    outputs = EngineCoreOutputs(
        **fields_of(
            EngineCoreOutputs,
            {
                "outputs": [output, EngineCoreOutput(request_id="s", stop_reason=7)],
                "scheduler_stats": stats,
                "blocks_stored": [b"\x00" * 24],
                "blocks_removed": [b"\xff" * 24],
                "finished_req_ids": ["é"],
                "model_runner_stats": ModelRunnerStats(
                    **fields_of(
                        ModelRunnerStats,
                        {
                            "num_reqs": 1,
                            "num_tokens": 2,
                            "prepare_s": 0.1,
                            "forward_s": 0.2,
                            "sample_s": 0.3,
                            "layer_s": [0.1, 0.1],
                        },
                    )
                ),
            },
        )
    )
    assert copied(outputs) == outputs


def test_an_error_is_the_same_after_its_output_was_sent() -> None:
    error = engine_error(copied(failed_output("r", InvalidRequest("top_p is 2", "top_p"))))
    assert isinstance(error, InvalidRequest)
    assert (str(error), error.field) == ("top_p is 2", "top_p")
    needs = copied(msgspec.structs.replace(failed_output("r", NeedsPrefill("long")), uncached_tokens=7))
    assert isinstance(answer := engine_error(needs), NeedsPrefill)
    assert answer.uncached_tokens == 7


def test_one_eos_token_may_be_given_by_its_own_name() -> None:
    fields: dict[str, Any] = {"request_id": "r", "prompt_token_ids": [1]}
    assert EngineCoreRequest(**fields, eos_token_id=2).eos_token_ids == (2,)
    assert EngineCoreRequest(**fields, eos_token_ids=(3,), eos_token_id=2).eos_token_ids == (2, 3)
    assert EngineCoreRequest(**fields, eos_token_ids=(3, 2), eos_token_id=2).eos_token_ids == (3, 2)


def test_an_output_with_a_finish_reason_is_the_last_unless_the_session_continues() -> None:
    outputs = [
        EngineCoreOutput(request_id="r", new_token_ids=[5]),
        EngineCoreOutput(request_id="r", finish_reason=FinishReason.STOP, awaits_input=True),
        EngineCoreOutput(request_id="r", finish_reason=FinishReason.STOP),
    ]
    assert [output.finished for output in outputs] == [False, False, True]


def test_a_step_names_the_requests_whose_last_sequence_ended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    one = engine.request([1, 2, 3], "one", params={"max_tokens": 2})
    # sequence 1 ends with its first token, sequence 0 later
    two = engine.request([4, 5], "two", n=2, params={"max_tokens": 4, "n": 2})
    for request in (one, two):
        engine.submit(request)
    named = []
    while engine.core.has_work:
        outputs = engine.core.step()
        named.append(outputs.finished_req_ids)
        if len(named) == 1:
            engine.core.scheduler.end_sequence("two", 1)
    assert [each for each in named if each] == [["one"], ["two"]]
    engine.core.add_request(engine.request([7], "three"))
    engine.core.abort_request("three")
    assert engine.core.step().finished_req_ids == ["three"]


def test_the_total_of_a_step_is_the_sum_of_its_sequences() -> None:
    assert SchedulerOutput().total_num_scheduled_tokens == 0
    assert SchedulerOutput(num_scheduled_tokens={"a": 3, "b": 1}).total_num_scheduled_tokens == 4
