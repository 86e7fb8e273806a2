"""`/tokenize` and `/detokenize`, in vLLM's shapes."""

from __future__ import annotations

import asyncio
import json
import threading
from types import SimpleNamespace

import pytest

from pdserve.common.net.body_budget import BodyRoom
from pdserve.common.security.fingerprint import tokenizer_fingerprint
from pdserve.common.settings.api_key_file import key_hash
from pdserve.router.http_front.tokenization_http import MAX_TOKENS
from pdserve.router.requests.preparation import Preparation
from pdserve.text.prompt import max_text_bytes
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.router.fake_worker import EOS, MAX_MODEL_LEN, SPECIAL, said, save_tokenizer, tokens
from tests.support.run.waiting import HANG_S, eventually

MAX_TEXT_BYTES = max_text_bytes(131_072)
USER = {"role": "user", "content": "hi"}


@pytest.fixture
async def quick(cluster):
    return await cluster.start(prefill=0, decode=1)


async def ask(cluster, path, **body):
    response = await cluster.http.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_prompt(quick):
    answer = await ask(quick, "/tokenize", model="fake-model", prompt="hi there")
    ids = tokens("hi\u0120there")
    assert answer == {"count": 8, "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None}
    answer = await ask(quick, "/tokenize", prompt="i j", return_token_strs=True)
    # as the vocabulary has them
    assert answer["token_strs"] == ["i", "\u0120", "j"]
    assert (await ask(quick, "/tokenize", prompt=""))["tokens"] == []


@pytest.mark.few(1)
@pytest.mark.parametrize("parse_special", [True, False])
async def test_special_tokens_in_messages_are_text_where_the_router_says_so(cluster, parse_special):
    await cluster.start(prefill=0, decode=1, parse_special=parse_special)
    messages = [{"role": "user", "content": f"a{SPECIAL[0]}b"}]
    inner = [EOS] if parse_special else tokens(SPECIAL[0])
    whole = [EOS + 1, *tokens("a"), *inner, *tokens("b"), EOS + 2]
    for fields in ({}, {"add_special_tokens": True}):
        assert (await ask(cluster, "/tokenize", messages=messages, **fields))["tokens"] == whole
    await cluster.http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1})
    assert list(cluster.of("decode").calls[0].request.prompt_token_ids) == whole
    assert (await ask(cluster, "/tokenize", prompt=SPECIAL[0]))["tokens"] == [EOS]


async def test_messages_go_through_the_chat_template(quick):
    whole = [EOS + 1, *tokens("hi"), EOS + 2]
    assert (await ask(quick, "/tokenize", messages=[USER]))["tokens"] == whole
    cut = await ask(quick, "/tokenize", messages=[USER], add_generation_prompt=False, add_special_tokens=False)
    assert cut["tokens"] == whole[:-1]
    # what a chat is computed from
    await quick.http.post("/v1/chat/completions", json={"messages": [USER], "max_tokens": 1})
    assert list(quick.of("decode").calls[0].request.prompt_token_ids) == whole
    await quick.http.post(
        "/v1/chat/completions", json={"messages": [USER], "max_tokens": 1, "add_generation_prompt": False}
    )
    assert list(quick.of("decode").calls[1].request.prompt_token_ids) == whole[:-1]


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "fields",
    [
        {"tools": TOOLS},
        {"tools": TOOLS, "chat_template_kwargs": {"mark": "x"}},
        {"chat_template_kwargs": {"mark": "x"}, "add_generation_prompt": False},
        {"tools": TOOLS, "chat_template_kwargs": {"mark": "y"}, "add_special_tokens": True},
        {"messages": [USER, {"role": "assistant", "content": "a"}], "tools": TOOLS, "continue_final_message": True},
        {"tools": [], "chat_template_kwargs": {}},
        {"tools": None, "chat_template_kwargs": None},
    ],
)
async def test_messages_have_the_tokens_of_the_chat_with_the_same_fields(cluster, tmp_path, fields):
    folder = save_tokenizer(tmp_path / "fake-model")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}{{ mark }}"
        "{% for message in messages %}{{ message.content }}{% endfor %}{% if add_generation_prompt %}z{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    cluster.folder, cluster.fingerprint = folder, tokenizer_fingerprint(folder)
    await cluster.start(prefill=0, decode=1)
    body = {"messages": [USER], **fields}
    response = await cluster.http.post("/v1/chat/completions", json={**body, "max_tokens": 1})
    assert response.status_code == 200, response.text
    ids = list(cluster.of("decode").calls[0].request.prompt_token_ids)
    assert (await ask(cluster, "/tokenize", **body))["tokens"] == ids
    assert (tokens("f")[0] in ids) == bool(fields.get("tools"))
    mark = (fields.get("chat_template_kwargs") or {}).get("mark")
    assert mark is None or tokens(mark)[0] in ids


