"""Checkpoints in formats that are not read, and what to do with them."""

from __future__ import annotations

from pathlib import Path

_CONVERT = "convert it with transformers: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)"
_FORMATS = {
    "adapter_model.*": "an adapter is served only after it was merged into its model",
    "consolidated*.safetensors": f"these have other names for the weights; {_CONVERT}",
    "*.safetensors": "safetensors under another name are not read",
    "*.bin": f"pickled weights are not read, since they can run code; {_CONVERT}",
    "*.pth": f"pickled weights are not read, since they can run code; {_CONVERT}",
    "*.gguf": "give the GGUF file itself as the model",
}
"""File name pattern -> advice, in the order in which the patterns are tried."""
_NUM_NAMED = 4


def other_weights(folder: Path) -> str:
    """Advice for a folder with weights in another format; empty if it has none."""
    for pattern, advice in _FORMATS.items():
        if found := sorted(path.name[:80] for path in folder.glob(pattern)):
            more = f" and {len(found) - _NUM_NAMED} more" if len(found) > _NUM_NAMED else ""
            return f", but {', '.join(found[:_NUM_NAMED])}{more}: {advice}"
    return ""


def advice_for_file(path: Path) -> str:
    """Advice for a file that was given as a model."""
    for pattern, advice in _FORMATS.items():
        if path.match(pattern):
            return advice
    return "a model is a folder with config.json, tokenizer and weights"
