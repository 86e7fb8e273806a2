"""Classes from one engine, by `transformers`' own class in float32: chunked, batched, cached, preempted, refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.request.engine_types import FinishReason
from pdserve.common.request.pooling_params import PoolingParams
from pdserve.common.settings.speculative_config import SpeculativeConfig
from pdserve.common.settings.worker_settings import DecodeSettings, PrefillSettings, WorkerSettings
from pdserve.engine.runner.loading.loaded_model import load_model, verify_classifier
from pdserve.models.read_config import read_config
from tests.support.engine.engine_harness import Harness
from tests.support.models.checkpoints import make_classifier

CLASSIFY = PoolingParams(task="classify")
PROMPTS = [[3 + (7 * place + start) % 290 for place in range(length)] for start, length in enumerate((1, 16, 45, 97))]
ATOL = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("classifier")


@pytest.fixture(scope="module", autouse=True)
def model(folder: Path) -> PreTrainedModel:
    return make_classifier(folder, "qwen3", num_labels=4)


@pytest.fixture(scope="module")
def scoring_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cross-encoder")
    make_classifier(path, num_labels=1)
    return path


def check(
    engine: Harness, model: PreTrainedModel, request_id: str, prompt: Sequence[int], params: PoolingParams
) -> None:
    answer = engine.answers[request_id]
    assert answer.finish_reason is FinishReason.STOP
    assert (answer.token_ids, answer.num_outputs) == ([], 1)
    assert answer.pooling_output is not None
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0]
    if params.use_activation:
        expected = expected.softmax(-1)
    assert float((torch.tensor(answer.pooling_output) - expected).abs().max()) < ATOL


@pytest.mark.few(1)
@pytest.mark.parametrize("chunk", [7, 512])
def test_equal_to_transformers(make_real_engine: Any, folder: Path, model: PreTrainedModel, chunk: int) -> None:
    """All prompts at once, so that steps have rows with and without the activation."""
    engine = make_real_engine(folder, max_num_batched_tokens=chunk)
    asked = []
    for prompt in PROMPTS:
        for params in (CLASSIFY, PoolingParams(task="classify", use_activation=False)):
            asked.append((engine.add(prompt, pooling_params=params), prompt, params))
    engine.run()
    for request_id, prompt, params in asked:
        check(engine, model, request_id, prompt, params)


def test_a_cached_prefix_and_a_small_pool(make_real_engine: Any, folder: Path, model: PreTrainedModel) -> None:
    engine = make_real_engine(
        folder, block_size=4, num_blocks=28, max_model_len=112, max_num_batched_tokens=16, reserve_whole_prompt=False
    )
    first = engine.add(PROMPTS[3], pooling_params=CLASSIFY)
    engine.run()
    again = engine.add(PROMPTS[3], pooling_params=CLASSIFY)
    others = [engine.add(PROMPTS[2], pooling_params=CLASSIFY, salt=f"{number}") for number in range(6)]
    engine.run()
    assert engine.answers[again].num_cached_tokens == 96
    for request_id in (first, again):
        check(engine, model, request_id, PROMPTS[3], CLASSIFY)
    for request_id in others:
        check(engine, model, request_id, PROMPTS[2], CLASSIFY)


def test_the_warm_up_generates_nothing(make_real_engine: Any, folder: Path, model: PreTrainedModel) -> None:
    engine = make_real_engine(folder)
    engine.core.warm_up()
    assert not engine.core.has_work
    request_id = engine.add(PROMPTS[1], pooling_params=CLASSIFY)
    engine.run()
    check(engine, model, request_id, PROMPTS[1], CLASSIFY)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "the model classifies into 4 labels: it has a classification head and generates no text"),
        (PoolingParams(), r"the model has a classification head and gives no embeddings \(task 'embed'\)"),
        (PoolingParams(task="score"), r"head has 4 labels, and one is needed \(task 'score'\)"),
        (PoolingParams(task="classify", dimensions=2), "dimensions is 2, and has no effect on the task 'classify'"),
        (PoolingParams(task="rank"), "task must be one of 'embed', 'classify', 'score', not 'rank'"),  # type: ignore[arg-type]
    ],
)
def test_a_model_with_a_head_refuses_other_tasks(
    make_real_engine: Any, folder: Path, params: Any, message: str
) -> None:
    engine = make_real_engine(folder)
    with pytest.raises(InvalidRequest, match=message):
        engine.request([3, 4], pooling_params=params)


def test_a_model_without_a_head_refuses_classes(make_real_engine: Any, tiny_checkpoints: Callable[..., Path]) -> None:
    engine = make_real_engine(tiny_checkpoints("llama"))
    for task in ("classify", "score"):
        with pytest.raises(InvalidRequest, match=rf"the model has no classification head \(task '{task}'\)") as error:
            engine.request([3, 4], pooling_params=PoolingParams(task=task))
        assert error.value.field == "model"
    with pytest.raises(InvalidRequest, match="use_activation is False, and has no effect on the task 'embed'"):
        engine.request([3, 4], pooling_params=PoolingParams(use_activation=False))


def test_a_request_that_nobody_verified_fails_alone(
    make_real_engine: Any, folder: Path, model: PreTrainedModel
) -> None:
    engine = make_real_engine(folder)
    good = engine.add(PROMPTS[1], pooling_params=CLASSIFY)
    bad = engine.request(PROMPTS[1], pooling_params=CLASSIFY)
    bad.pooling_params = None
    engine.submit(bad)
    engine.run()
    assert engine.answers[bad.request_id].error_code == "invalid_request"
    check(engine, model, good, PROMPTS[1], CLASSIFY)


def test_one_label_is_a_score(make_real_engine: Any, scoring_folder: Path) -> None:
    engine = make_real_engine(scoring_folder)
    asked = {
        use: engine.add(PROMPTS[2], pooling_params=PoolingParams(task="score", use_activation=use))
        for use in (True, False)
    }
    engine.run()
    scores = {use: torch.tensor(engine.answers[request_id].pooling_output) for use, request_id in asked.items()}
    assert scores[True].shape == (1,)
    assert torch.allclose(scores[True], scores[False].sigmoid())


def test_only_prefill_workers_load_it(folder: Path) -> None:
    config, draft = read_config(folder), SpeculativeConfig(method="ngram", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="generates no text: prefill workers alone serve it"):
        load_model(folder, DecodeSettings())
    with pytest.raises(ConfigError, match=r"speculative_config is set, and .* has a classification head"):
        verify_classifier(WorkerSettings(speculative_config=draft), folder, config)
    verify_classifier(PrefillSettings(speculative_config=draft), folder, config)
    loaded = load_model(folder, PrefillSettings(num_blocks=32, max_model_len=128))
    assert loaded.engine_info(PrefillSettings()).num_labels == 4
