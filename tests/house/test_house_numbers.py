"""`python -m house_numbers` and `docs/house.md`: what they count in a small checkout, and when the page is out of date."""

from __future__ import annotations

from pathlib import Path

import pytest
from house_numbers.shape import Room, shape_of

from generated_docs.house_page import figures, packages, settled, sizes


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    package, docs = tmp_path / "room/pdserve/room", tmp_path / "docs"
    (package / "settings").mkdir(parents=True)
    (tmp_path / "cli/pdserve/cli").mkdir(parents=True)
    (tmp_path / "proto/pdserve/v1").mkdir(parents=True)
    docs.mkdir()
    (docs / "notation.md").write_text("## Terms\n\n| term | meaning |\n|---|---|\n| block | KV |\n\n## Letters\n")
    (docs / "architecture.md").write_text(
        "## One request, step by step\n\n1. `room/a.py`, `room/low/c.py`, `room/a.py`\n\n## Packages\n"
    )
    (package / "__init__.py").touch()
    (package / "a.py").write_text(
        "class Place:\n    def get(self):\n        return self.other.get()\n\n    def put(self):\n        return self.get()\n"
    )
    (package / "b.py").write_text("class Place: ...\n\n\nclass _Own: ...\n")
    (package / "settings/room_settings.py").write_text(
        "class RoomSettings:\n    kind: ClassVar[str] = ''\n    port: int = 1\n    host: str = ''\n\n"
        "class Limits:\n    most: int = 1\n"
    )
    (tmp_path / "cli/pdserve/cli/__init__.py").touch()
    (tmp_path / "cli/pdserve/cli/app.py").write_text(
        "@app.command(cls=X)\ndef up(): ...\n\nfor one in (chat, top):\n    app.command()(one)\n"
    )
    (tmp_path / "proto/pdserve/v1/a.proto").write_text("service A {\n  rpc Ask(B) returns (C);\n}\n")
    (tmp_path / "Makefile").write_text(".PHONY: up test\n.PHONY: check\nup:\n\ttrue\n")
    return tmp_path


def test_a_small_checkout(checkout: Path) -> None:
    shape = shape_of(checkout)
    assert shape.rooms == {"cli": Room(5, 2, 1), "room": Room(17, 4, 2)}
    assert shape.two_meanings == {"Place": ["room/a.py", "room/b.py"]}
    assert shape.exact == {
        "files of the largest flat folder": 2,
        "settings": 2,
        "rpcs": 1,
        "commands of `pdserve`": 3,
        "targets of `make`": 3,
        "class names with two meanings": 1,
        "terms of our own": 1,
        "files that the walk of a request names": 2,
    }
    assert shape.sizes["functions"] == 3
    assert shape.sizes["lines of the longest function"] == 2
    assert shape.sizes["methods that only forward"] == 1
    assert (shape.sizes["files"], shape.sizes["lines of Python"], shape.sizes["lines of proto"]) == (6, 22, 3)


def test_a_size_is_written_again_when_it_has_moved_by_more_than_a_twentieth() -> None:
    assert [settled(now, 1000) for now in (950, 1000, 1050)] == [1000, 1000, 1000]
    assert [settled(now, 1000) for now in (949, 1051)] == [949, 1051]
    assert settled(7, None) == 7
    assert settled(4, 3) == 4


def test_the_page_keeps_what_is_near_and_replaces_what_is_not(checkout: Path) -> None:
    written = sizes(checkout, "")
    assert figures(written)["lines of Python"] == [22]
    old = written.replace("| lines of Python | 22 |", "| lines of Python | 1,000 |").replace(
        "| settings | 2 |", "| settings | 3 |"
    )
    assert sizes(checkout, old) == written
    near = written.replace("| lines of Python | 22 |", "| lines of Python | 23 |")
    assert sizes(checkout, near) == near
    moved = packages(checkout, "").replace("| `room` | 17 |", "| `room` | 18 |")
    assert packages(checkout, moved) == packages(checkout, "")
