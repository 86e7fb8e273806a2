"""Requests to models with images, with sound and with an encoder, whose prompts are encoded again wherever they continue."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from pdserve.v1 import inference_pb2
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.encoder_decoder_checkpoints import make_encoder_decoder
from tests.support.models.image_checkpoints import data_url, make_image_checkpoint, picture
from tests.support.models.wav_files import wav_file
from tests.support.models.whisper_checkpoints import RATE, make_whisper, sound

from .worker_matrix import Requested

SEEDED = {"max_tokens": 24, "temperature": 0.9, "top_p": 0.95, "seed": 11}


def chat(*parts: str | Image.Image) -> inference_pb2.ChatPrompt:
    """One message."""
    given = [
        inference_pb2.ContentPart(text=part)
        if isinstance(part, str)
        else inference_pb2.ContentPart(image_url=data_url(part))
        for part in parts
    ]
    return inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", parts=given)])


MODELS = {
    "qwen2_5_vl": lambda folder: make_image_checkpoint(folder, "qwen2_5_vl"),
    "qwen3_vl": lambda folder: make_image_checkpoint(folder, "qwen3_vl"),
    "bart": lambda folder: _encoder_decoder(folder, "bart"),
    "t5": lambda folder: _encoder_decoder(folder, "t5"),
    "whisper": lambda folder: _whisper(folder),
}
"""Name -> function that writes a checkpoint into a folder and returns it."""


def _encoder_decoder(folder: Path, name: str) -> Path:
    make_encoder_decoder(folder, name)
    return folder


def _whisper(folder: Path) -> Path:
    make_whisper(folder)
    return folder


def transcript(seed: int, prompt: str = "", seconds: float = 0.8) -> inference_pb2.AudioPrompt:
    """A prompt for a transcript. prompt: a text that precedes the sound."""
    return inference_pb2.AudioPrompt(file=wav_file(sound(seed, seconds), RATE), language="en", prompt=prompt)


def requests_of(model: str) -> dict[str, Requested]:
    """Requests to one of `MODELS`; with images some have several, one the image of another, and one has none."""
    if model == "whisper":
        return {
            "greedy": (transcript(1), {"max_tokens": 24}),
            "seeded": (transcript(2), SEEDED),
            "penalties": (
                transcript(3, prompt="one two three four five six"),
                {"max_tokens": 24, "repetition_penalty": 1.2, "min_tokens": 24},
            ),
            "short": (transcript(4, seconds=0.05), {"max_tokens": 24, "temperature": 0.8, "seed": 12}),
        }
    if "vl" not in model:
        return {
            "greedy": (prompt_of(90, 1), {"max_tokens": 24}),
            "seeded": (prompt_of(70, 2), SEEDED),
            "penalties": (prompt_of(33, 3), {"max_tokens": 24, "repetition_penalty": 1.2, "min_tokens": 24}),
            "short": (prompt_of(3, 4), {"max_tokens": 24, "temperature": 0.8, "seed": 12}),
        }
    return {
        "greedy": (chat("Compare ", picture(1), " with ", picture(2, 64, 48), "!"), {"max_tokens": 24}),
        "seeded": (chat("What follows on ", picture(2, 64, 48), picture(3, 16, 64)), SEEDED),
        "same": (
            chat(picture(1), " again"),
            {"max_tokens": 24, "repetition_penalty": 1.2, "min_tokens": 24, "temperature": 0.0},
        ),
        "text": (prompt_of(60, 4), {"max_tokens": 24, "temperature": 0.8, "seed": 12}),
    }
