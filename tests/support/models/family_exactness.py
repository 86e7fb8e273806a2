"""Differences between a family's decoder and `transformers` on the same random weights.

`make family-records` measures the native families whose row in `tests/models/family_exactness.json` is missing or out of date;
`python -m tests.support.models.family_exactness FAMILY ...` measures some, and `all` instead of names every one.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from pdserve.models.loading import load_decoder
from pdserve.models.model_impl import AnyDecoder
from pdserve.models.registry import FAMILIES
from tests.support.kernels.paged_run import PagedRun
from tests.support.models.checkpoints import VOCAB_SIZE
from tests.support.models.family_checkpoints import cases, make_family
from tests.support.models.family_records import Row, digest, renew
from tests.support.models.image_exactness import image_exactness, rounded_row
from tests.support.transfers.pair_tokens import pair_tokens

RECORD = Path(__file__).resolve().parents[2] / "models" / "family_exactness.json"
ARCHITECTURES = {family.model_type: name for name, family in sorted(FAMILIES.items())}
"""Native families."""


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of every position of one text, `[n, V]` float32."""

    ours: Tensor
    theirs: Tensor

    @property
    def difference(self) -> float:
        return float((self.ours - self.theirs).abs().max())


def float32_logits(
    folder: Path, family: str, fields: Mapping[str, Any], their_dtype: torch.dtype = torch.float32
) -> Logits:
    """A text in two chunks and then token by token. their_dtype: of the weights of `transformers`, which are float32 numbers."""
    model = make_family(folder, family, fields).to(their_dtype)
    [tokens] = _texts(fields, 60, 1)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].float()
    return Logits(paged_logits(load_decoder(folder), tokens), theirs)


def paged_logits(decoder: AnyDecoder, tokens: list[int]) -> Tensor:
    """`[n, V]`: a text in chunks of 37 and 11 tokens, and then token by token."""
    run = PagedRun(decoder, block_size=8)
    found = [run.step({}, {"a": tokens[:37]})["a"], run.step({}, {"a": tokens[37:48]})["a"]]
    return torch.cat(found + [run.step({"a": token}, {})["a"] for token in tokens[48:]])


def bfloat16_errors(folder: Path, family: str, fields: Mapping[str, Any]) -> tuple[float, float]:
    """Mean error of a log-probability against the same rounded weights in float32: ours, that of `transformers`."""
    model = make_family(folder, family, fields, "bfloat16")
    return mean_errors(model, load_decoder(folder), _texts(fields, 100, 4))


def mean_errors(model: Any, decoder: AnyDecoder, texts: Sequence[list[int]]) -> tuple[float, float]:
    """The same. model: of `transformers`, in bfloat16; it is widened. texts: computed in chunks and token by token here."""
    batch = torch.tensor(texts)
    positions = torch.arange(batch.shape[1]).expand_as(batch)
    with torch.inference_mode():
        theirs = model(batch, position_ids=positions, use_cache=False).logits.float().log_softmax(-1)
        truth = model.float()(batch, position_ids=positions, use_cache=False).logits.log_softmax(-1)
    ours = torch.stack([paged_logits(decoder, text) for text in texts]).log_softmax(-1)
    return float((ours - truth).abs().mean()), float((theirs - truth).abs().mean())


def _texts(fields: Mapping[str, Any], length: int, count: int) -> list[list[int]]:
    vocabulary = range(fields.get("vocab_size", VOCAB_SIZE))
    return [random.Random(seed).choices(vocabulary, k=length) for seed in range(3, 3 + count)]


def measure(family: str) -> Row:
    """A row of the record. Raises: AssertionError if the tokens are others, or show nothing."""
    architecture = ARCHITECTURES[family]
    if FAMILIES[architecture].has_images:
        return {"architecture": architecture, **rounded_row(image_exactness(family))}
    with tempfile.TemporaryDirectory() as folder:
        # an embedding that is the head too gives few different tokens
        fields = {**cases(family)[0], "tie_word_embeddings": False}
        tokens = pair_tokens(Path(folder), make_family(Path(folder), family, fields))
    assert tokens.equal == tokens.compared > 30, f"{tokens.equal} tokens of {tokens.compared} are equal"
    assert tokens.distinct > 5, f"{tokens.distinct} different tokens show nothing"
    differences, errors = [], []
    for fields in cases(family):
        with tempfile.TemporaryDirectory() as folder:
            differences.append(float32_logits(Path(folder), family, fields).difference)
        with tempfile.TemporaryDirectory() as folder:
            errors.append(bfloat16_errors(Path(folder), family, fields))
    ours, theirs = (sum(values) / len(errors) for values in zip(*errors, strict=True))
    return {
        "architecture": architecture,
        "tokens": [tokens.equal, tokens.compared],
        "float32": float(f"{max(differences):.1g}"),
        "bfloat16": [round(ours, 3), round(theirs, 3)],
    }


def configuration_digest(family: str) -> str:
    """The cases of a family, as `tests.support.models.family_records` compares them."""
    return digest("images" if FAMILIES[ARCHITECTURES[family]].has_images else cases(family))


if __name__ == "__main__":
    disable_progress_bar()
    digests = {family: configuration_digest(family) for family in ARCHITECTURES}
    sys.exit(min(renew(RECORD, digests, measure, sys.argv[1:]), 1))
