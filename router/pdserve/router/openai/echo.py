"""`Echo`: prompts of completions with `echo`, whose text begins with the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdserve.router.openai.logprobs import completion_logprobs, finite, named_by_ids, named_candidates
from pdserve.text.outputs.prompt_text import PromptText
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
        self._said: dict[int, int] = {}
        """Choice that has begun -> characters of its prompt."""
        self._texts: dict[int, PromptText] = {}
        """Place of a prompt -> its text with the offsets of its tokens."""

    def before(self, output: CompletionOutput) -> str:
        """The prompt's text before the first text of a choice, then ""."""
        if output.index in self._said:
            return ""
        prompt = self._own_text(output.index // self._choices_each)
        text = self._text(output).text if prompt is None else prompt.text
        self._said[output.index] = len(text)
        return text

    def _own_text(self, place: int) -> TextInput | None:
        """The client's text, if all of it is computed."""
        prompt = self._prompts[place]
        return prompt if isinstance(prompt, TextInput) and not self._truncated else None

    def _text(self, output: CompletionOutput) -> PromptText:
        """output: the first one of a choice."""
        place = output.index // self._choices_each
        if place not in self._texts:
            prompt, token_ids = self._own_text(place), output.prompt_token_ids or []
            if prompt is not None:
                self._texts[place] = PromptText.of_client(self._tokenizer, prompt, token_ids)
            else:
                # special tokens of a text are those that the tokenizer added
                hides = isinstance(self._prompts[place], TextInput)
                self._texts[place] = PromptText.of_tokens(
                    self._tokenizer, token_ids, hides_special_tokens=hides, ends=self.alone
                )
        return self._texts[place]

    def logprobs(self, output: CompletionOutput, num_top: int, *, as_token_ids: bool = False) -> dict[str, Any]:
        """As `completion_logprobs`, for a text that begins with its prompt. Called after `before`.

        The first token of the prompt has no log-probability. as_token_ids: as in `named_by_ids`, of which `output` comes.
        """
        of_output = completion_logprobs(output, num_top)
        shift = self._said[output.index]
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
            "text_offset": self._text(output).offsets,
        }
        return {key: [*value, *of_output[key]] for key, value in of_prompt.items()}
