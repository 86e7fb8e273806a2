"""Forms that are small as texts and cost seconds or minutes in a matcher or a compiler."""

from __future__ import annotations

from typing import Any


def _any_of(num_rules: int) -> tuple[str, str]:
    """An expression over ambiguous rules, and the rules. The time to match a token is about quadratic in their number."""
    rules = "\n".join(f'r{n} ::= "a"* "a"*' for n in range(num_rules))
    return f"({' | '.join(f'r{n}' for n in range(num_rules))})*", rules


_ANY_OF_THEM, _MANY_RULES = _any_of(200)
_ANY_OF_MORE, _MORE_RULES = _any_of(800)

SLOW_TO_MATCH: dict[str, dict[str, Any]] = {
    "nested stars": {"regex": "(a*)*b"},
    "200 rules": {"grammar": f"root ::= {_ANY_OF_THEM}\n{_MANY_RULES}"},
    "200 rules after a beginning": {"grammar": f'root ::= "aaaaaa" {_ANY_OF_THEM}\n{_MANY_RULES}'},
    "ambiguous pairs": {"grammar": 'root ::= x x x x x x\nx ::= x x | "a"* | ""'},
}
SLOW_TO_COMPILE: dict[str, Any] = {"regex": "a?" * 2700 + "a" * 2700}
EITHER_WAY: dict[str, Any] = {"grammar": f'root ::= "b" [a-z]* | "aaaaaa" {_ANY_OF_THEM}\n{_MANY_RULES}'}
"""Cheap for an output that begins with b."""
SLOW_BRANCH: dict[str, Any] = {"grammar": f'root ::= "c" ("b" [a-c]* | "aaaaaa" {_ANY_OF_MORE})\n{_MORE_RULES}'}
"""Cheap for an output that begins with cb. Behind ca, the twelfth token takes above 0.1 s (0.2 s on a core of Zen 5)."""
