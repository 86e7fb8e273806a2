"""`make sbom`: write a CycloneDX bill of materials of everything in `locks/`, as JSON.

`python deploy/sbom.py FILE`; what follows the file are options of `cyclonedx-py requirements`.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file")
    arguments, options = parser.parse_known_args()
    target: str = arguments.file
    packages: dict[str, str] = {}
    for lock in sorted(Path("locks").glob("*.txt")):
        for entry in re.findall(r"^[a-z0-9].*(?:\n .*)*\n", lock.read_text(), re.MULTILINE):
            packages[entry.partition(" ")[0]] = entry
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable, "-m", "cyclonedx_py", "requirements", "--pyproject", "pyproject.toml", "--mc-type", "application",
        *options, "--output-reproducible", "--output-format", "JSON", "--output-file", target, "-",
    ]  # fmt: skip
    subprocess.run(command, input="".join(packages[name] for name in sorted(packages)), text=True, check=True)


if __name__ == "__main__":
    main()
