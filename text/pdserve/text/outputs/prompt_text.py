"""`PromptText`: the text of a prompt's tokens, and the place in it at which each of them begins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdserve.text.prompt import TextInput
from pdserve.text.tokenization.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as it precedes an output."""

    text: str
    offsets: list[int]
    """Characters of `text` before each token; those of one character have the same number, as `CompletionOutput.text_offsets`."""

    @classmethod
    def of_tokens(
        cls, tokenizer: Tokenizer, token_ids: Sequence[int], *, hides_special_tokens: bool = False, ends: bool
    ) -> PromptText:
        """The tokens' own text. A character that the last of them leave incomplete is left to the output, which completes it.

        ends: no output follows, so that the incomplete character is U+FFFD.
        """
        detokenizer = tokenizer.detokenizer(skip_special_tokens=hides_special_tokens)
        parts: list[str] = []
        offsets: list[int] = []
        num_chars = 0
        for token_id in token_ids:
            offsets.append(num_chars)
            parts.append(part := detokenizer.add((token_id,)))
            num_chars += len(part)
        if ends or not detokenizer.completes_characters:
            parts.append(detokenizer.flush())
        return cls("".join(parts), offsets)

    @classmethod
    def of_client(cls, tokenizer: Tokenizer, prompt: TextInput, token_ids: Sequence[int]) -> PromptText:
        """The client's own text, from which the tokenizer may have made tokens with another one."""
        before, after = tokenizer.added_around(token_ids) if prompt.add_special_tokens else (0, 0)
        inner = cls.of_tokens(tokenizer, token_ids[before : len(token_ids) - after], ends=True)
        offsets = [*[0] * before, *inner.offsets, *[len(prompt.text)] * after]
        if inner.text != prompt.text:
            found = tokenizer.token_offsets(prompt.text, add_special_tokens=prompt.add_special_tokens)
            offsets = found if len(found) == len(token_ids) else [min(each, len(prompt.text)) for each in offsets]
        return cls(prompt.text, offsets)
