"""The table of model families, of what `tests.support.family_exactness` measured."""

from __future__ import annotations

import json
from pathlib import Path


def model_families(root: Path) -> str:
    """One row per family; float32 in scientific notation."""
    record = json.loads((root / "tests" / "models" / "family_exactness.json").read_text())
    lines = [
        "| family | `architectures` | computed | text | images | pooling | float32 | bfloat16 |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for family, row in record.items():
        ours, theirs = row["bfloat16"]
        lines.append(
            f"| `{family}` | `{row['architecture']}` | native | yes | no | yes | {row['float32']:.0e} | {ours} / {theirs} |"
        )
    return "\n".join(lines)
