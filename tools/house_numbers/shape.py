"""Counts of one checkout: lines, files, imports between files and between folders, terms, files of the walk."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from generated_docs.imported_modules import imports_of, package_folders, source_files

SMALL_LINES = 60
_WALK = re.compile(r"^## One request, step by step\n(.*?)^## ", re.MULTILINE | re.DOTALL)
_TERMS = re.compile(r"^## (?:Words|Terms)\n(.*?)^## ", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"\b[a-z_]+(?:/\w+)*/\w+\.(?:py|proto)\b")


@dataclass(frozen=True)
class Room:
    """One package. Arrows are imports within it; between packages the layer table rules."""

    lines: int
    files: int
    file_arrows: int
    """Pairs of files of which the first imports the second."""
    part_arrows: int
    """Pairs of its subfolders and modules, as `tests/house/test_layers.py` orders them."""
    largest_folder: int
    """Files in it, without those of subfolders."""
    small_files: int
    """Files below `SMALL_LINES` lines."""


@dataclass(frozen=True)
class Shape:
    rooms: dict[str, Room]
    terms: int
    """Rows of the table of terms in `docs/notation.md`."""
    walk: int
    """Files that the walk of a request in `docs/architecture.md` names."""


def room_of(folder: Path) -> Room:
    """Everything of one package, generated code left out."""
    files = source_files(folder)
    module_of = {path: _module(path, folder) for path in files}
    known = {module for path, module in module_of.items() if path.name != "__init__.py"}
    pairs = {
        (module, other) for path, module in module_of.items() for other in imports_of(path) & known if other != module
    }
    folders = {(_part(a), _part(b)) for a, b in pairs if _part(a) != _part(b)}
    lines = [len(path.read_text().splitlines()) for path in files]
    per_folder = Counter(path.parent for path in files if path.name != "__init__.py")
    small = sum(count < SMALL_LINES for path, count in zip(files, lines, strict=True) if path.name != "__init__.py")
    return Room(sum(lines), len(files), len(pairs), len(folders), max(per_folder.values(), default=0), small)


def shape_of(root: Path) -> Shape:
    """Count the files below `root`."""
    rooms = {name: room_of(folder) for name, folder in package_folders(root).items() if name != "v1"}
    terms = _TERMS.search((root / "docs/notation.md").read_text())
    walk = _WALK.search((root / "docs/architecture.md").read_text())
    rows = re.findall(r"^\| (?!term |word |-)[^|]+ \| ", terms[1], re.MULTILINE) if terms else []
    return Shape(rooms, len(rows), len(set(_FILE.findall(walk[1]))) if walk else 0)


def _module(path: Path, folder: Path) -> str:
    parts = path.relative_to(folder.parent).with_suffix("").parts
    return ".".join(["pdserve", *(parts[:-1] if parts[-1] == "__init__" else parts)])


def _part(module: str) -> str:
    """The subfolder of its package, or the module itself where it lies beside them."""
    return ".".join(module.split(".")[:3])
