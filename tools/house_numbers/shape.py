"""Counts of one checkout, from its text: nothing of it is imported, so that old revisions can be counted, too."""

from __future__ import annotations

import ast
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from generated_docs.imported_modules import package_folders, source_files

_WALK = re.compile(r"^## One request, step by step\n(.*?)^## ", re.MULTILINE | re.DOTALL)
_TERMS = re.compile(r"^## (?:Words|Terms)\n(.*?)^## ", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"\b[a-z_]+(?:/\w+)*/\w+\.(?:py|proto)\b")
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True)
class Room:
    """One package."""

    lines: int
    files: int
    largest_folder: int
    """Files in it, without those of subfolders and `__init__.py`."""


@dataclass(frozen=True)
class Shape:
    rooms: Mapping[str, Room]
    sizes: Mapping[str, int]
    """Label -> a count that most commits change a little."""
    exact: Mapping[str, int]
    """Label -> a count that changes on purpose."""
    two_meanings: Mapping[str, list[str]]
    """Class name -> the files of the product that define a class of that name, where these are several."""


def shape_of(root: Path) -> Shape:
    """Count the files below `root`. The product is `*/pdserve/`, without what protoc generates."""
    folders = {name: folder for name, folder in package_folders(root).items() if name != "v1"}
    texts = {path: path.read_text() for folder in folders.values() for path in source_files(folder)}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    rooms = {name: _room(folder, lines) for name, folder in folders.items()}
    lengths = [_length(node) for tree in trees.values() for node in ast.walk(tree) if isinstance(node, _FUNCTIONS)]
    two_meanings = _two_meanings(trees, root)
    sizes = {
        "files": len(lines),
        "lines of Python": sum(lines.values()),
        "lines of C++": _lines_below(root, "*/pdserve/**/*.cpp", "*/pdserve/**/*.h"),
        "lines of proto": _lines_below(root, "proto/pdserve/**/*.proto"),
        "lines of tests": _lines_below(root, "tests/**/*.py"),
        "lines of the median file": int(statistics.median(lines.values())),
        "lines of the largest file": max(lines.values()),
        "functions": len(lengths),
        "lines of the median function": int(statistics.median(lengths)) if lengths else 0,
        "lines of the longest function": max(lengths, default=0),
        "methods that only forward": sum(_forwards(node) for tree in trees.values() for node in ast.walk(tree)),
    }
    exact = {
        "files of the largest flat folder": max(room.largest_folder for room in rooms.values()),
        "settings": len(set(_settings(trees))),
        "rpcs": sum(
            len(re.findall(r"^\s*rpc ", path.read_text(), re.MULTILINE)) for path in (root / "proto").rglob("*.proto")
        ),
        "commands of `pdserve`": sum(map(_commands, root.glob("cli/pdserve/cli/*.py"))),
        "targets of `make`": _make_targets(root / "Makefile"),
        "class names with two meanings": len(two_meanings),
        "terms of our own": _terms(root / "docs/notation.md"),
        "files that the walk of a request names": _walk(root / "docs/architecture.md"),
    }
    return Shape(rooms, sizes, exact, two_meanings)


def _room(folder: Path, lines: Mapping[Path, int]) -> Room:
    files = source_files(folder)
    per_folder = Counter(path.parent for path in files if path.name != "__init__.py")
    return Room(sum(lines[path] for path in files), len(files), max(per_folder.values(), default=0))


def _lines_below(root: Path, *patterns: str) -> int:
    return sum(len(path.read_text().splitlines()) for pattern in patterns for path in root.glob(pattern))


def _length(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def _forwards(node: ast.AST) -> bool:
    """True for a function whose only statement calls a method of the same name of something else."""
    if not isinstance(node, _FUNCTIONS):
        return False
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if len(body) != 1 or not isinstance(body[0], ast.Return | ast.Expr):
        return False
    call = body[0].value
    call = call.value if isinstance(call, ast.Await) else call
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == node.name


def _two_meanings(trees: Mapping[Path, ast.Module], root: Path) -> dict[str, list[str]]:
    files: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                files[node.name].append("/".join(path.relative_to(root).parts[2:]))
    return {name: sorted(found) for name, found in sorted(files.items()) if len(found) > 1}


def _settings(trees: Mapping[Path, ast.Module]) -> Iterator[str]:
    """Fields of the classes `*Settings` in the folder of settings; one that two classes have comes twice."""
    for path, tree in trees.items():
        if path.parent.name == "settings":
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and node.name.endswith("Settings"):
                    yield from _fields(node.body)


def _fields(body: Iterable[ast.stmt]) -> Iterator[str]:
    for node in body:
        if (
            isinstance(node, ast.AnnAssign)
            and isinstance(node.target, ast.Name)
            and "ClassVar" not in ast.unparse(node)
        ):
            yield node.target.id


def _commands(app: Path) -> int:
    """Functions that `.command(...)` makes commands: as decorator, or in a loop over their names."""
    count = 0
    for node in ast.walk(ast.parse(app.read_text())):
        if isinstance(node, _FUNCTIONS):
            count += any(_makes_commands(decorator) for decorator in node.decorator_list)
        elif isinstance(node, ast.For) and isinstance(node.iter, ast.Tuple):
            calls = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
            count += len(node.iter.elts) if any(_makes_commands(call) for call in calls) else 0
    return count


def _makes_commands(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "command"


def _make_targets(makefile: Path) -> int:
    """Targets that are no files."""
    text = makefile.read_text() if makefile.exists() else ""
    return len({name for line in re.findall(r"^\.PHONY: (.+)$", text, re.MULTILINE) for name in line.split()})


def _terms(page: Path) -> int:
    terms = _TERMS.search(page.read_text())
    return len(re.findall(r"^\| (?!term |word |-)[^|]+ \| ", terms[1], re.MULTILINE)) if terms else 0


def _walk(page: Path) -> int:
    walk = _WALK.search(page.read_text())
    return len(set(_FILE.findall(walk[1]))) if walk else 0
