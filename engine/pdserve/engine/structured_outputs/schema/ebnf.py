"""`Rules`: the rules of a grammar in xgrammar's EBNF, and the expressions that they consist of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

MAX_RULES = 20_000
"""Maximum number of rules in one grammar."""
WORD = {'"': '\\"', "\\": "\\\\"}


class TooLarge(Exception):
    """A grammar would have more than `MAX_RULES` rules."""


class Rules:
    """Rules by name. Equal bodies share one rule, so that its masks are computed once."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._keyed: dict[Hashable, str] = {}

    def add(self, body: str) -> str:
        """The name of the rule with this body, which is added if it is new. Raises: TooLarge."""
        name = self._names.get(body)
        if name is None:
            name = self._names[body] = self._reserve()
            self._bodies[name] = body
        return name

    def _reserve(self) -> str:
        if len(self._bodies) >= MAX_RULES:
            raise TooLarge
        name = f"r{len(self._bodies)}"
        self._bodies[name] = '""'
        return name

    def once(self, key: Hashable, body: Callable[[str], str]) -> str:
        """The name of the rule with this key. body: makes a new rule's body from its name. Raises: TooLarge."""
        name = self._keyed.get(key)
        if name is None:
            name = self._keyed[key] = self._reserve()
            try:
                self._bodies[name] = body(name)
            except BaseException:
                del self._keyed[key]
                raise
        return name

    def text(self, root: str) -> str:
        """The grammar with this expression as its root."""
        return "\n".join([f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())])


def literal(text: str) -> str:
    """An expression for exactly this text, which must not be empty."""
    return f'"{"".join(map(_escaped, text))}"'


def one_of(ways: Iterable[str]) -> str:
    """An expression for any of these alternatives."""
    return " | ".join(ways)


def group(ways: Iterable[str]) -> str:
    """Like `one_of`, with parentheses where they are needed to use it in a sequence."""
    known = list(dict.fromkeys(ways))
    return known[0] if len(known) == 1 else f"({one_of(known)})"


def _escaped(char: str) -> str:
    return WORD.get(char) or (char if char.isprintable() else f"\\U{ord(char):08x}")
