"""Programs of `deploy/` and `tools/` say how they are used, and refuse options that they do not have."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    path
    for path in [*(ROOT / "deploy").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]
    if '__name__ == "__main__"' in path.read_text() or path.name == "__main__.py"
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_programs_are_found() -> None:
    assert {"deploy/lock.py", "deploy/sbom.py", "tools/generated_docs/__main__.py"} <= set(map(name, PROGRAMS))


@pytest.mark.parametrize("program", PROGRAMS, ids=name)
def test_arguments_are_parsed(program: Path) -> None:
    """A program that looks into `sys.argv` takes `--help` for something else."""
    tree = ast.parse(program.read_text())
    assert "sys.argv" not in {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.few(2)
@pytest.mark.timeout(2 * HANG_S)
@pytest.mark.parametrize("word", ["--help", "--no-such-option"])
@pytest.mark.parametrize("program", PROGRAMS, ids=name)
def test_help_is_shown_and_nothing_is_done(program: Path, word: str, tmp_path: Path) -> None:
    command = ["-m", program.parent.name] if program.name == "__main__.py" else [str(program)]
    done = subprocess.run(
        [sys.executable, *command, word], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT / "tools")},
        capture_output=True, text=True, timeout=HANG_S, check=False,
    )  # fmt: skip
    assert done.returncode == (0 if word == "--help" else 2), done.stderr
    assert "usage: " in (done.stdout if word == "--help" else done.stderr)
    assert not list(tmp_path.iterdir())
