"""Documents contain between markers exactly the output of `make docs-generated`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from generated_docs import tests_of_modules
from generated_docs.imported_modules import package_folders
from generated_docs.package_drawing import all_below, direct_imports, reduced
from generated_docs.parts import files, part, replace_part, texts

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def current() -> dict[tuple[str, str], str]:
    """Made once, since it takes seconds, and not while tests are collected."""
    return texts()


@pytest.mark.slow
def test_generated_parts_are_current(current: dict[tuple[str, str], str]) -> None:
    stale = [place for place, text in current.items() if part(ROOT / place[0], place[1]) != text]
    assert not stale, "run `make docs-generated`"


@pytest.mark.parametrize("file", files())
def test_generated_file_is_current(file: str) -> None:
    assert (ROOT / file).read_text() == files()[file], "run `make docs-generated`"


def test_each_module_has_a_test() -> None:
    rows = [line for line in tests_of_modules.tests_of_modules(ROOT).splitlines() if line.startswith("| `")]
    assert len(rows) > 300
    assert not [row for row in rows if "`tests/" not in row]


def test_arrows_left_out_follow_from_those_drawn() -> None:
    imports = direct_imports(ROOT)
    drawn = reduced(imports)
    assert set(drawn) == set(package_folders(ROOT)) >= {"router", "engine", "v1"}
    for package in imports:
        assert all_below(package, drawn) == all_below(package, imports)
        for other in drawn[package]:
            assert other not in set().union(*(all_below(third, imports) for third in imports[package] - {other}))


def test_another_text_replaces_a_part_alone(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("before\n<!-- made by make docs-generated: it -->\nold\n<!-- end -->\nafter\n")
    replace_part(document, "it", r"new \1")
    assert document.read_text() == ("before\n<!-- made by make docs-generated: it -->\nnew \\1\n<!-- end -->\nafter\n")
    with pytest.raises(ValueError, match="has no part other"):
        replace_part(document, "other", "new")


@pytest.mark.slow
def test_the_command_prints_every_part(current: dict[tuple[str, str], str]) -> None:
    command = [sys.executable, "-m", "generated_docs"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(text in printed for text in (*current.values(), *files().values()))
