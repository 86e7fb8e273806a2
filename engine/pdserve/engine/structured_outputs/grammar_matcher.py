"""`compile_grammar`: a compiled grammar from `StructuredOutputsParams`; `GrammarMatcher`: one sequence's state in it.

Importing this module imports xgrammar and transformers, which takes about 1 s. Only `grammar_process` does so, after the first
request with structured outputs.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xgrammar
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pdserve.common.errors import InvalidRequest, PdServeError, PeerError
from pdserve.common.request.structured_outputs import FIELD, StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar_messages import WHITESPACE_CHARS
from pdserve.engine.structured_outputs.schema.ebnf import literal, one_of
from pdserve.engine.structured_outputs.schema.schema_grammar import grammar_of_schema
from pdserve.engine.structured_outputs.schema.strings import LADDER, ladder_grammar

CACHE_BYTES = 128 << 20
"""Bytes of compiled grammars per compiler; the least recently used are dropped first."""
_MAX_REASON_CHARS = 300
LADDER_STEP = 4
"""Characters by which `Vocabulary.warm_more` goes on."""
MAX_WHITESPACE_CHARS = 1024
_JSON_OBJECT = {"type": "object"}
_SMALL = {"type": "array", "items": {"type": ["string", "number", "boolean", "null"]}}
_NO_UTF8 = re.compile(rb"[\xc0\xc1\xf5-\xff]")
_LOCATION = re.compile(r"^\[[\d:]+\] \S+:\d+: (?:Check failed: .*? is false: )?")
"""Time and source line at the beginning of the library's messages."""


