"""Families with images in odd shapes, with odd images, against the same weights in `transformers`, in float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pdserve.llm import LLM, SamplingParams
from tests.support.engine.llm_requests import core_of
from tests.support.models.image_checkpoints import PICTURE, ImageOracle, make_image_checkpoint
from tests.support.models.image_shapes import SHAPES, odd_images

ATOL = 3e-4
"""Largest difference of a log-probability."""
NUM_TOKENS = 6
IN_EVERY_RUN = (("qwen3_vl", "deepstack_everywhere_tied"),)
CASES = [
    pytest.param(family, name, marks=() if (family, name) in IN_EVERY_RUN else pytest.mark.slow)
    for family, shapes in SHAPES.items()
    for name in shapes
]
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "block_size": 4, "num_blocks": 512, "max_model_len": 1024, "max_num_batched_tokens": 19,
}  # fmt: skip


@pytest.mark.parametrize(("family", "name"), CASES)
def test_i1_odd_shapes_and_images(tmp_path: Path, family: str, name: str) -> None:
    shape = SHAPES[family][name]
    folder = make_image_checkpoint(tmp_path, family, tie_word_embeddings=name.endswith("tied"), shape=shape)
    assert (len(list(folder.glob("*.safetensors"))) > 2) is (shape.max_shard_size != "5GB")
    oracle = ImageOracle(folder, family)
    vocab_size = oracle.model.config.get_text_config().vocab_size
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=vocab_size)
    given = [(f"See {PICTURE * len(images)} there", images) for images in odd_images(shape)]
    with LLM(folder, max_logprobs=vocab_size, **OPTIONS) as llm:
        prompts: list[Any] = [{"prompt": text, "multi_modal_data": {"image": images}} for text, images in given]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        tokens = [llm.get_tokenizer().encode(text) for text, _ in given]
        core_of(llm).scheduler.check(idle=True)
    answers = set()
    for output, prompt, (_, images) in zip(outputs, tokens, given, strict=True):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        ours = torch.tensor([[row[token].logprob for token in range(vocab_size)] for row in answer.logprobs])
        theirs = oracle.logprobs(prompt, images, answer.token_ids)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=ATOL)
        best = theirs.max(-1).values
        assert (theirs.gather(1, torch.tensor(answer.token_ids).unsqueeze(1))[:, 0] > best - 2 * ATOL).all()
        answers.add(tuple(answer.token_ids))
    assert len(answers) > 3, "the answers are degenerate and test nothing"
