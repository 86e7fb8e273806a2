"""`FAMILIES`: the architectures that can be served."""

from __future__ import annotations

from collections.abc import Mapping

from pdserve.models.config.model_config import ModelFamily
from pdserve.models.families.axk1 import AXK1
from pdserve.models.families.deepseek import DeepSeekV2, DeepSeekV3
from pdserve.models.families.dots1 import Dots1
from pdserve.models.families.ernie4_5_moe import Ernie45Moe
from pdserve.models.families.falcon_h1 import FalconH1
from pdserve.models.families.gemma2 import Gemma2
from pdserve.models.families.gemma3 import Gemma3
from pdserve.models.families.gemma4 import Gemma4, Gemma4WithOtherParts
from pdserve.models.families.glm4 import Glm4
from pdserve.models.families.glm4_moe import Glm4Moe, Glm4MoeLite
from pdserve.models.families.gpt_oss import GptOss
from pdserve.models.families.granite import Granite
from pdserve.models.families.jamba import Jamba
from pdserve.models.families.kimi_linear import KimiLinear
from pdserve.models.families.lfm2 import Lfm2
from pdserve.models.families.llama import Llama
from pdserve.models.families.llama4 import Llama4, Llama4WithImages
from pdserve.models.families.longcat_flash import LongcatFlash
from pdserve.models.families.mamba import FalconMamba, Mamba2Model, MambaModel
from pdserve.models.families.mamba_hybrids import Bamba, GraniteHybrid
from pdserve.models.families.mimo_v2 import MiMoV2
from pdserve.models.families.minicpm3 import MiniCPM3
from pdserve.models.families.minimax_m2 import MiniMaxM2
from pdserve.models.families.ministral import Ministral
from pdserve.models.families.mistral import Mistral
from pdserve.models.families.mixtral import Mixtral
from pdserve.models.families.nemotron_h import NemotronH
from pdserve.models.families.olmo2 import Olmo2
from pdserve.models.families.olmoe import Olmoe
from pdserve.models.families.phi3 import Phi3
from pdserve.models.families.qwen2 import Qwen2
from pdserve.models.families.qwen2_5_vl import Qwen2_5_VL
from pdserve.models.families.qwen2_moe import Qwen2Moe
from pdserve.models.families.qwen3 import Qwen3
from pdserve.models.families.qwen3_5 import Qwen35, Qwen35Moe, Qwen35VL, Qwen35VLMoe
from pdserve.models.families.qwen3_moe import Qwen3Moe
from pdserve.models.families.qwen3_next import Qwen3Next
from pdserve.models.families.qwen3_vl import Qwen3VL
from pdserve.models.families.qwen3_vl_moe import Qwen3VLMoe
from pdserve.models.families.seed_oss import SeedOss
from pdserve.models.families.smollm3 import SmolLM3
from pdserve.models.families.solar_open import SolarOpen
from pdserve.models.families.youtu import Youtu

