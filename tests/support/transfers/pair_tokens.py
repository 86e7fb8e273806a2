"""Greedy answers through a prefill and a decode engine, compared token by token with `generate` of `transformers`."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pdserve.common.settings.worker_settings import ModelImpl
from tests.support.engine.engine_harness import Harness, real_engines
from tests.support.engine.engine_pair import Pair
from tests.support.models.oracle import NEAR_TIE

_PROMPT_TOKENS = (5, 17, 50)
_MAX_TOKENS = 20


class PairTokens(NamedTuple):
    """Tokens of all answers, up to the first place of each where two candidates lie within `NEAR_TIE`."""

    equal: int
    compared: int
    distinct: int
    """Different tokens among them."""


def pair_tokens(folder: Path, model: Any, model_impl: ModelImpl = "native") -> PairTokens:
    """Three prompts, two of them longer than a step of the prefill engine. model: of `transformers`, in float32."""
    vocab_size = model.config.get_text_config().vocab_size
    prompts = {f"r{size}": random.Random(size).choices(range(3, vocab_size), k=size) for size in _PROMPT_TOKENS}
    harnesses: list[Harness] = []
    make = real_engines(harnesses)
    pair = Pair(make(folder, model_impl=model_impl, max_num_batched_tokens=20), make(folder, model_impl=model_impl))
    for request_id, prompt in prompts.items():
        pair.add(prompt, request_id, params={"max_tokens": _MAX_TOKENS})
    pair.run()
    for harness in harnesses:
        harness.scheduler.check(idle=True)
        harness.core.executor.close()
    results = [_compare(model, prompt, pair.answer(request_id).token_ids) for request_id, prompt in prompts.items()]
    found = [token for kept, _ in results for token in kept]
    return PairTokens(len(found), sum(compared for _, compared in results), len({*found}))


@torch.inference_mode()
def _compare(model: Any, prompt: list[int], answer: list[int]) -> tuple[list[int], int]:
    """The beginning of the answer that is that of `generate`, and the number of tokens that are compared."""
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=_MAX_TOKENS, min_new_tokens=_MAX_TOKENS, do_sample=False,
        eos_token_id=None, pad_token_id=0, use_cache=True,
    )  # fmt: skip
    expected: list[int] = output[0, len(prompt) :].tolist()
    places = [place for place, pair in enumerate(zip(answer, expected, strict=True)) if pair[0] != pair[1]]
    if not places:
        return answer, len(answer)
    [place, *_] = places
    text = torch.tensor([[*prompt, *expected[:place]]])
    logits = model(text, position_ids=torch.arange(text.shape[1]).unsqueeze(0), use_cache=False).logits[0, -1]
    is_tie = float(logits[expected[place]] - logits[answer[place]]) < NEAR_TIE
    return answer[:place], place if is_tie else len(answer)
