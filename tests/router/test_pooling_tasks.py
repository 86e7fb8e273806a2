"""`/classify`, `/v1/score`, `/v1/rerank` and their gRPC calls: bodies, answers, what a worker is asked, and refusals."""

from __future__ import annotations

import json
import math
from operator import itemgetter
from pathlib import Path
from typing import Any

import grpc
import pytest

from pdserve.common.request.pooling_params import PoolingParams
from pdserve.router.openai.pooling_bodies import PAIR_NAMES
from pdserve.router.requests.fields.request_limits import MAX_EMBEDDING_INPUTS
from pdserve.v1 import inference_pb2
from tests.router.fake_worker import MAX_MODEL_LEN, classes, embedding, save_tokenizer, tokens

LABELS = {"0": "sad", "1": "glad", "2": "mixed"}
CLASSIFY, SCORE, RERANK = "/classify", "/v1/score", "/v1/rerank"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tokenizer(tmp_path_factory.mktemp("models") / "fake-model")
    (folder / "config.json").write_text(json.dumps({"id2label": LABELS}))
    return folder


async def started(cluster: Any, num_labels: int) -> Any:
    """The prefill worker of a fleet of one. num_labels: 0 is a model that embeds."""
    worker = cluster.worker("prefill")
    worker.num_labels = num_labels
    if num_labels:
        worker.hidden_size = 0
    await worker.start()
    await cluster.start(prefill=0, decode=0)
    return worker


async def answered(cluster: Any, path: str, **body: Any) -> dict[str, Any]:
    response = await cluster.http.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["model"] == "fake-model"
    assert answer["id"].removeprefix(path.rpartition("/")[2] + "-") == response.headers["x-request-id"]
    return answer


def text(content: str) -> inference_pb2.EmbedInput:
    return inference_pb2.EmbedInput(text=inference_pb2.TextPrompt(text=content))


