"""Types of prompts that a caller may give, and how one prompt is distinguished from many."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict, Unpack

import msgspec
import torch
from torch import Tensor

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.prompt_embeds import EmbedsDtype, PromptEmbeds
from pdserve.text.images.image_processor import FIELD
from pdserve.text.prompt import ChatInput, EmbedsInput, PairInput, Prompt, TextInput, TokenInput, Truncation


class MultiModalData(TypedDict, total=False):
    """Images of a prompt, or its sound."""

    audio: Any
    """Samples `[n]` from -1 to 1 at the model's sampling rate, with `(samples, rate)` at another one; a list with one of these."""
    image: Any
    """A `PIL.Image.Image`, an array `[H, W, 3]` of uint8, or a list of these: one for each image token of the prompt."""


class TextPrompt(TypedDict):
    prompt: str
    cache_salt: NotRequired[str]
    """Prompts share cached blocks only with those of the same salt."""
    multi_modal_data: NotRequired[MultiModalData]


class TokensPrompt(TypedDict):
    prompt_token_ids: Sequence[int]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[MultiModalData]


class EmbedsPrompt(TypedDict):
    prompt_embeds: Tensor
    """`[tokens, H]` of float32, float16 or bfloat16, on any device; H is the model's hidden size."""
    cache_salt: NotRequired[str]


PromptType = str | Sequence[int] | TextPrompt | TokensPrompt | EmbedsPrompt
Conversation = Sequence[Mapping[str, Any]]
"""Messages with `role` and `content`."""


class TokenizationKwargs(TypedDict, total=False):
    """Options of tokenizing, by vLLM's names."""

    truncate_prompt_tokens: int
    """Keep this number of the prompt's tokens; -1: as many as fit."""
    truncation_side: Literal["left", "right"]
    """Side at which tokens are dropped; default `left`."""
    add_special_tokens: bool
    """Default true; for a conversation false, whose template adds them."""


_PROMPT_KEYS = ("prompt", "prompt_token_ids", "prompt_embeds")
_EMBEDS_DTYPES: Mapping[torch.dtype, EmbedsDtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}
_TOKENIZATION_KWARGS = {"truncate_prompt_tokens": int, "truncation_side": str, "add_special_tokens": bool}


class PromptWithSalt(NamedTuple):
    """One prompt, its kind known."""

    prompt: Prompt
    field: str
    """The caller's name of the argument, for error messages."""
    cache_salt: str | None = None
    truncation: Truncation | None = None
    images: tuple[object, ...] = ()
    """Images in the order of their places, as the caller gave them."""
    sounds: tuple[object, ...] = ()
    """As the caller gave them."""

    def tokenized_with(self, options: TokenizationKwargs | None) -> PromptWithSalt:
        """This prompt with options. Raises: InvalidRequest naming the option."""
        if options is None:
            return self
        for name, value in options.items():
            kind = _TOKENIZATION_KWARGS.get(name)
            if kind is None or (value is not None and type(value) is not kind):
                problem = f"must be {kind.__name__}, not {value!r:.60}" if kind else "is not a known option"
                raise InvalidRequest(f"tokenization_kwargs: {name} {problem}", "tokenization_kwargs")
        num_kept, side = options.get("truncate_prompt_tokens"), options.get("truncation_side")
        truncation = Truncation.of(num_kept, side)
        prompt, adds = self.prompt, options.get("add_special_tokens")
        if isinstance(prompt, PairInput):
            if adds is not None:
                raise InvalidRequest(
                    "tokenization_kwargs: add_special_tokens is given, and a pair has those of the tokenizer",
                    "tokenization_kwargs",
                )
            pair = msgspec.structs.replace(prompt, truncation=Truncation.of(num_kept, side or "right"))
            return self._replace(prompt=pair)
        if adds is not None and not isinstance(prompt, TokenInput | EmbedsInput):
            prompt = msgspec.structs.replace(prompt, add_special_tokens=adds)
        return self._replace(prompt=prompt, truncation=truncation)


