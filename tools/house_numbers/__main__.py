"""`python -m house_numbers [REVISION]...`: the counts of revisions next to each other; `.` is the folder as it is."""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from house_numbers.shape import shape_of

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """A folder with the files of a revision. Raises: CalledProcessError when git does not know it."""
    if revision == ".":
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
        subprocess.run(["tar", "-x", "-C", folder], input=archive, check=True)
        yield Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m house_numbers", description="Counts of revisions, next to each other."
    )
    parser.add_argument("revisions", nargs="*", default=["."], help="default: `.`, the folder as it is")
    revisions: list[str] = parser.parse_args().revisions
    columns: list[dict[str, int]] = []
    for revision in revisions:
        with checkout(revision) as root:
            shape = shape_of(root)
        rooms = {f"{name}, lines": room.lines for name, room in shape.rooms.items()}
        columns.append({**shape.sizes, **shape.exact, **rooms})
    print("\n".join([f"| | {' | '.join(revisions)} |", "|---" + "|---:" * len(revisions) + "|"]))
    for label in dict.fromkeys(label for column in columns for label in column):
        print(f"| {label} | {' | '.join(f'{column[label]:,}' if label in column else '' for column in columns)} |")


if __name__ == "__main__":
    main()
