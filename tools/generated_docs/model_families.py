"""Tables of model families, of what `make family-records` measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_RECORDS = ("family_exactness.json", "any_family.json")


def model_families(root: Path) -> str:
    """One row per family that is served, native ones first; float32 in scientific notation."""
    native, others = _records(root)
    lines = [
        "| family | `architectures` | computed | text | images | pooling | tokens | float32 | bfloat16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_row(family, row, "native") for family, row in native.items()]
    served = {family: row for family, row in others.items() if "refused" not in row and family not in native}
    lines += [_row(family, row, "transformers") for family, row in served.items()]
    return "\n".join(lines)


def refused_families(root: Path) -> str:
    """One row per reason for which families of transformers are refused."""
    native, others = _records(root)
    families: dict[str, list[str]] = {}
    for family, row in others.items():
        if "refused" in row and family not in native:
            families.setdefault(row["refused"].replace("|", "\\|"), []).append(f"`{family}`")
    rows = [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(families.items())]
    return "\n".join(["| reason | families |", "|---|---|", *rows])


def _row(family: str, row: dict[str, Any], computed: str) -> str:
    cells = [
        f"`{family}`",
        f"`{row['architecture']}`",
        computed,
        "yes",
        "yes" if row.get("images") else "no",
        "yes",
        " of ".join(map(str, row["tokens"])),
        f"{row['float32']:.0e}",
        " / ".join(map(str, row["bfloat16"])),
    ]
    return f"| {' | '.join(cells)} |"


def _records(root: Path) -> list[dict[str, dict[str, Any]]]:
    return [json.loads((root / "tests" / "models" / name).read_text()) for name in _RECORDS]
