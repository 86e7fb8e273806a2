"""Odd shapes of model families with images, and images that are odd for each of them."""

from __future__ import annotations

from collections.abc import Mapping

from PIL import Image

from tests.support.models.checkpoints import VOCAB_SIZE
from tests.support.models.image_checkpoints import IMAGE_TOKENS, PREPROCESSOR, ImageShape, picture

_TOKENS = VOCAB_SIZE + len(IMAGE_TOKENS)

SHAPES: Mapping[str, Mapping[str, ImageShape]] = {
    "qwen2_5_vl": {
        "wide_heads": ImageShape(
            text={"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 72, "vocab_size": _TOKENS + 17},
            vision={"hidden_size": 24, "num_heads": 1, "out_hidden_size": 72, "window_size": 24},
            mrope_section=(2, 2, 2),
        ),
        # windows of one token, and no layer that sees the whole image
        "small_windows_tied": ImageShape(
            text={"num_attention_heads": 4, "num_key_value_heads": 1, "hidden_size": 96, "num_hidden_layers": 1},
            vision={"window_size": 8, "fullatt_block_indexes": [], "out_hidden_size": 96, "depth": 2},
            mrope_section=(4, 6, 2),
            max_shard_size="30KB",
        ),
        # three patches of a token's side, and windows that no grid fills
        "three_patches": ImageShape(
            text={"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48, "num_hidden_layers": 5},
            vision={
                "patch_size": 3, "spatial_merge_size": 3, "temporal_patch_size": 3, "window_size": 45, "num_heads": 4,
                "fullatt_block_indexes": [0, 2], "out_hidden_size": 48, "hidden_size": 48,
            },
            pixels={"patch_size": 3, "merge_size": 3, "temporal_patch_size": 3, "min_pixels": 81},
            mrope_section=(6, 1, 1),
        ),
        "one_layer": ImageShape(
            vision={"depth": 1, "fullatt_block_indexes": [0], "patch_size": 2, "temporal_patch_size": 1, "window_size": 40},
            pixels={"patch_size": 2, "temporal_patch_size": 1, "min_pixels": 16, "max_pixels": 900},
        ),
    },
    "qwen3_vl": {
        "wide_heads": ImageShape(
            text={
                "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 12, "hidden_size": 36,
                "vocab_size": _TOKENS + 17, "num_hidden_layers": 4,
            },
            vision={"hidden_size": 24, "num_heads": 1, "out_hidden_size": 36, "deepstack_visual_indexes": [1]},
            mrope_section=(2, 2, 2),
        ),
        # as many layers of deepstack as the language model has; one row of learned positions per side of two
        "deepstack_everywhere_tied": ImageShape(
            text={
                "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 24, "hidden_size": 40, "num_hidden_layers": 3,
            },
            vision={"deepstack_visual_indexes": [0, 1, 2], "num_position_embeddings": 4, "out_hidden_size": 40},
            mrope_section=(4, 4, 4),
            max_shard_size="30KB",
        ),
        "no_deepstack": ImageShape(
            text={"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 32, "hidden_size": 48},
            vision={
                "deepstack_visual_indexes": [], "num_position_embeddings": 9, "out_hidden_size": 48, "patch_size": 3,
                "spatial_merge_size": 3, "temporal_patch_size": 3, "hidden_size": 48, "num_heads": 4,
            },
            pixels={"patch_size": 3, "merge_size": 3, "temporal_patch_size": 3, "min_pixels": 81},
            mrope_section=(8, 4, 4),
        ),
        "one_layer": ImageShape(
            vision={
                "depth": 1, "deepstack_visual_indexes": [0], "patch_size": 2, "temporal_patch_size": 1,
                "num_position_embeddings": 121,
            },
            pixels={"patch_size": 2, "temporal_patch_size": 1, "min_pixels": 16, "max_pixels": 900},
        ),
    },
}  # fmt: skip
"""Family -> name -> fields. Names that end in `tied` are of checkpoints whose embedding is the head."""


def odd_images(shape: ImageShape) -> list[list[Image.Image]]:
    """Images of several prompts: of one token, very thin, several, one twice, and none."""
    pixels = PREPROCESSOR | dict(shape.pixels)
    side = pixels["patch_size"] * pixels["merge_size"]
    return [
        [picture(1, side, side)],
        [picture(2, 190 * 2, 2)],
        [picture(3, 2, 300), picture(4, side, side), picture(5, 3 * side, 5 * side)],
        [picture(6, 7 * side, side), picture(6, 7 * side, side)],
        [],
    ]
