"""The training loop: plain torch, AdamW, a cosine schedule, fixed seeds."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from demo_image_model.batches import Batch, Batches, resized_side
from demo_image_model.conversations import BOTH, asked, example
from demo_image_model.network import answer_logits, embed_images, hidden_states
from demo_image_model.pictures import COLOURS, SHAPES, any_ratio, draw, drawn
from demo_model.train import Schedule, make_optimizer

BATCH = 24
"""Conversations of a step."""
SAVED_EVERY = 250
"""Steps."""
_TEXT_EVERY = 3
"""Steps with questions; the steps between train the vision encoder alone, in half of the time."""
_BUSY = 0.1  # share of busy pictures, see `draw`
_LOOK = 480  # pictures


class Names(nn.Module):
    """Reads colour and shape from the mean of a picture's embeddings, so that most steps need no text. It is not saved."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self._linear = nn.Linear(hidden_size, len(COLOURS) + len(SHAPES))

    def loss(self, images: Tensor, names: Tensor) -> Tensor:
        """images: `[N, t, hidden]`; names: see `Pictures.names`."""
        named = self._linear(images.mean(1)).float()
        colours, shapes = named[:, : len(COLOURS)], named[:, len(COLOURS) :]
        return F.cross_entropy(colours, names[:, 0]) + F.cross_entropy(shapes, names[:, 1])


@dataclass
class _Smooth:
    """Means over the last steps, for what is printed."""

    values: dict[str, float] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.values[name] = 0.95 * self.values.get(name, value) + 0.05 * value

    def __str__(self) -> str:
        return "  ".join(f"{name} {value:.4f}" for name, value in self.values.items())


def train(
    model: Any, batches: Batches, schedule: Schedule, half: bool, checkpoint: Callable[[], None] = lambda: None
) -> float:
    """Train the model in place and return the seconds it took.

    half: multiply matrices in bfloat16. checkpoint: called every `SAVED_EVERY` steps.
    """
    rng = random.Random(schedule.seed)
    held_out = _held_out(batches, random.Random(schedule.seed + 2))
    names = Names(model.config.text_config.hidden_size)
    optimizer = make_optimizer(nn.ModuleList([model, names]), schedule)
    model.train()
    smooth = _Smooth()
    started = printed = time.monotonic()
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)

        ratio = any_ratio(rng)
        side = resized_side(rng, ratio)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            if step % _TEXT_EVERY:
                pictures = batches.pictures([drawn(rng, ratio, _BUSY) for _ in range(BATCH)], side)
                loss = names.loss(embed_images(model.model.visual, pictures.pixels), pictures.names)
                smooth.add(names=loss.item())
            else:
                # the same number of questions in each, so that little is padding
                num_questions = rng.choice((1, 1, 1, 2))
                batch = batches.make([example(rng, num_questions, ratio, _BUSY) for _ in range(BATCH)], side)
                images = embed_images(model.model.visual, batch.pictures.pixels)
                hidden = hidden_states(model, batch, images)
                logits, expected = answer_logits(model, hidden, batch.rows.input_ids, batch.rows.is_answer)
                answers_loss = F.cross_entropy(logits, expected)
                loss = answers_loss + names.loss(images, batch.pictures.names)
                right = float((logits.argmax(-1) == expected).float().mean())
                smooth.add(answers=answers_loss.item(), right=right)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        now = time.monotonic()
        is_last = step + 1 == schedule.steps
        if now - printed >= 10 or is_last:
            printed = now
            print(
                f"step {step + 1}/{schedule.steps}  {smooth}  rate {schedule.rate(step):.1e}  {now - started:.0f} s",
                flush=True,
            )
        if (step + 1) % SAVED_EVERY == 0 and not is_last:
            print(f"step {step + 1}: {_right(model, held_out):.1%} of {_LOOK} held-out pictures", flush=True)
            checkpoint()
    model.eval()
    return time.monotonic() - started


def _held_out(batches: Batches, rng: random.Random) -> list[Batch]:
    """`_LOOK` pictures in batches of one size each."""
    made = []
    for _ in range(_LOOK // BATCH):
        ratio = any_ratio(rng)
        pictures = [draw(rng, ratio) for _ in range(BATCH)]
        made.append(batches.make([asked(BOTH[0], each) for each in pictures], resized_side(rng, ratio)))
    return made


@torch.inference_mode()
def _right(model: Any, held_out: list[Batch]) -> float:
    """Share of answers that are right to the last token."""
    found: list[bool] = []
    for batch in held_out:
        rows = batch.rows
        hidden = hidden_states(model, batch, embed_images(model.model.visual, batch.pictures.pixels))
        logits, expected = answer_logits(model, hidden, rows.input_ids, rows.is_answer)
        found += right_rows(logits, expected, rows.is_answer)
    return sum(found) / len(found)


def right_rows(logits: Tensor, expected: Tensor, is_answer: Tensor) -> list[bool]:
    """For each row: all of its answer tokens are the most likely ones. Arguments: see `answer_logits`."""
    each = torch.split(logits.argmax(-1) == expected, is_answer[:, 1:].sum(1).tolist())
    return [bool(row.all()) for row in each]
