"""Prompts and inputs as OpenAI's clients write them: a text, token ids, or a list of either."""

from __future__ import annotations

from pdserve.common.errors import InvalidRequest
from pdserve.text.prompt import TextInput, TokenInput

OpenAIPrompts = str | list[int | str | list[int]]


def num_prompts(given: OpenAIPrompts, field: str, limit: int) -> int:
    """The number of prompts. Raises: InvalidRequest for more than `limit`, before any is built."""
    num = 1 if isinstance(given, str) or not given or isinstance(given[0], int) else len(given)
    if num > limit:
        raise InvalidRequest(f"{field} has {num} entries, 1 to {limit} are allowed", field)
    return num


def as_prompts(given: OpenAIPrompts, field: str, *, add_special_tokens: bool = True) -> list[TextInput | TokenInput]:
    """The prompts, one or many. field: the client's name of them. add_special_tokens: to texts. Raises: InvalidRequest."""
    if isinstance(given, str):
        return [TextInput(given, add_special_tokens)]
    if not given:
        raise InvalidRequest(f"{field} is empty, at least one token is needed", field)
    kinds = {type(part) for part in given}
    if len(kinds) > 1:
        raise InvalidRequest(f"{field} mixes kinds: strings, token ids, or lists of token ids are needed", field)
    if kinds == {int}:
        return [TokenInput([part for part in given if isinstance(part, int)])]
    return [TokenInput(part) if isinstance(part, list) else TextInput(str(part), add_special_tokens) for part in given]
