"""Tables of model families, of what `tests.support.family_exactness` and `tests.support.any_family_record` measured."""

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
    served = {family: row for family, row in others.items() if "float32" in row and family not in native}
    lines += [_row(family, row, "transformers") for family, row in served.items()]
    return "\n".join(lines)


def refused_families(root: Path) -> str:
    """One row per reason for which families of transformers are refused, then those that could not be measured."""
    return "\n".join(
        [
            "| reason | families |",
            "|---|---|",
            *_reasons(root, "refused", ""),
            *_reasons(root, "unchecked", "not measured: "),
        ]
    )


def _reasons(root: Path, column: str, prefix: str) -> list[str]:
    native, others = _records(root)
    families: dict[str, list[str]] = {}
    for family, row in others.items():
        if column in row and family not in native:
            families.setdefault(row[column].replace("|", "\\|"), []).append(f"`{family}`")
    return [f"| {prefix}{reason} | {', '.join(names)} |" for reason, names in sorted(families.items())]


def _row(family: str, row: dict[str, Any], computed: str) -> str:
    cells = [
        f"`{family}`",
        f"`{row['architecture']}`",
        computed,
        "yes",
        "yes" if row.get("images") else "no",
        "yes",
        _tokens(row, computed),
        f"{row['float32']:.0e}",
        " / ".join(map(str, row["bfloat16"])) if "bfloat16" in row else "not measured",
    ]
    return f"| {' | '.join(cells)} |"


def _tokens(row: dict[str, Any], computed: str) -> str:
    if "tokens" in row:
        return " of ".join(map(str, row["tokens"]))
    return "few differ" if computed == "transformers" and "bfloat16" in row else "not measured"


def _records(root: Path) -> list[dict[str, dict[str, Any]]]:
    return [json.loads((root / "tests" / "models" / name).read_text()) for name in _RECORDS]
