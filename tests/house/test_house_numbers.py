"""`python -m house_numbers`: what it counts in a small checkout with a history of its own."""

from __future__ import annotations

import subprocess
from pathlib import Path

from house_numbers.history import lines_by_feature
from house_numbers.shape import Room, shape_of


def commit(root: Path, *arguments: str) -> None:
    named = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    subprocess.run([*named, "commit", "-q", "-m", "x", *arguments], cwd=root, check=True)


def test_a_small_checkout(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    package, docs = tmp_path / "room/pdserve/room", tmp_path / "docs"
    (package / "low").mkdir(parents=True)
    docs.mkdir()
    (docs / "notation.md").write_text("## Terms\n\n| term | meaning |\n|---|---|\n| block | KV |\n\n## Letters\n")
    (docs / "architecture.md").write_text(
        "## One request, step by step\n\n1. `room/a.py`, `room/low/c.py`, `room/a.py`\n\n## Packages\n"
    )
    (package / "__init__.py").touch()
    (package / "a.py").write_text("from pdserve.room.b import x\nfrom pdserve.room.low.c import y\n")
    (package / "b.py").write_text("x = 1\n" * 60)
    (package / "low/c.py").write_text("from pdserve.room.low.d import y\n")
    (package / "low/d.py").write_text("y = 1\n")
    shape = shape_of(tmp_path)
    assert shape.rooms == {"room": Room(64, 5, file_arrows=3, part_arrows=2, largest_folder=2, small_files=3)}
    assert (shape.terms, shape.walk) == (1, 2)
    commit(tmp_path)
    base = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=tmp_path, text=True).strip()
    (tmp_path / "tools").mkdir()
    (package / "b.py").rename(tmp_path / "tools/b.py")
    (package / "a.py").write_text("y = 1\n" * 12)
    commit(tmp_path)
    assert [*lines_by_feature(tmp_path, base, "HEAD", 64)][-2:] == [
        "| trust | small repairs | -50 |",
        "| | after | 14 |",
    ]
