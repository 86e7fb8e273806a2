"""Bounded strings over a vocabulary as large as real ones: their masks are computed once, and no mask takes long."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar_matcher import LADDER_STEP, GrammarMatcher, Vocabulary, compile_grammar
from pdserve.engine.structured_outputs.grammar_messages import GrammarLimits
from pdserve.engine.structured_outputs.schema.strings import FORMATS
from tests.support.inputs.schema_samples import allowed_tokens

NUM_TOKENS = 49_152
SYLLABLES = [consonant + vowel for consonant in "bcdfghklmnprstvwz" for vowel in "aeiou"] + [
    "th",
    "er",
    "ing",
    "ion",
    "an",
    "es",
]
SIGNS = list("ĠĊ.,;:!?\"'()[]{}<>/\\-_=+*&")
BLOG: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 12, "maxLength": 60},
        "story": {"type": "string", "minLength": 80, "maxLength": 160},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "minItems": 1, "maxItems": 4},
    },
    "required": ["name", "story", "tags"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer of words, numbers and signs."""
    draw = random.Random(0)
    tokens = dict.fromkeys(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    while len(tokens) < NUM_TOKENS:
        kind = draw.random()
        if kind < 0.9:
            word = "".join(draw.choices(SYLLABLES, k=1 + min(5, int(draw.expovariate(0.6)))))
            tokens.setdefault(
                ("Ġ" if draw.random() < 0.6 else "") + (word.capitalize() if draw.random() < 0.1 else word)
            )
        else:
            tokens.setdefault(
                str(draw.randrange(10_000)) if kind < 0.93 else "".join(draw.choices(SIGNS, k=draw.randint(2, 5)))
            )
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    folder = tmp_path_factory.mktemp("large")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def compile_s(vocabulary: Vocabulary, schema: Any) -> float:
    """CPU time of compiling a schema, seconds."""
    began = time.thread_time()
    compile_grammar(vocabulary, StructuredOutputsParams(json=schema))
    return time.thread_time() - began


@pytest.mark.slow
def test_strings_share_their_masks(folder: Path) -> None:
    vocabulary = Vocabulary(folder, NUM_TOKENS)
    first_s = compile_s(vocabulary, {"type": "string", "maxLength": 48})
    others = [{"type": "array", "items": {"type": "string", "maxLength": most}} for most in (48, 31, 16)]
    assert sum(compile_s(vocabulary, schema) for schema in others) < first_s / 4
    fresh = Vocabulary(folder, NUM_TOKENS)
    while fresh.ladder < 48:
        assert fresh.warm_more()
    assert fresh.ladder == -(-48 // LADDER_STEP) * LADDER_STEP
    assert compile_s(fresh, {"type": "string", "maxLength": 48}) < first_s / 4


@pytest.mark.slow
def test_a_schema_with_long_strings_is_compiled_within_the_limit(folder: Path) -> None:
    assert compile_s(Vocabulary(folder, NUM_TOKENS), BLOG) < 2 * GrammarLimits().compile_s


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "uri" in name else ()) for name in FORMATS]
)
def test_no_mask_of_a_format_takes_long(folder: Path, name: str) -> None:
    vocabulary, limits = Vocabulary(folder, NUM_TOKENS), GrammarLimits()
    compiled = compile_grammar(vocabulary, StructuredOutputsParams(json={"type": "string", "format": name}))
    draw, matcher = random.Random(1), GrammarMatcher(compiled, (), NUM_TOKENS)
    text, spent_s = b"", [0.0]
    while not matcher.has_ended:
        began = time.thread_time()
        allowed = allowed_tokens(matcher)
        spent_s.append(time.thread_time() - began)
        token = int(draw.choice(allowed))
        assert matcher.accept(token)
        text += vocabulary.token(token)
    json.loads(text)
    assert max(spent_s) < 2 * limits.token_s
