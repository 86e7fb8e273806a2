"""Which cases of a test `make test` runs."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.support.run.chosen_cases import diagonal_of, evenly_spread

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

@pytest.fixture(params=["x", "y"])
def letter(request):
    return request.param

@pytest.mark.diagonal
@pytest.mark.parametrize("number", range(4))
def test_diagonal(letter, number): pass

@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(9))
def test_few(seed): pass

@pytest.mark.diagonal
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("other", range(2))
def test_some_are_slow(number, other): pass

@pytest.mark.parametrize("number", range(2))
def test_all(letter, number): pass
"""


def product_of(*sizes: int) -> list[dict[str, int]]:
    return [dict(zip("abcde", values, strict=False)) for values in product(*map(range, sizes))]


@pytest.mark.parametrize("sizes", [(1,), (5,), (3, 3), (2, 7), (7, 2), (4, 3, 5), (2, 2, 2, 2), (1, 6, 1)], ids=str)
def test_a_diagonal_has_each_value_and_as_few_cases_as_can_be(sizes: tuple[int, ...]) -> None:
    cases = product_of(*sizes)
    chosen = [cases[place] for place in diagonal_of(cases)]
    assert len(chosen) == max(sizes)
    for name, size in zip("abcde", sizes, strict=False):
        uses = [sum(case[name] == value for case in chosen) for value in range(size)]
        assert min(uses) > 0
        assert max(uses) - min(uses) <= 1, "values take turns"


def test_values_that_are_asked_for_twice_meet_other_ones() -> None:
    cases = product_of(4, 3, 3)
    chosen = [cases[place] for place in diagonal_of(cases, 2)]
    assert len(chosen) == 8
    for name, size in zip("abc", (4, 3, 3), strict=True):
        assert all(sum(case[name] == value for case in chosen) >= 2 for value in range(size))
    for name in "bc":
        assert len({(case["a"], case[name]) for case in chosen}) >= 7, "nearly all pairs differ"
    assert len(diagonal_of(product_of(2, 1), 5)) == 2, "there are no more"


def test_values_that_occur_in_few_combinations_are_there_too() -> None:
    cases = [case for case in product_of(4, 4, 4) if case["a"] == 0 or case["b"] == case["c"] == 3]
    chosen = [cases[place] for place in diagonal_of(cases)]
    for name in "abc":
        assert {case[name] for case in chosen} == set(range(4))
    assert len(chosen) < len(cases) / 2


@pytest.mark.parametrize(
    ("number", "among", "expected"),
    [(1, 5, [0]), (2, 5, [0, 4]), (3, 5, [0, 2, 4]), (3, 100, [0, 50, 99]), (5, 5, [0, 1, 2, 3, 4]), (9, 2, [0, 1])],
)
def test_few_cases_are_evenly_spread(number: int, among: int, expected: list[int]) -> None:
    assert evenly_spread(number, among) == expected


def collected(folder: Path, *arguments: str) -> set[str]:
    (folder / "test_marked.py").write_text(TESTS)
    marks = ("slow", "diagonal", "few(number)", "faults", "soak")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n" + "".join(f"  {mark}\n" for mark in marks))
    command = ["-m", "pytest", "--collect-only", "-q", "-p", "tests.support.run.chosen_cases", "--rootdir", str(folder)]
    done = subprocess.run(
        [sys.executable, *command, "-c", str(folder / "pytest.ini"), *arguments], cwd=folder, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line}


def test_the_other_cases_are_slow(tmp_path: Path) -> None:
    chosen, all_cases = collected(tmp_path, "-m", "not slow"), collected(tmp_path)
    assert len(all_cases) == 8 + 9 + 6 + 4
    tests = {
        name: sorted(case for case in chosen if case.startswith(f"{name}[")) for name in ("test_diagonal", "test_few")
    }
    assert [case[-2] for case in sorted(tests["test_diagonal"], key=lambda case: case[-2])] == ["0", "1", "2", "3"]
    assert {case[-4] for case in tests["test_diagonal"]} == {"x", "y"}
    assert tests["test_few"] == ["test_few[0]", "test_few[8]"]
    assert len([case for case in chosen if case.startswith("test_some_are_slow")]) == 2
    assert {case for case in all_cases if case.startswith("test_all[")} < chosen
    assert len(chosen) == 4 + 2 + 2 + 4


def test_a_case_that_is_named_runs(tmp_path: Path) -> None:
    case = "test_marked.py::test_diagonal[y-2]"
    assert collected(tmp_path, "-m", "not slow", case) == {"test_diagonal[y-2]"}


def users_tests() -> list[tuple[str, str]]:
    """(file, test) of each promise, without the files that the page's head names for other runs."""
    head, _, promises = (ROOT / "docs/users.md").read_text().partition("\n## ")
    others = re.findall(r"`(tests/[\w/]+\.py)`", head.replace("`tests/house/test_docs.py`", ""))
    found = sorted(set(re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", promises)))
    return [(file, test) for file, test in found if file not in others and not file.startswith("tests/clients/")]


@pytest.mark.parametrize(("file", "test"), users_tests())
def test_what_users_rely_on_runs_in_make_test(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    marks = [
        ast.unparse(statement.value)
        for statement in tree.body
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "pytestmark"
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == test:
            marks += map(ast.unparse, node.decorator_list)
    other_runs = [mark for mark in marks if re.search(r"mark\.(slow|faults|soak)", mark) and "parametrize" not in mark]
    assert not other_runs, f"{test} is left to another run"
