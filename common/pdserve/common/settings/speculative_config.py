"""`SpeculativeConfig`: how a worker drafts tokens, by vLLM's names."""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.common.errors import ConfigError
from pdserve.common.request.generation_request import MAX_SPECULATIVE_TOKENS

FIELD = "speculative_config"
DEFAULT_LOOKUP = 5
"""Tokens of the n-grams of `ngram`, if neither limit is given."""
MAX_LOOKUP = 64


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are drafted. A draft changes the number of steps of a text, never the text."""

    method: Literal["ngram", "draft_model", "mtp", "eagle3"] | None = None
    """`ngram`: what followed the last tokens of the sequence where they stand in it before. `draft_model`: what a smaller model of
    the same vocabulary says. `mtp`: what the model's own draft head says (multi-token prediction); `eagle3`: what an EAGLE-3 head
    says. Prefill workers with the same head compute its keys and values for decode workers. Default: `draft_model` with `model`,
    else `ngram`."""
    model: str | None = None
    """Folder or name of the model or head that drafts, as `--model` takes it; with `draft_model` and `eagle3` only."""
    num_speculative_tokens: int
    """Tokens of a sequence that are drafted per step, at most."""
    prompt_lookup_max: int | None = None
    """Tokens of the longest n-gram that is looked up; default: `prompt_lookup_min`, or `DEFAULT_LOOKUP`."""
    prompt_lookup_min: int | None = None
    """Tokens of the shortest; default: `prompt_lookup_max`, or `DEFAULT_LOOKUP`."""
    disable_by_batch_size: int | None = 8
    """Sequences of a step beyond which nothing is drafted; None: no limit."""

    @property
    def draft_model(self) -> str | None:
        """The `model` of `draft_model`; None with another method."""
        return self.model if self.method in (None, "draft_model") else None

    @property
    def has_draft_head(self) -> bool:
        """True: the model is loaded with its draft head."""
        return self.method in ("mtp", "eagle3")

    @property
    def reads_tokens_only(self) -> bool:
        """True: sequences with images are not drafted."""
        return self.draft_model is not None or self.has_draft_head

    def num_drafted(self, num_seqs: int) -> int:
        """Sequences of a batch of `num_seqs` at most that have drafts at once."""
        return num_seqs if self.disable_by_batch_size is None else min(num_seqs, self.disable_by_batch_size)

    def num_drafts(self, num_seqs: int, step_tokens: int) -> int:
        """Drafts of a step of at most `num_seqs` sequences and `step_tokens` tokens, of which drafts take half."""
        return min(self.num_drafted(num_seqs) * self.num_speculative_tokens, step_tokens // 2)

    @property
    def longest_lookup(self) -> int:
        return self.prompt_lookup_max or self.prompt_lookup_min or DEFAULT_LOOKUP

    @property
    def shortest_lookup(self) -> int:
        return self.prompt_lookup_min or self.prompt_lookup_max or DEFAULT_LOOKUP

    def verify(self) -> None:
        """Raises: ConfigError naming the field, its value and its limit."""
        limits = {
            "num_speculative_tokens": MAX_SPECULATIVE_TOKENS,
            "prompt_lookup_max": MAX_LOOKUP,
            "prompt_lookup_min": MAX_LOOKUP,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None and not 1 <= value <= limit:
                raise ConfigError(f"{FIELD}.{name} is {value}, 1 to {limit} tokens are possible")
        if self.method in ("draft_model", "eagle3") and not self.model:
            raise ConfigError(f"{FIELD}.method is {self.method!r}, which needs {FIELD}.model: a folder or a name")
        if self.method in ("ngram", "mtp") and self.model is not None:
            raise ConfigError(f"{FIELD}.model is {self.model!r:.100}, which the method {self.method!r} does not take")
        if self.reads_tokens_only and (self.prompt_lookup_max or self.prompt_lookup_min):
            raise ConfigError(
                f"{FIELD}.prompt_lookup_max is {self.prompt_lookup_max} and prompt_lookup_min {self.prompt_lookup_min}, which "
                f"the method {self.method or 'draft_model'!r} does not take"
            )
        if self.shortest_lookup > self.longest_lookup:
            raise ConfigError(
                f"{FIELD}.prompt_lookup_min is {self.prompt_lookup_min}, at most prompt_lookup_max "
                f"({self.prompt_lookup_max}) is possible"
            )
        if self.disable_by_batch_size is not None and self.disable_by_batch_size < 1:
            raise ConfigError(
                f"{FIELD}.disable_by_batch_size is {self.disable_by_batch_size}, at least 1 sequence is needed"
            )
