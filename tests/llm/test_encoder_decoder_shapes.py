"""Families with an encoder and a decoder in odd shapes, against the same weights in `transformers`, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pdserve.llm import LLM, SamplingParams, TokensPrompt
from tests.support.engine.llm_requests import core_of
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.encoder_decoder_checkpoints import START, GreedyAnswers, make_encoder_decoder
from tests.support.models.encoder_decoder_shapes import SHAPES

ATOL = 3e-4
"""Largest difference of a log-probability."""
NUM_TOKENS = 9
IN_EVERY_RUN = ("t5_wide_heads",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in SHAPES]
)
def test_i1_odd_shapes(tmp_path: Path, name: str) -> None:
    family, fields = SHAPES[name]
    model = make_encoder_decoder(tmp_path, family, **fields)
    theirs, vocab_size = GreedyAnswers(model), int(model.config.vocab_size)
    length = getattr(model.config, "max_position_embeddings", None) or model.config.n_positions
    prompts = [prompt_of(number, 3) for number in (1, 7, 16, 33, length)]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=vocab_size)
    with LLM(str(tmp_path), dtype="float32", num_blocks=64, max_logprobs=vocab_size) as llm:
        given = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        outputs = llm.generate(given, params, use_tqdm=False)
        core_of(llm).scheduler.check(idle=True)
    rows = []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        ours = torch.tensor([[row[token].logprob for token in range(vocab_size)] for row in answer.logprobs])
        expected = theirs.logits(prompt, [START, *answer.token_ids[:-1]]).log_softmax(-1)
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=ATOL)
        chosen = expected.gather(1, torch.tensor(answer.token_ids).unsqueeze(1))[:, 0]
        assert (chosen > expected.max(-1).values - 2 * ATOL).all()
        rows.append(ours[-1])
    assert torch.stack(rows).std(0).max() > 0.01, "the answers do not depend on the prompts"
