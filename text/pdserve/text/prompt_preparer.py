"""`PromptPreparer`: a client's prompt and parameters as a `GenerationRequest`: tokenized, checked and filled in.

Router and `LLM` prepare by the rules of this file, in their order, and refuse with the same words. A router adds threads, budgets
and what a tenant has; `LLM` adds functions of its caller.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.encoder_prompt import verify_encoder_features
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.sampling_params import MAX_LOGPROBS, MAX_SEQUENCES, SamplingParams
from pdserve.text.audio.audio_processor import AudioProcessor
from pdserve.text.bad_words import bad_words_token_ids
from pdserve.text.beam_search import BeamSearchParams
from pdserve.text.images.image_processor import ImageProcessor
from pdserve.text.prompt import (
    EmbedsInput,
    EncodedPrompt,
    LengthRule,
    Prompt,
    Truncation,
    encode_prompt,
    verify_cache_salt,
    verify_prompt_tokens,
)
from pdserve.text.prompt_room import PromptRoom
from pdserve.text.tokenization.tokenizer import Tokenizer

_NO_FILES: Mapping[str, bytes] = MappingProxyType({})


class ModelLimits(msgspec.Struct, frozen=True):
    """Limits of the model and of the workers that compute it."""

    max_model_len: int
    vocab_size: int
    hidden_size: int = 0
    """Numbers in an embedding; 0 where they are not known, or none is computed."""
    max_logprobs: int = MAX_LOGPROBS
    """Most likely tokens per position."""
    max_n_sequences: int = MAX_SEQUENCES
    """Sequences of one request."""
    decoder_prompt_len: int = 0
    """See `PromptRoom`."""

    @property
    def room(self) -> PromptRoom:
        """Tokens of prompt and output."""
        return PromptRoom(self.max_model_len, self.decoder_prompt_len)


class PromptRequest(GenerationRequest, kw_only=True, gc=False):
    """One prompt and what is asked of it, by the names that the client or caller uses."""

    prompt: Prompt
    field: str
    """The client's name of the prompt field, for error messages."""
    max_tokens: int | None = None
    """In place of that of the sampling parameters. None: the default of the prompt's kind."""
    max_tokens_field: str = "max_tokens"
    takes_rest: bool = False
    """Without `max_tokens`, a completion too takes the rest of the model's length."""
    logprobs_field: str = "logprobs"
    truncation: Truncation | None = None
    """A part of the prompt's tokens is kept; None: all."""
    beams: BeamSearchParams | None = None
    """A beam search is asked for; its width is the number of sequences."""
    images: tuple[object, ...] = ()
    """Images given next to the prompt, in the order of their places; a chat has its own."""
    sounds: tuple[object, ...] = ()
    """Sound given next to the prompt."""


def embeds_fields(prompt: Prompt) -> dict[str, Any]:
    """Fields of a request whose prompt is embeddings; empty for another."""
    if not isinstance(prompt, EmbedsInput):
        return {}
    # a drafter would take the placeholders for the prompt
    return {"prompt_embeds": prompt.embeds, "speculative_tokens": 0}


class PromptPreparer:
    """Safe from any thread. Every method raises InvalidRequest naming the field, its value and its limit."""

    def __init__(self, tokenizer: Tokenizer, images: ImageProcessor | None, audio: AudioProcessor | None) -> None:
        """images, audio: of a model that takes them."""
        self.tokenizer = tokenizer
        self.images = images
        self.audio = audio

    def encode(
        self, request: PromptRequest, room: PromptRoom, num_before: int = 0, files: Mapping[str, bytes] = _NO_FILES
    ) -> EncodedPrompt:
        """Tokenize the prompt, and process its images or sound; a text that cannot fit is refused at once.

        num_before: tokens of a session that precede it. files: of URLs of images in a chat.
        """
        return encode_prompt(
            self.tokenizer,
            request.prompt,
            request.field,
            _rule(request, room, num_before),
            truncates=request.truncation is not None,
            # no image is pooled
            images=self.images if request.pooling_params is None else None,
            given_images=request.images,
            fetched_images=files,
            audio=self.audio,
            given_sounds=request.sounds,
        )

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Token sequences for the client's `bad_words`."""
        params.verify_bad_words()
        return bad_words_token_ids(self.tokenizer, params.bad_words)

    def complete(
        self,
        request: PromptRequest,
        token_ids: list[int],
        limits: ModelLimits,
        bad_words: tuple[tuple[int, ...], ...] = (),
        num_before: int = 0,
        *,
        form: bool = True,
    ) -> GenerationRequest:
        """The request with its tokens and with what the client left open, but for its seed.

        token_ids, bad_words: of `encode` and `bad_words`. num_before: as in `encode`. form: False where `structured_outputs` is
        known to be verified.
        """
        token_ids = self.prompt_tokens(request, token_ids, limits, num_before)
        if limits.decoder_prompt_len or self.audio is not None:
            verify_encoder_features(request)
        params = msgspec.structs.replace(
            request.sampling_params,
            bad_words_token_ids=bad_words,
            max_tokens=self.max_tokens(request, num_before + len(token_ids), limits),
        )
        params.verify_logprobs(limits.max_logprobs, request.logprobs_field)
        params.verify(limits.vocab_size, limits.max_logprobs, limits.max_n_sequences, form=form)
        return GenerationRequest(**request.carried() | {"prompt_token_ids": token_ids, "sampling_params": params})

    def complete_pooling(self, request: PromptRequest, token_ids: list[int], limits: ModelLimits) -> GenerationRequest:
        """As `complete`, for an embedding, classes or a score."""
        token_ids = self.prompt_tokens(request, token_ids, limits)
        _rule(request, limits.room).verify(len(token_ids), request.field)
        if request.pooling_params is not None:
            request.pooling_params.verify(limits.hidden_size)
        return GenerationRequest(**request.carried() | {"prompt_token_ids": token_ids})

    def prompt_tokens(
        self, request: PromptRequest, token_ids: list[int], limits: ModelLimits, num_before: int = 0
    ) -> list[int]:
        """The tokens that are kept of the prompt, after the checks of everything but the parameters."""
        if request.prompt_embeds is not None:
            if request.truncation is not None:
                raise InvalidRequest(
                    "truncate_prompt_tokens is given, and prompt_embeds are not truncated", "truncate_prompt_tokens"
                )
            if limits.hidden_size:
                request.prompt_embeds.verify_shape(len(token_ids), limits.hidden_size)
        if request.truncation is not None:
            token_ids = request.truncation.apply(token_ids, _rule(request, limits.room, num_before), request.max_tokens)
        verify_prompt_tokens(self.tokenizer, request.prompt, token_ids, limits.vocab_size, request.field)
        verify_cache_salt(request.cache_salt)
        request.verify_client()
        return token_ids

    def max_tokens(self, request: PromptRequest, num_tokens: int, limits: ModelLimits) -> int:
        """Output tokens at most. num_tokens: of the prompt and what precedes it."""
        return limits.room.resolve_max_tokens(
            request.prompt,
            num_tokens,
            request.max_tokens,
            field=request.field,
            max_tokens_field=request.max_tokens_field,
            takes_rest=request.takes_rest,
        )


def _rule(request: PromptRequest, room: PromptRoom, num_before: int = 0) -> LengthRule:
    """How long the prompt may be."""
    if request.pooling_params is not None:
        return LengthRule(room.max_model_len, num_before, has_output=False)
    return room.rule(num_before)
