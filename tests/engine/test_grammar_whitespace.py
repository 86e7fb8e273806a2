"""White space in JSON of structured outputs: the matcher allows the bound of the setting, and no character more."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import xgrammar

from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.common.settings.worker_settings import PrefillSettings
from pdserve.engine.structured_outputs.grammar_matcher import Vocabulary, compile_grammar
from pdserve.engine.structured_outputs.grammar_messages import WHITESPACE_CHARS
from pdserve.router.requests.fields.tools import FunctionBody, ToolBody, tool_use

VOCAB_SIZE = 320
LIMIT = 3
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"enum": ["Lima", "Oslo"]}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
SPACED = '{~"name"~:~"Lima"~,~"sizes"~:~[~7~,~8~]~}'
CALL = f'<tool_call>\n{{"name": "city", "arguments": {SPACED}}}\n</tool_call>'
FORCED = tool_use([ToolBody(function=FunctionBody(name="city", parameters=CITY))], "required", None).form
TAG = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": CITY}}
OLDER_TAG = {"structures": [{"begin": "<a>", "schema": CITY, "end": "</a>"}], "triggers": ["<a>"]}
FORMS = {
    "json": (StructuredOutputsParams(json=CITY), SPACED),
    "additional properties": (
        StructuredOutputsParams(json=CITY | {"additionalProperties": True}),
        SPACED[:-1] + ',~"x"~:~[~1~,~{~"y"~:~"z"~}~]~}',
    ),
    "json_object": (StructuredOutputsParams(json_object=True), '{~"x"~:~[~1~,~{~"y"~:~"z"~}~]~}'),
    "structural_tag": (StructuredOutputsParams(structural_tag=json.dumps(TAG)), SPACED),
    "older structural_tag": (StructuredOutputsParams(structural_tag=json.dumps(OLDER_TAG)), f"<a>{SPACED}</a>"),
    "tools": (FORCED or StructuredOutputsParams(), CALL),
}
EACH = pytest.mark.parametrize(("form", "text"), FORMS.values(), ids=FORMS)


@pytest.fixture(scope="module")
def vocabulary(tiny_checkpoints: Callable[..., Path]) -> Callable[..., Vocabulary]:
    folder = tiny_checkpoints("llama")
    made: dict[tuple[int, ...], Vocabulary] = {}

    def vocabulary(*limit: int) -> Vocabulary:
        if limit not in made:
            made[limit] = Vocabulary(folder, VOCAB_SIZE, *limit)
        return made[limit]

    return vocabulary


def allowed_in_each_gap(grammar: xgrammar.CompiledGrammar, text: str, most: int) -> list[int]:
    """Characters of white space that the grammar accepts in each place of `text` that `~` marks, counted to `most`."""
    parts = text.split("~")

    def accepts(gap: int, space: str) -> bool:
        matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
        spaced = "".join([*parts[: gap + 1], space, *parts[gap + 1 :]])
        return bool(matcher.accept_string(spaced))

    return [
        max(count for count in range(most + 1) if all(accepts(gap, blank * count) for blank in (" ", "\n", "\t")))
        for gap in range(len(parts) - 1)
    ]


@EACH
def test_the_bound_holds_at_every_place(
    vocabulary: Callable[..., Vocabulary], form: StructuredOutputsParams, text: str
) -> None:
    grammar = compile_grammar(vocabulary(LIMIT), form)
    assert set(allowed_in_each_gap(grammar, text, LIMIT + 2)) == {LIMIT}


@EACH
def test_no_white_space_is_free_by_default(
    vocabulary: Callable[..., Vocabulary], form: StructuredOutputsParams, text: str
) -> None:
    assert PrefillSettings().limits.grammar_whitespace_chars == WHITESPACE_CHARS
    grammar = compile_grammar(vocabulary(), form)
    assert max(allowed_in_each_gap(grammar, text, WHITESPACE_CHARS + 2)) == WHITESPACE_CHARS


def test_0_is_no_limit(vocabulary: Callable[..., Vocabulary]) -> None:
    grammar = compile_grammar(vocabulary(0), StructuredOutputsParams(json=CITY))
    assert set(allowed_in_each_gap(grammar, SPACED, 100)) == {100}


def test_a_tag_may_have_a_bound_of_its_own(vocabulary: Callable[..., Vocabulary]) -> None:
    own = {"type": "json_schema", "json_schema": CITY, "max_whitespace_cnt": 5}
    tag = {"type": "structural_tag", "format": own}
    grammar = compile_grammar(vocabulary(LIMIT), StructuredOutputsParams(structural_tag=json.dumps(tag)))
    assert set(allowed_in_each_gap(grammar, SPACED, 7)) == {5}


def test_a_schema_is_not_taken_for_a_tag(vocabulary: Callable[..., Vocabulary]) -> None:
    """A property whose schema looks like a part of a tag keeps its values."""
    odd = {"type": "object", "properties": {"type": {"const": "json_schema"}}, "required": ["type"]}
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": odd}}
    grammar = compile_grammar(vocabulary(LIMIT), StructuredOutputsParams(structural_tag=json.dumps(tag)))
    assert set(allowed_in_each_gap(grammar, '{~"type"~:~"json_schema"~}', LIMIT + 2)) == {LIMIT}


@pytest.mark.parametrize("name", ["json", "json_object", "structural_tag", "tools"])
def test_a_request_may_ask_for_none(vocabulary: Callable[..., Vocabulary], name: str) -> None:
    form, text = FORMS[name]
    grammar = compile_grammar(
        vocabulary(LIMIT), form.with_options_of(StructuredOutputsParams(disable_any_whitespace=True))
    )
    matcher = xgrammar.GrammarMatcher(grammar, terminate_without_stop_token=True)
    # JSON alone has one space after its commas and colons, JSON in a tag has the choice of one
    compact = re.sub(r"~([,:])~", r"\1 ", text).replace("~", "")
    assert matcher.accept_string(compact)
    matcher.reset()
    assert not matcher.accept_string(compact.replace(", ", ",  "))
