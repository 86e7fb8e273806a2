"""`transformers` as the oracle: greedy continuations in float32, with the margin by which each token won."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import AutoModelForCausalLM

NEAR_TIE = 1e-4
"""Two candidates closer than this may change places between two correct float32 implementations (I1)."""


_PAD = 100_000
"""Fills what follows a beam's end; no token of any model here."""


class Oracle:
    """One checkpoint."""

    def __init__(self, folder: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """`max_tokens` most likely tokens, EOS or not."""
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        token_ids: list[int] = output[0, len(prompt) :].tolist()
        return token_ids

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """`[T, V]` float32, of every position."""
        logits: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return logits

    @torch.inference_mode()
    def hidden_states(self, token_ids: Sequence[int]) -> torch.Tensor:
        """`[T, H]` float32: the base model's last, after its final norm."""
        states: torch.Tensor = self._model.model(torch.tensor([list(token_ids)])).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def beams(self, prompt: Sequence[int], params: Any, eos: Sequence[int]) -> list[tuple[list[int], float]]:
        """Output tokens and score of every beam, best first. params: a `BeamSearchParams`."""
        ids = torch.tensor([prompt])
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=params.max_tokens, do_sample=False,
            num_beams=params.beam_width, num_return_sequences=params.beam_width, length_penalty=params.length_penalty,
            early_stopping=params.early_stopping, eos_token_id=list(eos) or None, pad_token_id=_PAD,
            return_dict_in_generate=True, output_scores=True,
        )  # fmt: skip
        beams = [[token for token in row if token != _PAD] for row in output.sequences[:, len(prompt) :].tolist()]
        return list(zip(beams, output.sequences_scores.tolist(), strict=True))

    @torch.inference_mode()
    def check(self, prompt: Sequence[int], answer: Sequence[int], near_tie: float = NEAR_TIE) -> None:
        """The answer is the oracle's own, or leaves it only at a near-tie, which is printed."""
        expected = self.greedy(prompt, len(answer))
        if list(answer) == expected:
            return
        place = next(i for i, (ours, theirs) in enumerate(zip(answer, expected, strict=True)) if ours != theirs)
        logits = self._model(torch.tensor([[*prompt, *expected[:place]]])).logits[0, -1]
        margin = float(logits[expected[place]] - logits[answer[place]])
        assert margin < near_tie, f"token {place}: {answer[place]} instead of {expected[place]}, {margin} apart"
        print(f"near-tie at token {place} of a {len(prompt)}-token prompt: {margin:.2e}")
