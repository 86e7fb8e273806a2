"""`Echo`: prompts of completions with `echo`, whose text begins with the prompt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from pdserve.router.openai.logprobs import completion_logprobs, finite, named_by_ids, named_candidates
from pdserve.text.outputs.request_output import CompletionOutput
from pdserve.text.prompt import Prompt, TextInput
from pdserve.text.tokenization.tokenizer import Tokenizer


class Echo:
    """Prompts of one request, by choice."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        choices_each: int,
        tokenizer: Tokenizer,
        *,
        truncated: bool = False,
        alone: bool = False,
    ) -> None:
        """choices_each: number of choices per prompt; choices are numbered prompt by prompt. truncated: only a part of the
        prompts' tokens may have been computed. alone: the output is left out."""
        self.alone = alone
        self._prompts = prompts
        self._truncated = truncated
        self._choices_each = choices_each
        self._tokenizer = tokenizer
        self._said: dict[int, str] = {}

    def before(self, output: CompletionOutput) -> str:
        """The prompt's text before the first text of a choice, then ""."""
        if output.index in self._said:
            return ""
        prompt = self._prompts[output.index // self._choices_each]
        if isinstance(prompt, TextInput) and not self._truncated:
            said = prompt.text
        else:
            # special tokens of a text are those that the tokenizer added
            hides = isinstance(prompt, TextInput)
            said = self._tokenizer.decode(output.prompt_token_ids or [], skip_special_tokens=hides)
        self._said[output.index] = said
        return said

    def logprobs(self, output: CompletionOutput, num_top: int, *, as_token_ids: bool = False) -> dict[str, Any]:
        """As `completion_logprobs`, for a text that begins with its prompt. Called after `before`.

        The first token of the prompt has no log-probability. as_token_ids: as in `named_by_ids`, of which `output` comes.
        """
        of_output = completion_logprobs(output, num_top)
        shift = len(self._said.get(output.index, ""))
        of_output["text_offset"] = [offset + shift for offset in of_output["text_offset"]]
        if output.prompt_logprobs is None or output.prompt_token_ids is None:
            return of_output
        tokens = [
            self._tokenizer.token_piece(token_id).decode(errors="replace") for token_id in output.prompt_token_ids
        ]
        known = [candidates for candidates in output.prompt_logprobs if candidates is not None]
        names = tokens
        if as_token_ids:
            known = list(map(named_by_ids, known))
            names = [f"token_id:{token_id}" for token_id in output.prompt_token_ids]
        of_prompt: dict[str, list[Any]] = {
            "tokens": names,
            "token_logprobs": [None, *(finite(next(iter(candidates.values())).logprob) for candidates in known)],
            "top_logprobs": [None, *(named_candidates(next(iter(c)), c, num_top) for c in known)],
            "text_offset": [0, *itertools.accumulate(map(len, tokens[:-1]))],
        }
        return {key: [*value, *of_output[key]] for key, value in of_prompt.items()}
