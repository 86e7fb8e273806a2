"""Facts that the demo model is taught: countries, sums, the calendar and short dialogues."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

FOLDER = Path(__file__).parent

# Every country is asked about in each of these ways during training. {c} is the country, {p} its possessive form.
TRAINED_PHRASINGS: tuple[str, ...] = (
    "What is the capital of {c}?",
    "What's the capital of {c}?",
    "What is the capital city of {c}?",
    "Which city is the capital of {c}?",
    "What is {p} capital?",
    "What is {p} capital city?",
    "What city is {p} capital?",
    "Tell me the capital of {c}.",
    "Name the capital of {c}.",
    "Do you know the capital of {c}?",
    "Can you tell me the capital of {c}?",
    "Could you name the capital city of {c}, please?",
    "Please tell me what the capital of {c} is.",
    "I would like to know the capital of {c}.",
    "Capital of {c}?",
    "{p} capital?",
    "{c} has which city as its capital?",
    "For {c}, which city is the capital?",
    "What's {p} capital?",
    "Which city is {p} capital?",
    "Tell me {p} capital city.",
    "I would like to know {p} capital.",
    "What is the capital of {c} called?",
    "How is {p} capital called?",
    "What is the name of {p} capital?",
)

# Courtesies around a question, so that unfamiliar words beside it do not change the answer.
OPENINGS: tuple[str, ...] = (
    "Hello, ", "Hi! ", "Excuse me, ", "Quick question: ", "I have a question. ", "One more: ", "Please answer: ", "So, ",
)  # fmt: skip
CLOSINGS: tuple[str, ...] = (
    " Thanks.",
    " Thank you!",
    " Please answer.",
    " I forgot it.",
    " I am curious.",
    " Be brief.",
)

# These never occur in training: they measure whether the model learned the question or only its wording.
HELD_OUT_PHRASINGS: tuple[str, ...] = (
    "Can you tell me which city is the capital of {c}?",
    "What is {p} capital called?",
    "Please name the capital city of {c}.",
)

# Short questions that make sense only after a question about another capital.
FOLLOW_UPS: tuple[str, ...] = ("And of {c}?", "And {c}?", "What about {c}?", "And what about {c}?", "How about {c}?")

REVERSE_PHRASINGS: tuple[str, ...] = (
    "Which country has {k} as its capital?",
    "What country has {k} as its capital?",
    "{k} is the capital of which country?",
    "Of which country is {k} the capital?",
    "What country is {k} the capital of?",
    "Which country's capital is {k}?",
)

ARITHMETIC_PHRASINGS: tuple[str, ...] = (
    "What is {a} {w} {b}?",
    "What is {a} {s} {b}?",
    "How much is {a} {w} {b}?",
    "Calculate {a} {s} {b}.",
    "{a} {s} {b}?",
)

IMAGINARY_PLACES: tuple[str, ...] = (
    "Atlantis", "Narnia", "Utopia", "Lilliput", "Camelot", "El Dorado", "Shangri-La", "the Moon", "Mars", "Neverland",
    "Middle-earth", "Antarctica",
)  # fmt: skip

DAYS: tuple[str, ...] = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

MONTHS: tuple[tuple[str, str], ...] = (
    ("January", "31 days"),
    ("February", "28 days, or 29 in a leap year"),
    ("March", "31 days"),
    ("April", "30 days"),
    ("May", "31 days"),
    ("June", "30 days"),
    ("July", "31 days"),
    ("August", "31 days"),
    ("September", "30 days"),
    ("October", "31 days"),
    ("November", "30 days"),
    ("December", "31 days"),
)

ORDINALS: tuple[str, ...] = (
    "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth",
)  # fmt: skip

UNKNOWN = "I do not know. I am a small demo model and know only a few facts."


@dataclass(frozen=True)
class Country:
    """A country as it stands inside a sentence ("the Netherlands"), its capital, and other names people use."""

    name: str
    capital: str
    aliases: tuple[str, ...]


@dataclass(frozen=True)
class Dialogue:
    """One answer and the questions that deserve it."""

    topic: str
    questions: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Sum:
    """``a op b = result`` with the operation as a word and as a sign."""

    a: int
    b: int
    word: str
    sign: str
    result: int


@cache
def countries() -> tuple[Country, ...]:
    """The members of the United Nations and its two observer states, 195 in all."""
    found = []
    for line in (FOLDER / "countries.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        name, capital, aliases = line.split("\t")
        found.append(Country(name, capital, tuple(a for a in aliases.split("|") if a)))
    return tuple(found)


@cache
def dialogues() -> tuple[Dialogue, ...]:
    """The fixed questions and answers of ``dialogues.json``."""
    rows = json.loads((FOLDER / "dialogues.json").read_text(encoding="utf-8"))
    return tuple(Dialogue(str(r["topic"]), tuple(map(str, r["questions"])), str(r["answer"])) for r in rows)


@cache
def words() -> tuple[str, ...]:
    """Common English words, for filler text and for the code words that the model must read from its context."""
    return tuple((FOLDER / "words.txt").read_text(encoding="utf-8").split())


@cache
def sums() -> tuple[Sum, ...]:
    """Every sum the model is taught: 0..20 plus 0..20, differences of those that are not negative, 0..12 times 0..12."""
    added = [Sum(a, b, "plus", "+", a + b) for a in range(21) for b in range(21)]
    taken = [Sum(a, b, "minus", "-", a - b) for a in range(21) for b in range(a + 1)]
    multiplied = [Sum(a, b, "times", "*", a * b) for a in range(13) for b in range(13)]
    return tuple(added + taken + multiplied)


def sentence_start(text: str) -> str:
    """The text with its first letter in upper case and the rest untouched."""
    return text[:1].upper() + text[1:]


def possessive(name: str) -> str:
    """``France's``, ``the Netherlands'``."""
    return name + ("'" if name.endswith("s") else "'s")


def ask_capital(phrasing: str, name: str) -> str:
    """The question in the given phrasing about the country called ``name``."""
    return sentence_start(phrasing.format(c=name, p=possessive(name)))


def capital_answer(country: Country) -> str:
    """The one right answer to every phrasing of the capital question."""
    stop = "" if country.capital.endswith(".") else "."
    return f"The capital of {country.name} is {country.capital}{stop}"


def reverse_answer(country: Country) -> str:
    """The one right answer to "which country has this capital"."""
    return f"{country.capital} is the capital of {country.name}."


def sum_answer(item: Sum) -> str:
    """A sum as a sentence: ``2 plus 3 is 5.``"""
    return f"{item.a} {item.word} {item.b} is {item.result}."
