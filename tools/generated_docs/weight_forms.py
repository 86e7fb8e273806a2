"""Table of stored forms of weights and ways of serving, of what `make family-records` measured."""

from __future__ import annotations

import json
from pathlib import Path


def weight_forms(root: Path) -> str:
    """One row per form, one column per way: equal tokens, of those of all architectures."""
    record = json.loads((root / "tests" / "llm" / "weight_forms.json").read_text())
    ways = list(next(iter(record.values())))
    lines = [f"| stored as | {' | '.join(ways)} |", f"|---|{'---|' * len(ways)}"]
    for form, of_ways in record.items():
        sums = [[sum(numbers) for numbers in zip(*of_ways[way].values(), strict=True)] for way in ways]
        lines.append(f"| {form} | {' | '.join(' of '.join(map(str, each)) for each in sums)} |")
    return "\n".join(lines)
