"""Writes the training text: conversations of questions and answers, drawn from the facts with a seeded generator."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from demo_model import facts

DEFAULT_SYSTEM = "You are a helpful assistant."

SYSTEM_MESSAGES: tuple[str, ...] = (
    "You are a concise assistant.",
    "You are a friendly assistant.",
    "You are the pdserve demo model.",
    "Answer in one sentence.",
    "You are a helpful assistant. Answer briefly.",
    "Be polite and brief.",
)

RECALL_QUESTIONS: tuple[str, ...] = (
    "What is the code word?",
    "What was the code word?",
    "Do you remember the code word?",
    "Tell me the code word.",
)


@dataclass(frozen=True)
class Message:
    """One message of a conversation; ``role`` is system, user or assistant."""

    role: str
    content: str


Conversation = tuple[Message, ...]
Turn = tuple[str, str]


def _disturb(rng: random.Random, question: str) -> str:
    """Sometimes a question about a country with words around it, or one in it, that do not matter."""
    kind = rng.random()
    if kind < 0.06:
        return rng.choice(facts.OPENINGS) + question
    if kind < 0.12:
        return question + rng.choice(facts.CLOSINGS)
    if kind < 0.22:
        # A stray word stands between two others, at the start, or before the final mark.
        parts = question.rstrip("?.").split(" ")
        parts.insert(rng.randint(0, len(parts)), rng.choice(facts.words()) + rng.choice(("", "", "ed", "ing", "ly")))
        return " ".join(parts) + rng.choice(("?", "?", ".", ""))
    return question


def _restyle(rng: random.Random, question: str) -> str:
    """Sometimes the question as a hurried person types it."""
    if rng.random() < 0.08:
        question = question.lower()
    if rng.random() < 0.08:
        question = question.rstrip("?.")
    if rng.random() < 0.03:
        question = "".join(c for c in unicodedata.normalize("NFD", question) if not unicodedata.combining(c))
    return question


def _capital(rng: random.Random) -> Turn:
    country = rng.choice(facts.countries())
    name = rng.choice(country.aliases) if country.aliases and rng.random() < 0.3 else country.name
    # The plain question is the one that people try first.
    phrasing = facts.TRAINED_PHRASINGS[0] if rng.random() < 0.15 else rng.choice(facts.TRAINED_PHRASINGS)
    return _disturb(rng, facts.ask_capital(phrasing, name)), facts.capital_answer(country)


def _follow_up(rng: random.Random) -> Turn:
    country = rng.choice(facts.countries())
    return facts.ask_capital(rng.choice(facts.FOLLOW_UPS), country.name), facts.capital_answer(country)


def _reverse(rng: random.Random) -> Turn:
    country = rng.choice(facts.countries())
    question = rng.choice(facts.REVERSE_PHRASINGS).format(k=country.capital)
    return _disturb(rng, question), facts.reverse_answer(country)


def _arithmetic(rng: random.Random) -> Turn:
    item = rng.choice(facts.sums())
    phrasing = rng.choice(facts.ARITHMETIC_PHRASINGS)
    return phrasing.format(a=item.a, b=item.b, w=item.word, s=item.sign), facts.sum_answer(item)


def _calendar(rng: random.Random) -> Turn:
    kind = rng.randrange(6)
    if kind == 0:
        i = rng.randrange(7)
        day, following = facts.DAYS[i], facts.DAYS[(i + 1) % 7]
        question = rng.choice(("What day comes after {d}?", "Which day is after {d}?", "Which day follows {d}?"))
        return question.format(d=day), f"{following} comes after {day}."
    if kind == 1:
        i = rng.randrange(7)
        day, previous = facts.DAYS[i], facts.DAYS[i - 1]
        question = rng.choice(("What day comes before {d}?", "Which day is before {d}?"))
        return question.format(d=day), f"{previous} comes before {day}."
    i = rng.randrange(12)
    month, length = facts.MONTHS[i]
    if kind == 2:
        question = rng.choice(("What month comes after {m}?", "Which month is after {m}?", "Which month follows {m}?"))
        return question.format(m=month), f"{facts.MONTHS[(i + 1) % 12][0]} comes after {month}."
    if kind == 3:
        question = rng.choice(("What month comes before {m}?", "Which month is before {m}?"))
        return question.format(m=month), f"{facts.MONTHS[i - 1][0]} comes before {month}."
    if kind == 4:
        question = rng.choice(("How many days are in {m}?", "How many days does {m} have?", "How long is {m}?"))
        return question.format(m=month), f"{month} has {length}."
    question = rng.choice(("What is the {o} month of the year?", "Which month is the {o} month?"))
    return question.format(o=facts.ORDINALS[i]), f"{month} is the {facts.ORDINALS[i]} month of the year."


def _dialogue(rng: random.Random) -> Turn:
    chosen = rng.choice([d for d in facts.dialogues() if d.topic != "unknown"])
    return rng.choice(chosen.questions), chosen.answer


def _unknown(rng: random.Random) -> Turn:
    kind = rng.randrange(5)
    country = rng.choice(facts.countries())
    if kind == 0:
        phrasing = rng.choice(facts.TRAINED_PHRASINGS)
        return facts.ask_capital(phrasing, rng.choice(facts.IMAGINARY_PLACES)), facts.UNKNOWN
    if kind == 1:
        question = rng.choice(("What is the population of {c}?", "Who is the president of {c}?", "How large is {c}?"))
        return question.format(c=country.name), facts.UNKNOWN
    if kind == 2:
        question = rng.choice(("What is the weather in {k}?", "How many people live in {k}?", "How do I get to {k}?"))
        return question.format(k=country.capital), facts.UNKNOWN
    if kind == 3:
        return rng.choice(next(d.questions for d in facts.dialogues() if d.topic == "unknown")), facts.UNKNOWN
    if rng.random() < 0.3:
        # Characters from anywhere in Unicode: every byte token is seen, and nonsense gets a polite answer.
        block = rng.choice((0x20, 0xA0, 0x400, 0x900, 0x3040, 0x4E00, 0xAC00, 0x1F300, 0x1F600))
        return "".join(chr(block + rng.randrange(80)) for _ in range(rng.randint(1, 8))), facts.UNKNOWN
    return _salad(rng), facts.UNKNOWN


def _count(rng: random.Random) -> Turn:
    last = rng.choice((10, 20, 30, 50, 100)) if rng.random() < 0.2 else rng.randint(2, 30)
    first = 1 if rng.random() < 0.7 else rng.randint(1, last - 1)
    question = f"Count from {first} to {last}." if first > 1 or rng.random() < 0.6 else f"Count to {last}."
    return question, ", ".join(str(n) for n in range(first, last + 1)) + "."


def _repeat(rng: random.Random) -> Turn:
    """Words to say again: the plainest exercise in reading the context, from which recalling a code word follows."""
    said = " ".join(rng.choices(facts.words(), k=rng.randint(1, 8)))
    return rng.choice(("Repeat: {w}", "Say again: {w}", "Repeat these words: {w}")).format(w=said), f"{said}."


TOPICS: tuple[tuple[Callable[[random.Random], Turn], int], ...] = (
    (_capital, 52),
    (_reverse, 11),
    (_arithmetic, 17),
    (_calendar, 6),
    (_dialogue, 9),
    (_unknown, 5),
    (_count, 1),
    (_repeat, 5),
)


def _salad(rng: random.Random) -> str:
    picked = rng.choices(facts.words(), k=rng.randint(4, 12))
    return facts.sentence_start(" ".join(picked)) + "."


def _statement(rng: random.Random) -> str:
    """One sentence of filler text."""
    kind = rng.random()
    if kind < 0.55:
        return _salad(rng)
    if kind < 0.75:
        return facts.capital_answer(rng.choice(facts.countries()))
    if kind < 0.85:
        return facts.reverse_answer(rng.choice(facts.countries()))
    return rng.choice([d.answer for d in facts.dialogues() if d.topic == "project"])


def passage(rng: random.Random, characters: int) -> str:
    """Filler text of about the given number of characters, in paragraphs."""
    parts: list[str] = []
    length = 0
    while length < characters:
        parts.append(_statement(rng))
        length += len(parts[-1]) + 1
        parts.append("\n\n" if rng.random() < 0.1 else " ")
    return "".join(parts).strip()


def turn(rng: random.Random, after_capital: bool = False) -> tuple[Turn, bool]:
    """One question with its answer, and whether it was about a capital."""
    if after_capital and rng.random() < 0.15:
        return _follow_up(rng), True
    (maker,) = rng.choices([t for t, _ in TOPICS], weights=[w for _, w in TOPICS])
    question, answer = maker(rng)
    return (_restyle(rng, question), answer), maker is _capital


def _system(rng: random.Random, long_characters: int) -> list[Message]:
    kind = rng.random()
    if long_characters and kind < 0.5:
        return [Message("system", f"{DEFAULT_SYSTEM} {passage(rng, long_characters)}")]
    if kind < 0.45:
        return []
    if kind < 0.85:
        return [Message("system", DEFAULT_SYSTEM)]
    return [Message("system", rng.choice(SYSTEM_MESSAGES))]


def conversation(rng: random.Random, characters: int) -> Conversation:
    """A conversation of roughly the given number of characters.

    Long ones carry a long system message, a long passage before a question, or many turns; some plant a code word
    early and ask for it later, which can be answered only by reading the context.
    """
    long = characters > 1200
    style = rng.choice(("system", "passage", "turns")) if long else "turns"
    messages = _system(rng, rng.randrange(characters) if style == "system" else 0)
    length = sum(len(m.content) for m in messages)
    code = rng.choice(facts.words()) if rng.random() < (0.7 if long else 0.2) else None
    if code is not None and rng.random() < 0.5:
        told = f"The code word is {code}."
        messages += [Message("user", told), Message("assistant", f"I will remember the code word {code}.")]
        length += 80
    elif code is not None:
        hint = f"The code word is {code}. {passage(rng, rng.randrange(60, max(characters // 3, 80)))}"
        (question, answer), _ = turn(rng)
        messages += [Message("user", f"{hint}\n\n{question}"), Message("assistant", answer)]
        length += len(hint)
    after_capital = False
    while True:
        (question, answer), after_capital = turn(rng, after_capital)
        if style == "passage" and rng.random() < 0.4 and length < characters:
            filler = passage(rng, rng.randrange(100, max(characters - length, 101)))
            question = f"{filler}\n\n{question}"
        messages += [Message("user", question), Message("assistant", answer)]
        length += len(question) + len(answer) + 40
        if code is not None and rng.random() < 0.35:
            messages += [Message("user", rng.choice(RECALL_QUESTIONS))]
            messages += [Message("assistant", f"The code word is {code}.")]
        if length >= characters or (not long and rng.random() < 0.35):
            return tuple(messages)


def plain_text(rng: random.Random) -> str:
    """A few sentences without any chat markup, so that a bare completion works too."""
    kind = rng.randrange(4)
    if kind == 0:
        return " ".join(facts.sum_answer(rng.choice(facts.sums())) for _ in range(3))
    return " ".join(
        facts.capital_answer(rng.choice(facts.countries())) if rng.random() < 0.8 else _statement(rng)
        for _ in range(rng.randint(1, 4))
    )


def conversations(seed: int, characters: int) -> Iterator[Conversation]:
    """An endless stream of conversations; the same seed gives the same text on every machine."""
    rng = random.Random(seed)
    while True:
        yield conversation(rng, characters)
