"""Prints what pyproject.toml says that pdserve needs, one requirement a line; arguments are extras to include."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
unknown = sorted(set(sys.argv[1:]) - set(extras))
if unknown:
    sys.exit(f"unknown extra {', '.join(unknown)}; there are {', '.join(sorted(extras))}")
print("\n".join(project["dependencies"] + [line for extra in sys.argv[1:] for line in extras[extra]]))
