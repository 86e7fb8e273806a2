"""A client's prompt (text, chat messages or token ids), and its checks before the model computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from pdserve.common.errors import InvalidRequest, PromptTooLong
from pdserve.common.request.multimodal import MultiModalFeatureSpec
from pdserve.common.request.prompt_embeds import PromptEmbeds
from pdserve.common.request.sampling_params import verify_token_ids
from pdserve.text.audio.audio_processor import AudioProcessor
from pdserve.text.audio.transcript_prompt import Task
from pdserve.text.images.chat_images import ImageSource, without_images
from pdserve.text.images.image_processor import FIELD as IMAGES_FIELD
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.images.placeholders import with_images
from pdserve.text.tokenization.pair_limit import PairLimit, TruncationSide
from pdserve.text.tokenization.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""Default of a completion; the default of a chat is the rest of the model's length."""
MAX_CACHE_SALT_CHARS = 256
_MIN_TEXT_BYTES = 1 << 19
_TEXT_BYTES_PER_TOKEN = 5


def max_text_bytes(model_len: int) -> int:
    """Most bytes of a text that is tokenized although it may have more tokens than the model's length; each byte may become a
    token, which temporarily takes hundreds of bytes."""
    return max(_MIN_TEXT_BYTES, _TEXT_BYTES_PER_TOKEN * model_len)


def verify_text_bytes(text: str, max_bytes: int, field: str) -> None:
    """Raises: InvalidRequest."""
    if (num_bytes := len(text.encode(errors="surrogatepass"))) > max_bytes:
        raise InvalidRequest(f"{field} has {num_bytes} bytes, at most {max_bytes} are tokenized at once", field)


class TextInput(msgspec.Struct, frozen=True):
    text: str
    add_special_tokens: bool = True
    """False if the text continues an earlier one."""


class PairInput(msgspec.Struct, frozen=True):
    """Two texts for a cross-encoder, with the tokenizer's special tokens around and between them."""

    text: str
    text_pair: str
    truncation: Truncation | None = None
    """Drops tokens of the longer text first, then of both texts in turn; drops no special token."""


class TranscriptInput(msgspec.Struct, frozen=True):
    """Sound to transcribe or to translate into text."""

    file: bytes
    """An audio file; empty once its samples have been made."""
    language: str | None
    """A code, as `TranscriptPrompt.language` returns it."""
    task: Task = "transcribe"
    text: str = ""
    """Text that precedes the sound."""
    text_field: str = "prompt"
    """The client's name of `text`."""


class ChatInput(msgspec.Struct, frozen=True):
    messages: Sequence[Mapping[str, Any]]
    add_generation_prompt: bool = True
    template_variables: Mapping[str, Any] = {}
    """The client's variables for the chat template, such as `enable_thinking`."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Functions that the model may call, in the form of OpenAI's `tools`."""
    continue_final_message: bool = False
    """The prompt ends with the content of the last message; `add_generation_prompt` is then False."""
    add_special_tokens: bool = False
    """Add special tokens in addition to those of the chat template."""
    chat_template: str | None = None
    """The template that a caller of `LLM` gives in place of the model's; a router accepts none from its clients."""


class TokenInput(msgspec.Struct, frozen=True):
    token_ids: list[int]


class EmbedsInput(msgspec.Struct, frozen=True):
    """Embeddings in place of token ids."""

    embeds: PromptEmbeds


Prompt = TextInput | PairInput | ChatInput | TokenInput | EmbedsInput | TranscriptInput


class Truncation(msgspec.Struct, frozen=True):
    """Keeps a part of a prompt's tokens; the fields are vLLM's."""

    truncate_prompt_tokens: int
    """Tokens to keep, at least 1; -1: as many as fit into the model's length."""
    truncation_side: TruncationSide = "left"
    """Side at which tokens are dropped: `left` keeps the last ones, `right` the first."""

    @classmethod
    def of(cls, truncate_prompt_tokens: int | None, truncation_side: str | None) -> Truncation | None:
        """None without `truncate_prompt_tokens`. Raises: InvalidRequest."""
        if truncation_side not in (None, "left", "right"):
            raise InvalidRequest(
                f"truncation_side is {truncation_side[:40]!r}, left or right is needed", "truncation_side"
            )
        if truncate_prompt_tokens is None:
            return None
        if truncate_prompt_tokens != -1 and truncate_prompt_tokens < 1:
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 or at least 1, not {truncate_prompt_tokens}",
                "truncate_prompt_tokens",
            )
        return cls(truncate_prompt_tokens, "right" if truncation_side == "right" else "left")

    def most(self, length_rule: LengthRule, max_tokens: int | None = None) -> int:
        """Most tokens that are kept. max_tokens: output tokens that the client requests.

        Raises: InvalidRequest if fewer fit than are to be kept.
        """
        num_output = max(1, max_tokens or 1) if length_rule.has_output else 0
        most = max(0, length_rule.max_model_len - length_rule.num_before - num_output)
        if self.truncate_prompt_tokens > most:
            beside = f", of which {num_output} are left for the output" if num_output else ""
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at most {most}, not {self.truncate_prompt_tokens}: "
                f"the model's length is {length_rule.max_model_len} tokens{beside}",
                "truncate_prompt_tokens",
            )
        return most if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens

    def apply(self, token_ids: list[int], length_rule: LengthRule, max_tokens: int | None = None) -> list[int]:
        """The kept tokens. Arguments and errors: as `most`."""
        num_kept = self.most(length_rule, max_tokens)
        if len(token_ids) <= num_kept:
            return token_ids
        return token_ids[:num_kept] if self.truncation_side == "right" else token_ids[len(token_ids) - num_kept :]


