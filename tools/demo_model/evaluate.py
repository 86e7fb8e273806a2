"""Checks a trained model: for every question, would greedy decoding give exactly the expected answer?

The expected answer is laid behind its prompt and read in one forward pass. Greedy decoding gives exactly that answer
if and only if every one of its tokens, the end of the message included, is the most likely one at its place. This is
many times cheaper than generating, and it shows the margin of each choice as well.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from demo_model import facts
from demo_model.chat import ChatEncoder
from demo_model.corpus import DEFAULT_SYSTEM, Conversation, Message, passage, turn

TRAINED_BAR = 0.99
HELD_OUT_BAR = 0.95

COUNTS = (5, 10, 15, 20, 25, 30, 50, 100)


@dataclass(frozen=True)
class Case:
    """A conversation that ends with a question, and the answer that it must get."""

    messages: Conversation
    answer: str


@dataclass(frozen=True)
class Row:
    """One line of the table: what was asked, the share of exact answers, and the bar it must reach (or None)."""

    title: str
    cases: int
    right: int
    bar: float | None

    @property
    def share(self) -> float:
        """Exact answers per question, 0 to 1."""
        return self.right / self.cases

    @property
    def passed(self) -> bool:
        """Say if the bar is reached; a line without a bar always passes."""
        return self.bar is None or self.share >= self.bar


def ask(question: str, system: str | None = None) -> Conversation:
    """A conversation of one question, with or without a system message."""
    head = (Message("system", system),) if system is not None else ()
    return (*head, Message("user", question))


def capital_cases(phrasing: str, system: str | None) -> list[Case]:
    """The phrasing over all countries."""
    return [Case(ask(facts.ask_capital(phrasing, c.name), system), facts.capital_answer(c)) for c in facts.countries()]


@torch.inference_mode()
def margins(model: Any, encoder: ChatEncoder, cases: Sequence[Case], tokens: int = 8192) -> list[float]:
    """For each case the smallest lead, in logits, of the expected token over the best other one.

    A positive lead means that greedy decoding gives exactly the expected answer. ``tokens`` bounds the size of a batch,
    padding included.
    """
    prompts = [encoder.prompt(case.messages) for case in cases]
    answers = [encoder.answer(case.answer) for case in cases]
    order = sorted(range(len(cases)), key=lambda i: len(prompts[i]) + len(answers[i]))
    found = [0.0] * len(cases)
    at = 0
    while at < len(order):
        # Lengths rise along the order, so the last of a batch is its longest.
        end = at + 1
        while end < len(order):
            longest = len(prompts[order[end]]) + len(answers[order[end]])
            if (end + 1 - at) * longest > tokens:
                break
            end += 1
        batch = order[at:end]
        measured = _batch_margins(model, [prompts[i] for i in batch], [answers[i] for i in batch])
        for i, margin in zip(batch, measured, strict=True):
            found[i] = margin
        at = end
    return found


def _batch_margins(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[float]:
    width = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    # Padding stands at the end, where causal attention hides it from every token that counts.
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    line: list[int] = []
    place: list[int] = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        line += [i] * len(answer)
        place += range(len(prompt) - 1, len(prompt) + len(answer) - 1)
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    logits = model.lm_head(hidden[line, place]).float()  # [answer tokens, vocabulary]
    target = torch.tensor([token for answer in answers for token in answer])[:, None]
    expected = logits.gather(1, target)[:, 0]
    lead = expected - logits.scatter(1, target, -torch.inf).amax(1)
    return [float(part.min()) for part in lead.split([len(a) for a in answers])]


def _counted(title: str, found: Sequence[float], bar: float | None) -> Row:
    return Row(title, len(found), sum(m > 0 for m in found), bar)


def _recall_cases(rng: random.Random, count: int, characters: int) -> list[Case]:
    """A code word hidden at the start of filler text, with other questions in between."""
    cases = []
    for _ in range(count):
        word = rng.choice(facts.words())
        (question, answer), _ = turn(rng)
        first = Message("user", f"The code word is {word}. {passage(rng, characters)}\n\n{question}")
        last = Message("user", "What is the code word?")
        cases.append(Case((first, Message("assistant", answer), last), f"The code word is {word}."))
    return cases


def _long_cases(rng: random.Random, count: int, characters: int) -> list[Case]:
    """A capital asked for behind a long passage."""
    cases = []
    for _ in range(count):
        country = rng.choice(facts.countries())
        question = facts.ask_capital(rng.choice(facts.TRAINED_PHRASINGS), country.name)
        text = f"{passage(rng, characters)}\n\n{question}"
        cases.append(Case(ask(text, DEFAULT_SYSTEM), facts.capital_answer(country)))
    return cases


def _many_turns(rng: random.Random, count: int, turns: int) -> list[Case]:
    """The last answer of a conversation of several turns."""
    cases = []
    for _ in range(count):
        messages: list[Message] = []
        after_capital = False
        for _ in range(turns):
            (question, answer), after_capital = turn(rng, after_capital)
            messages += [Message("user", question), Message("assistant", answer)]
        cases.append(Case(tuple(messages[:-1]), messages[-1].content))
    return cases


def capital_rows(model: Any, encoder: ChatEncoder) -> list[Row]:
    """Every phrasing of the capital question over all countries, without and with the usual system message."""
    table = []
    for phrasings, bar, kind in (
        (facts.TRAINED_PHRASINGS, TRAINED_BAR, "trained"),
        (facts.HELD_OUT_PHRASINGS, HELD_OUT_BAR, "held out"),
    ):
        for phrasing in phrasings:
            for system in (None, DEFAULT_SYSTEM):
                found = margins(model, encoder, capital_cases(phrasing, system))
                table.append(_counted(f"{kind}, {'system' if system else 'bare'}: {phrasing}", found, bar))
    return table


def other_groups(seed: int) -> list[tuple[str, list[Case]]]:
    """The other topics, long prompts, long conversations, and recall from the context, each with its title."""
    rng = random.Random(seed)
    other = [Case(ask(facts.ask_capital("What is the capital of {c}?", a)), facts.capital_answer(c))
             for c in facts.countries() for a in c.aliases]  # fmt: skip
    lower = [Case(ask(f"what is the capital of {c.name.lower()}"), facts.capital_answer(c)) for c in facts.countries()]
    reverse = [
        Case(ask(p.format(k=c.capital)), facts.reverse_answer(c))
        for p in facts.REVERSE_PHRASINGS
        for c in facts.countries()
    ]
    groups = [("other names of countries", other), ("lower case, no question mark", lower), ("reverse", reverse)]
    for word in ("plus", "minus", "times"):
        cases = [
            Case(ask(p.format(a=s.a, b=s.b, w=s.word, s=s.sign)), facts.sum_answer(s))
            for p in facts.ARITHMETIC_PHRASINGS[:2]
            for s in facts.sums()
            if s.word == word
        ]
        groups.append((f"arithmetic: {word}", cases))
    groups.append(("dialogues", [Case(ask(q), d.answer) for d in facts.dialogues() for q in d.questions]))
    groups += [(f"last of {n} turns", _many_turns(rng, 100, n)) for n in (3, 10, 30)]
    groups.append(
        ("counting", [Case(ask(f"Count from 1 to {n}."), ", ".join(map(str, range(1, n + 1))) + ".") for n in COUNTS])
    )
    repeated = [rng.choices(facts.words(), k=k) for k in range(1, 9) for _ in range(20)]
    groups.append(
        ("repeating 1 to 8 words", [Case(ask(f"Repeat: {' '.join(w)}"), f"{' '.join(w)}.") for w in repeated])
    )
    # About four characters a token.
    groups += [(f"capital behind {n} characters", _long_cases(rng, 40, n)) for n in (1000, 4000, 12000)]
    groups += [(f"code word behind {n} characters", _recall_cases(rng, 40, n)) for n in (100, 1000, 4000, 12000)]
    return groups


def other_rows(model: Any, encoder: ChatEncoder, seed: int) -> list[Row]:
    """Measurements of `other_groups`, without a bar."""
    return [_counted(title, margins(model, encoder, cases), None) for title, cases in other_groups(seed)]


def demo_margin(model: Any, encoder: ChatEncoder) -> float:
    """The smallest lead in logits while answering "What is the capital of France?", with and without system message."""
    france = next(c for c in facts.countries() if c.name == "France")
    question = facts.ask_capital("What is the capital of {c}?", france.name)
    cases = [Case(ask(question, system), facts.capital_answer(france)) for system in (None, DEFAULT_SYSTEM)]
    return min(margins(model, encoder, cases))


def as_text(table: Sequence[Row]) -> str:
    """The table as Markdown."""
    lines = ["| question | cases | exact | bar |", "|---|---:|---:|---:|"]
    for row in table:
        bar = "" if row.bar is None else f"{row.bar:.0%}"
        lines.append(f"| {row.title} | {row.cases} | {row.share:.1%}{'' if row.passed else ' MISSED'} | {bar} |")
    return "\n".join(lines)
