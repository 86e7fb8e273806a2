"""Questions about pictures, and their answers."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tokenizers import Tokenizer

from demo_image_model.pictures import COLOURS, SHAPES, Picture, drawn
from demo_model.chat import END_OF_TEXT, MESSAGE_END, MESSAGE_START, learn_byte_pairs
from demo_model.corpus import Message, turn

VOCABULARY = 512
IMAGE_TOKENS: tuple[str, ...] = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
"""Stands in a message for a picture."""

# The first question is the one that `pdserve up` asks.
BOTH: tuple[str, ...] = (
    "What is in the picture?",
    "What is in this picture?",
    "What is this?",
    "What do you see?",
    "What is in the image?",
    "What does the picture show?",
    "Describe the picture.",
    "Name the shape and its colour.",
)
COLOUR: tuple[str, ...] = (
    "What colour is it?",
    "Which colour does it have?",
    "What color is the shape?",
    "Name its colour.",
)
SHAPE: tuple[str, ...] = (
    "Which shape is it?",
    "What shape is in the picture?",
    "What shape is this?",
    "Name the shape.",
)
NO_PICTURE = "I see no picture."
"""Answer to a question about a picture without one."""
OTHER = "I only name colours and shapes in pictures."
"""Answer to another question."""

_LONGEST_OTHER = 48  # characters


@dataclass(frozen=True)
class Example:
    """A conversation, with the picture for the place `IMAGE` in it, or without one."""

    messages: tuple[Message, ...]
    picture: Picture | None


def answer_to(question: str, picture: Picture) -> str:
    """The sentence that the model should say."""
    if question in COLOUR:
        return f"It is {picture.colour}."
    if question in SHAPE:
        return f"It is a {picture.shape}."
    return f"{'An' if picture.colour[0] in 'aeiou' else 'A'} {picture.colour} {picture.shape}."


def example(rng: random.Random, num_questions: int, ratio: float, busy: float) -> Example:
    """Questions about a picture; sometimes one question without a picture, or about something else.

    ratio, busy: see `draw`.
    """
    kind = rng.random()
    if kind < 0.04:
        return Example((Message("user", _question(rng)), Message("assistant", NO_PICTURE)), None)
    if kind < 0.08:
        picture = drawn(rng, ratio, busy) if rng.random() < 0.25 else None
        place = _other_question(rng) if picture is None else _with_image(rng, _other_question(rng))
        return Example((Message("user", place), Message("assistant", OTHER)), picture)
    picture = drawn(rng, ratio, busy)
    messages: list[Message] = []
    for number in range(num_questions):
        question = _question(rng)
        place = question if number else _with_image(rng, question)
        messages += [Message("user", place), Message("assistant", answer_to(question, picture))]
    return Example(tuple(messages), picture)


def asked(question: str, picture: Picture, *, is_first: bool = False) -> Example:
    """One question. is_first: the picture precedes it."""
    text = IMAGE + question if is_first else question + IMAGE
    return Example((Message("user", text), Message("assistant", answer_to(question, picture))), picture)


def learn_tokenizer(seed: int) -> Tokenizer:
    """A tokenizer of `VOCABULARY` entries, most of them for the words of these questions and answers."""
    rng = random.Random(seed)
    texts = [*BOTH, *COLOUR, *SHAPE, NO_PICTURE, OTHER, "system\nuser\nassistant\n"]
    texts += [f"{article} {colour} {shape}." for article in ("A", "An") for colour in COLOURS for shape in SHAPES]
    texts += [f"It is {named}." for named in (*COLOURS, *(f"a {shape}" for shape in SHAPES))]
    others = [_other_question(rng) for _ in range(1000)]
    return learn_byte_pairs(texts * 100 + others, VOCABULARY, (END_OF_TEXT, MESSAGE_START, MESSAGE_END, *IMAGE_TOKENS))


def _with_image(rng: random.Random, question: str) -> str:
    return question + IMAGE if rng.random() < 0.5 else IMAGE + question


def _question(rng: random.Random) -> str:
    return rng.choice(rng.choice((BOTH, BOTH, COLOUR, SHAPE)))


def _other_question(rng: random.Random) -> str:
    """One of those that the bundled text model is asked."""
    while True:
        (question, _), _ = turn(rng)
        if len(question) <= _LONGEST_OTHER:
            return question
