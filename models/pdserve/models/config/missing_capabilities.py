"""`MISSING`: what well-known architectures need that no code here has, so that a refusal says more than a name."""

from __future__ import annotations

from collections.abc import Mapping

_INDEX = "an index of keys (sparse attention)"

MISSING: Mapping[str, str] = {
    "DeciLMForCausalLM": "layers of different shapes",
    "DeepseekV41ForCausalLM": _INDEX,
    "Glm5NextForConditionalGeneration": _INDEX,
    "KimiK25ForConditionalGeneration": "a vision encoder of its own",
    "KimiK3ForConditionalGeneration": "attention residuals, and a vision encoder of its own",
    "MiMoForCausalLM": "draft layers (multi-token prediction) in the checkpoint",
}
"""Architecture -> the capability."""
