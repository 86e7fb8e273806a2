"""`PromptRoom`: how many tokens of prompt and output a model takes."""

from __future__ import annotations

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.text.prompt import DEFAULT_MAX_TOKENS, ChatInput, LengthRule, Prompt, resolve_max_tokens


class PromptRoom(msgspec.Struct, frozen=True):
    """A decoder's prompt and output share its length. With an encoder the prompt has that length for itself."""

    max_model_len: int
    decoder_prompt_len: int = 0
    """Tokens with which a decoder with an encoder begins; 0: the model has no encoder."""

    def rule(self, num_before: int = 0) -> LengthRule:
        """The rule of a prompt whose request has output. num_before: tokens of a session before the prompt."""
        return LengthRule(self.max_model_len, num_before, has_output=not self.decoder_prompt_len)

    @property
    def continues_prompt(self) -> bool:
        """True if the output goes on from the prompt's text; False if it is a text of its own."""
        return not self.decoder_prompt_len

    def resolve_max_tokens(
        self,
        prompt: Prompt,
        num_tokens: int,
        max_tokens: int | None,
        *,
        field: str,
        max_tokens_field: str,
        takes_rest: bool = False,
    ) -> int:
        """As the function of this name. Raises: PromptTooLong, InvalidRequest."""
        if not self.decoder_prompt_len:
            return resolve_max_tokens(
                prompt, num_tokens, self.max_model_len, max_tokens,
                field=field, max_tokens_field=max_tokens_field, takes_rest=takes_rest,
            )  # fmt: skip
        self.rule().verify(num_tokens, field)
        room = self.max_model_len - self.decoder_prompt_len
        if max_tokens is None:
            return room if takes_rest or isinstance(prompt, ChatInput) else min(room, DEFAULT_MAX_TOKENS)
        if max_tokens > room:
            raise InvalidRequest(
                f"{max_tokens_field} is {max_tokens}, the decoder of this model writes at most {room} tokens",
                max_tokens_field,
            )
        return max_tokens