def is_one_prompt(prompts: object) -> bool:
    """True if this is a single prompt and not a sequence of them; a list of numbers is one list of token ids."""
    if isinstance(prompts, str | Mapping):
        return True
    return isinstance(prompts, Sequence) and len(prompts) > 0 and all(isinstance(part, int) for part in prompts)


def is_one_conversation(messages: object) -> bool:
    """True if this is a list of messages and not a list of such lists; any other value counts as one conversation."""
    return not isinstance(messages, Sequence) or not messages or not isinstance(messages[0], list | tuple)


def as_prompt(prompt: object, tokenization_kwargs: TokenizationKwargs | None = None) -> PromptWithSalt:
    """Raises: InvalidRequest naming what is wrong."""
    if isinstance(prompt, str):
        known = PromptWithSalt(TextInput(prompt), "prompt")
    elif isinstance(prompt, Mapping):
        known = _from_mapping(prompt)
    else:
        known = PromptWithSalt(TokenInput(_token_ids(prompt, "prompt")), "prompt")
    return known.tokenized_with(tokenization_kwargs)


class ChatKwargs(TypedDict, total=False):
    """Options of `chat` for the chat template, by vLLM's names."""

    chat_template: str | None
    """A Jinja template in place of the model's."""
    add_generation_prompt: bool
    """Default true: the prompt ends with the beginning of an answer."""
    continue_final_message: bool
    """The prompt ends with the content of the last message; `add_generation_prompt` must be false then."""
    tools: Sequence[Mapping[str, Any]] | None
    """Functions that the model may call, in the form of OpenAI's `tools`."""
    chat_template_kwargs: Mapping[str, Any] | None
    """Variables of this template, such as `enable_thinking`."""


_CHAT_KWARGS: dict[str, type] = {
    "chat_template": str,
    "add_generation_prompt": bool,
    "continue_final_message": bool,
    "tools": Sequence,
    "chat_template_kwargs": Mapping,
}


def as_conversation(
    messages: object, tokenization_kwargs: TokenizationKwargs | None = None, **options: Unpack[ChatKwargs]
) -> PromptWithSalt:
    """An option that is None is not given.

    Raises: InvalidRequest; what a message must hold is checked when it is rendered. TypeError for an unknown option.
    """
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise InvalidRequest(f"messages must be a list of messages, not {type(messages).__name__}", "messages")
    for name, value in options.items():
        if name not in _CHAT_KWARGS:
            raise TypeError(f"chat() got an unexpected keyword argument {name!r}")
        if value is not None and (
            not isinstance(value, _CHAT_KWARGS[name]) or (name == "tools" and isinstance(value, str))
        ):
            raise InvalidRequest(f"{name} must be {_CHAT_KWARGS[name].__name__}, not {value!r:.60}", name)
    begins, continues = options.get("add_generation_prompt"), options.get("continue_final_message") or False
    begins_answer = True if begins is None else begins
    if begins_answer and continues:
        raise InvalidRequest(
            "continue_final_message is true, and add_generation_prompt must be false then", "continue_final_message"
        )
    chat = ChatInput(
        messages,
        begins_answer,
        options.get("chat_template_kwargs") or {},
        tools=options.get("tools") or None,
        continue_final_message=continues,
        chat_template=options.get("chat_template"),
    )
    return PromptWithSalt(chat, "messages").tokenized_with(tokenization_kwargs)


def one_of_both(prompt: object, prompt_token_ids: object, field: str = "prompt") -> object:
    """A caller's prompt or prompts: the first argument, or the keyword for token ids. Raises: InvalidRequest for both or none."""
    if (prompt is None) == (prompt_token_ids is None):
        problem = "both are given" if prompt is not None else "none is given"
        raise InvalidRequest(f"either {field} or prompt_token_ids is needed, and {problem}", field)
    return prompt_token_ids if prompt is None else prompt


