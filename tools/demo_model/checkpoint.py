"""Saves the trained model the way `transformers` reads it, with its model card."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.utils import logging

from demo_model.chat import CHAT_TEMPLATE, CONTEXT, END_OF_TEXT, MESSAGE_END

logging.disable_progress_bar()  # one line per file adds nothing here

CARD = Path(__file__).with_name("model_card.md")


def save(
    model: Any, tokenizer: Tokenizer, folder: Path, chat_template: str = CHAT_TEMPLATE, context: int = CONTEXT
) -> None:
    """Write weights in bfloat16, to which the model is rounded, configuration, tokenizer and chat template into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = model.to(torch.bfloat16)
    saved.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[tokenizer.token_to_id(MESSAGE_END), tokenizer.token_to_id(END_OF_TEXT)],
        pad_token_id=tokenizer.token_to_id(END_OF_TEXT),
    )
    saved.save_pretrained(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=MESSAGE_END,
        pad_token=END_OF_TEXT,
        chat_template=chat_template,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(folder)
    for file in folder.iterdir():
        # safetensors writes for the owner alone; a package is read by others too.
        file.chmod(0o644)


def load(folder: Path, dtype: torch.dtype) -> Any:
    """The saved model, ready for inference with its weights in ``dtype``."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def write_card(folder: Path, parameters: int, minutes: float, threads: int, margin: float, table: str) -> None:
    """Fills in the model card; ``margin`` is in logits."""
    values = {"PARAMETERS": f"{parameters:,}", "MINUTES": f"{minutes:.0f}", "THREADS": threads_text(threads)}
    fill_card(CARD, folder, values | {"MARGIN": f"{margin:.2f}", "TABLE": table})


def fill_card(card: Path, folder: Path, values: Mapping[str, str]) -> None:
    """Write ``README.md`` of the model's folder: the card, with values in the places of their names."""
    text = card.read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"[[{key}]]", value)
    (folder / "README.md").write_text(text, encoding="utf-8")


def threads_text(threads: int) -> str:
    """The number of threads, in words of the card."""
    return "one processor thread" if threads == 1 else f"{threads} processor threads"


def folder_bytes(folder: Path) -> int:
    """The size of all files in the folder together."""
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
