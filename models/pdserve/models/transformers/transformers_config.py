"""`TransformersConfig`: dimensions and options of a model that the code of `transformers` computes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import transformers
from transformers import PreTrainedConfig

from pdserve.common.errors import UnsupportedModel
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.transformers.traced_model import TracedModel

IMPLEMENTATION_VERSION = f"transformers {transformers.__version__}"
"""Part of the fingerprint: it decides how keys are rounded, and in which order the numbers of a head are stored."""


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """`rope` and `rms_norm_eps` are not used, nor is `family` but for its windows: the code of `transformers` reads its own
    configuration."""

    traced: TracedModel
    hf: PreTrainedConfig = field(compare=False, repr=False)
    """The configuration of `transformers`; its attention, masks and experts are ours."""

    def attention_spec(self, layer: int) -> AttentionSpec:
        return self.traced.specs[layer]

    @property
    def implementation(self) -> str:
        return IMPLEMENTATION_VERSION

    def verify_sharding(self, size: int, folder: Path) -> None:
        if size > 1:
            raise UnsupportedModel(f"tensor_parallel_size is {size}, and {self.computed_by}; such a model is not split")

    def verify_options(self, quantization: str | None, enable_lora: bool) -> None:
        """Check settings that only native families have. Raises: UnsupportedModel naming the setting."""
        if quantization is not None:
            raise UnsupportedModel(
                f"quantization is {quantization!r}, and {self.computed_by}; its matrices are not rounded"
            )
        if enable_lora:
            raise UnsupportedModel(f"enable_lora is true, and {self.computed_by}; it takes no adapters")

    @property
    def computed_by(self) -> str:
        """A clause for messages."""
        return f"{self.architecture} is computed by the code of transformers"