def _from_mapping(prompt: Mapping[Any, Any]) -> PromptWithSalt:
    unknown = prompt.keys() - {*_PROMPT_KEYS, "cache_salt", "multi_modal_data"}
    if unknown or sum(key in prompt for key in _PROMPT_KEYS) != 1:
        raise InvalidRequest(
            "a prompt's dict must have one of 'prompt', 'prompt_token_ids' and 'prompt_embeds', and may have "
            f"'cache_salt' and 'multi_modal_data'; this one has {sorted(map(str, prompt))}",
            "prompt",
        )
    salt = prompt.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise InvalidRequest(f"cache_salt must be a string, not {type(salt).__name__}", "cache_salt")
    if "prompt_token_ids" in prompt:
        token_ids = _token_ids(prompt["prompt_token_ids"], "prompt_token_ids")
        return _with_data(PromptWithSalt(TokenInput(token_ids), "prompt_token_ids", salt or None), prompt)
    if "prompt_embeds" in prompt:
        if prompt.get("multi_modal_data") is not None:
            raise InvalidRequest("multi_modal_data is given, and the prompt is embeddings", FIELD)
        return PromptWithSalt(EmbedsInput(_embeds(prompt["prompt_embeds"])), "prompt_embeds", salt or None)
    if not isinstance(prompt["prompt"], str):
        raise InvalidRequest(f"prompt must be a string, not {type(prompt['prompt']).__name__}", "prompt")
    return _with_data(PromptWithSalt(TextInput(prompt["prompt"]), "prompt", salt or None), prompt)


def _with_data(known: PromptWithSalt, prompt: Mapping[Any, Any]) -> PromptWithSalt:
    """Raises: InvalidRequest."""
    data: object = prompt.get("multi_modal_data")
    if data is None:
        return known
    if not isinstance(data, Mapping) or data.keys() - {"image", "audio"}:
        shown = sorted(map(str, data)) if isinstance(data, Mapping) else type(data).__name__
        raise InvalidRequest(f"multi_modal_data must be a dict with 'image' or 'audio', not {shown}", FIELD)
    images, sound = data.get("image"), data.get("audio")
    if images is not None:
        known = known._replace(images=tuple(images) if isinstance(images, list | tuple) else (images,))
    if sound is not None:
        # a tuple is samples and their rate; a list of numbers is samples
        is_several = isinstance(sound, list) and not all(isinstance(sample, int | float) for sample in sound[:1])
        known = known._replace(sounds=tuple(sound) if is_several else (sound,))
    return known


def _embeds(value: object) -> PromptEmbeds:
    """A caller's tensor as bytes. Raises: InvalidRequest."""
    if not isinstance(value, Tensor):
        raise InvalidRequest(f"prompt_embeds must be a torch.Tensor, not {type(value).__name__}", "prompt_embeds")
    dtype = _EMBEDS_DTYPES.get(value.dtype)
    if dtype is None or value.dim() != 2 or not value.numel():
        given = f"{list(value.shape)} of {value.dtype}"
        raise InvalidRequest(
            f"prompt_embeds must be [tokens, hidden size] of float32, float16 or bfloat16, not {given}",
            "prompt_embeds",
        )
    data = value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return PromptEmbeds.of(value.shape[0], value.shape[1], dtype, data)


def _token_ids(value: object, field: str) -> list[int]:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise InvalidRequest(f"{field} must be a string or token ids, not {type(value).__name__}", field)
    for place, token_id in enumerate(value):
        try:
            operator.index(token_id)
        except TypeError:
            raise InvalidRequest(f"{field}[{place}] is {token_id!r}, not a token id", field) from None
    return [operator.index(token_id) for token_id in value]


@contextmanager
def named(label: str | None) -> Iterator[None]:
    """Puts the name of one of many, such as `prompts[3]`, before the message of an `InvalidRequest`."""
    try:
        yield
    except InvalidRequest as error:
        if label is None:
            raise
        raise type(error)(f"{label}: {error.message}", error.field) from None
