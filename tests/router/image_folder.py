"""A model folder with images, of which a router reads tokenizer, template and `preprocessor_config.json` alone."""

from __future__ import annotations

import json
from pathlib import Path

from tests.router.fake_worker import EOS, save_tokenizer

PROCESSOR = {"patch_size": 4, "merge_size": 2, "min_pixels": 256, "max_pixels": 4096}
TEMPLATE = (
    "{% for m in messages %}{% for part in m.content %}{% if part.type == 'image' %}<|user|>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endfor %}<|assistant|>"
)


def save_image_folder(folder: Path) -> Path:
    """Each image stands for one token `<|user|>`. Returns the folder."""
    save_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps({"vision_config": {}, "image_token_id": EOS + 1}))
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return folder