async def refusal(cluster: Any, path: str, **body: Any) -> tuple[str | None, str]:
    response = await cluster.http.post(path, json=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["param"], error["message"]


def asked(worker: Any, first: int = 0) -> list[tuple[list[int], PoolingParams | None]]:
    """Tokens and parameters of each call from number `first` on, ordered by tokens: calls of one request go side by side."""
    requests = [call.request for call in worker.calls[first:]]
    return sorted(((request.prompt_token_ids, request.pooling_params) for request in requests), key=itemgetter(0))


async def test_classes(cluster: Any) -> None:
    worker = await started(cluster, 3)
    answer = await answered(cluster, CLASSIFY, input=["hey", "youthere"], model="fake-model", use_activation=False)
    expected = [classes(tokens(text), 3) for text in ("hey", "youthere")]
    assert [entry["probs"] for entry in answer["data"]] == expected
    assert [entry["label"] for entry in answer["data"]] == [LABELS[str(e.index(max(e)))] for e in expected]
    assert [(entry["index"], entry["num_classes"]) for entry in answer["data"]] == [(0, 3), (1, 3)]
    assert answer["usage"] == {"prompt_tokens": 11, "total_tokens": 11, "prompt_tokens_details": {"cached_tokens": 4}}
    params = PoolingParams(task="classify", use_activation=False)
    assert asked(worker) == [(tokens(text), params) for text in ("hey", "youthere")]
    listed = await answered(cluster, CLASSIFY, input=[5, 6, 7])
    assert listed["data"][0]["probs"] == classes([5, 6, 7], 3)
    five_six = inference_pb2.EmbedInput(tokens=inference_pb2.TokenPrompt(token_ids=[5, 6]))
    request = inference_pb2.ClassifyRequest(inputs=[text("hey"), five_six])
    by_grpc = await cluster.grpc.Classify(request)
    assert [list(each.probs) for each in by_grpc.classifications] == [expected[0], classes([5, 6], 3)]
    assert by_grpc.classifications[0].label == answer["data"][0]["label"]
    assert by_grpc.usage.prompt_tokens == 5
    assert [params for _, params in asked(worker, 3)] == 2 * [PoolingParams(task="classify")]
    model = await cluster.grpc.GetModel(inference_pb2.GetModelRequest())
    assert (model.num_labels, model.hidden_size) == (3, 0)
    assert (await cluster.http.get("/ready")).status_code == 200


async def test_scores_of_a_cross_encoder(cluster: Any) -> None:
    worker = await started(cluster, 1)
    answer = await answered(cluster, SCORE, text_1="who", text_2=["a", "bcd"])
    pairs = [tokens("who") + tokens(text) for text in ("a", "bcd")]
    scores = [classes(pair, 1)[0] for pair in pairs]
    assert answer["data"] == [{"index": n, "object": "score", "score": score} for n, score in enumerate(scores)]
    assert asked(worker) == [(pair, PoolingParams(task="score")) for pair in pairs]
    request = inference_pb2.ScoreRequest(text_1=["who"], text_2=["a", "bcd"], use_activation=False)
    by_grpc = await cluster.grpc.Score(request)
    assert list(by_grpc.scores) == scores
    assert asked(worker, 2) == [(pair, PoolingParams(task="score", use_activation=False)) for pair in pairs]
    assert (await answered(cluster, "/score", text_1=["x", "y"], text_2=["y", "x"]))["usage"]["prompt_tokens"] == 4


@pytest.mark.diagonal
@pytest.mark.parametrize("names", PAIR_NAMES)
@pytest.mark.parametrize("num_labels", [0, 1])
async def test_texts_by_each_of_vllms_names(cluster: Any, names: tuple[str, str], num_labels: int) -> None:
    await started(cluster, num_labels)
    for first, second in (("who", "a"), ("who", ["a", "bcd"]), (["x", "y"], ["y", "x"]), (["who"], "a")):
        told = await answered(cluster, SCORE, text_1=first, text_2=second)
        named = await answered(cluster, "/score", **{names[0]: first, names[1]: second}, encoding_format="float")
        assert (named["data"], named["usage"]) == (told["data"], told["usage"])


@pytest.mark.parametrize("path", [RERANK, "/rerank", "/v2/rerank"])
async def test_a_reranking(cluster: Any, path: str) -> None:
    await started(cluster, 1)
    documents = ["a", {"text": "bcd"}, "ef", "fe"]
    texts = ["a", "bcd", "ef", "fe"]
    scores = [classes(tokens("who") + tokens(text), 1)[0] for text in texts]
    order = sorted(range(4), key=lambda place: -scores[place])
    assert order != [0, 1, 2, 3]
    answer = await answered(cluster, path, query="who", documents=documents)
    assert answer["results"] == [
        {"index": place, "document": {"text": texts[place]}, "relevance_score": scores[place]} for place in order
    ]
    short = await answered(cluster, path, query="who", documents=documents, top_n=2, return_documents=False)
    assert short["results"] == [{"index": place, "relevance_score": scores[place]} for place in order[:2]]


async def test_scores_without_a_head_are_cosines(cluster: Any) -> None:
    """Each different text is embedded once."""
    worker = await started(cluster, 0)
    answer = await answered(cluster, SCORE, text_1="who", text_2=["a", "who", "a"])
    vectors = {text: embedding(tokens(text)) for text in ("who", "a")}
    products = sum(one * other for one, other in zip(vectors["who"], vectors["a"], strict=True))
    cosine = products / math.hypot(*vectors["who"]) / math.hypot(*vectors["a"])
    assert [entry["score"] for entry in answer["data"]] == pytest.approx([cosine, 1.0, cosine])
    assert asked(worker) == [(tokens(text), PoolingParams()) for text in ("a", "who")]
    ranked = await answered(cluster, RERANK, query="who", documents=["a", "who"], top_n=1)
    assert ranked["results"][0]["index"] == 1
    assert list((await cluster.grpc.Score(inference_pb2.ScoreRequest(text_1=["a"], text_2=["a"]))).scores) == [1.0]
    field, message = await refusal(cluster, SCORE, text_1="a", text_2="b", use_activation=False)
    assert (field, "scores are cosines of embeddings" in message) == ("use_activation", True)


async def test_a_model_refuses_the_tasks_that_it_lacks(cluster: Any) -> None:
    worker = await started(cluster, 3)
    for path, body, message in (
        ("/v1/completions", {"prompt": "x"}, "classifies into 3 labels: it has a classification head and generates no"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}, "generates no text"),
        ("/v1/embeddings", {"input": "x"}, "gives no embeddings (task 'embed')"),
        (SCORE, {"text_1": "x", "text_2": "y"}, "head has 3 labels, and one is needed (task 'score')"),
        (RERANK, {"query": "x", "documents": ["y"]}, "and one is needed (task 'score')"),
    ):
        field, told = await refusal(cluster, path, **body)
        assert field == "model"
        assert message in told
    call = cluster.grpc.Generate(inference_pb2.GenerateRequest(text=inference_pb2.TextPrompt(text="x")))
    with pytest.raises(grpc.aio.AioRpcError, match="generates no text") as refused:
        await anext(aiter(call))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not worker.calls


