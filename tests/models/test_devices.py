"""One code for every device: an engine on a device that refuses tensors of the CPU gives the CPU's answers.

On a machine with a GPU the same runs there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.common.request.pooling_params import PoolingParams, PoolingType
from pdserve.common.request.sampling_params import NamedLogitsProcessor
from tests.support.engine.engine_harness import Answer, Harness, harnesses, make_real_engine  # noqa: F401
from tests.support.engine.logits_plugins import installed
from tests.support.engine.pretend_device import CUDA, DEVICE, PretendTensor, pretended_device, usable
from tests.support.models.checkpoints import ARCHITECTURES, VOCAB_SIZE, make_checkpoint

PROMPTS = [[(7 * i + n) % VOCAB_SIZE for i in range(n)] for n in (1, 15, 16, 17, 40, 100)]
PARAMETERS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 7, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.2, "seed": 8, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": -0.5},
    {"temperature": 0.0, "logit_bias": {5: 4.0}, "bad_words_token_ids": ((7, 8), (9,)), "logprobs": 3},
    {"temperature": 0.7, "seed": 9, "top_k": 5, "allowed_token_ids": tuple(range(3, 90)), "min_tokens": 4},
    {"temperature": 0.5, "seed": 10},
]


@pytest.fixture(params=[str(DEVICE), CUDA])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    with usable(request.param):
        yield request.param


def _answers(engine: Harness) -> list[Answer]:
    """More than fits into one step, so that chunks and decodes meet."""
    ids = [
        engine.add(prompt, params={"max_tokens": 12} | params)
        for prompt, params in zip(PROMPTS, PARAMETERS, strict=True)
    ]
    answers = engine.run()
    siblings = engine.ask_many(PROMPTS[3], 3, params={"max_tokens": 12, "temperature": 1.0, "seed": 11, "logprobs": 1})
    return [*(answers[request_id] for request_id in ids), *siblings]


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_operation_of_a_step_stays_on_its_device(
    tmp_path: Path,
    architecture: str,
    device: str,
    make_real_engine: Callable[..., Harness],  # noqa: F811
) -> None:
    folder = make_checkpoint(tmp_path / architecture, architecture)
    limits = {"max_num_batched_tokens": 48, "num_blocks": 40, "max_model_len": 180}
    there = make_real_engine(folder, device=device, **limits)
    assert there.kv_cache.device.type == device
    found = _answers(there)
    assert isinstance(there.kv_cache, PretendTensor) == (device == str(DEVICE))
    expected = _answers(make_real_engine(folder, **limits))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
    own, reference = found[3].logprobs, expected[3].logprobs
    assert own is not None
    assert reference is not None
    for logprobs, others in zip(own.logprobs, reference.logprobs, strict=True):
        assert logprobs == pytest.approx(others, abs=1e-4)


def test_embeddings_and_plug_ins_stay_on_their_device(
    tmp_path: Path,
    device: str,
    make_real_engine: Callable[..., Harness],  # noqa: F811
) -> None:
    folder = make_checkpoint(tmp_path / "model")

    def answers(**options: Any) -> list[Answer]:
        engine = make_real_engine(
            folder, processors=installed(), max_num_batched_tokens=48, num_blocks=40, max_model_len=180, **options
        )
        types: list[PoolingType] = ["last", "mean"]
        ids = [
            engine.add(prompt, pooling_params=PoolingParams(pooling_type=pooling_type, dimensions=20))
            for prompt, pooling_type in zip(PROMPTS, types * 3, strict=True)
        ]
        for name, args in (("ban", {"tokens": [7, 9]}), ("only", {"token": 5}), ("broken", {"how": "nan", "at": 2})):
            asked = NamedLogitsProcessor(name=name, args=args)
            ids.append(engine.add(PROMPTS[2], params={"logits_processors": (asked,)}))
        found = engine.run()
        return [found[request_id] for request_id in ids]

    for ours, theirs in zip(answers(device=device), answers(), strict=True):
        assert (ours.token_ids, ours.error_message) == (theirs.token_ids, theirs.error_message)
        assert ours.pooling_output == pytest.approx(theirs.pooling_output, abs=1e-4)


def test_a_tensor_forgotten_on_the_processor_is_refused() -> None:
    with pretended_device() as device, pytest.raises(RuntimeError, match="two devices"):
        torch.ones(3, device=device) + torch.ones(3)
