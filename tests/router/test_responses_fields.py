"""Fields of `/v1/responses` beyond those of a chat's: vLLM's, and tools that are allowed; paths that are not served."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router.test_responses import SUM, long_worker, sent


async def test_further_fields_of_vllm(cluster: Any) -> None:
    await long_worker(cluster)
    given = await sent(
        cluster, stop=["zz"], ignore_eos=True, logit_bias={"3": 5}, structured_outputs={"regex": "a+"},
    )  # fmt: skip
    assert (
        list(given.sampling_params.stop),
        given.sampling_params.ignore_eos,
        dict(given.sampling_params.logit_bias),
    ) == (
        ["zz"],
        True,
        {3: 5},
    )
    assert given.sampling_params.structured_outputs.regex == "a+"
    for stop in ("", [""], []):
        assert not (await sent(cluster, stop=stop)).sampling_params.stop
    assert list((await sent(cluster, stop="x")).sampling_params.stop) == ["x"]
    options = {"text": {"format": {"type": "json_object"}}, "structured_outputs": {"disable_any_whitespace": True}}
    form = (await sent(cluster, **options)).sampling_params.structured_outputs
    assert (form.json_object, form.disable_any_whitespace) == (True, True)
    await sent(cluster, include=["reasoning.encrypted_content"])
    answer = await cluster.http.post(
        "/v1/responses", json={"input": "hi", "presence_penalty": 1, "max_output_tokens": 1}
    )
    assert (answer.json()["presence_penalty"], answer.json()["frequency_penalty"]) == (1, 0)


async def test_allowed_tools_are_the_only_ones(cluster: Any) -> None:
    await long_worker(cluster)
    other = SUM | {"name": "other"}
    alone = await sent(cluster, tools=[SUM], tool_choice="required")
    allowed: dict[str, Any] = {"type": "allowed_tools", "tools": [{"type": "function", "name": "sum"}]}
    forced = await sent(cluster, tools=[other, SUM], tool_choice=allowed | {"mode": "required"})
    assert (forced.prompt_token_ids, forced.sampling_params.structured_outputs) == (
        alone.prompt_token_ids,
        alone.sampling_params.structured_outputs,
    )
    free = await sent(cluster, tools=[other, SUM], tool_choice=allowed | {"mode": "auto"})
    assert free.prompt_token_ids == alone.prompt_token_ids
    assert not free.sampling_params.structured_outputs


@pytest.mark.parametrize("path", ["input_tokens", "compact", "x/cancel"])
async def test_paths_that_are_not_served(cluster: Any, path: str) -> None:
    await cluster.start(prefill=0, decode=1)
    for method in ("GET", "POST"):
        answer = await cluster.http.request(method, f"/v1/responses/{path}", json={})
        told = f"there is no such path: {method} /v1/responses/{path}"
        assert (answer.status_code, answer.json()["error"]["message"]) == (404, told)
