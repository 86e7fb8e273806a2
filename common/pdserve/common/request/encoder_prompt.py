"""`EncoderPrompt` and `EncoderDecoderPrompts`: how a model with an encoder lays out a request's tokens.

    | prompt, for the encoder | padding to a full block | decoder's prompt | output
    0                   num_tokens                num_slots

The padding is not computed, so that the decoder's tokens have blocks of their own. A block of the prompt depends on all of its
tokens: its hash covers them. Where the encoder reads sound, a place stands for each of its positions, and the request's prompt is
the decoder's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.common.audio_processor_config import SAMPLE_BYTES, AudioProcessorConfig
from pdserve.common.block_hash import BlockHasher, HashedSpan, token_bytes
from pdserve.common.errors import InvalidRequest, PromptTooLong
from pdserve.common.request.audio import audio_feature, placed, verify_audio
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.multimodal import MultiModalFeatureSpec

_IDENTIFIER_BYTES = 16


class EncoderPrompt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The part of a sequence's tokens that the encoder reads, at its beginning."""

    num_tokens: int
    num_slots: int
    """Tokens and padding: a multiple of `block_size`."""
    is_audio: bool = False
    """The tokens are the encoder's positions, and no part of the request's prompt."""


class EncoderDecoderPrompts(msgspec.Struct, frozen=True, array_like=True):
    """Properties of a model with an encoder that the preparation of its requests needs."""

    decoder_prompt_token_ids: tuple[int, ...]
    pad_token_id: int
    max_len: int
    """Tokens of the encoder's prompt, and of the decoder's prompt and output together, at most."""
    audio: AudioProcessorConfig | None = None
    """The encoder reads sound, and `max_len` counts only the decoder's tokens. None: it reads the prompt."""
    suppressed_token_ids: tuple[int, ...] = ()
    """Tokens that are never sampled."""
    begin_suppressed_token_ids: tuple[int, ...] = ()
    """Tokens that are not sampled first."""

    @property
    def num_decoder_prompt_tokens(self) -> int:
        return len(self.decoder_prompt_token_ids)

    @property
    def max_output_tokens(self) -> int:
        """Output tokens that the decoder's positions allow."""
        return self.max_len - len(self.decoder_prompt_token_ids)

    def max_sequence_len(self, block_size: int) -> int:
        """Tokens and padding of the longest sequence."""
        return _round_up(self.max_encoder_len, block_size) + self.max_len

    @property
    def max_encoder_len(self) -> int:
        """Tokens or positions that the encoder reads, at most."""
        return self.max_len if self.audio is None else self.audio.num_positions

    def verify(self, request: GenerationRequest) -> None:
        """Refuse what such a model does not serve. Raises: InvalidRequest, PromptTooLong, by the client's names."""
        verify_encoder_features(request)
        self.verify_lengths(len(request.prompt_token_ids), request.sampling_params.output_limit)
        self.verify_sound(request.mm_features)

    def verify_sound(self, features: Sequence[MultiModalFeatureSpec], *, needs_samples: bool = False) -> None:
        """Check that sound is given where the encoder reads it, and only there. needs_samples: as `verify_audio`.

        Raises: InvalidRequest.
        """
        if self.audio is not None:
            verify_audio(features, self.audio, needs_samples=needs_samples)
        elif features:
            raise InvalidRequest("request.mm_features is given, and this model takes text alone", "mm_features")

    def silence(self) -> list[MultiModalFeatureSpec]:
        """The shortest sound for a prompt; empty where the encoder reads tokens."""
        return [] if self.audio is None else [audio_feature(bytes(SAMPLE_BYTES), self.audio)]

    def verify_lengths(self, num_tokens: int, max_tokens: int) -> None:
        """num_tokens: of the request's prompt. Raises: InvalidRequest, PromptTooLong."""
        if self.audio is not None:
            if num_tokens >= self.max_len:
                raise PromptTooLong(
                    f"prompt_token_ids has {num_tokens} tokens, prompt and output have at most {self.max_len}",
                    "prompt_token_ids",
                )
            return
        if num_tokens > self.max_len:
            raise PromptTooLong(
                f"prompt_token_ids has {num_tokens} tokens, the encoder of this model reads at most {self.max_len}",
                "prompt_token_ids",
            )
        if max_tokens > self.max_output_tokens:
            raise InvalidRequest(
                f"max_tokens is {max_tokens}, the decoder of this model writes at most {self.max_output_tokens} tokens",
                "max_tokens",
            )

    def laid_out(
        self, prompt: Sequence[int], block_size: int, features: Sequence[MultiModalFeatureSpec] = ()
    ) -> dict[str, Any]:
        """Fields of an `EngineCoreRequest`: the prompt's tokens with padding, and the part of them that the encoder reads."""
        if self.audio is not None:
            num_slots = _round_up(self.audio.num_positions, block_size)
            return {
                "prompt_token_ids": [*[self.pad_token_id] * num_slots, *prompt],
                "encoder_prompt": EncoderPrompt(self.audio.num_positions, num_slots, is_audio=True),
                "mm_features": placed(features, num_slots),
            }
        encoder = EncoderPrompt(len(prompt), _round_up(len(prompt), block_size))
        padding = [self.pad_token_id] * (encoder.num_slots - encoder.num_tokens)
        return {"prompt_token_ids": [*prompt, *padding, *self.decoder_prompt_token_ids], "encoder_prompt": encoder}

    def hashed(
        self,
        prompt: Sequence[int],
        output: Sequence[int],
        root: bytes,
        hasher: BlockHasher,
        features: Sequence[MultiModalFeatureSpec] = (),
    ) -> dict[str, Any]:
        """As `laid_out`, with the hashes of the blocks of prompt and earlier output. features: the sound."""
        fields = self.laid_out(prompt, hasher.block_size, features)
        identifier = hashlib.blake2b(token_bytes(prompt), digest_size=_IDENTIFIER_BYTES).digest()
        if self.audio is not None:
            identifier = b"".join(feature.identifier.encode() for feature in features)
        span = HashedSpan(0, fields["encoder_prompt"].num_slots, identifier)
        return fields | {"block_hashes": hasher.extend(root, [*fields["prompt_token_ids"], *output], (span,))}


def verify_encoder_features(request: GenerationRequest) -> None:
    """Raises: InvalidRequest naming a field that a model with an encoder does not serve."""
    if request.pooling_params is not None:
        raise InvalidRequest("pooling_params is given, and a model with an encoder generates alone", "pooling_params")
    if request.prompt_embeds is not None:
        raise InvalidRequest("prompt_embeds is given, and the encoder of this model reads token ids", "prompt_embeds")
    if (num := request.sampling_params.prompt_logprobs) is not None:
        raise InvalidRequest(
            f"prompt_logprobs is {num}, and an encoder gives its prompt no probabilities", "prompt_logprobs"
        )


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