class GrammarMatcher:
    """A `Grammar` in this process. The time of a call depends on the grammar; `GrammarSequences` limits it."""

    failure: PdServeError | None = None
    is_prompt = True

    def __init__(
        self,
        compiled: xgrammar.CompiledGrammar,
        eos_token_ids: Sequence[int],
        vocab_size: int,
        output_token_ids: Sequence[int] = (),
    ) -> None:
        """State after `output_token_ids`, which a resumed sequence already has.

        eos_token_ids: allowed where the grammar may end; if empty, the grammar ends as soon as it can.
        vocab_size: length of the model's logits. Raises: PeerError if the tokens do not fit the grammar.
        """
        self._vocab_size = vocab_size
        self._matcher = xgrammar.GrammarMatcher(
            compiled,
            override_stop_tokens=list(eos_token_ids) or None,
            terminate_without_stop_token=not eos_token_ids,
        )
        self._num_replayed = 0
        self._draft_masks: list[NDArray[np.uint8]] = []
        self.replay(output_token_ids)

    def replay(self, output_token_ids: Sequence[int]) -> None:
        """Advance by tokens of earlier attempts. Raises: PeerError if one does not fit the grammar."""
        for token_id in output_token_ids:
            if not self.accept(token_id):
                raise PeerError(
                    f"token {token_id} at output position {self._num_replayed} does not fit the request's grammar"
                )
            self._num_replayed += 1

    def accept(self, token_id: int) -> bool:
        self._draft_masks = []
        return self.advance(token_id)

    def advance(self, token_id: int) -> bool:
        """As `accept`, for a token that `rollback` may take back."""
        return not self.has_ended and self._matcher.accept_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens."""
        self._matcher.rollback(num_tokens)

    def fork(self) -> GrammarMatcher:
        other = copy.copy(self)
        other._matcher = self._matcher.fork()
        return other

    def allowed(self, until: float = 0.0, num_drafts: int = 0) -> NDArray[np.uint8] | None:
        if num_drafts:
            return self._draft_masks[num_drafts - 1] if num_drafts <= self.num_drafts else None
        return self.mask()

    def draft(self, token_ids: Sequence[int]) -> None:
        self._draft_masks, num_advanced = [], 0
        for token_id in token_ids:
            if not self.advance(token_id):
                break
            num_advanced += 1
            if self.has_ended:
                break
            self._draft_masks.append(self.mask())
        self.rollback(num_advanced)

    @property
    def num_drafts(self) -> int:
        return len(self._draft_masks)

    def mask(self) -> NDArray[np.uint8]:
        """Mask of the next token, as `allowed`. The text has not ended."""
        bitmask = np.zeros((1, -(-self._vocab_size // 32)), np.int32)
        self._matcher.fill_next_token_bitmask(bitmask)
        return bitmask.reshape(-1).view(np.uint8)

    @property
    def has_ended(self) -> bool:
        return bool(self._matcher.is_terminated())

    def close(self) -> None:
        """Nothing to free: the matcher is in this process."""


class Vocabulary:
    """The tokens of a model folder as bytes, and a compiler over them. Any thread may use it."""

    def __init__(
        self, folder: Path, vocab_size: int, whitespace_chars: int = WHITESPACE_CHARS, string_chars: int = 0
    ) -> None:
        """vocab_size: length of the model's logits. whitespace_chars, string_chars: as in `GrammarLimits`.

        Special tokens have no text in a grammar, so that they do not match the characters of their names.
        """
        self.size = vocab_size
        self.whitespace_chars = whitespace_chars
        self.string_chars = string_chars
        backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
        described = xgrammar.TokenizerInfo.from_huggingface(
            PreTrainedTokenizerFast(tokenizer_object=backend), vocab_size=vocab_size, stop_token_ids=[0]
        )
        self._add_prefix_space = described.add_prefix_space
        self._tokens = described.decoded_vocab
        for token_id, token in backend.get_added_tokens_decoder().items():
            if token_id < vocab_size:
                self._tokens[token_id] = b"" if token.special else token.content.encode()

        self.compiler = self._compiler()
        """A compiler over all tokens except bytes that are invalid in UTF-8, which xgrammar would accept as parts of characters."""
        self.ladder = 0
        """Characters of the longest strings whose masks `warm_more` has computed."""

    def _compiler(self) -> xgrammar.GrammarCompiler:
        info = xgrammar.TokenizerInfo(
            [b"" if _NO_UTF8.search(token) else token for token in self._tokens],
            xgrammar.VocabType.RAW,
            vocab_size=len(self._tokens),
            stop_token_ids=[],
            add_prefix_space=self._add_prefix_space,
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    def token(self, token_id: int) -> bytes:
        """The text of a token."""
        return self._tokens[token_id]

    def warm_more(self) -> bool:
        """Compute some of the masks of strings of bounded length, which grammars then share: well below a second. False if none is
        left."""
        if self.ladder < LADDER:
            self.ladder += LADDER_STEP
            self.compiler.compile_grammar(ladder_grammar(self.ladder))
        return self.ladder < LADDER


def warm_up(vocabulary: Vocabulary) -> None:
    """Compute the state that most grammars need, so that forked processes inherit it."""
    for whitespace_chars in (vocabulary.whitespace_chars, None):
        vocabulary.compiler.compile_grammar(grammar_of_schema(_SMALL, whitespace_chars))


def compile_grammar(vocabulary: Vocabulary, params: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
    """Compile a grammar, which takes milliseconds to seconds, or return it from the cache. Raises: InvalidRequest."""
    try:
        return _compiled(vocabulary, params)
    except PdServeError:
        raise
    except Exception as error:
        # the input is a client's text, so any exception is an error of this request
        reason = _LOCATION.sub("", str(error)).strip()[:_MAX_REASON_CHARS] or "xgrammar cannot deal with it"
        raise InvalidRequest(f"{FIELD} cannot be compiled: {reason}", FIELD) from error


def _compiled(vocabulary: Vocabulary, params: StructuredOutputsParams) -> xgrammar.CompiledGrammar:
    compiler = vocabulary.compiler
    if params.json is not None or params.json_object:
        schema = json.loads(params.json_schema) if params.json is not None else _JSON_OBJECT
        limit = None if params.disable_any_whitespace else vocabulary.whitespace_chars
        return compiler.compile_grammar(grammar_of_schema(schema, limit, vocabulary.string_chars))
    if params.regex is not None:
        return compiler.compile_regex(params.regex)
    if params.choice is not None:
        return compiler.compile_grammar(_ebnf_of(params.choice))
    if params.grammar is not None:
        return compiler.compile_grammar(params.grammar)
    tag = json.loads(params.structural_tag or "{}")
    if "structures" in tag:
        tag = _from_older_form(tag)
    limit = 1 if params.disable_any_whitespace else vocabulary.whitespace_chars
    return compiler.compile_structural_tag(json.dumps(_with_grammars(vocabulary, tag, limit)))


def _with_grammars(vocabulary: Vocabulary, tag: Any, whitespace_chars: int) -> Any:
    """A structural tag whose JSON schemas are grammars. whitespace_chars: limit of those that have none of their own.

    Raises: InvalidRequest.
    """
    if isinstance(tag, list):
        return [_with_grammars(vocabulary, value, whitespace_chars) for value in tag]
    if not isinstance(tag, dict):
        return tag
    if tag.get("type") != "json_schema":
        return {name: _with_grammars(vocabulary, value, whitespace_chars) for name, value in tag.items()}
    for name, plain in (("style", "json"), ("any_order", False), ("excludes", [])):
        if tag.get(name, plain) != plain:
            told = f"{FIELD}.structural_tag: {name} of a json_schema is not supported: {json.dumps(tag[name]):.120}"
            raise InvalidRequest(told, FIELD)
    limit = tag.get("max_whitespace_cnt")
    if limit is not None and not (isinstance(limit, int) and 0 < limit <= MAX_WHITESPACE_CHARS):
        told = f"{FIELD}.structural_tag: max_whitespace_cnt must be 1 to {MAX_WHITESPACE_CHARS}, not {limit!r:.40}"
        raise InvalidRequest(told, FIELD)
    grammar = grammar_of_schema(
        tag.get("json_schema", True), whitespace_chars if limit is None else limit, vocabulary.string_chars
    )
    return {"type": "grammar", "grammar": grammar}


def _from_older_form(tag: dict[str, Any]) -> dict[str, Any]:
    """Convert `structures` and `triggers`, the older form that vLLM also accepts, to the current form."""
    tags = [
        {
            "type": "tag",
            "begin": structure["begin"],
            "content": {"type": "json_schema", "json_schema": structure["schema"]},
            "end": structure["end"],
        }
        for structure in tag["structures"]
    ]
    return {"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}}


def _ebnf_of(choices: Sequence[str]) -> str:
    return f"root ::= {one_of(map(literal, choices))}"