async def test_and_back(quick):
    ids = (await ask(quick, "/tokenize", prompt="gr\u00fc\u00df dich"))["tokens"]
    assert await ask(quick, "/detokenize", tokens=ids) == {"prompt": "gr\u00fc\u00df dich"}
    assert await ask(quick, "/detokenize", tokens=[EOS, EOS + 2]) == {"prompt": SPECIAL[0] + SPECIAL[2]}
    assert await ask(quick, "/detokenize", tokens=[], model="fake-model") == {"prompt": ""}


async def test_no_worker_is_needed(cluster):
    await cluster.start(prefill=0, decode=0)
    answer = await ask(cluster, "/tokenize", prompt="a")
    assert (answer["tokens"], answer["max_model_len"]) == (tokens("a"), None)
    assert await ask(cluster, "/detokenize", tokens=tokens("a")) == {"prompt": "a"}


async def test_but_a_key_is(cluster):
    await cluster.start(prefill=0, decode=0, api_keys=("k1",))
    for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})):
        assert (await cluster.http.post(path, json=body)).status_code == 401
        response = await cluster.http.post(path, json=body, headers={"authorization": "Bearer k1"})
        assert response.status_code == 200


@pytest.mark.slow
async def test_texts_longer_than_the_model_takes_are_counted_but_not_any(cluster):
    quick = await cluster.start(prefill=0, decode=1, max_request_bytes=8 << 20)
    answer = await ask(quick, "/tokenize", prompt="x" * (MAX_MODEL_LEN + 1))
    assert (answer["count"], answer["max_model_len"]) == (MAX_MODEL_LEN + 1, MAX_MODEL_LEN)
    whole = "x " * (MAX_TEXT_BYTES // 2 - 1) + "\u00fc"
    answer = await ask(quick, "/tokenize", prompt=whole)
    assert answer["count"] == MAX_TEXT_BYTES
    assert await ask(quick, "/detokenize", tokens=answer["tokens"]) == {"prompt": whole}
    for path, body, field, told in (
        ("/tokenize", {"prompt": f"{whole}x"}, "prompt", f"prompt has {MAX_TEXT_BYTES + 1} bytes"),
        (
            "/tokenize",
            {"messages": [USER | {"content": whole}]},
            "messages",
            f"messages has {MAX_TEXT_BYTES + len(SPECIAL[1] + SPECIAL[2])} bytes",
        ),
        ("/detokenize", {"tokens": [0] * (MAX_TOKENS + 1)}, "tokens", f"tokens has {MAX_TOKENS + 1} entries"),
    ):
        response = await quick.http.post(path, json=body)
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, field)
        assert told in error["message"]


@pytest.fixture
async def held(cluster, monkeypatch):
    """Whoever detokenizes stays at it until `go_on` is set; `asked` counts those that wait, too."""
    held = SimpleNamespace(go_on=threading.Event(), begun=asyncio.Event(), asked=0, served=[])
    loop = asyncio.get_running_loop()
    decode, aside = Tokenizer.decode, Preparation.in_background_pool

    def wait(tokenizer, token_ids, **options):
        held.served.append(token_ids)
        loop.call_soon_threadsafe(held.begun.set)
        assert held.go_on.wait(HANG_S)
        return decode(tokenizer, token_ids, **options)

    def count(preparation, call, client):
        held.asked += 1
        return aside(preparation, call, client)

    monkeypatch.setattr(Tokenizer, "decode", wait)
    monkeypatch.setattr(Preparation, "in_background_pool", count)
    yield held
    held.go_on.set()


async def until(look):
    """Returns when `look` says true."""
    await eventually(look)


def detokenize(cluster, *token_ids):
    return asyncio.create_task(cluster.http.post("/detokenize", json={"tokens": token_ids}))


async def test_no_generation_waits_for_it(quick, held):
    asking = [detokenize(quick, *tokens("ab")) for _ in range(5)]
    await until(lambda: held.asked == 5)
    assert await quick.text(max_tokens=5) == said(5)
    assert not any(task.done() for task in asking)
    held.go_on.set()
    assert [response.json() for response in await asyncio.gather(*asking)] == [{"prompt": "ab"}] * 5


