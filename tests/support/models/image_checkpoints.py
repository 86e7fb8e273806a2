"""Tiny random checkpoints of model families with images, and `transformers` as their oracle."""

from __future__ import annotations

import base64
import io
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer

from tests.support.models.checkpoints import SPECIAL_TOKENS, VOCAB_SIZE, tiny_tokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        PreTrainedModel,
        PreTrainedTokenizerFast,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        Qwen3_5Config,
        Qwen3_5ForConditionalGeneration,
        Qwen3_5MoeConfig,
        Qwen3_5MoeForConditionalGeneration,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLMoeConfig,
        Qwen3VLMoeForConditionalGeneration,
    )
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

IMAGE_TOKENS = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"]
IMAGE_TOKEN_ID = VOCAB_SIZE + 1
PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}" + PICTURE + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PREPROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 256,
    "max_pixels": 4096,
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.2, 0.25],
}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE + len(IMAGE_TOKENS), "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "initializer_range": 0.3,
    "rms_norm_eps": 1e-6, "bos_token_id": None, "eos_token_id": SPECIAL_TOKENS.index("<|im_end|>"), "pad_token_id": 0,
}  # fmt: skip
_VISION: dict[str, Any] = {
    "depth": 3, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40, "patch_size": 4, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "out_hidden_size": 64, "initializer_range": 0.3,
}  # fmt: skip
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_IDS = {"image_token_id": IMAGE_TOKEN_ID, "video_token_id": VOCAB_SIZE + 3, "vision_start_token_id": VOCAB_SIZE,
        "vision_end_token_id": VOCAB_SIZE + 2}  # fmt: skip
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
ALL_FAMILIES = (*FAMILIES, "qwen3_5", "qwen3_5_moe", "qwen3_vl_moe")
_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 24, "linear_value_head_dim": 16,
    "num_hidden_layers": 3, "head_dim": 32, "layer_types": ["full_attention", "linear_attention", "full_attention"],
}  # fmt: skip


class ImageShape(NamedTuple):
    """Fields that a checkpoint has in place of those of the plain one."""

    text: Mapping[str, Any] = {}
    vision: Mapping[str, Any] = {}
    pixels: Mapping[str, Any] = {}
    """Fields of `preprocessor_config.json`."""
    mrope_section: Sequence[int] = (2, 3, 3)
    max_shard_size: str = "5GB"


PLAIN = ImageShape()


