"""Differences between a family with images and `transformers` on the same random weights: answers to prompts with two images."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pdserve.llm import LLM, SamplingParams
from tests.support.models.image_checkpoints import PICTURE, ImageOracle, make_image_checkpoint, picture

_PROMPTS = (
    (f"The river {PICTURE} had another colour, {PICTURE} and the miller sang.", (picture(1), picture(2, 64, 48))),
    (f"{PICTURE}{PICTURE} twice", (picture(3, 16, 64), picture(4))),
)
_OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "max_model_len": 512, "max_num_batched_tokens": 24}
_MAX_TOKENS = 20


class ImageExactness(NamedTuple):
    """Over the output tokens of all prompts, which are computed in chunks of 24 tokens and then token by token."""

    equal: int
    """Greedy tokens that are those of `generate`, in float32."""
    compared: int
    float32: float
    """Largest difference of a log-probability."""
    bfloat16: tuple[float, float]
    """Mean error of a log-probability against the same rounded weights in float32: ours, that of `transformers`."""


def image_exactness(family: str) -> ImageExactness:
    """family: `model_type`."""
    with tempfile.TemporaryDirectory() as name:
        folder = make_image_checkpoint(Path(name), family)
        oracle = ImageOracle(folder, family)
        exact, rounded = _answers(folder, oracle, "float32"), _answers(folder, oracle, "bfloat16")
    equal = [
        one == other
        for answer, (_, images) in zip(exact, _PROMPTS, strict=True)
        for one, other in zip(answer.tokens, oracle.greedy(answer.prompt, images, _MAX_TOKENS), strict=True)
    ]
    difference = float((_ours(exact) - _theirs(oracle, exact)).abs().max())
    oracle.model.bfloat16()
    theirs = _theirs(oracle, rounded)
    oracle.model.float()
    truth = _theirs(oracle, rounded)
    errors = float((_ours(rounded) - truth).abs().mean()), float((theirs - truth).abs().mean())
    return ImageExactness(sum(equal), len(equal), difference, errors)


class _Answer(NamedTuple):
    prompt: list[int]
    """With one token per image."""
    tokens: list[int]
    logprobs: Tensor
    """`[n, V]`"""


def _answers(folder: Path, oracle: ImageOracle, dtype: Literal["float32", "bfloat16"]) -> list[_Answer]:
    vocab_size = oracle.model.config.get_text_config().vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=_MAX_TOKENS, ignore_eos=True, logprobs=vocab_size)
    with LLM(folder, dtype=dtype, max_logprobs=vocab_size, **_OPTIONS) as llm:
        given = [{"prompt": text, "multi_modal_data": {"image": list(images)}} for text, images in _PROMPTS]
        outputs = llm.generate(given, params, use_tqdm=False)  # type: ignore[arg-type]
        prompts = [llm.get_tokenizer().encode(text) for text, _ in _PROMPTS]
    return [
        _Answer(prompt, output.outputs[0].token_ids, _rows(output.outputs[0].logprobs, vocab_size))
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def _ours(answers: Sequence[_Answer]) -> Tensor:
    return torch.cat([answer.logprobs for answer in answers])


def _theirs(oracle: ImageOracle, answers: Sequence[_Answer]) -> Tensor:
    """The same of `transformers`."""
    rows = [
        oracle.logprobs(answer.prompt, images, answer.tokens)
        for answer, (_, images) in zip(answers, _PROMPTS, strict=True)
    ]
    return torch.cat(rows)


def _rows(logprobs: Any, vocab_size: int) -> Tensor:
    return torch.tensor([[row[token].logprob for token in range(vocab_size)] for row in logprobs])


def rounded_row(found: ImageExactness) -> dict[str, Any]:
    """A row of the record, without its architecture."""
    return {
        "images": True,
        "tokens": [found.equal, found.compared],
        "float32": float(f"{found.float32:.1g}"),
        "bfloat16": [round(error, 3) for error in found.bfloat16],
    }
