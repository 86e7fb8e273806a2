"""Tables of `docs/settings.md`, from the structs of settings and their docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import groupby

from pdserve.common.settings.catalogue import Setting, catalogue


def settings_tables() -> str:
    """One heading and table per struct of settings."""
    return "\n\n".join(_tables(is_limit=False))


def limits_tables() -> str:
    """One heading and table per struct of limits."""
    return "\n\n".join(_tables(is_limit=True))


def _tables(*, is_limit: bool) -> Iterator[str]:
    chosen = [setting for setting in catalogue() if setting.is_limit is is_limit]
    for group, settings in groupby(chosen, key=lambda setting: setting.owner.group):
        rows = ["| name | values | default | meaning |", "|---|---|---|---|", *map(_row, settings)]
        yield "\n".join([f"### {group}", "", *rows])


def _row(setting: Setting) -> str:
    values = ", ".join(f"`{choice}`" for choice in setting.choices) or setting.type_text
    default = "none" if setting.default_text == "none" else f"`{setting.default_text}`"
    # the docstrings name pages from the root of the repository, and this page lies next to them
    meaning = re.sub(r"docs/((\w+\.md)(#[\w-]+)?)", r"[\2](\1)", setting.meaning).replace("|", "\\|")
    return f"| `{setting.name}` | {values} | {default} | {meaning} |"
