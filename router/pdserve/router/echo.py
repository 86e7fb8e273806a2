"""`Echo`: the prompts of a completion that is to begin with its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.text.prompt import Prompt, TextInput, TokenInput
from pdserve.text.tokenizer import Tokenizer


class Echo:
    """One request's prompts, and which choice begins with which."""

    def __init__(self, prompts: Sequence[Prompt], choices_each: int, tokenizer: Tokenizer) -> None:
        """choices_each: how many continue each prompt, one prompt's after the other's."""
        self._prompts = prompts
        self._choices_each = choices_each
        self._tokenizer = tokenizer
        self._said: set[int] = set()

    def before(self, choice: int) -> str:
        """What comes before the next text of a choice: its prompt, once. Token ids have been verified by then."""
        if choice in self._said:
            return ""
        self._said.add(choice)
        match self._prompts[choice // self._choices_each]:
            case TextInput(text):
                return text
            case TokenInput(token_ids):
                return self._tokenizer.decode(token_ids, skip_special_tokens=False)
            case _:
                return ""
