"""`VisionTower`: an image's pixels to rows of hidden states, by the vision encoder of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdserve.common.errors import ConfigError
from pdserve.common.image_processor_config import FILE, ImageProcessorConfig
from pdserve.models.config.vision_config import VisionConfig
from pdserve.models.weights.weight_loader import WeightLoader

PREFIX = "visual."
"""Begins the names of its weights."""


class VisionTower:
    """The caller holds `torch.inference_mode`."""

    def __init__(self, module: Any, config: VisionConfig, pixels: ImageProcessorConfig, device: str) -> None:
        """module: transformers' encoder, on the device."""
        self._module = module
        self.config = config
        self._pixels = pixels
        self._device = device
        self._mean = torch.tensor(pixels.image_mean, device=device)
        self._std = torch.tensor(pixels.image_std, device=device)

    def encode(self, data: bytes, grid_thw: tuple[int, int, int]) -> Tensor:
        """`[n, (1 + S) H]`: per token of an image its embedding, then what it adds after each of the first S layers.

        One image at a time: the result does not depend on other images of the step. data, grid_thw: see `MultiModalFeatureSpec`.
        """
        grid = torch.tensor([grid_thw], device=self._device)
        output = self._module(self._patches(data, grid_thw), grid_thw=grid)
        deepstack = getattr(output, "deepstack_features", None) or ()
        return torch.cat([output.pooler_output, *deepstack], dim=-1) if deepstack else output.pooler_output

    def _patches(self, data: bytes, grid_thw: tuple[int, int, int]) -> Tensor:
        """`[patches, 3 * frames * P * P]`, in the order in which neighbours become one token."""
        size, merge, (_, height, width) = self._pixels.patch_size, self._pixels.merge_size, grid_thw
        image = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._device)
        scaled = image.view(height * size, width * size, 3).float() * self._pixels.rescale_factor
        normal = (scaled - self._mean) / self._std
        split = normal.view(height // merge, merge, size, width // merge, merge, size, 3)
        patches = split.permute(0, 3, 1, 4, 6, 2, 5).unsqueeze(5)
        frames = patches.expand(-1, -1, -1, -1, -1, self._pixels.temporal_patch_size, -1, -1)
        return frames.reshape(height * width, -1)


def load_vision_tower(
    weights: WeightLoader, config: VisionConfig, pixels: ImageProcessorConfig, device: str
) -> VisionTower:
    """Read the encoder's weights, in the served dtype. Raises: ConfigError."""
    for name, ours, theirs in (
        ("patch_size", config.patch_size, pixels.patch_size),
        ("temporal_patch_size", config.temporal_patch_size, pixels.temporal_patch_size),
        ("spatial_merge_size", config.merge_size, pixels.merge_size),
    ):
        if ours != theirs:
            raise ConfigError(f"config.json: vision_config: {name} is {ours}, {FILE} says {theirs}")
    try:
        with torch.device("meta"):
            module = _module(config)
    except Exception as error:  # transformers raises whatever its checks do
        raise ConfigError(f"config.json: vision_config: {type(error).__name__}: {error!s:.300}") from error
    module.requires_grad_(False)
    module.eval()
    tensors = {name: weights.tensor(f"{PREFIX}{name}", *weight.shape) for name, weight in module.named_parameters()}
    if torch.device(device).type != "meta":
        module.load_state_dict(tensors, assign=True)
        # its frequencies are in no checkpoint, and were made on the meta device
        module.rotary_pos_emb = type(module.rotary_pos_emb)(module.config).to(device)
    return VisionTower(module, config, pixels, device)


def _module(config: VisionConfig) -> Any:
    """transformers' encoder, without weights. Imported here: only models with images spend the time."""
    if config.model_type == "qwen2_5_vl":
        from transformers.models.qwen2_5_vl import configuration_qwen2_5_vl, modeling_qwen2_5_vl

        values = dict(config.values) | {"model_type": "qwen2_5_vl_vision"}
        return modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(
            configuration_qwen2_5_vl.Qwen2_5_VLVisionConfig(**values)
        )
    from transformers.models.qwen3_vl import configuration_qwen3_vl, modeling_qwen3_vl

    # transformers has three layers where config.json names none
    layers = list(config.values.get("deepstack_visual_indexes") or ())
    values = dict(config.values) | {"model_type": "qwen3_vl_vision", "deepstack_visual_indexes": layers}
    return modeling_qwen3_vl.Qwen3VLVisionModel(configuration_qwen3_vl.Qwen3VLVisionConfig(**values))
