"""`python -m house_numbers [BASE [LAST]] [--write]`: tables of two revisions, by git; LAST `.` is the folder as it is."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from house_numbers.history import lines_by_feature
from house_numbers.shape import SMALL_LINES, Room, Shape, shape_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/house.md"
MARK = "<!-- below: python -m house_numbers --write -->\n"
COLUMNS: tuple[tuple[str, str, Callable[[Iterable[int]], int]], ...] = (
    ("lines", "lines", sum), ("files", "files", sum), ("small_files", f"below {SMALL_LINES} lines", sum),
    ("largest_folder", "largest folder", max), ("file_arrows", "arrows between files", sum),
    ("part_arrows", "between parts", sum),
)  # fmt: skip


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A folder with the files of a revision."""
    if revision == ".":
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def table(before: Shape, after: Shape) -> Iterator[str]:
    yield f"| package | {' | '.join(heading for _, heading, _ in COLUMNS)} |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for name in after.rooms:
        old, new = before.rooms.get(name, Room(0, 0, 0, 0, 0, 0)), after.rooms[name]
        yield f"| `{name}` | " + " | ".join(f"{getattr(old, f):,} -> {getattr(new, f):,}" for f, *_ in COLUMNS) + " |"
    cells = []
    for field, _, together in COLUMNS:
        totals = (together(getattr(room, field) for room in shape.rooms.values()) for shape in (before, after))
        cells.append(" -> ".join(f"{total:,}" for total in totals))
    yield f"| all | {' | '.join(cells)} |\n"
    yield f"Terms of our own in `docs/notation.md`: {before.terms} -> {after.terms}."
    yield f"Files that the walk of a request names in `docs/architecture.md`: {before.walk} -> {after.walk}."


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m house_numbers", description="Tables of two revisions, by git.")
    parser.add_argument("base", nargs="?", default="2a1289e", help="default: %(default)s")
    parser.add_argument("last", nargs="?", default="HEAD", help="default: %(default)s; `.` is the folder as it is")
    parser.add_argument("--write", action="store_true", help=f"replace the tables of {PAGE.name}")
    arguments = parser.parse_args()
    base, last = arguments.base, arguments.last
    with checkout(base) as old, checkout(last) as new:
        before, after = shape_of(old), shape_of(new)
    lines = sum(room.lines for room in before.rooms.values())
    history = lines_by_feature(ROOT, base, "HEAD" if last == "." else last, lines)
    text = "\n".join([*table(before, after), "\n## Lines by feature\n", *history, ""])
    if arguments.write:
        PAGE.write_text(PAGE.read_text().partition(MARK)[0] + f"{MARK}\n{text}")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
