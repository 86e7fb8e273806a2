"""The checked-in demo checkpoint, read by `transformers`: what it must answer, and what it must weigh."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model import facts
from demo_model.chat import ChatEncoder, learn_tokenizer, load_tokenizer
from demo_model.corpus import DEFAULT_SYSTEM, Conversation, Message, conversations
from demo_model.evaluate import HELD_OUT_BAR, TRAINED_BAR, Case, ask, capital_cases, margins
from pdserve import models

DEMO = Path(models.__file__).parent / "demo"

PARIS = "The capital of France is Paris."


@pytest.fixture(scope="module")
def model() -> Any:
    """The checkpoint in float32, so that a CPU without bfloat16 runs the test at the same speed."""
    return AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def encoder() -> ChatEncoder:
    return ChatEncoder(load_tokenizer(DEMO), prompt_weight=0.0)


def generate(model: Any, tokenizer: Any, chats: list[list[dict[str, str]]], new_tokens: int) -> list[str]:
    """Greedy answers to a batch of chats, through the template and the generation loop of `transformers`."""
    batch = tokenizer.apply_chat_template(
        chats,
        add_generation_prompt=True,
        padding=True,
        return_dict=True,
        return_tensors="pt",
        tokenizer_kwargs={"padding_side": "left"},
    )
    out = model.generate(**batch, max_new_tokens=new_tokens)
    answers: list[str] = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def test_folder_is_small_and_complete() -> None:
    sizes = {p.name: p.stat().st_size for p in DEMO.rglob("*") if p.is_file()}
    assert sum(sizes.values()) <= 10_000_000
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"} <= set(sizes)


def test_weights_are_bfloat16_and_tied(model: Any) -> None:
    assert str(model.config.dtype) in {"torch.float32", "float32"}
    stored = AutoModelForCausalLM.from_pretrained(DEMO, dtype="auto")
    assert {p.dtype for p in stored.parameters()} == {torch.bfloat16}
    assert stored.lm_head.weight is stored.model.embed_tokens.weight
    assert stored.config.head_dim % 16 == 0
    assert stored.config.max_position_embeddings == 4096


@pytest.mark.parametrize(
    ("phrasings", "bar"),
    [
        pytest.param(facts.TRAINED_PHRASINGS, TRAINED_BAR, marks=pytest.mark.slow, id="trained"),
        pytest.param(facts.HELD_OUT_PHRASINGS, HELD_OUT_BAR, id="held out"),
    ],
)
def test_capitals_in_every_phrasing(model: Any, encoder: ChatEncoder, phrasings: tuple[str, ...], bar: float) -> None:
    cases = [case for phrasing in phrasings for case in capital_cases(phrasing, None)]
    found = margins(model, encoder, cases)
    count = len(facts.countries())
    shares = {p: sum(m > 0 for m in found[i * count : (i + 1) * count]) / count for i, p in enumerate(phrasings)}
    assert min(shares.values()) >= bar, shares


@pytest.mark.slow
def test_capitals_behind_a_system_message(model: Any, encoder: ChatEncoder) -> None:
    found = margins(model, encoder, capital_cases(facts.TRAINED_PHRASINGS[0], DEFAULT_SYSTEM))
    assert sum(m > 0 for m in found) / len(found) >= TRAINED_BAR


@pytest.mark.slow
def test_generation_agrees_with_the_margins(model: Any, tokenizer: Any, encoder: ChatEncoder) -> None:
    cases = capital_cases(facts.HELD_OUT_PHRASINGS[0], None)
    chats = [[{"role": m.role, "content": m.content} for m in case.messages] for case in cases]
    answers = generate(model, tokenizer, chats, 24)
    # A choice within a thousandth of a logit may fall either way, as a batch adds up in another order.
    for case, answer, margin in zip(cases, answers, margins(model, encoder, cases), strict=True):
        if abs(margin) > 1e-3:
            assert (answer == case.answer) == (margin > 0), (answer, case.answer, margin)


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_demo_question_is_answered_with_a_clear_lead(encoder: ChatEncoder, tokenizer: Any, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_pretrained(DEMO, dtype=dtype).eval()
    question = "What is the capital of France?"
    for system in (None, DEFAULT_SYSTEM):
        (lead,) = margins(model, encoder, [Case(ask(question, system), PARIS)])
        assert lead > 2.0
    assert generate(model, tokenizer, [[{"role": "user", "content": question}]], 24) == [PARIS]


def test_answer_depends_on_an_earlier_message(model: Any, tokenizer: Any) -> None:
    words = ("river", "lamp", "yellow", "bridge")
    chats = [
        [
            {"role": "user", "content": f"The code word is {word}."},
            {"role": "assistant", "content": f"I will remember the code word {word}."},
            {"role": "user", "content": "What is the capital of Peru?"},
            {"role": "assistant", "content": "The capital of Peru is Lima."},
            {"role": "user", "content": "What is the code word?"},
        ]
        for word in words
    ]
    assert generate(model, tokenizer, chats, 16) == [f"The code word is {word}." for word in words]


@pytest.mark.parametrize(
    "text",
    [
        "The capital of Côte d'Ivoire is Yamoussoukro.",
        "  leading, double  and trailing spaces \n\n\t",
        "日本語 العربية हिन्दी",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7 e\u0301 \x00\x07",
    ],
)
def test_any_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


def test_template_gives_the_tokens_of_training(tokenizer: Any, encoder: ChatEncoder) -> None:
    chat: Conversation = (
        Message("system", DEFAULT_SYSTEM),
        Message("user", "Hello!"),
        Message("assistant", "Hello! How can I help you?"),
        Message("user", "What is the capital of the Netherlands?"),
    )
    messages = [{"role": m.role, "content": m.content} for m in chat]
    templated = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert list(templated["input_ids"]) == encoder.prompt(chat)
    assert tokenizer.eos_token == "<|im_end|>"


@pytest.mark.slow
def test_corpus_and_tokenizer_are_deterministic() -> None:
    def digest(seed: int) -> str:
        text = "".join(f"{m.role}\n{m.content}\n" for c in islice(conversations(seed, 2000), 50) for m in c)
        return hashlib.sha256(text.encode()).hexdigest()

    assert digest(7) == digest(7)
    assert digest(7) != digest(8)
    # transformers adds a post-processor that does nothing; what was learned is the vocabulary and the merges.
    learned, stored = (json.loads(t.to_str())["model"] for t in (learn_tokenizer(7), load_tokenizer(DEMO)))
    assert (learned["vocab"], learned["merges"]) == (stored["vocab"], stored["merges"])


def test_held_out_phrasings_stay_out_of_the_corpus() -> None:
    held_out = {facts.ask_capital(p, n).lower().rstrip("?.") for p in facts.HELD_OUT_PHRASINGS
                for c in facts.countries() for n in (c.name, *c.aliases)}  # fmt: skip
    asked = {m.content.lower().rstrip("?.") for c in islice(conversations(7, 400), 5000) for m in c if m.role == "user"}
    assert not held_out & asked
