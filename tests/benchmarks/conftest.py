"""Makes the scripts of `benchmarks/` importable."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"
if str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))
