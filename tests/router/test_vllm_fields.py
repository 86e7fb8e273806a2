"""Every field of vLLM's chats and completions is accepted with its meaning, without effect, or refused by name."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from pdserve.common.errors import InvalidRequest
from pdserve.router.bodies.request_body import parse_body
from pdserve.router.openai.no_op_fields import IGNORED, NO_OP
from pdserve.router.openai.protocol import ChatBody, CompletionBody
from pdserve.router.requests.preparation import CallFields
from tests.router.fake_worker import said

BOTH = frozenset(
    re.findall(
        r"\w+",
        """add_special_tokens allowed_token_ids bad_words cache_salt echo ec_transfer_params frequency_penalty ignore_eos
include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens
mm_payload model n presence_penalty priority prompt_logprobs repetition_detection repetition_penalty request_id response_format
return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed session_id
skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval stream_options structured_outputs
temperature thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs
watermarking""",
    )
)
CHAT = frozenset(
    re.findall(
        r"\w+",
        """add_generation_prompt chat_template
    chat_template_kwargs continue_final_message documents include_reasoning max_completion_tokens
media_io_kwargs messages mm_processor_kwargs parallel_tool_calls reasoning_effort return_prompt_text tool_choice tools
top_logprobs""",
    )
)
COMPLETION = frozenset(("prompt", "suffix"))
"""The fields of vLLM 0.32 by name; `prompt_embeds` is refused as unknown."""
REFUSED: dict[str, Any] = {
    "chat_template": "{{ messages[0].content }}",
    "ec_transfer_params": {"a": 1},
    "kv_transfer_params": {"do_remote_prefill": True},
    "logprob_token_ids": [3],
    "media_io_kwargs": {"video": {"num_frames": 4}},
    "mm_processor_kwargs": {"num_crops": 4},
    "repetition_detection": {"max_pattern_size": 3},
    "return_prompt_text": True,
    "suffix": "end",
    "thinking_token_budget": 10,
    "vllm_xargs": {"a": 1},
    "watermarking": True,
}
"""Field -> a value with an effect in vLLM that there is not here."""


@pytest.mark.parametrize(("kind", "own"), [(ChatBody, CHAT), (CompletionBody, COMPLETION)])
def test_every_field_is_known(kind: type[Any], own: frozenset[str]) -> None:
    assert {*BOTH, *own} - {*kind.__struct_fields__} == set()


def test_what_has_no_effect_or_is_refused_is_listed() -> None:
    of_vllm = {*BOTH, *CHAT, *COMPLETION}
    assert of_vllm & {*NO_OP} == {*REFUSED}
    assert not of_vllm & {*IGNORED} & {*NO_OP}


@pytest.mark.parametrize("field", REFUSED)
def test_refusals(field: str) -> None:
    for kind, prompt in (
        (ChatBody, {"messages": [{"role": "user", "content": "x"}]}),
        (CompletionBody, {"prompt": "x"}),
    ):
        if field not in kind.__struct_fields__:
            continue
        body: Any = parse_body(json.dumps({**prompt, field: REFUSED[field]}).encode(), kind, 256)
        with pytest.raises(InvalidRequest, match=f"^{field} is ") as refused:
            body.requests({}, CallFields(1.0, {}, ""))
        assert refused.value.field == field


@pytest.fixture
async def quick(cluster: Any) -> Any:
    return await cluster.start(prefill=0, decode=1)


async def chat(cluster: Any, *messages: tuple[str, Any], **body: Any) -> dict[str, Any]:
    told = [{"role": role, "content": content} for role, content in messages]
    response = await cluster.http.post("/v1/chat/completions", json={"messages": told, "max_tokens": 3, **body})
    assert response.status_code == 200, response.text
    return response.json()


PARTS = [{"type": "text", "text": "So"}, {"type": "text", "text": "it"}]


@pytest.mark.parametrize(
    ("messages", "begins"),
    [
        ([("user", "x"), ("assistant", "So")], "So"),
        ([("user", "x"), ("assistant", PARTS)], "So\nit"),
        ([("assistant", "So"), ("user", "x")], ""),
    ],
)
async def test_a_chat_that_echoes_the_assistants_last_message(quick: Any, messages: Any, begins: str) -> None:
    whole = await chat(quick, *messages, echo=True, n=2)
    assert [choice["message"]["content"] for choice in whole["choices"]] == [begins + said(3), begins + said(3, 1)]
    plain = await chat(quick, *messages)
    assert plain["choices"][0]["message"]["content"] == said(3)
    told = [{"role": role, "content": content} for role, content in messages]
    body = {"messages": told, "max_tokens": 3, "echo": True, "stream": True}
    lines = (await quick.http.post("/v1/chat/completions", json=body)).text.split("\n\n")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in lines if line and "[DONE]" not in line]
    assert "".join(delta.get("content", "") for delta in deltas) == begins + said(3)
    assert deltas[0]["content"] == begins


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_alone(quick: Any, stream: bool) -> None:
    body = {"prompt": ["hi", "you"], "max_tokens": 0, "echo": True, "n": 2, "return_token_ids": True}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await quick.http.post("/v1/completions", json=body | options)
    assert response.status_code == 200, response.text
    if stream:
        events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line and "[DONE]" not in line]
        choices, usage = [event["choices"][0] for event in events[:-1]], events[-1]["usage"]
    else:
        choices, usage = response.json()["choices"], response.json()["usage"]
    by_index = sorted((choice["index"], choice["text"], choice["finish_reason"]) for choice in choices)
    assert by_index == [(0, "hi", "length"), (1, "hi", "length"), (2, "you", "length"), (3, "you", "length")]
    assert all(choice["token_ids"] == [] for choice in choices)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 0)
    assert all(call.request.sampling_params.max_tokens == 1 for call in quick.of("decode").calls)


async def test_no_output_needs_echo(quick: Any) -> None:
    for path, prompt in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": [{"role": "user"}]})):
        for echo in (False, path.startswith("chat")):
            body = {**prompt, "max_tokens": 0, "echo": echo}
            error = (await quick.http.post(f"/v1/{path}", json=body)).json()["error"]
            assert error["param"] == "max_tokens", error
            assert "max_tokens must be at least 1" in error["message"]
