"""Client libraries of Node, in tests of Node's own runner."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clients.documented import Snippet, snippets
from tests.support.processes.up_cluster import ENVIRON, UpCluster

FOLDER = Path(__file__).parents[1] / "node"
NODE = shutil.which("node") or ""
TIMEOUT_S = 100.0
pytestmark = pytest.mark.skipif(
    not NODE or not (FOLDER / "node_modules").is_dir(),
    reason="Node 20 with npm is not installed, or was not when `make clients` first ran (`make clean` lets it look again)",
)


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.test.mjs")), ids=lambda path: path.name)
def test_file(up: UpCluster, root: Path, file: Path) -> None:
    environ = ENVIRON | {"BASE_URL": up.base_url, "GRPC": up.grpc, "PROTO": str(root / "proto")}
    done = subprocess.run(
        [NODE, "--test", "--test-reporter=tap", file.name],
        cwd=FOLDER, env=environ, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    counts = {name: int(count) for name, count in re.findall(r"^# (\w+) (\d+)$", done.stdout, re.MULTILINE)}
    assert counts["pass"] == counts["tests"] >= file.read_text().count("test("), done.stdout


@pytest.mark.parametrize("snippet", snippets("node"), ids=lambda snippet: snippet.heading)
def test_the_page_is_true(up: UpCluster, root: Path, snippet: Snippet) -> None:
    here = replace(snippet, code=snippet.code.replace("['proto']", f"['{root}/proto']"))
    here.run(up, [NODE, "--input-type=module", "-"], FOLDER)
