"""Imports as they stand in source files, read without running them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path


def package_folders(root: Path) -> dict[str, Path]:
    """Package -> its folder `*/pdserve/<package>`, in alphabetical order."""
    folders = (path for path in root.glob("*/pdserve/*") if (path / "__init__.py").is_file())
    return {path.name: path for path in sorted(folders, key=lambda path: path.name)}


def source_files(folder: Path) -> list[Path]:
    """Python files below a folder, without those that protoc generates."""
    return sorted(path for path in folder.rglob("*.py") if "_pb2" not in path.name)


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Dotted names that a file imports: of `from a import b` both `a` and `a.b`."""
    return frozenset(_names(ast.parse(path.read_text())))


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
