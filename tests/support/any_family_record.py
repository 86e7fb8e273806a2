"""The causal language models of the installed `transformers`: served by their own code, or refused, and how exact they are.

`python -m tests.support.any_family_record [FAMILY ...]` writes `tests/models/any_family.json`, of which `make docs-generated` makes
parts of `docs/models.md`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from tests.support.any_family import bfloat16_errors, causal_families, float32_logits, refusal

RECORD = Path(__file__).resolve().parents[1] / "models" / "any_family.json"


def measure(model_type: str, architecture: str) -> dict[str, Any]:
    """A row of the record."""
    with tempfile.TemporaryDirectory() as folder:
        reason = refusal(Path(folder), model_type, architecture)
    if reason is not None:
        return {"architecture": architecture, "refused": reason}
    with tempfile.TemporaryDirectory() as folder:
        difference = float32_logits(Path(folder), model_type).difference
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = bfloat16_errors(Path(folder), model_type)
    return {
        "architecture": architecture,
        "float32": float(f"{difference:.1g}"),
        "bfloat16": [round(ours, 3), round(theirs, 3)],
    }


if __name__ == "__main__":
    disable_progress_bar()
    set_verbosity_error()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    families = dict(causal_families())
    for model_type in sys.argv[1:] or families:
        record[model_type] = measure(model_type, families[model_type])
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=2) + "\n")
