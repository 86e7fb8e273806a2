"""The network, and its forward pass for pictures of one size.

Transformers runs the attention of the vision encoder once per picture and layer; here it runs once per layer, for the whole batch.
`tests/models/test_demo_image_tool.py` compares the two.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from demo_image_model.batches import PIXELS, Batch
from demo_image_model.conversations import IMAGE_TOKENS, VOCABULARY
from demo_model.chat import END_OF_TEXT, MESSAGE_END, ChatEncoder

CONTEXT = 2048
DEPTH = 4


def network(encoder: ChatEncoder, seed: int) -> Any:
    """A fresh network: Qwen2.5-VL's layout with tied embeddings, a million parameters."""
    torch.manual_seed(seed)
    ids = {name: encoder.ids(name)[0] for name in (*IMAGE_TOKENS, END_OF_TEXT, MESSAGE_END)}
    hidden_size = 128
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]},
        "bos_token_id": None,
        "eos_token_id": ids[MESSAGE_END],
        "pad_token_id": ids[END_OF_TEXT],
    }
    vision = {
        "depth": DEPTH,
        "hidden_size": 96,
        "num_heads": 4,
        "intermediate_size": 192,
        "patch_size": PIXELS.patch_size,
        "spatial_merge_size": PIXELS.merge_size,
        "temporal_patch_size": PIXELS.temporal_patch_size,
        "out_hidden_size": hidden_size,
        # the pictures are as small as a window, so every layer sees the whole picture
        "window_size": 64,
        "fullatt_block_indexes": list(range(DEPTH)),
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():
        # transformers' 0.02 is for large layers: these would attend to all patches alike for hundreds of steps
        for weight in model.model.visual.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    return model


def embed_images(visual: Any, pixels: Tensor) -> Tensor:
    """`[N, t, hidden]` of N pictures of t tokens. visual: the vision encoder. pixels: `[N, H, W, 3]` of uint8."""
    size, merge = PIXELS.patch_size, PIXELS.merge_size
    count, height, width = len(pixels), pixels.shape[1] // size, pixels.shape[2] // size
    scaled = (pixels.float() * PIXELS.rescale_factor - torch.tensor(PIXELS.image_mean)) / torch.tensor(PIXELS.image_std)
    split = scaled.view(count, height // merge, merge, size, width // merge, merge, size, 3)
    # neighbours that become one token follow each other
    patches = split.permute(0, 1, 4, 2, 5, 7, 3, 6).reshape(count, height * width, 3, 1, size * size)
    frames = patches.expand(-1, -1, -1, PIXELS.temporal_patch_size, -1).flatten(2)
    hidden = F.linear(frames, visual.patch_embed.proj.weight.flatten(1))
    places = torch.stack(torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij"), dim=-1)
    ordered = places.view(height // merge, merge, width // merge, merge, 2).transpose(1, 2).reshape(-1, 2)
    cos, sin = visual.rotary_pos_emb(hidden, ordered)
    for block in visual.blocks:
        hidden = hidden + _attend(block.attn, block.norm1(hidden), cos, sin)
        hidden = hidden + block.mlp(block.norm2(hidden))
    embedded: Tensor = visual.merger(hidden)
    return embedded.view(count, -1, embedded.shape[-1])


def _attend(attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """hidden: `[N, patches, hidden]`; cos, sin: `[patches, head size]`."""
    count, num_patches, _ = hidden.shape
    query, key, value = attention.qkv(hidden).view(count, num_patches, 3, attention.num_heads, -1).unbind(2)
    query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
    mixed = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    projected: Tensor = attention.proj(mixed.transpose(1, 2).reshape(count, num_patches, -1))
    return projected


def hidden_states(model: Any, batch: Batch, images: Tensor) -> Tensor:
    """`[B, T, hidden]` of the last layer. images: see `embed_images`."""
    rows, text = batch.rows, model.model.language_model
    embedded = text.embed_tokens(rows.input_ids)
    inputs = embedded.masked_scatter(rows.is_image[..., None], images.to(embedded.dtype))
    # padding stands at the ends, where causal attention hides it
    hidden: Tensor = text(inputs_embeds=inputs, position_ids=rows.positions, use_cache=False).last_hidden_state
    return hidden


def answer_logits(model: Any, hidden: Tensor, input_ids: Tensor, is_answer: Tensor) -> tuple[Tensor, Tensor]:
    """`[N, V]` logits of the N answer tokens, and their ids `[N]`. hidden: `[B, T, hidden]`; the others: `[B, T]`."""
    # position i predicts token i + 1
    following = is_answer[:, 1:]
    return model.lm_head(hidden[:, :-1][following]).float(), input_ids[:, 1:][following]
