"""Events of every stream have one line per field, also for clients that split a text as Python does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from pdserve.common.errors import InternalError
from pdserve.common.security.fingerprint import tokenizer_fingerprint
from pdserve.router.http_front.generation_response import one_line_each
from tests.router.audio_folder import save_audio_folder
from tests.router.fake_worker import ALPHABET, decode_outputs, play
from tests.router.test_sound_placement import FILE

LINE_ENDS = [chr(code) for code in range(0x110000) if len(f"a{chr(code)}b".splitlines()) > 1]
TEXT = "é" + "x".join(LINE_ENDS) + "🙂"
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/responses": {"input": "hello", "instructions": TEXT, "metadata": {"a": TEXT}},
}


def say(cluster: Any, *more: Any) -> None:
    """Have decode workers say the text, and then `more`."""
    spelled = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(TEXT)
    ids = [ALPHABET.index(char) for word, _ in spelled for char in word]
    last = None if more else "stop"
    ends = [None] * (len(ids) - 1) + [last]
    outputs = [decode_outputs(i, token_ids=[t], finish=end) for i, (t, end) in enumerate(zip(ids, ends, strict=True))]
    cluster.of("decode").script = play(*outputs, *more)


def data_of(received: bytes) -> list[Any]:
    """The events for a client that splits the decoded text as `str.splitlines` does."""
    lines = [line for line in received.decode().splitlines() if line]
    fields = [line.partition(": ") for line in lines]
    assert {name for name, _, _ in fields} <= {"event", "data"}
    return [json.loads(value) for name, _, value in fields if name == "data" and value != "[DONE]"]


def test_the_characters_are_those_of_python() -> None:
    assert set("\x85\u2028\u2029\r\n\x0b\x0c\x1c\x1d\x1e") == set(LINE_ENDS)


@pytest.mark.parametrize("end", LINE_ENDS, ids=ascii)
def test_each_line_end_is_escaped_and_means_the_same(end: str) -> None:
    # the last two are parts of longer characters
    text = f"{end}{end}a{end}\u2027\u202a\x84\u0142\u0145"
    written = json.dumps(text, ensure_ascii=False).encode()
    assert len(one_line_each(written).decode().splitlines()) == 1
    assert json.loads(one_line_each(written)) == text


@pytest.mark.parametrize("path", STREAMS)
async def test_every_event_is_read_by_lines(cluster: Any, path: str) -> None:
    await cluster.start(prefill=0)
    say(cluster)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = await cluster.http.post(path, json={**STREAMS[path], "stream": True, limit: 200})
    found = data_of(response.content)
    if path == "/v1/responses":
        assert "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta") == TEXT
        assert found[-1]["response"]["instructions"] == TEXT
        assert found[-1]["response"]["output"][0]["content"][0]["text"] == TEXT
    elif path == "/v1/completions":
        assert "".join(event["choices"][0]["text"] for event in found) == TEXT
    else:
        assert "".join(event["choices"][0]["delta"]["content"] for event in found) == TEXT


async def test_log_probabilities_and_echoed_prompts(cluster: Any) -> None:
    await cluster.start(prefill=0)
    say(cluster)
    body = {"prompt": TEXT, "echo": True, "stream": True, "max_tokens": 200, "return_token_ids": True}
    found = data_of((await cluster.http.post("/v1/completions", json=body)).content)
    assert "".join(event["choices"][0]["text"] for event in found) == TEXT + TEXT


@pytest.mark.parametrize("path", STREAMS)
async def test_an_error_in_mid_stream(cluster: Any, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    await cluster.start(prefill=0)

    async def fail(worker: Any, call: Any) -> None:
        raise InternalError("x")

    monkeypatch.setattr(
        "pdserve.router.requests.tasks.placed_task.as_client_sees", lambda error, request_id: InternalError(TEXT)
    )
    say(cluster, fail)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    response = await cluster.http.post(path, json={**STREAMS[path], "stream": True, limit: 200})
    found = data_of(response.content)
    assert found[-1].get("response", found[-1])["error"]["message"] == TEXT


async def test_transcripts(cluster: Any, tmp_path: Any) -> None:
    folder = save_audio_folder(tmp_path / "audio")
    cluster.folder, cluster.fingerprint = folder, tokenizer_fingerprint(folder)
    await cluster.start(prefill=0)
    say(cluster)
    response = await cluster.http.post(
        "/v1/audio/transcriptions",
        files={"file": ("a.wav", FILE)},
        data={"model": folder.name, "language": "en", "stream": "true"},
    )
    found = data_of(response.content)
    assert found[-1]["type"] == "transcript.text.done", found
    assert found[-1]["text"] == TEXT
