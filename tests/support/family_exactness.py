"""Differences between a family's decoder and `transformers` on the same random weights.

`python -m tests.support.family_exactness` measures every family and writes `tests/models/family_exactness.json`, of which
`make docs-generated` makes the table in `docs/models.md`.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from pdserve.models.loading import load_decoder
from pdserve.models.registry import FAMILIES
from tests.support.checkpoints import VOCAB_SIZE
from tests.support.family_checkpoints import cases, make_family
from tests.support.paged_run import PagedRun

RECORD = Path(__file__).resolve().parents[1] / "models" / "family_exactness.json"


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of every position of one text, `[n, V]` float32."""

    ours: Tensor
    theirs: Tensor

    @property
    def difference(self) -> float:
        return float((self.ours - self.theirs).abs().max())


def float32_logits(folder: Path, family: str, fields: Mapping[str, Any]) -> Logits:
    """A text in two chunks and then token by token."""
    model = make_family(folder, family, fields)
    tokens = _tokens(fields, 60)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0]
    run = PagedRun(load_decoder(folder), block_size=8)
    found = [run.step({}, {"a": tokens[:37]})["a"], run.step({}, {"a": tokens[37:48]})["a"]]
    found += [run.step({"a": token}, {})["a"] for token in tokens[48:]]
    return Logits(torch.cat(found), theirs)


def bfloat16_errors(folder: Path, family: str, fields: Mapping[str, Any]) -> tuple[float, float]:
    """Mean error of a log-probability against the same rounded weights in float32: ours, that of `transformers`."""
    model = make_family(folder, family, fields, "bfloat16")
    tokens = _tokens(fields, 100)
    with torch.inference_mode():
        theirs = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        truth = model.float()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    ours = PagedRun(load_decoder(folder)).step({}, {"a": tokens})["a"].log_softmax(-1)
    return float((ours - truth).abs().mean()), float((theirs - truth).abs().mean())


def _tokens(fields: Mapping[str, Any], length: int) -> list[int]:
    return random.Random(3).choices(range(fields.get("vocab_size", VOCAB_SIZE)), k=length)


def _measure(architecture: str, family: str) -> dict[str, Any]:
    differences, errors = [], []
    for fields in cases(family):
        with tempfile.TemporaryDirectory() as folder:
            differences.append(float32_logits(Path(folder), family, fields).difference)
        with tempfile.TemporaryDirectory() as folder:
            errors.append(bfloat16_errors(Path(folder), family, fields))
    ours, theirs = (sum(values) / len(errors) for values in zip(*errors, strict=True))
    return {
        "architecture": architecture,
        "cases": len(differences),
        "float32": float(f"{max(differences):.1g}"),
        "bfloat16": [round(ours, 3), round(theirs, 3)],
    }


if __name__ == "__main__":
    disable_progress_bar()
    families = {family.model_type: name for name, family in sorted(FAMILIES.items()) if not family.has_images}
    record = {model_type: _measure(name, model_type) for model_type, name in families.items()}
    RECORD.write_text(json.dumps(record, indent=2) + "\n")
