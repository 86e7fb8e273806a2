"""`RequestReader`: turns a router's submissions into requests for this worker's engine."""

from __future__ import annotations

from typing import Any

from pdserve.common import clock
from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import DigestMismatch, InvalidRequest
from pdserve.common.image_processor_config import ImageProcessorConfig
from pdserve.common.request.encoder_prompt import EncoderDecoderPrompts
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.multimodal import hashed_spans
from pdserve.common.request.wire.request_bytes import decode_request


def sequence_stem(request_id: str, attempt: int) -> str:
    """`request.attempt`, so that a late event of one attempt never reaches the next."""
    return f"{request_id}.{attempt}"


def engine_request_id(request_id: str, attempt: int, index: int) -> str:
    """`request.attempt.index`, as `EngineCoreRequest.sequence_id` makes it."""
    return f"{sequence_stem(request_id, attempt)}.{index}"


class RequestReader:
    """Takes no value from a caller that this worker can compute: it computes block hashes, and compares the request digest."""

    def __init__(
        self,
        hasher: BlockHasher,
        max_model_len: int,
        vocab_size: int | None = None,
        images: ImageProcessorConfig | None = None,
        encoder_decoder: EncoderDecoderPrompts | None = None,
    ) -> None:
        """images: how pixels are made; None for a model without images. encoder_decoder: how a model with an encoder lays out
        prompts; None for a model that is only a decoder."""
        self._images = images
        self._encoder_decoder = encoder_decoder
        self._hasher = hasher
        # where an encoder reads the prompt, prompt and output may each have this length
        reads_prompt = encoder_decoder is not None and encoder_decoder.audio is None
        self._max_model_len = 2 * max_model_len if reads_prompt else max_model_len
        self._vocab_size = vocab_size

    def request(self, data: bytes, attempt: int = 0, **fields: Any) -> EngineCoreRequest:
        """The request of a submission. fields: further fields of `EngineCoreRequest`.

        Raises: PeerError, InvalidRequest, PromptTooLong, before anything is hashed; DigestMismatch if the request digest is
        not that of these tokens under this root and deployment key.
        """
        request = decode_request(data, self._max_model_len, self._vocab_size)
        request.verify_received(self._max_model_len)
        if (prompts := self._encoder_decoder) is not None:
            self._verify_sound(request, prompts)
        else:
            self._verify_images(request)
        carried = request.carried() | {"request_id": engine_request_id(request.request_id, attempt, request.index)}
        carried["block_hashes"] = self._block_hashes(request)
        if prompts is not None:
            carried |= prompts.hashed(
                request.prompt_token_ids,
                request.output_token_ids,
                request.hash_root,
                self._hasher,
                request.mm_features,
            )
        return EngineCoreRequest(
            **carried,
            sequence_stem=sequence_stem(request.request_id, attempt),
            arrival_time=clock.monotonic(),
            **fields,
        )

    def _verify_images(self, request: GenerationRequest) -> None:
        """Raises: InvalidRequest for pixels that do not match their identifier, by which the prefix cache finds them."""
        for place, feature in enumerate(request.mm_features):
            if self._images is None:
                raise InvalidRequest("request.mm_features is given, and this model takes text alone", "mm_features")
            if feature.data:
                expected = self._images.identifier(feature.data, feature.grid_thw)
                _verify_identifier(place, feature.identifier, expected, "pixels")

    def _verify_sound(self, request: GenerationRequest, prompts: EncoderDecoderPrompts) -> None:
        """Raises: InvalidRequest for a request that a model with an encoder cannot serve, and for samples that do not match their
        identifier; PromptTooLong."""
        prompts.verify(request)
        for place, feature in enumerate(request.mm_features):
            if prompts.audio is not None and feature.data:
                _verify_identifier(place, feature.identifier, prompts.audio.identifier(feature.data), "samples")

    def turn(self, data: bytes) -> GenerationRequest:
        """A session's later turn; only its prompt, sampling parameters and trace headers are used, and the number of output tokens
        that it keeps. Raises: as `decode_request`."""
        return decode_request(data, self._max_model_len, self._vocab_size)

    def _block_hashes(self, request: GenerationRequest) -> list[bytes]:
        given = request.given_token_ids
        block_hashes = self._hasher.extend(request.hash_root, given, hashed_spans(request.mm_features))
        digest = self._hasher.request_digest(request.hash_root, block_hashes, given, request.digest_extras)
        if digest != request.request_digest:
            adapter = f", request.lora_fingerprint {request.lora_fingerprint}" if request.lora_fingerprint else ""
            raise DigestMismatch(
                f"request.request_digest is {request.request_digest.hex()}, which is not that of the {len(given)} tokens "
                f"under request.hash_root{adapter} and this worker's deployment key"
            )
        return block_hashes


def _verify_identifier(place: int, identifier: str, expected: str, content: str) -> None:
    """Raises: InvalidRequest if the identifier of `request.mm_features[place]` does not match its content."""
    if identifier != expected:
        raise InvalidRequest(
            f"request.mm_features[{place}].identifier is {identifier[:40]!r}, which is not that of its {content}",
            "mm_features",
        )
