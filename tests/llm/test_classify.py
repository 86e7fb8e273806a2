"""`LLM.classify`, `LLM.score` and `encode`, by transformers' own classes in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pdserve.common.errors import InvalidRequest
from pdserve.llm import LLM, AsyncLLM, PoolingOutput, PoolingParams, SamplingParams
from pdserve.text.beam_search import BeamSearchParams
from tests.llm.conftest import TINY
from tests.support.engine.llm_requests import TEXT, core_of
from tests.support.models.checkpoints import make_classifier
from tests.support.models.oracle import Oracle

QUERY, DOCUMENTS = "Where does the water go?", ["To the sea.", "one, two, three", "Where does the water go?"]
Served = tuple[LLM, PreTrainedModel]


def _served(folder: Path, num_labels: int, **fields: Any) -> Iterator[Served]:
    model = make_classifier(folder, num_labels=num_labels, **fields)
    with LLM(folder, **TINY) as llm:
        yield llm, model
        core_of(llm).scheduler.check(idle=True)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _served(tmp_path_factory.mktemp("classifier"), 3, problem_type="multi_label_classification")


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from _served(tmp_path_factory.mktemp("cross-encoder"), 1)


def _logits(model: PreTrainedModel, token_ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits[0]
    return logits


def test_classes_and_raw_numbers(classifier: Served) -> None:
    llm, model = classifier
    raw = PoolingParams(use_activation=False)
    prompts: list[Any] = [TEXT, [9, 8, 7]]
    outputs = llm.classify(prompts, pooling_params=[PoolingParams(), raw], use_tqdm=False)
    expected = [_logits(model, output.prompt_token_ids) for output in outputs]
    assert outputs[0].outputs.probs == pytest.approx(expected[0].sigmoid().tolist(), abs=1e-4)
    assert outputs[1].outputs.probs == pytest.approx(expected[1].tolist(), abs=1e-4)
    assert (outputs[0].prompt, outputs[0].outputs.num_classes, outputs[0].finished) == (TEXT, 3, True)
    [pooled] = llm.encode(TEXT, use_tqdm=False)
    assert pooled.outputs == PoolingOutput(data=pooled.outputs.data)
    assert pooled.outputs.data == pytest.approx(outputs[0].outputs.probs, abs=1e-5)


def test_a_head_of_several_labels_refuses_the_rest(classifier: Served) -> None:
    llm, _ = classifier
    calls: list[tuple[Callable[[], object], str]] = [
        (
            lambda: llm.generate(TEXT, SamplingParams(), use_tqdm=False),
            "classifies into 3 labels: .* generates no text",
        ),
        (lambda: llm.chat([{"role": "user", "content": "x"}], use_tqdm=False), "generates no text"),
        (lambda: llm.beam_search(TEXT, BeamSearchParams(beam_width=2, max_tokens=3)), "generates no text"),
        (lambda: llm.embed(TEXT, use_tqdm=False), "gives no embeddings"),
        (lambda: llm.score(QUERY, DOCUMENTS, use_tqdm=False), r"head has 3 labels, and one is needed \(task 'score'\)"),
        (
            lambda: llm.classify(TEXT, pooling_params=PoolingParams(task="score"), use_tqdm=False),
            "pooling_params.task is 'score', and the call is for 'classify'",
        ),
    ]
    for call, message in calls:
        with pytest.raises(InvalidRequest, match=message):
            call()


def test_a_cross_encoder_scores_pairs(cross_encoder: Served) -> None:
    llm, model = cross_encoder
    scored = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    for output, document in zip(scored, DOCUMENTS, strict=True):
        assert output.prompt_token_ids == tokenizer.encode(QUERY) + tokenizer.encode(document)
        assert output.outputs.score == pytest.approx(float(_logits(model, output.prompt_token_ids).sigmoid()), abs=1e-4)
    assert len({output.outputs.score for output in scored}) == 3
    paired = llm.score(
        [QUERY, TEXT], [DOCUMENTS[0], QUERY], pooling_params=PoolingParams(use_activation=False), use_tqdm=False
    )
    assert paired[1].outputs.score == pytest.approx(float(_logits(model, paired[1].prompt_token_ids)), abs=1e-4)


def test_pairs_are_truncated_at_the_longer_text(cross_encoder: Served) -> None:
    llm, _ = cross_encoder
    tokenizer = llm.get_tokenizer()
    query, document = tokenizer.encode(QUERY), tokenizer.encode(DOCUMENTS[0] * 9)
    assert len(document) > 2 * len(query)
    for options, expected in (
        ({"truncate_prompt_tokens": 2 * len(query)}, query + document[: len(query)]),
        ({"truncate_prompt_tokens": 7, "truncation_side": "left"}, query[-3:] + document[-4:]),
    ):
        kwargs: Any = options
        [output] = llm.score(QUERY, DOCUMENTS[0] * 9, use_tqdm=False, tokenization_kwargs=kwargs)
        assert output.prompt_token_ids == expected
    with pytest.raises(InvalidRequest, match="tokenization_kwargs: add_special_tokens is given, and a pair has"):
        llm.score(QUERY, DOCUMENTS, use_tqdm=False, tokenization_kwargs={"add_special_tokens": False})


def test_a_model_without_a_head_scores_by_cosine(llm: LLM, oracle: Oracle) -> None:
    scored = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    states = [oracle.hidden_states(tokenizer.encode(text))[-1] for text in (QUERY, *DOCUMENTS)]
    for output, state in zip(scored, states[1:], strict=True):
        expected = float(torch.nn.functional.cosine_similarity(states[0], state, dim=0))
        assert output.outputs.score == pytest.approx(expected, abs=1e-4)
    assert scored[2].outputs.score == pytest.approx(1.0, abs=1e-5)
    with pytest.raises(InvalidRequest, match=r"the model has no classification head \(task 'classify'\)"):
        llm.classify(TEXT, use_tqdm=False)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (["a", "b"], ["c", "d", "e"], "data_1 has 2 texts and data_2 3: one, or as many, are needed"),
        ("a", [], "data_2 is empty"),
        ("", "b", r"data_1\[0\] is empty"),
        ("a", ["b", ""], r"data_2\[1\] is empty"),
        ("a", [3, 4], "data_2 must be a text or a list of them"),
        (QUERY, [QUERY, "two " * 300], r"pairs\[1\]: data_2 has \d+ tokens; the model's length is 256"),
        ("a", "\ud800", "data_2 is not valid Unicode"),
    ],
)
def test_pairs_that_are_refused(cross_encoder: Served, first: Any, second: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        cross_encoder[0].score(first, second, use_tqdm=False)


async def test_a_stream_with_a_task(tmp_path: Path) -> None:
    """`AsyncLLM.encode` takes the task of its parameters, else that of the model."""
    model = make_classifier(tmp_path, num_labels=1)
    llm = AsyncLLM(tmp_path, **TINY)
    try:
        expected = float(_logits(model, [9, 8, 7]).sigmoid())
        for params in (None, PoolingParams(task="score")):
            [output] = [each async for each in llm.encode([9, 8, 7], params)]
            assert output.outputs.data == pytest.approx([expected], abs=1e-4)
        with pytest.raises(InvalidRequest, match="gives no embeddings"):
            await llm.embed([9, 8, 7])
        with pytest.raises(InvalidRequest, match="generates no text"):
            await anext(llm.generate([9, 8, 7]))
    finally:
        llm.shutdown()
