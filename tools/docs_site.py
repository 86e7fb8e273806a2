"""`make site`: build the documentation as a site with search, in `dist/site`; a link to no page or heading is an error.

Needs zensical (`deploy/requirements/site.txt`). The pages are those of `docs/` and some of the repository's root, which become its
neighbours: links between the two are rewritten. `docs/zensical.toml` has the navigation.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FROM_ROOT = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
"""Pages outside `docs/` that the site has, too."""


def as_neighbour(text: str) -> str:
    """The text of a page with its links as they are once all pages lie in one folder, and no more than a language after a fence."""
    text = re.sub(r"^```(\w+) \w+$", r"```\1", text, flags=re.MULTILINE)
    return re.sub(r"\]\((?:docs|\.\.)/([\w./-]+\.(?:md|png))", r"](\1", text)


def stage(folder: Path) -> None:
    """Put all pages, their images and the site's configuration into the folder, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder / "pages", ignore=shutil.ignore_patterns("*.toml"))
    shutil.copy(ROOT / "docs/zensical.toml", folder)
    for page in [*(folder / "pages").glob("*.md"), *(ROOT / name for name in FROM_ROOT)]:
        (folder / "pages" / page.name).write_text(as_neighbour(page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=ROOT / "dist/site", help="folder of the site; default: dist/site")
    out: Path = parser.parse_args().out
    staged = out.parent / f"{out.name}-pages"
    stage(staged)
    command = [
        str(Path(sys.executable).with_name("zensical")),
        "build",
        "--strict",
        "--clean",
        "--config-file",
        "zensical.toml",
    ]
    if status := subprocess.run(command, cwd=staged, check=False).returncode:
        sys.exit(status)
    shutil.rmtree(out, ignore_errors=True)
    (staged / "site").rename(out)
    shutil.rmtree(staged)
    print(f"{out}/index.html")


if __name__ == "__main__":
    main()