def make_image_checkpoint(
    folder: Path, family: str = "qwen2_5_vl", *, tie_word_embeddings: bool = False, shape: ImageShape = PLAIN
) -> Path:
    """Write model, tokenizer and image processor into `folder` and return it."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = _model(family, tie_word_embeddings, shape)
        for name, weight in model.named_parameters():
            if name.endswith(("norm.weight", "norm1.weight", "norm2.weight", "ln_q.weight")):
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.normal_(std=0.5)
            elif name.endswith("A_log"):
                # with transformers' first values a state forgets each token at once
                weight.uniform_(-4.0, -1.0)
        if not tie_word_embeddings:
            # an answer with the token of an image is no prompt
            model.get_output_embeddings().weight[IMAGE_TOKEN_ID].zero_()
    model.save_pretrained(folder, max_shard_size=shape.max_shard_size)
    tokenizer = Tokenizer.from_str(tiny_tokenizer())
    tokenizer.add_special_tokens(IMAGE_TOKENS)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_TEMPLATE
    ).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR | dict(shape.pixels)))
    return folder


def _model(family: str, is_tied: bool, shape: ImageShape) -> PreTrainedModel:
    rope = _ROPE | {"mrope_section": list(shape.mrope_section)}
    if family == "qwen2_5_vl":
        vision = _VISION | {"window_size": 16, "fullatt_block_indexes": [1]} | dict(shape.vision)
        text = _TEXT | {"rope_parameters": rope} | dict(shape.text)
        return Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=is_tied, **_IDS)
        ).eval()
    vision = _VISION | {"num_position_embeddings": 49}
    if family.startswith("qwen3_5"):
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
        text = _TEXT | _DELTA | {"rope_parameters": rope} | dict(shape.text)
        given: dict[str, Any] = {"vision_config": vision | dict(shape.vision), "tie_word_embeddings": is_tied, **_IDS}
        if family == "qwen3_5":
            return Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, **given)).eval()
        text |= {"num_experts": 5, "num_experts_per_tok": 2}
        text |= {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 20, "initializer_range": 0.2}
        mixture = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, **given)).eval()
        mixture.set_experts_implementation("eager")
        return mixture
    vision |= {"deepstack_visual_indexes": [0, 2]} | dict(shape.vision)
    text = _TEXT | {"head_dim": 16, "rope_parameters": rope | {"mrope_interleaved": True}} | dict(shape.text)
    if family == "qwen3_vl_moe":
        text |= {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1]}
        config = Qwen3VLMoeConfig(text_config=text, vision_config=vision, tie_word_embeddings=is_tied, **_IDS)
        model = Qwen3VLMoeForConditionalGeneration(config).eval()
        # the default takes only sizes that are multiples of 8
        model.set_experts_implementation("eager")
        return model
    return Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=is_tied, **_IDS)
    ).eval()


def picture(seed: int, width: int = 40, height: int = 24) -> Image.Image:
    """Random pixels in large spots."""
    spots = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(spots).resize((width, height), Image.Resampling.NEAREST)


def data_url(image: Image.Image) -> str:
    """A PNG file, as chats have it."""
    return f"data:image/png;base64,{base64.b64encode(file_of(image)).decode()}"


def file_of(image: Image.Image) -> bytes:
    """A PNG file."""
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def chat_of(*parts: str | Image.Image) -> list[dict[str, Any]]:
    """One message with these parts."""
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def chat_text(*parts: str | Image.Image) -> str:
    """The prompt that the checkpoints' template makes of it."""
    text = "".join(part if isinstance(part, str) else PICTURE for part in parts)
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


_CLASSES: dict[str, Any] = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_5": Qwen3_5ForConditionalGeneration,
    "qwen3_5_moe": Qwen3_5MoeForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
    "qwen3_vl_moe": Qwen3VLMoeForConditionalGeneration,
}


class ImageOracle:
    """One checkpoint in `transformers`."""

    def __init__(self, folder: Path, family: str = "qwen2_5_vl") -> None:
        kind = _CLASSES[family]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = kind.from_pretrained(folder, dtype=torch.float32).eval()
        if family.endswith("moe"):
            self.model.set_experts_implementation("eager")
        self.pixels = json.loads((folder / "preprocessor_config.json").read_text())
        self.processor = Qwen2VLImageProcessorPil(**self.pixels)

    def inputs(self, token_ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, torch.Tensor]:
        """Arguments of the model. token_ids: with one image token per image."""
        given: dict[str, torch.Tensor] = {}
        expanded = list(token_ids)
        if images:
            given = dict(self.processor(list(images), return_tensors="pt"))
            counts = iter((given["image_grid_thw"].prod(-1) // self.pixels["merge_size"] ** 2).tolist())
            repeated = [[each] * (next(counts) if each == IMAGE_TOKEN_ID else 1) for each in token_ids]
            expanded = [token for tokens in repeated for token in tokens]
        ids = torch.tensor([expanded])
        is_image = (ids == IMAGE_TOKEN_ID).int()
        return given | {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": is_image}

    @torch.inference_mode()
    def greedy(self, token_ids: Sequence[int], images: Sequence[Image.Image], max_tokens: int) -> list[int]:
        """`max_tokens` most likely tokens, EOS or not."""
        inputs = self.inputs(token_ids, images)
        output = self.model.generate(
            **inputs, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        answer: list[int] = output[0, inputs["input_ids"].shape[1] :].tolist()
        return answer

    @torch.inference_mode()
    def logprobs(self, token_ids: Sequence[int], images: Sequence[Image.Image], answer: Sequence[int]) -> torch.Tensor:
        """`[n, V]` float32, of the answer's n tokens."""
        logits: torch.Tensor = self.model(**self.inputs([*token_ids, *answer[:-1]], images), use_cache=False).logits[0]
        return logits[-len(answer) :].float().log_softmax(-1)
