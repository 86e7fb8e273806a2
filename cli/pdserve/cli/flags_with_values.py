"""`FlagsWithValues`: commands whose flags also take `true` or `false`, as their help shows them with `<bool>`."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

_VALUES = {"true": True, "false": False}


class FlagsWithValues(TyperCommand):
    """`--flag`, `--flag true` and `--flag=true` are the same; `--flag false` overrides a file and the environment."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take the values out of the words, which then have flags without values."""
        flags = {
            word: str(option.name)
            for option in self.params
            if getattr(option, "is_flag", False) and not option.is_eager
            for word in option.opts
        }
        words: list[str] = []
        values: dict[str, bool] = {}
        last = None
        """Name of the flag that was the last word."""
        for place, word in enumerate(args):
            flag, equals, value = word.partition("=")
            if word == "--":
                words += args[place:]
                break
            if last is not None and word.lower() in _VALUES:
                values[last], last = _VALUES[word.lower()], None
            elif flag in flags and (not equals or value.lower() in _VALUES):
                values[flags[flag]] = _VALUES[value.lower()] if equals else True
                last = None if equals else flags[flag]
            else:
                last = None
                words.append(word)
        left: list[str] = super().parse_args(ctx, words)
        ctx.params.update(values)
        return left
