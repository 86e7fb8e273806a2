"""Request parameters through real prefill and decode processes, by `transformers`' logits and processors (I1)."""

from __future__ import annotations

from typing import Any

import grpc
import httpx
import numpy as np
import pytest
import torch

from pdserve.engine.sampling.token_texts import BadTexts, TokenTexts
from pdserve.text.bad_words import bad_words_token_ids
from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2
from tests.support.models.logit_reference import processed
from tests.support.models.oracle import NEAR_TIE, Oracle
from tests.support.processes.inference_client import InferenceClient
from tests.support.processes.shared_cluster import SharedCluster
from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.process

PROMPT = [3 + (place * place) % 290 for place in range(100)]
MAX_TOKENS = 16
NUM_TOP = 5


async def ask(client: InferenceClient, **sampling: Any) -> list[inference_pb2.GenerateResponse]:
    return [message async for message in client.start(PROMPT, max_tokens=MAX_TOKENS, logprobs=NUM_TOP, **sampling)]


def check(oracle: Oracle, messages: list[inference_pb2.GenerateResponse], params: dict[str, Any]) -> list[int]:
    """Each token is the best by the oracle's processed logits, and its log-probabilities are those of the raw ones."""
    answer = [token_id for message in messages for token_id in message.token_ids]
    entries = [entry for message in messages for entry in message.logprobs]
    assert len(entries) == len(answer) == MAX_TOKENS
    logits = oracle.logits([*PROMPT, *answer])[len(PROMPT) - 1 : -1]
    logprobs = torch.log_softmax(logits, -1)
    for place, (token_id, entry) in enumerate(zip(answer, entries, strict=True)):
        scores = processed(PROMPT, answer[:place], logits[place], params)
        assert float(scores.max() - scores[token_id]) < NEAR_TIE, f"{params}: token {place}"
        assert entry.sampled.token_id == token_id
        assert abs(entry.sampled.logprob - float(logprobs[place, token_id])) < 1e-4
        best = logprobs[place].topk(NUM_TOP).values
        assert float((torch.tensor([top.logprob for top in entry.top]) - best).abs().max()) < 1e-4
    assert abs(messages[-1].cumulative_logprob - sum(entry.sampled.logprob for entry in entries)) < 1e-3
    return answer


async def check_prompt(oracle: Oracle, http: httpx.AsyncClient) -> None:
    """Both of HTTP's ways to ask for a prompt's log-probabilities."""
    of_prompt = torch.log_softmax(oracle.logits(PROMPT), -1)
    expected = [float(of_prompt[place, token_id]) for place, token_id in enumerate(PROMPT[1:])]
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    choice = (await http.post("/v1/completions", json=body | {"prompt_logprobs": 2})).json()["choices"][0]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    assert [entry[str(token)]["logprob"] for entry, token in zip(others, PROMPT[1:], strict=True)] == pytest.approx(
        expected, abs=1e-4
    )
    assert choice["logprobs"] is None
    echoed = (await http.post("/v1/completions", json=body | {"echo": True, "logprobs": 1})).json()["choices"][0]
    assert [len(values) for values in echoed["logprobs"].values()] == [len(PROMPT) + 3] * 4
    assert echoed["logprobs"]["token_logprobs"][0] is None
    assert echoed["logprobs"]["token_logprobs"][1 : len(PROMPT)] == pytest.approx(expected, abs=1e-4)
    offsets = echoed["logprobs"]["text_offset"]
    assert offsets == sorted(offsets)
    assert echoed["text"][offsets[len(PROMPT)] :].startswith(echoed["logprobs"]["tokens"][len(PROMPT)])
    alone = {"echo": True, "logprobs": 1, "max_tokens": 0, "return_tokens_as_token_ids": True}
    prompt = (await http.post("/v1/completions", json=body | alone)).json()["choices"][0]
    assert prompt["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in PROMPT]
    for name in ("token_logprobs", "text_offset"):
        assert prompt["logprobs"][name] == pytest.approx(echoed["logprobs"][name][: len(PROMPT)], abs=1e-4)
    assert echoed["text"].startswith(prompt["text"])
    split = body | {"prompt": "😀😀😀😀😀😀 x", "echo": True, "logprobs": 1}
    choice = (await http.post("/v1/completions", json=split)).json()["choices"][0]
    told = choice["logprobs"]
    whole = [
        (begin, name) for begin, name in zip(told["text_offset"], told["tokens"], strict=True) if "\ufffd" not in name
    ]
    assert any(name.endswith("x") for _, name in whole)
    assert all(choice["text"][begin:].startswith(name) for begin, name in whole)


async def test_i1_parameters_and_log_probabilities_through_p_and_d(shared: SharedCluster) -> None:
    model, oracle, cluster = shared.model, shared.oracle, shared.processes
    tokenizer = Tokenizer.from_folder(model)
    async with InferenceClient(cluster.router.address) as client:
        messages = await ask(client)
        assert "kv_landed" in {moment.name for moment in messages[-1].moments}
        plain = check(oracle, messages, {})
        given: list[dict[str, Any]] = [
            {"presence_penalty": -2.0},
            {"frequency_penalty": -1.0},
            {"repetition_penalty": 1.6},
            {"logit_bias": {plain[0]: -100.0, plain[1]: -100.0}},
            {"allowed_token_ids": sorted({*range(5, 200, 3)} - {plain[0]})},
        ]
        for params in given:
            assert check(oracle, await ask(client, **params), params) != plain, params
        word = next(
            text
            for token in plain
            if (text := tokenizer.decode([token], skip_special_tokens=True)) and "\ufffd" not in text
        )
        texts = TokenTexts.from_folder(model, tokenizer.vocab_size)
        assert texts is not None
        bad = BadTexts(texts, (word.lstrip() or word,))
        rules = {
            "bad_words_token_ids": bad_words_token_ids(tokenizer, (word,)),
            "forbidden_after": lambda output: bad.forbidden_after(np.array(output, np.int64)).tolist(),
        }
        answer = check(oracle, await ask(client, bad_words=[word]), rules)
        assert (word.lstrip() or word) not in tokenizer.decode(answer, skip_special_tokens=True)

        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await ask(client, allowed_token_ids=[7], stop_token_ids=[7], min_tokens=2)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "leave no token for output position 0" in str(refused.value.details())
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    async with httpx.AsyncClient(base_url=f"http://{cluster.router.http}", trust_env=False, timeout=HANG_S) as http:
        logprobs = (await http.post("/v1/completions", json=body)).json()["choices"][0]["logprobs"]
        assert [len(values) for values in logprobs.values()] == [MAX_TOKENS] * 4
        assert sum(logprobs["token_logprobs"]) == pytest.approx(messages[-1].cumulative_logprob, abs=1e-3)
        await check_prompt(oracle, http)
    async with InferenceClient(cluster.router.address) as client:
        messages = await ask(client, prompt_logprobs=NUM_TOP, n=2)
        firsts = [message for message in messages if message.prompt_logprobs]
        assert sorted(message.index for message in firsts) == [0, 1]
        of_prompt = torch.log_softmax(oracle.logits(PROMPT), -1)
        for place, entry in enumerate(firsts[0].prompt_logprobs):
            assert entry.sampled.token_id == PROMPT[place + 1]
            assert abs(entry.sampled.logprob - float(of_prompt[place, PROMPT[place + 1]])) < 1e-4
            assert len(entry.top) == NUM_TOP
        assert len(firsts[0].prompt_logprobs) == len(PROMPT) - 1
