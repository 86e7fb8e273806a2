"""`EngineInfo`: properties of a loaded engine."""

from __future__ import annotations

import msgspec

from pdserve.common.image_processor_config import ImageProcessorConfig
from pdserve.common.kv_layout import KvLayout
from pdserve.common.request.encoder_prompt import EncoderDecoderPrompts
from pdserve.engine.config import EncoderConfig


class EngineInfo(msgspec.Struct, frozen=True, array_like=True):
    """Properties of a loaded engine that its front end needs."""

    model_fingerprint: str
    vocab_size: int
    hidden_size: int
    max_model_len: int
    """Tokens of prompt and output together; with an encoder, of each of the two."""
    num_blocks: int
    block_size: int
    max_num_seqs: int
    layout: KvLayout
    tokenizer_fingerprint: str
    has_grammars: bool
    """False without a tokenizer: there are no structured outputs."""
    num_labels: int = 0
    """Labels of the classification head; 0: the model generates."""
    images: ImageProcessorConfig | None = None
    """How the pixels of images are made; None for a model that takes only text."""
    encoder: EncoderConfig | None = None
    """The encoder of images; None as `images`."""
    encoder_decoder: EncoderDecoderPrompts | None = None
    """How prompts are laid out, of a model with an encoder; None for a model that is only a decoder."""

    @property
    def takes_media(self) -> bool:
        """True if prompts have images or sound, which make their messages long."""
        return self.images is not None or (self.encoder_decoder is not None and self.encoder_decoder.audio is not None)
