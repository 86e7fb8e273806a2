"""`pdserve settings`: what can be set, and how."""

from __future__ import annotations

import textwrap

from pdserve.common.errors import ConfigError
from pdserve.common.settings.catalogue import Setting, hint, matching

_WIDTH = 100


def print_settings(word: str) -> None:
    """Those with the word in name or meaning, by group; all without one. Raises: ConfigError if there is none."""
    found = matching(word)
    if not found:
        raise ConfigError(f"no setting has {word[:100]!r} in its name or meaning{hint(word)}")
    print("\n\n".join(map(_shown, found)))


def _shown(setting: Setting) -> str:
    where = ("[limits] of " if setting.is_limit else "") + ", ".join(setting.services)
    head = f"{setting.name}  {setting.type_text}; default: {setting.default_text}  ({where})"
    meaning = textwrap.fill(setting.meaning, _WIDTH, initial_indent="  ", subsequent_indent="  ")
    return f"{head}\n  {setting.option}  {setting.variable}\n{meaning}"
