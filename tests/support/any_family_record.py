"""The causal language models of the installed `transformers`: served by their own code, or refused, and how exact they are.

`python -m tests.support.any_family_record [FAMILY ...]` writes `tests/models/any_family.json`, of which `make docs-generated` makes
parts of `docs/models.md`. With the argument `missing` it measures the families that lack a row or a column. A family whose
measurement fails keeps its row, and is named at the end.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from tests.support.any_family import (
    FEW_TOKENS,
    NOT_CHECKED,
    bfloat16_errors,
    causal_families,
    float32_logits,
    refusal,
    tokens_of_pair,
)

RECORD = Path(__file__).resolve().parents[1] / "models" / "any_family.json"


def measure(model_type: str, architecture: str) -> dict[str, Any]:
    """A row of the record."""
    if model_type in NOT_CHECKED:
        return {"architecture": architecture, "unchecked": NOT_CHECKED[model_type]}
    with tempfile.TemporaryDirectory() as folder:
        reason = refusal(Path(folder), model_type, architecture)
    if reason is not None:
        return {"architecture": architecture, "refused": reason}
    with tempfile.TemporaryDirectory() as folder:
        difference = float32_logits(Path(folder), model_type).difference
    with tempfile.TemporaryDirectory() as folder:
        ours, theirs = bfloat16_errors(Path(folder), model_type)
    row = {
        "architecture": architecture,
        "float32": float(f"{difference:.1g}"),
        "bfloat16": [round(ours, 3), round(theirs, 3)],
    }
    if model_type in FEW_TOKENS:
        return row
    with tempfile.TemporaryDirectory() as folder:
        tokens = tokens_of_pair(Path(folder), model_type)
    return row | {"tokens": [tokens.equal, tokens.compared]}


def is_complete(model_type: str, row: dict[str, Any]) -> bool:
    """True for a row with all that `measure` measures."""
    columns = {"float32", "bfloat16"} | ({"tokens"} if model_type not in FEW_TOKENS else set())
    return "refused" in row or "unchecked" in row or columns <= set(row)


def main(names: list[str]) -> int:
    """The number of families whose measurement failed."""
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    families, failed = dict(causal_families()), []
    if names == ["missing"]:
        names = [name for name in families if not is_complete(name, record.get(name, {}))]
    for model_type in names or families:
        try:
            record[model_type] = measure(model_type, families[model_type])
        except Exception as error:  # any code of any model
            failed.append(model_type)
            print(f"{model_type}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
            continue
        print(model_type, record[model_type], flush=True)
        RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=2) + "\n")
    print(f"failed: {', '.join(failed) or 'none'}")
    return len(failed)


if __name__ == "__main__":
    disable_progress_bar()
    set_verbosity_error()
    sys.exit(main(sys.argv[1:]))