async def test_a_model_without_a_head_refuses_classes(cluster: Any) -> None:
    worker = await started(cluster, 0)
    assert await refusal(cluster, CLASSIFY, input="x") == (
        "model",
        "the model has no classification head (task 'classify')",
    )
    with pytest.raises(grpc.aio.AioRpcError, match="has no classification head") as refused:
        await cluster.grpc.Classify(inference_pb2.ClassifyRequest(inputs=[text("hey")]))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not worker.calls


LONG = "x" * MAX_MODEL_LEN
MANY = ["y"] * (MAX_EMBEDDING_INPUTS + 1)
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CLASSIFY, {"input": MANY}, "input", "input has 2049 entries, 1 to 2048 are allowed"),
    (CLASSIFY, {"input": ["a", LONG + "x"]}, "input[1]", "input[1] has 257 tokens; the model's length is 256"),
    (CLASSIFY, {"input": "a", "dimensions": 3}, "dimensions", "dimensions is not a known field"),
    (SCORE, {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "text_1 has 2 texts and text_2 1: one, or as many"),
    (SCORE, {"text_1": "a", "text_2": []}, "text_2", "text_2 is empty"),
    (SCORE, {"text_1": "a", "text_2": ["b", ""]}, "text_2", "text_2[1] is empty"),
    (SCORE, {"text_1": "a", "text_2": MANY}, "text_2", "text_2 has 2049 entries, 1 to 2048 are allowed"),
    (SCORE, {"text_1": MANY, "text_2": MANY}, "text_1", "text_1 has 2049 entries"),
    (SCORE, {"text_1": "a", "text_2": ["b", LONG]}, "text_2[1]", "text_2[1] has 257 tokens"),
    (SCORE, {"text_1": "a", "text_2": 3}, "text_2", "expected"),
    (
        SCORE,
        {},
        "text_1",
        "no texts are given: one pair of fields is needed, text_1 and text_2, or queries and documents",
    ),
    (SCORE, {"text_1": "a"}, "text_2", "text_2 is missing, text_1 needs it"),
    (SCORE, {"text_2": "a", "text_1": None}, "text_1", "text_1 is missing, text_2 needs it"),
    (SCORE, {"queries": "a"}, "documents", "documents or items is missing, queries needs it"),
    (SCORE, {"items": "a"}, "queries", "queries is missing, items needs it"),
    (SCORE, {"queries": "a", "text_2": "b"}, "queries", "text_2, queries are given: one pair of fields is needed"),
    (SCORE, {"queries": "a", "documents": "b", "items": "c"}, "items", "queries, documents, items are given"),
    (SCORE, {"queries": "a", "documents": ["b", ""]}, "documents", "documents[1] is empty"),
    (SCORE, {"queries": ["a", "b"], "items": ["c"]}, "queries", "queries has 2 texts and items 1: one, or as many"),
    (SCORE, {"data_1": "a", "data_2": ["b", LONG]}, "data_2[1]", "data_2[1] has 257 tokens"),
    (
        SCORE,
        {"data_1": "a", "data_2": "b", "encoding_format": "base64"},
        "encoding_format",
        'only "float" is supported',
    ),
    (RERANK, {"query": "", "documents": ["b"]}, "query", "query is empty"),
    (RERANK, {"query": "a", "documents": []}, "documents", "documents is empty"),
    (RERANK, {"query": "a", "documents": MANY}, "documents", "documents has 2049 entries"),
    (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "top_n must be at least 0, not -1"),
    (RERANK, {"query": LONG, "documents": ["b"]}, "documents[0]", "documents[0] has 257 tokens"),
    (RERANK, {"query": "a", "documents": [{"image": "b"}]}, "documents", "is not a known field"),
]


async def test_bad_bodies(cluster: Any) -> None:
    worker = await started(cluster, 1)
    for path, body, param, message in REFUSED:
        found, told = await refusal(cluster, path, **body)
        assert message in told, path
        assert (found or "").startswith(param), (found, told)
    with pytest.raises(grpc.aio.AioRpcError, match="text_2 has 2049 entries"):
        await cluster.grpc.Score(inference_pb2.ScoreRequest(text_1=["a"], text_2=MANY))
    # inputs beside one that is too long may have been computed when it is refused
    assert all(len(token_ids) <= 2 for token_ids, _ in asked(worker))
