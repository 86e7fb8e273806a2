"""The test files that cover each module, as Markdown tables.

A test file covers the modules that it imports. A module that no test file imports is covered through others: for it the tables list
the tests of its nearest enclosing package that have any.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from generated_docs.imported_modules import imports_of, package_folders, source_files

MAX_LISTED = 6
"""Test files in one row; the others are only said to exist."""


def modules_of(root: Path) -> dict[str, str]:
    """Dotted module -> path as documents write it; packages themselves (`__init__.py`) are left out."""
    modules = {}
    for folder in package_folders(root).values():
        for path in source_files(folder):
            if path.name != "__init__.py":
                written = path.relative_to(folder.parent).as_posix()
                modules["pdserve." + written.removesuffix(".py").replace("/", ".")] = written
    return modules


def importers(root: Path, modules: dict[str, str]) -> dict[str, set[Path]]:
    """Dotted module -> test files that import it."""
    found: dict[str, set[Path]] = defaultdict(set)
    house = root / "tests/house"
    for path in sorted((root / "tests").rglob("test_*.py")):
        if house in path.parents:
            continue  # they compare code with documents, and run none of it
        for module in imports_of(path) & modules.keys():
            found[module].add(path.relative_to(root))
    return found


def nearest(module: str, found: dict[str, set[Path]]) -> set[Path]:
    """Test files that import another module of the nearest enclosing package that any test file imports from."""
    package = module
    while "." in package:
        package = package.rpartition(".")[0]
        tests = {path for other, paths in found.items() if other.startswith(f"{package}.") for path in paths}
        if tests:
            return tests
    return set()


def listed(module: str, tests: set[Path]) -> str:
    """The test of the same name first, then those in the package's own folder, then by path."""
    _, package, *_, name = module.split(".")
    by_name = sorted(tests, key=lambda path: (path.stem != f"test_{name}", path.parts[1] != package, path))
    shown = ", ".join(f"`{path.as_posix()}`" for path in by_name[:MAX_LISTED])
    return shown + (" and more" if len(by_name) > MAX_LISTED else "")


def tests_of_modules(root: Path) -> str:
    """One section and table per package."""
    modules = modules_of(root)
    found = importers(root, modules)
    sections = []
    for package in package_folders(root):
        rows = []
        for module, written in modules.items():
            if module.split(".")[1] == package:
                cell = (
                    listed(module, found[module]) if module in found else f"*{listed(module, nearest(module, found))}*"
                )
                rows.append(f"| `{written}` | {cell} |")
        if rows:
            sections.append("\n".join([f"## {package}", "", "| module | tests |", "|---|---|", *rows]))
    return "\n\n".join(sections)
