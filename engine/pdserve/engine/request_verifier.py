"""`RequestVerifier`: the rules of an engine for requests. It needs only values, so it may be in another process than the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.encoder_prompt import EncoderDecoderPrompts, verify_encoder_features
from pdserve.common.request.engine_types import EngineCoreRequest, StreamingUpdate
from pdserve.common.request.multimodal import verify_features
from pdserve.common.request.pooling_params import verify_generates
from pdserve.common.request.prompt_embeds import PromptEmbeds
from pdserve.common.request.sampling_params import MAX_SEQUENCES, SamplingParams, verify_token_ids
from pdserve.engine.config import EncoderConfig
from pdserve.engine.prompt_embeds_values import verify_finite
from pdserve.engine.sampling.logits_processors import LogitsProcessors


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestVerifier:
    """Safe from any thread."""

    max_model_len: int
    """Tokens of prompt and output together."""
    max_num_seqs: int
    max_sequences: int = MAX_SEQUENCES
    """Sequences of one request, at most."""
    vocab_size: int
    hidden_size: int
    num_labels: int = 0
    """Labels of the model's classification head; 0: it has none, and generates."""
    enable_prompt_embeds: bool = False
    has_grammars: bool
    """False without a tokenizer: requests with `structured_outputs` are refused."""
    logits_processors: LogitsProcessors
    """The plug-ins that requests may name."""
    encoder: EncoderConfig | None = None
    """None for a model without images."""
    encoder_decoder: EncoderDecoderPrompts | None = None
    """None for a model without an encoder."""
    knows_adapter: Callable[[str], bool] | None = None
    """True for the fingerprint of an adapter that requests may name; None without `enable_lora`."""
    has_transfers: bool
    """False for an engine without services: requests whose blocks another worker sends or reads are refused."""

    def verify(self, request: EngineCoreRequest) -> None:
        """Raise `InvalidRequest` naming the field, its value and the limit."""
        request.verify_supported()
        if not self.has_transfers:
            request.verify_without_transfers()
        if self.encoder_decoder is not None:
            self._verify_encoder_prompt(request, self.encoder_decoder)
        num_tokens = len(request.prompt_token_ids)
        num_to_come = 0 if request.pooling_params is not None else 1
        if request.pooling_params is not None:
            request.pooling_params.verify(self.hidden_size)
            request.pooling_params.verify_task(self.num_labels)
        else:
            verify_generates(self.num_labels)
            self._verify_sampling(request.sampling_params)
        if request.prompt_embeds is not None:
            self._verify_embeds(request, request.prompt_embeds)
        if num_tokens == 0:
            raise InvalidRequest("prompt_token_ids is empty, at least 1 token is needed", "prompt_token_ids")
        self._verify_resumed(request)
        self._verify_lora(request)
        if num_tokens + num_to_come > self.max_model_len:
            room = ", and one more must fit" if num_to_come else ""
            raise InvalidRequest(
                f"prompt_token_ids has {num_tokens} tokens; the model's length is {self.max_model_len}{room}",
                "prompt_token_ids",
            )
        verify_token_ids("prompt_token_ids", request.prompt_token_ids, self.vocab_size)
        self._verify_images(request)
        if request.n > self.max_num_seqs and not request.transfer_source:
            raise InvalidRequest(
                f"n is {request.n}, at most {self.max_num_seqs} sequences run here at a time (max_num_seqs)", "n"
            )

    def _verify_encoder_prompt(self, request: EngineCoreRequest, prompts: EncoderDecoderPrompts) -> None:
        if request.encoder_prompt is None:
            raise InvalidRequest("encoder_prompt is missing, and this model has an encoder", "prompt_token_ids")
        if request.resumable:
            raise InvalidRequest(
                "resumable is set, and a session's later input would have to be encoded with the earlier one",
                "resumable",
            )
        verify_encoder_features(request)
        num_prompt = request.num_sent_tokens - len(request.output_token_ids)
        prompts.verify_lengths(num_prompt, request.sampling_params.output_limit)
        prompts.verify_sound(request.mm_features, needs_samples=not request.remote_prefill)

    def _verify_resumed(self, request: EngineCoreRequest) -> None:
        num_output, max_tokens = len(request.output_token_ids), request.sampling_params.output_limit
        if not num_output:
            return
        room = min(max_tokens, self.max_model_len - len(request.prompt_token_ids))
        if num_output >= room:
            raise InvalidRequest(
                f"output_token_ids has {num_output} tokens, at most {room - 1} leave room for one more",
                "output_token_ids",
            )
        verify_token_ids("output_token_ids", request.output_token_ids, self.vocab_size)

    def _verify_embeds(self, request: EngineCoreRequest, embeds: PromptEmbeds) -> None:
        if not self.enable_prompt_embeds:
            raise InvalidRequest("prompt_embeds is given, and enable_prompt_embeds is false here", "prompt_embeds")
        embeds.verify(len(request.prompt_token_ids), self.hidden_size)
        if embeds.data:
            verify_finite(embeds)
        elif not request.remote_prefill:
            raise InvalidRequest("prompt_embeds has no data, and the prompt is to be computed here", "prompt_embeds")

    def _verify_lora(self, request: EngineCoreRequest) -> None:
        fingerprint = request.lora_fingerprint
        if not fingerprint:
            return
        if self.knows_adapter is None:
            raise InvalidRequest("lora_request is given, and this engine was made without enable_lora", "lora_request")
        if not self.knows_adapter(fingerprint):
            raise InvalidRequest(
                f"lora_request names {request.lora_name[:128]!r} with the fingerprint {fingerprint[:32]}, which is not known here",
                "lora_request",
            )

    def _verify_images(self, request: EngineCoreRequest) -> None:
        if not request.mm_features or self.encoder_decoder is not None:
            return
        if self.encoder is None:
            raise InvalidRequest("multi_modal_data is given, and this model takes text alone", "multi_modal_data")
        verify_features(
            request.mm_features,
            request.prompt_token_ids,
            image_token_id=self.encoder.image_token_id,
            patch_size=self.encoder.patch_size,
            merge_size=self.encoder.merge_size,
            max_tokens=self.encoder.max_image_tokens,
            needs_pixels=not request.remote_prefill,
        )

    def verify_update(self, update: StreamingUpdate) -> None:
        """Raise `InvalidRequest` naming the field, its value and the limit."""
        self._verify_sampling(update.sampling_params)
        if not update.prompt_token_ids:
            raise InvalidRequest("prompt_token_ids is empty, at least 1 token is needed", "prompt_token_ids")
        verify_token_ids("prompt_token_ids", update.prompt_token_ids, self.vocab_size)

    def _verify_sampling(self, params: SamplingParams) -> None:
        params.verify(self.vocab_size, max_logprobs=self.vocab_size, max_sequences=self.max_sequences)
        if params.structured_outputs is not None and not self.has_grammars:
            raise InvalidRequest("structured_outputs needs a tokenizer, and this engine has none", "structured_outputs")
        self.logits_processors.verify(params.logits_processors, self.vocab_size)