async def test_who_would_wait_behind_too_many_is_refused(quick, held, monkeypatch):
    monkeypatch.setattr("pdserve.router.requests.preparation.MAX_ASIDE", 2)
    asking = [detokenize(quick, 1) for _ in range(5)]
    await until(lambda: sum(task.done() for task in asking) == 2)
    refused = [task.result() for task in asking if task.done()]
    assert [(response.status_code, response.headers["retry-after"]) for response in refused] == [(429, "1")] * 2
    held.go_on.set()
    responses = await asyncio.gather(*asking)
    assert sorted(response.status_code for response in responses) == [200] * 3 + [429] * 2
    assert (await detokenize(quick, 1)).status_code == 200


async def test_nothing_is_done_for_who_has_left(quick, held):
    first = detokenize(quick, 1)
    await held.begun.wait()
    leaving = detokenize(quick, 2)
    await until(lambda: held.asked == 2)
    leaving.cancel()
    async with asyncio.timeout(HANG_S):
        told = 'pdserve_requests_total{outcome="cancelled"} 1.0'
        while told not in (await quick.http.get("/metrics")).text:  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(0.002)
    assert 'code="cancelled"' not in (await quick.http.get("/metrics")).text
    held.go_on.set()
    assert ((await first).status_code, (await detokenize(quick, 3)).status_code) == (200, 200)
    assert [list(token_ids) for token_ids in held.served] == [[1], [3]]


async def test_nothing_is_done_for_who_has_waited_too_long(cluster, held):
    await cluster.start(prefill=0, decode=0, request_timeout_s=1.0)
    first, second = detokenize(cluster, 1), detokenize(cluster, 2)
    for response in await asyncio.gather(first, second):
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
    held.go_on.set()
    assert (await detokenize(cluster, 3)).status_code == 200
    assert len(held.served) == 2
    assert list(held.served[1]) == [3]


async def test_one_tenant_cannot_hold_the_thread_beside(cluster, held, monkeypatch, tmp_path):
    monkeypatch.setattr("pdserve.router.requests.preparation.MAX_ASIDE", 4)
    file = tmp_path / "keys.toml"
    file.write_text(
        "".join(f'[[keys]]\nname = "{name}"\nsha256 = "{key_hash(name)}"\n' for name in ("greedy", "quiet"))
    )
    await cluster.start(prefill=0, decode=0, api_keys_file=str(file))

    def ask(name):
        headers = {"authorization": f"Bearer {name}"}
        return asyncio.create_task(cluster.http.post("/detokenize", json={"tokens": [1]}, headers=headers))

    greedy = [ask("greedy") for _ in range(10)]
    # one is served, two wait, as many as others still could
    await until(lambda: sum(task.done() for task in greedy) == 7)
    quiet = ask("quiet")
    await until(lambda: held.asked == 11)
    held.go_on.set()
    assert (await quiet).status_code == 200
    assert sorted(task.status_code for task in await asyncio.gather(*greedy)) == [200] * 3 + [429] * 7


async def test_a_text_longer_than_answers_may_be_is_refused(cluster):
    """Its tokens are few bytes each, and their texts are not."""
    await cluster.start(prefill=0, decode=0, max_answer_bytes=20_000)
    text = SPECIAL[0] * 5000
    response = await cluster.http.post("/detokenize", json={"tokens": [EOS] * 5000})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "tokens")
    assert error["message"].startswith(f"tokens has a text of {len(text)} bytes, at most 20000 are answered")
    assert await ask(cluster, "/detokenize", tokens=tokens("a") * 20_000) == {"prompt": "a" * 20_000}


async def test_a_long_text_has_room_before_it_is_made(cluster, monkeypatch):
    """A body of known length says little about the texts of its tokens."""
    rooms = []
    grow = BodyRoom.grow

    async def noted(room, num_bytes):
        await grow(room, num_bytes)
        rooms.append((num_bytes, room._budget.used_bytes))

    monkeypatch.setattr(BodyRoom, "grow", noted)
    await cluster.start(prefill=0, decode=0)
    num_bytes = 3 * len(SPECIAL[0]) * 5000
    assert await ask(cluster, "/detokenize", tokens=[EOS] * 5000) == {"prompt": SPECIAL[0] * 5000}
    assert rooms == [(num_bytes, max(num_bytes, 40 * 5000))]
