"""`MISSING`: what well-known architectures need that no code here has, so that a refusal says more than a name."""

from __future__ import annotations

from collections.abc import Mapping

_DELTA_NET = "recurrent state (gated delta net)"
_INDEX = "an index of keys (sparse attention)"
_CHUNKS = "chunked attention, and layers of different shapes"

MISSING: Mapping[str, str] = {
    "DeciLMForCausalLM": "layers of different shapes",
    "DeepseekV41ForCausalLM": _INDEX,
    "Glm5NextForConditionalGeneration": _INDEX,
    "KimiK25ForConditionalGeneration": "a vision encoder of its own, and latent attention",
    "KimiK3ForConditionalGeneration": "recurrent state (delta attention), and latent attention",
    "Llama4ForConditionalGeneration": _CHUNKS,
    "Llama4ForCausalLM": _CHUNKS,
    "MiMoForCausalLM": "draft layers (multi-token prediction) in the checkpoint",
    "Qwen3_5ForConditionalGeneration": _DELTA_NET,
    "Qwen3_5MoeForConditionalGeneration": _DELTA_NET,
    "Qwen3NextForCausalLM": _DELTA_NET,
}
"""Architecture -> the capability."""