class EncodedPrompt(NamedTuple):
    """The input of a model."""

    text: str | None
    """The text that was tokenized: a text prompt, or the output of the chat template. None for token ids, embeddings, a pair and
    a transcript."""
    token_ids: list[int]
    features: tuple[MultiModalFeatureSpec, ...] = ()
    """The prompt's images, or its sound."""


class LengthRule(msgspec.Struct, frozen=True):
    """Limit of a prompt's tokens."""

    max_model_len: int
    num_before: int = 0
    """Tokens of a session before the prompt."""
    has_output: bool = True
    """False for an embedding, which ends with its prompt."""

    def verify(self, num_tokens: int, field: str, *, at_least: bool = False) -> None:
        """field: the client's name of the prompt. at_least: `num_tokens` is a lower bound. Raises: PromptTooLong."""
        num_tokens += self.num_before
        if num_tokens + self.has_output <= self.max_model_len:
            return
        room = ", prompt and output together, and at least one must be left for the output" if self.has_output else ""
        raise PromptTooLong(
            f"{field} has {'at least ' if at_least else ''}{num_tokens} tokens; "
            f"the model's length is {self.max_model_len} tokens{room}",
            field,
        )


def encode_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    field: str,
    length_rule: LengthRule | None = None,
    *,
    truncates: bool = False,
    images: ImageProcessor | None = None,
    given_images: Sequence[object] = (),
    fetched_images: Mapping[str, bytes] | None = None,
    audio: AudioProcessor | None = None,
    given_sounds: Sequence[object] = (),
) -> EncodedPrompt:
    """Tokenize a prompt; the result has at least one token. Given ids are not checked. Safe from any thread.

    field: the client's name of the prompt. length_rule: refuses a text that is too long before it is tokenized, or as soon as too
    many tokens are known, since the rest could take many seconds and gigabytes; the caller checks the final number of tokens.
    truncates: the caller drops tokens, so that only the bytes of the text are limited. images: processor of a model with images;
    each image's tokens are inserted into the prompt. given_images: images next to a prompt that is not a chat. fetched_images:
    files of URLs in the chat. audio: processor of a model whose encoder reads sound; given_sounds then has one, and the decoder
    reads the prompt.
    Raises: InvalidRequest.
    """
    if isinstance(prompt, TranscriptInput):
        return _transcript(tokenizer, prompt, length_rule, audio, field)
    sound: tuple[MultiModalFeatureSpec, ...] = ()
    if audio is not None:
        sound = audio.features(given_sounds)
        if isinstance(prompt, TextInput):
            # the tokenizer of such a model would end the text with EOS
            prompt = msgspec.structs.replace(prompt, add_special_tokens=False)
    elif given_sounds:
        raise InvalidRequest(f"{IMAGES_FIELD} has 'audio', and this model reads none", IMAGES_FIELD)
    sources = [ImageSource(f"{IMAGES_FIELD}.image[{place}]", None, image) for place, image in enumerate(given_images)]
    if images is not None and isinstance(prompt, ChatInput):
        messages, sources = without_images(prompt.messages)
        prompt = msgspec.structs.replace(prompt, messages=messages)
    if sources and images is None:
        raise InvalidRequest(f"{IMAGES_FIELD} is given, and this model takes text alone", IMAGES_FIELD)
    if sources and truncates:
        raise InvalidRequest("truncate_prompt_tokens is given, and the prompt has images", "truncate_prompt_tokens")

    def verify(text: str) -> None:
        if length_rule is not None and truncates:
            verify_text_bytes(text, max_text_bytes(length_rule.max_model_len), field)
        elif length_rule is not None:
            length_rule.verify(tokenizer.least_tokens(text), field, at_least=True)

    def count(num_tokens: int) -> None:
        if length_rule is not None and not truncates:
            length_rule.verify(num_tokens, field, at_least=True)

    match prompt:
        case TokenInput():
            text, token_ids = None, prompt.token_ids
        case EmbedsInput():
            text, token_ids = None, prompt.embeds.placeholders()
        case ChatInput():
            try:
                text, token_ids = tokenizer.encode_chat(
                    prompt.messages,
                    add_generation_prompt=prompt.add_generation_prompt,
                    variables=prompt.template_variables,
                    tools=prompt.tools or None,
                    continue_final_message=prompt.continue_final_message,
                    add_special_tokens=prompt.add_special_tokens,
                    chat_template=prompt.chat_template,
                    field=field,
                    verify=verify,
                    count=count,
                )
            except InvalidRequest as error:
                # the chat template always names the field `messages`
                error.field = field if error.field == "messages" else error.field
                raise
        case PairInput():
            text, token_ids = None, []
            if prompt.text and prompt.text_pair and prompt.truncation is not None and length_rule is not None:
                verify_text_bytes(prompt.text + prompt.text_pair, max_text_bytes(length_rule.max_model_len), field)
                limit = PairLimit(prompt.truncation.most(length_rule), prompt.truncation.truncation_side)
                token_ids = tokenizer.encode_pair(prompt.text, prompt.text_pair, field=field, limit=limit)
            elif prompt.text and prompt.text_pair:
                verify(prompt.text + prompt.text_pair)
                token_ids = tokenizer.encode_pair(prompt.text, prompt.text_pair, field=field, count=count)
        case TextInput():
            # an empty text is refused even if the tokenizer would add a BOS token
            text, token_ids = prompt.text, []
            if text:
                verify(text)
                token_ids = tokenizer.encode(
                    text, add_special_tokens=prompt.add_special_tokens, field=field, count=count
                )
    if not token_ids:
        raise InvalidRequest(f"{field} is empty, at least one token is needed", field)
    if images is None:
        return EncodedPrompt(text, token_ids, sound)
    images_field = field if isinstance(prompt, ChatInput) else IMAGES_FIELD
    processed = images.process_all(sources, images_field, fetched_images or {})
    token_ids, features = with_images(token_ids, processed, images.image_token_id, field, images_field)
    return EncodedPrompt(text, token_ids, tuple(features))


