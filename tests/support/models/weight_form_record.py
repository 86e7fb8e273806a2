"""`python -m tests.support.models.weight_form_record`: what every form and way gives, into `tests/llm/weight_forms.json`."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from tests.support.models.weight_form_ways import ARCHITECTURES, NAMES, WAYS, compare

RECORD = Path(__file__).resolve().parents[2] / "llm" / "weight_forms.json"


def main() -> int:
    rows: dict[str, dict[str, dict[str, list[int]]]] = {}
    num_different = 0
    with tempfile.TemporaryDirectory() as name:
        for form in NAMES:
            for way in WAYS:
                for architecture in ARCHITECTURES:
                    found = compare(form, architecture, way, Path(name))
                    num_different += found.equal != found.compared
                    rows.setdefault(form, {}).setdefault(way, {})[architecture] = list(found)
            print(f"{form}: {rows[form]}", flush=True)
    RECORD.write_text(json.dumps(rows, indent=1) + "\n")
    return num_different


if __name__ == "__main__":
    sys.exit(main() > 0)
