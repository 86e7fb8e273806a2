"""Makes the room of `make gpu` importable, as the Makefile does."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
for folder in (ROOT / "benchmarks", ROOT):
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