def _transcript(
    tokenizer: Tokenizer, prompt: TranscriptInput, rule: LengthRule | None, audio: AudioProcessor | None, field: str
) -> EncodedPrompt:
    """field: the client's name of the file. Raises: InvalidRequest."""
    if audio is None or audio.transcript is None:
        raise InvalidRequest(f"{field} is given, and this model reads no sound", field)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False, field=prompt.text_field, count=lambda num_tokens: None)

    most = _MIN_TEXT_BYTES
    if rule is not None:
        verify_text_bytes(prompt.text, max_text_bytes(rule.max_model_len), prompt.text_field)
        most = max(1, rule.max_model_len // 2 - 1)
    token_ids = audio.transcript.token_ids(prompt.language, prompt.task, prompt.text, encode, most, prompt.text_field)
    return EncodedPrompt(None, token_ids, (audio.process_file(prompt.file, field),))


def verify_prompt_tokens(
    tokenizer: Tokenizer, prompt: Prompt, token_ids: Sequence[int], vocab_size: int, field: str
) -> None:
    """Check that the model has an embedding for every token of a prompt.

    A tokenizer may have more tokens than the model, so a text is checked as token ids are. vocab_size: rows of the model's
    embedding. field: the client's name of the prompt. Raises: InvalidRequest naming the first token without an embedding.
    """
    if isinstance(prompt, TokenInput):
        verify_token_ids(field, token_ids, vocab_size)
    elif token_ids and max(token_ids) >= vocab_size:
        token_id = next(token_id for token_id in token_ids if token_id >= vocab_size)
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        raise InvalidRequest(
            f"{field} contains {text!r:.60}, token {token_id} of the tokenizer; "
            f"the model has tokens 0 to {vocab_size - 1} alone",
            field,
        )


def resolve_max_tokens(
    prompt: Prompt,
    num_tokens: int,
    max_model_len: int,
    max_tokens: int | None,
    *,
    field: str,
    max_tokens_field: str,
    takes_rest: bool = False,
) -> int:
    """Most output tokens after a prompt of `num_tokens` tokens. max_tokens: None for the default of a chat or a completion.

    field, max_tokens_field: the client's names of the two. takes_rest: by default, a completion may also use the rest of the
    model's length. Raises: PromptTooLong, InvalidRequest.
    """
    LengthRule(max_model_len).verify(num_tokens, field)
    left = max_model_len - num_tokens
    if max_tokens is None:
        is_whole = takes_rest or isinstance(prompt, ChatInput | TranscriptInput)
        return left if is_whole else min(left, DEFAULT_MAX_TOKENS)
    if max_tokens > left:
        raise InvalidRequest(
            f"{max_tokens_field} is {max_tokens} and {field} has {num_tokens} tokens; together "
            f"they may be at most {max_model_len}, so {max_tokens_field} at most {left}",
            max_tokens_field,
        )
    return max_tokens


def verify_cache_salt(cache_salt: str | None) -> None:
    """Raises: InvalidRequest if it is too long."""
    if cache_salt is not None and len(cache_salt) > MAX_CACHE_SALT_CHARS:
        raise InvalidRequest(
            f"cache_salt has {len(cache_salt)} characters, at most {MAX_CACHE_SALT_CHARS} are allowed", "cache_salt"
        )
