"""Repetitions that a schema leaves open end by themselves, whatever token a model prefers for ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar_matcher import Vocabulary
from pdserve.engine.structured_outputs.schema.containers import MAX_ENTRIES
from pdserve.engine.structured_outputs.schema.numbers import DIGITS
from pdserve.engine.structured_outputs.schema.schema_grammar import MAX_NESTING
from pdserve.engine.structured_outputs.schema.strings import NAME_CHARS
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.inputs.schema_samples import greedy

VOCAB_SIZE = 320
NUMBER_TOKENS = 2 * DIGITS
STRING_CHARS = 8
TREE: dict[str, Any] = {
    "type": "object",
    "properties": {"t": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["t"],
}
CASES: dict[str, tuple[Any, str, int]] = {
    "integer": ({"type": "integer"}, "1", DIGITS),
    "integer from": ({"type": "integer", "minimum": 3}, "9", DIGITS),
    "integer to": ({"type": "integer", "maximum": 3}, "-9", 1 + DIGITS),
    "multiples": ({"type": "integer", "multipleOf": 3}, "3", DIGITS),
    "number": ({"type": "number"}, "1", NUMBER_TOKENS),
    "fraction": ({"type": "number"}, "01.", NUMBER_TOKENS),
    "fraction within": ({"type": "number", "minimum": 0}, ".0", NUMBER_TOKENS),
    "exponent": ({"type": "number"}, "e1", NUMBER_TOKENS),
    "anything": ({}, "1.0", NUMBER_TOKENS),
    "fraction of a time": ({"type": "string", "format": "date-time"}, ".0", 64),
    "duration": ({"type": "string", "format": "duration"}, "P1", 64),
    "host": ({"type": "string", "format": "hostname"}, "a", 128),
    "address": ({"type": "string", "format": "email"}, "a", 256),
    "address of a page": ({"type": "string", "format": "uri"}, "/a", 512),
    "pointer": ({"type": "string", "format": "json-pointer"}, "/a", 512),
    "white space": ({"type": "array", "items": {"type": "null"}, "maxItems": 2}, " ", 128),
    "names": (
        {"type": "object", "additionalProperties": {"type": "null"}, "maxProperties": 1},
        '"n',
        3 * 16 + NAME_CHARS + 16,
    ),
    "names other than some": (
        {"type": "object", "properties": {"aa": True}, "additionalProperties": {"const": 1}, "maxProperties": 1},
        '"za',
        3 * 16 + NAME_CHARS + 16,
    ),
    "items": ({"type": "array", "items": {"const": 1}}, "1,", 3 * MAX_ENTRIES + 16),
    "properties": ({"type": "object", "additionalProperties": {"const": 1}}, '",:1', 8 * MAX_ENTRIES),
    "arrays in arrays": ({}, "[]", 2 * MAX_NESTING + 8),
    "objects in objects": ({}, '{":}', (NAME_CHARS + 8) * MAX_NESTING),
    "references": (TREE, '{":}', 16 * MAX_NESTING),
}


@pytest.fixture(scope="module")
def folder(tiny_checkpoints: Callable[..., Path]) -> Path:
    return tiny_checkpoints("llama")


@pytest.mark.few(7)
@pytest.mark.parametrize(("schema", "wanted", "most"), CASES.values(), ids=CASES)
def test_a_model_that_repeats_itself_comes_to_an_end(folder: Path, schema: Any, wanted: str, most: int) -> None:
    tokenizer, vocabulary = Tokenizer.from_folder(folder), Vocabulary(folder, VOCAB_SIZE, 16, STRING_CHARS)
    favourites = [tokenizer.encode(char, add_special_tokens=False)[-1] for char in wanted]
    text = greedy(vocabulary, StructuredOutputsParams(json=json.dumps(schema)), favourites, most + 64)
    assert text is not None, "no end"
    json.loads(text)
