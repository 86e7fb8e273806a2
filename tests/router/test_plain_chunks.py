"""Chunks that have nothing but text: the same objects as where more is written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pdserve.router.openai.response_writer import CompletionResponseWriter
from pdserve.router.requests.usage import Usage
from pdserve.text.outputs.request_output import CompletionOutput


def events(written: bytes) -> list[dict[str, Any]]:
    assert written.endswith(b"\n\n")
    return [json.loads(event.removeprefix(b"data: ")) for event in written.split(b"\n\n")[:-1]]


@pytest.mark.parametrize("chat", [True, False])
def test_a_plain_chunk_has_the_fields_of_one_with_token_ids(chat: bool) -> None:
    def writer(*, ids: bool) -> CompletionResponseWriter:
        return CompletionResponseWriter(
            chat=chat, request_id="r", model="m", include_usage=False, include_timeline=False, returns_token_ids=ids
        )

    plain, full = writer(ids=False), writer(ids=True)
    for index, text in ((0, "a"), (1, 'b"\n'), (0, ""), (1, "\u00e9\U0001f600"), (0, "z")):
        output = CompletionOutput(index=index, text=text, token_ids=[7])
        seen, told = events(plain.chunk(output, Usage())), events(full.chunk(output, Usage()))
        for event in told:
            event.pop("prompt_token_ids", None)
            for choice in event["choices"]:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
            event["created"] = seen[0]["created"]
        assert seen == told
    assert (
        events(plain.chunk(CompletionOutput(index=1, text="", token_ids=[], finish_reason="stop"), Usage()))[0][
            "choices"
        ][0]["finish_reason"]
        == "stop"
    )
