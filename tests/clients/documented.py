"""The snippets of docs/clients.md, so that tests run what users paste.

A snippet is a fenced block whose first line names its language and the environment that has its packages (`python openai_3`); the
next block is what it prints.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes.up_cluster import ENVIRON, UpCluster
from tests.support.run.waiting import HANG_S

IMPORT_HANG_S = 3 * HANG_S
"""A library takes up to 5 s of CPU time to import, so that a busy machine may need longer than for any other wait."""
PAGE = Path(__file__).parents[2] / "docs/clients.md"
_SNIPPET = re.compile(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```\w+ (\w+)\n(.*?)^```\n+prints\n+```\n(.*?)^```", re.M | re.S)


@dataclass(frozen=True, slots=True)
class Snippet:
    heading: str
    code: str
    printed: str

    def run(self, up: UpCluster, command: Sequence[str], folder: Path) -> None:
        """Run as the file that `command` ends with, in `folder`; it must print what the page says."""
        code = self.code.replace("http://127.0.0.1:8000/v1", up.base_url).replace("127.0.0.1:50051", up.grpc)
        done = subprocess.run(
            command,
            input=code,
            cwd=folder,
            env=ENVIRON,
            capture_output=True,
            text=True,
            timeout=IMPORT_HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == self.printed


def snippets(environment: str) -> list[Snippet]:
    """Snippets of one environment."""
    found = _SNIPPET.findall(PAGE.read_text())
    return [Snippet(heading, code, printed) for heading, name, code, printed in found if name == environment]
