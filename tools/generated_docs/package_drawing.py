"""The imports between packages, as a Mermaid flowchart. Arrows that follow from others are left out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from generated_docs.imported_modules import imports_of, package_folders, source_files


def direct_imports(root: Path) -> dict[str, set[str]]:
    """Package -> packages of ours that it imports."""
    return {
        package: {
            module.split(".")[1]
            for path in source_files(folder)
            for module in imports_of(path)
            if module.startswith("pdserve.") and module.split(".")[1] != package
        }
        for package, folder in package_folders(root).items()
    }


def all_below(package: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Packages that it imports, directly or through others."""
    below: set[str] = set()
    waiting = [package]
    while waiting:
        new = imports[waiting.pop()] - below
        below |= new
        waiting += new
    return below


def reduced(imports: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Direct imports without those that another imported package has, too."""
    return {
        package: direct - set().union(*(all_below(other, imports) for other in direct))
        for package, direct in imports.items()
    }


def package_drawing(root: Path) -> str:
    """The flowchart in a fenced block, importers before what they import."""
    imports = direct_imports(root)
    by_height = sorted(imports, key=lambda package: (-len(all_below(package, imports)), package))
    arrows = reduced(imports)
    lines = [f"    {package} --> {other}" for package in by_height for other in sorted(arrows[package])]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])
