"""Forms for `structured_outputs`: JSON schemas, regexes, grammars, choices and tags, made at random and then changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tests.support.inputs.fuzz_cases import Fuzzer
from tests.support.inputs.hostile_grammars import EITHER_WAY, SLOW_TO_COMPILE, SLOW_TO_MATCH

_TEXTS = (
    "",
    "a",
    "yes",
    "no",
    "a b",
    "é",
    "💥",
    '"',
    "\\",
    "\n",
    "\x00",
    "a" * 300,
    "\ud7ff",
    "[",
    "(?",
    "{",
    "]",
    "root",
    "::=",
)
_HOSTILE = [*SLOW_TO_MATCH.values(), SLOW_TO_COMPILE, EITHER_WAY]
_NUMBERS = (0, 1, -1, 2, 3, 7, 0.5, 1e9, 2**31, 2**63, -(2**63), 10**30, 1e308)


class RandomForms:
    """Draws from the fuzzer."""

    def __init__(self, fuzzer: Fuzzer) -> None:
        self._fuzzer = fuzzer
        self._draw = fuzzer.draw

    def form(self) -> dict[str, Any]:
        """Fields of `StructuredOutputs`; not all are accepted."""
        kinds: tuple[Callable[[], dict[str, Any]], ...] = (
            self._json, self._json, self._regex, self._regex, self._grammar, self._grammar, self._choice, self._tag,
        )  # fmt: skip
        if self._draw.random() < 0.08:
            return self._draw.choice(_HOSTILE)
        form = self._draw.choice(kinds)()
        if self._draw.random() < 0.05:
            form |= self._draw.choice(kinds)()
        if self._draw.random() < 0.1:
            form |= {"disable_any_whitespace": True}
        return form

    def _text(self, text: str, rate: float = 0.3) -> str:
        """At times with some bytes changed; always Unicode."""
        if self._draw.random() < rate:
            text = self._fuzzer.bytes(text.encode(errors="replace")).decode(errors="replace")
        return text.encode(errors="replace").decode()

    # ---- JSON

    def _json(self) -> dict[str, Any]:
        draw = self._draw
        schema: Any = self._schema(draw.randrange(4))
        if isinstance(schema, dict) and draw.random() < 0.3:
            schema |= {"$defs": {"x": self._schema(2), "y": {"$ref": draw.choice(("#/$defs/x", "#/$defs/y", "#"))}}}
        if draw.random() < 0.4:
            schema = self._fuzzer.json(schema)
        return {"json": self._text(json.dumps(schema), 0.15)}

    def _schema(self, depth: int) -> Any:
        draw = self._draw
        leaves: tuple[Callable[[], Any], ...] = (
            lambda: {"type": "string"} | self._some(
                minLength=self._size, maxLength=self._size, pattern=lambda: self._pattern(2),
                format=lambda: draw.choice(("date", "email", "uuid", "ipv4", "uri", "time", "nonsense")),
            ),
            lambda: {"type": draw.choice(("integer", "number"))} | self._some(
                minimum=self._number, maximum=self._number, exclusiveMinimum=self._number, multipleOf=self._number
            ),
            lambda: {"type": draw.choice(("boolean", "null", ["string", "null"], "array", "object"))},
            lambda: {"enum": [draw.choice((*_TEXTS, *_NUMBERS, None, True, {}, [1])) for _ in range(draw.randint(0, 5))]},
            lambda: {"const": draw.choice((*_TEXTS, *_NUMBERS))},
            lambda: {"$ref": draw.choice(("#/$defs/x", "#/$defs/y", "#", "#/$defs/none", "http://x/y"))},
            lambda: draw.choice((True, False, {})),
        )  # fmt: skip
        if depth <= 0 or draw.random() < 0.2:
            return draw.choice(leaves)()
        match draw.randrange(4):
            case 0:
                return {"type": "array", "items": self._schema(depth - 1)} | self._some(
                    minItems=self._size, maxItems=self._size, uniqueItems=lambda: True,
                    prefixItems=lambda: [self._schema(depth - 1) for _ in range(draw.randrange(4))],
                    contains=lambda: self._schema(depth - 1),
                )  # fmt: skip
            case 1:
                name = draw.choice(("anyOf", "oneOf", "allOf"))
                return {name: [self._schema(depth - 1) for _ in range(draw.randint(0, 4))]}
            case _:
                properties = {
                    draw.choice(_TEXTS)[:9] + str(n): self._schema(depth - 1) for n in range(draw.randrange(5))
                }
                return {"type": "object", "properties": properties} | self._some(
                    required=lambda: [*list(properties)[:2], *draw.choice(([], ["missing"]))],
                    additionalProperties=lambda: self._schema(depth - 1), minProperties=self._size,
                    patternProperties=lambda: {self._pattern(2): self._schema(depth - 1)}, maxProperties=self._size,
                    propertyNames=lambda: {"pattern": self._pattern(2)},
                )  # fmt: skip

    def _some(self, **parts: Callable[[], Any]) -> dict[str, Any]:
        return {name: make() for name, make in parts.items() if self._draw.random() < 0.25}

    def _number(self) -> float:
        return self._draw.choice(_NUMBERS)

    def _size(self) -> int:
        return self._draw.choice((0, 1, 2, 5, 40, 1000, 10**6, 10**9, -1))

    # ---- regexes

    def _regex(self) -> dict[str, Any]:
        return {"regex": self._text(self._pattern(self._draw.randrange(5)))}

    def _pattern(self, depth: int) -> str:
        draw = self._draw
        if depth <= 0 or draw.random() < 0.2:
            return draw.choice(
                ("a", "b", "[a-z]", "[^a]", "\\d", "\\w", "\\s", ".", "\\.", "x{0,3}", "[\\d_-]", "\\u00e9", "\\x41", "^", "$",
                 "\\b", "\\1", "(?=a)", "(?!b)", "(?i)", "[]", "[z-a]", "é", "💥", "\\p{L}", "\\Q", "")
            )  # fmt: skip
        match draw.randrange(5):
            case 0:
                return "".join(self._pattern(depth - 1) for _ in range(draw.randint(1, 4)))
            case 1:
                return "(" + "|".join(self._pattern(depth - 1) for _ in range(draw.randint(1, 4))) + ")"
            case 2:
                return draw.choice(("(", "(?:", "(?P<n>")) + self._pattern(depth - 1) + ")"
            case _:
                times = draw.choice(
                    ("*", "+", "?", "*?", "{2}", "{0,30}", "{3,}", "{1000}", "{0,1000000000}", "{5,2}", "**")
                )
                return f"({self._pattern(depth - 1)}){times}"

    # ---- grammars

    def _grammar(self) -> dict[str, Any]:
        draw = self._draw
        names = ["root", *(f"r{n}" for n in range(draw.choice((0, 1, 3, 12, 150))))]
        refs = [*names, *draw.choice(([], ["none"]))]
        rules = [f"{name} ::= {self._body(refs, draw.randrange(4))}" for name in names]
        if draw.random() < 0.1:
            draw.shuffle(rules)
        return {"grammar": self._text(draw.choice(("\n", "\n", " # x\n", " ")).join(rules))}

    def _body(self, names: list[str], depth: int) -> str:
        draw = self._draw
        if depth <= 0 or draw.random() < 0.2:
            literals = ('"a"', '"b"', '"ab"', '""', "[a-z]", "[^a]", "[0-9]", '"\\n"', '"\\""', "[\\u00e9]", '"é"')
            return draw.choice((*literals, *(draw.choice(names) for _ in range(6))))
        match draw.randrange(4):
            case 0:
                return " ".join(self._body(names, depth - 1) for _ in range(draw.randint(1, 4)))
            case 1:
                return " | ".join(self._body(names, depth - 1) for _ in range(draw.randint(1, 4)))
            case _:
                times = draw.choice(("*", "+", "?", "{2}", "{0,30}", "{3,}", "{100000}", ""))
                return f"({self._body(names, depth - 1)}){times}"

    # ---- the others

    def _choice(self) -> dict[str, Any]:
        draw = self._draw
        count = draw.choice((0, 1, 2, 5, 100, 1024, 1025))
        choices = [draw.choice(_TEXTS) + draw.choice(("", str(n))) for n in range(count)]
        return {"choice": [self._text(choice, 0.1) for choice in choices]}

    def _tag(self) -> dict[str, Any]:
        schema = self._schema(2)
        older = {"structures": [{"begin": "<f>", "schema": schema, "end": "</f>"}], "triggers": ["<f"]}
        content = {"type": "json_schema", "json_schema": schema}
        newer = {"type": "structural_tag", "format": {"type": "tag", "begin": "<", "content": content, "end": ">"}}
        tag = self._fuzzer.json(self._draw.choice((older, newer)))
        return {"structural_tag": self._text(json.dumps(tag), 0.1)}
