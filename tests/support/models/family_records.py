"""Measured rows per model family, kept in a file: which of them are out of date, and how they are renewed."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers

Row = dict[str, Any]
_COLUMNS = {"tokens", "float32", "bfloat16"}


def digest(*parts: object) -> str:
    """Names all that a row was measured with: the version of `transformers`, and `parts`, values of JSON."""
    text = json.dumps([transformers.__version__, *parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def is_complete(row: Row) -> bool:
    """True for a family that is refused with a reason, or measured in every column."""
    return "refused" in row or row.keys() >= _COLUMNS


def renew(path: Path, digests: Mapping[str, str], measure: Callable[[str], Row], arguments: Sequence[str]) -> int:
    """Measure rows and write them into `path`, each as soon as it is there; return how many measurements failed.

    digests: of every family, in the order of the file. measure: the row of a family; what it raises is printed, and the old row
    stays. arguments: names of families, or `all`; without any, the families whose row is missing, not complete, or measured
    with something else.
    """
    found: dict[str, Row] = json.loads(path.read_text()) if path.exists() else {}
    rows = {family: found[family] for family in digests if family in found}
    families = list(digests) if list(arguments) == ["all"] else list(arguments)
    if not families:
        families = [name for name, wanted in digests.items() if _is_out_of_date(rows.get(name), wanted)]
    print(f"{path.name}: {len(families)} of {len(digests)} families are measured", flush=True)
    failed = []
    for family in families:
        begin = time.monotonic()
        try:
            row = measure(family)
        except Exception as error:  # any code of any model
            failed.append(family)
            print(f"{family}: {type(error).__name__}: {' '.join(str(error).split())[:300]}", flush=True)
            continue
        rows[family] = {**row, "configuration": digests[family]}
        print(f"{family}: {row} in {time.monotonic() - begin:.1f} s", flush=True)
        _write(path, {name: rows[name] for name in digests if name in rows})
    print(f"failed: {', '.join(failed) or 'none'}", flush=True)
    return len(failed)


def _is_out_of_date(row: Row | None, wanted: str) -> bool:
    return row is None or row.get("configuration") != wanted or not is_complete(row)


def _write(path: Path, rows: Mapping[str, Row]) -> None:
    path.write_text(json.dumps(rows, indent=2) + "\n")
