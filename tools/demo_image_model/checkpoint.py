"""Saves the trained model the way `transformers` reads it, with its image processor and its model card."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen2_5_VLForConditionalGeneration

from demo_image_model.batches import PREPROCESSOR
from demo_image_model.conversations import IMAGE
from demo_image_model.network import CONTEXT
from demo_model import checkpoint

CARD = Path(__file__).with_name("model_card.md")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}\n"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}\n"
    "{%- if message['content'] is string -%}\n"
    "{{- message['content'] -}}\n"
    "{%- else -%}\n"
    "{%- for part in message['content'] -%}\n"
    "{%- if part['type'] == 'image' -%}\n"
    "{{- '" + IMAGE + "' -}}\n"
    "{%- else -%}\n"
    "{{- part['text'] -}}\n"
    "{%- endif -%}\n"
    "{%- endfor -%}\n"
    "{%- endif -%}\n"
    "{{- '<|im_end|>\\n' -}}\n"
    "{%- endfor -%}\n"
    "{%- if add_generation_prompt -%}\n"
    "{{- '<|im_start|>assistant\\n' -}}\n"
    "{%- endif -%}\n"
)


def save(model: Any, tokenizer: Tokenizer, folder: Path) -> None:
    """Write weights in bfloat16, configurations, tokenizer and chat template into ``folder``; the model stays as it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2) + "\n", encoding="utf-8")
    checkpoint.save(copy.deepcopy(model), tokenizer, folder, CHAT_TEMPLATE, CONTEXT)


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The saved model, ready for inference with its weights in ``dtype``."""
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=dtype).eval()