FAMILIES: Mapping[str, type[ModelFamily]] = {
    "AXK1ForCausalLM": AXK1,
    "BambaForCausalLM": Bamba,
    "DeepseekV2ForCausalLM": DeepSeekV2,
    "DeepseekV3ForCausalLM": DeepSeekV3,
    "Dots1ForCausalLM": Dots1,
    "Ernie4_5_MoeForCausalLM": Ernie45Moe,
    "FalconH1ForCausalLM": FalconH1,
    "FalconMambaForCausalLM": FalconMamba,
    "Gemma2ForCausalLM": Gemma2,
    "Gemma3ForCausalLM": Gemma3,
    "Gemma4ForCausalLM": Gemma4,
    "Gemma4ForConditionalGeneration": Gemma4WithOtherParts,
    "Glm4ForCausalLM": Glm4,
    "Glm4MoeForCausalLM": Glm4Moe,
    "Glm4MoeLiteForCausalLM": Glm4MoeLite,
    "GptOssForCausalLM": GptOss,
    "GraniteForCausalLM": Granite,
    "GraniteMoeHybridForCausalLM": GraniteHybrid,
    "JambaForCausalLM": Jamba,
    "KimiLinearForCausalLM": KimiLinear,
    "Lfm2ForCausalLM": Lfm2,
    "Llama4ForCausalLM": Llama4,
    "Llama4ForConditionalGeneration": Llama4WithImages,
    "LlamaForCausalLM": Llama,
    "LongcatFlashForCausalLM": LongcatFlash,
    "Mamba2ForCausalLM": Mamba2Model,
    "MambaForCausalLM": MambaModel,
    "MiMoV2FlashForCausalLM": MiMoV2,
    "MiniCPM3ForCausalLM": MiniCPM3,
    "MiniMaxM2ForCausalLM": MiniMaxM2,
    "MinistralForCausalLM": Ministral,
    "MistralForCausalLM": Mistral,
    "MixtralForCausalLM": Mixtral,
    "NemotronHForCausalLM": NemotronH,
    "Olmo2ForCausalLM": Olmo2,
    "OlmoeForCausalLM": Olmoe,
    "Phi3ForCausalLM": Phi3,
    "Qwen2ForCausalLM": Qwen2,
    "Qwen2MoeForCausalLM": Qwen2Moe,
    "Qwen2_5_VLForConditionalGeneration": Qwen2_5_VL,
    "Qwen3ForCausalLM": Qwen3,
    "Qwen3MoeForCausalLM": Qwen3Moe,
    "Qwen3NextForCausalLM": Qwen3Next,
    "Qwen3VLForConditionalGeneration": Qwen3VL,
    "Qwen3VLMoeForConditionalGeneration": Qwen3VLMoe,
    "Qwen3_5ForCausalLM": Qwen35,
    "Qwen3_5ForConditionalGeneration": Qwen35VL,
    "Qwen3_5MoeForCausalLM": Qwen35Moe,
    "Qwen3_5MoeForConditionalGeneration": Qwen35VLMoe,
    "SeedOssForCausalLM": SeedOss,
    "SmolLM3ForCausalLM": SmolLM3,
    "SolarOpenForCausalLM": SolarOpen,
    "YoutuForCausalLM": Youtu,
}
"""The single entry of `architectures` in config.json -> its family."""
_TEXT_PARTS = ("Gemma3", "Gemma4", "Llama4", "Qwen3_5", "Qwen3_5Moe")
"""Families whose name without an ending is that of models with images, and whose bodies and classifiers have names of their own."""
_CAUSAL = {name.removesuffix("ForCausalLM"): name for name in FAMILIES if name.endswith("ForCausalLM")}
BODIES: Mapping[str, str] = {
    f"{name}TextModel" if name in _TEXT_PARTS else f"{name}Model": causal for name, causal in _CAUSAL.items()
}
"""Architectures without a language-model head -> the same with it."""
_WITHOUT_CLASSIFIER = (
    "Bamba", "Dots1", "Ernie4_5_Moe", "FalconH1", "FalconMamba", "Gemma4", "Glm4Moe", "Glm4MoeLite", "Granite",
    "GraniteMoeHybrid", "KimiLinear", "Lfm2", "Llama4", "LongcatFlash", "Mamba", "Mamba2", "MiMoV2Flash", "MiniMaxM2", "NemotronH",
    "Olmoe", "Qwen3_5Moe", "SolarOpen", "Youtu",
)  # fmt: skip
"""Families for which transformers has no class with a classification head."""
CLASSIFIERS: Mapping[str, str] = {
    f"{name}{'Text' * (name in _TEXT_PARTS)}ForSequenceClassification": causal
    for name, causal in _CAUSAL.items()
    if name not in _WITHOUT_CLASSIFIER
}
"""Architectures with a classification head -> the same with a language-model head."""
DRAFT_HEADS: Mapping[str, str] = {
    "Eagle3LlamaForCausalLM": "LlamaForCausalLM",
    "LlamaForCausalLMEagle3": "LlamaForCausalLM",
}
"""Architectures of EAGLE-3 heads -> the family whose layer they have."""
