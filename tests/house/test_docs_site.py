"""The documentation's index and the site's navigation name every page in the same groups, and every link leads to a heading."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from docs_site import FROM_ROOT, as_neighbour, stage

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *(ROOT / name for name in FROM_ROOT)]
GROUPS = ["Use", "Operate", "Understand", "Prove"]


def index_groups() -> dict[str, list[tuple[str, str]]]:
    """Group -> titles and files of its pages, in the order of `docs/index.md`."""
    sections = re.split(r"^## (.+)\n", (ROOT / "docs/index.md").read_text(), flags=re.MULTILINE)[1:]
    return {
        name: [
            (title.replace("`", ""), Path(file).name)
            for title, file in re.findall(r"^\| \[(.+?)\]\((.+?)\)", text, re.M)
        ]
        for name, text in zip(sections[::2], sections[1::2], strict=True)
    }


def navigation_groups() -> dict[str, list[tuple[str, str]]]:
    """The same in the order of the site's navigation, whose first entry is the index."""
    _, *groups = tomllib.loads((ROOT / "docs/zensical.toml").read_text())["project"]["nav"]
    return {name: [next(iter(page.items())) for page in pages] for group in groups for name, pages in group.items()}


def test_the_index_has_every_page_once() -> None:
    groups = index_groups()
    assert [*groups] == GROUPS
    named = [file for pages in groups.values() for _, file in pages]
    assert sorted(named) == sorted({path.name for path in PAGES} - {"index.md"})


def test_the_navigation_is_the_index() -> None:
    assert navigation_groups() == index_groups()


def test_generated_and_raw_pages_come_last() -> None:
    assert index_groups()["Prove"][-1][1] == "tests.md"


@cache
def anchors(page: Path) -> frozenset[str]:
    """Names that a link may have after `#`: GitHub's anchors of the page's headings."""
    seen: Counter[str] = Counter()
    return frozenset(_anchors(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S), seen))


def _anchors(text: str, seen: Counter[str]) -> Iterator[str]:
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", heading).replace("`", "").strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        yield f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor
        seen[anchor] += 1


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda path: path.name)
def test_every_link_to_a_heading_finds_it(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]*)#([^)\s]+)\)", page.read_text())
    broken = [
        f"{file}#{anchor}"
        for file, anchor in links
        if anchor not in anchors((page.parent / file).resolve() if file else page)
    ]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_every_link_of_the_site_stays_on_it(page: Path) -> None:
    links = re.findall(r"\]\(([\w./-]+\.md)(?:#[^)]*)?\)", page.read_text())
    assert {(page.parent / link).resolve() for link in links} <= set(PAGES)


def test_anchors_are_those_of_github(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b_c` (d)\n\n```\n# no heading\n```\n\n## Twice\n\n## Twice\n\n## It's [here](x.md), now\n")
    assert anchors(page) == {"a-b_c-d", "twice", "twice-1", "its-here-now"}


def test_pages_of_both_folders_become_neighbours(tmp_path: Path) -> None:
    assert as_neighbour("[a](docs/a.md#x) [b](../B.md) ![c](docs/images/c.png) [d](https://d.org/docs/d.md)") == (
        "[a](a.md#x) [b](B.md) ![c](images/c.png) [d](https://d.org/docs/d.md)"
    )
    assert as_neighbour("```python openai_3\nx\n```\n") == "```python\nx\n```\n"
    stage(tmp_path / "site-pages")
    staged = {path.name for path in (tmp_path / "site-pages/pages").glob("*.md")}
    assert staged == {path.name for path in PAGES}
    assert (tmp_path / "site-pages/zensical.toml").is_file()
