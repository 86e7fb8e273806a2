"""Measures a saved model, run by transformers, on pictures that were not drawn in training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from demo_image_model.batches import Batches
from demo_image_model.conversations import BOTH, COLOUR, SHAPE, Example, asked
from demo_image_model.network import answer_logits
from demo_image_model.pictures import COLOURS, SHAPES, Picture, draw, photo, plain
from demo_image_model.train import right_rows
from demo_model.evaluate import Row

HELD_OUT_BAR = 0.95
_BATCH = 64


@torch.inference_mode()
def right_answers(model: Any, batches: Batches, examples: Sequence[Example]) -> list[bool]:
    """For each conversation: greedy decoding gives exactly its answers."""
    found: list[bool] = []
    for first in range(0, len(examples), _BATCH):
        given, is_answer = batches.for_transformers(examples[first : first + _BATCH])
        hidden = model.model(**given, use_cache=False).last_hidden_state
        found += right_rows(*answer_logits(model, hidden, given["input_ids"], is_answer), is_answer)
    return found


def upright_pictures() -> list[Picture]:
    """All colours and shapes, in three sizes, on white or black."""
    return [plain(colour, shape, side) for colour in COLOURS for shape in SHAPES for side in (32, 64, 256)]


def rows(model: Any, batches: Batches, seed: int, count: int) -> list[Row]:
    """The lines of the table. seed: another one than that of training. count: pictures of a line, at least 8."""
    rng = random.Random(seed)
    drawn = [draw(rng) for _ in range(count)]

    def row(title: str, examples: Sequence[Example], bar: float | None) -> Row:
        right = right_answers(model, batches, examples)
        return Row(title, len(right), sum(right), bar)

    right = right_answers(model, batches, [asked(BOTH[0], each, is_first=True) for each in drawn])
    table = [
        Row("colour and shape", len(right), sum(right), HELD_OUT_BAR),
        row("the same, other questions, picture last", [asked(rng.choice(BOTH), each) for each in drawn], HELD_OUT_BAR),
        row("colour", [asked(rng.choice(COLOUR), each) for each in drawn], HELD_OUT_BAR),
        row("shape", [asked(rng.choice(SHAPE), each) for each in drawn], HELD_OUT_BAR),
        row(
            "plain colours on white or black",
            [asked(BOTH[0], each) for each in upright_pictures()],
            None,
        ),
        row("on any colour, many with noise", [asked(BOTH[0], draw(rng, busy=1.0)) for _ in range(count // 2)], None),
        row("1600 x 1200 pixels, JPEG", [asked(BOTH[0], photo(rng)) for _ in range(count // 8)], None),
    ]
    for kind, names in (("colour", tuple(COLOURS)), ("shape", SHAPES)):
        for name in names:
            of_name = [is_right for each, is_right in zip(drawn, right, strict=True) if getattr(each, kind) == name]
            table.append(Row(f"colour and shape where the {kind} is {name}", len(of_name), sum(of_name), None))
    return table
