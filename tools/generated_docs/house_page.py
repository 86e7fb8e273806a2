"""The tables of `docs/house.md`. A size is written again once it has moved from the page's by more than a twentieth.

So the page is out of date after a change that a reader would notice, and not after every commit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

from house_numbers.shape import Shape, shape_of

TOLERANCE = 0.05


def settled(now: int, written: int | None = None) -> int:
    """The written figure while it is near enough, else the present one."""
    return now if written is None or abs(now - written) > TOLERANCE * written else written


def figures(text: str) -> dict[str, list[int]]:
    """First cell -> the numbers in the row's others, for each row of a table in the text."""
    rows = re.findall(r"^\| (.+?) \| ([\d,]+(?: \| [\d,]+)*) \|$", text, re.MULTILINE)
    return {label: [int(number.replace(",", "")) for number in numbers.split(" | ")] for label, numbers in rows}


@cache
def _shape(root: Path) -> Shape:
    return shape_of(root)


def sizes(root: Path, written: str) -> str:
    """written: the table that stands in the page."""
    shape, before = _shape(root), figures(written)
    rows = [f"| {label} | {settled(now, *before.get(label, [])):,} |" for label, now in shape.sizes.items()]
    rows += [f"| {label} | {now:,} |" for label, now in shape.exact.items()]
    return "\n".join(["| | |", "|---|---:|", *rows])


def packages(root: Path, written: str) -> str:
    """written: the table that stands in the page."""
    before = figures(written)
    lines = ["| package | lines | files | files of its largest folder |", "|---|---:|---:|---:|"]
    for name, room in _shape(root).rooms.items():
        now = (room.lines, room.files, room.largest_folder)
        old = before.get(f"`{name}`", now)
        lines.append(f"| `{name}` | {' | '.join(f'{settled(*pair):,}' for pair in zip(now, old, strict=True))} |")
    return "\n".join(lines)


def two_meanings(root: Path, _: str) -> str:
    """One row per class name that two files of the product define."""
    rows = [
        f"| `{name}` | {', '.join(f'`{file}`' for file in files)} |"
        for name, files in _shape(root).two_meanings.items()
    ]
    return "\n".join(["| name | files |", "|---|---|", *rows])


PARTS: Mapping[str, Callable[[Path, str], str]] = {
    "sizes": sizes,
    "packages": packages,
    "names with two meanings": two_meanings,
}
"""Name of a part of the page -> what makes it, from the repository and the text that stands there."""
