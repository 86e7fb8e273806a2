"""Short prompts are tokenized where they arrive; long ones, and whatever else may take time, in a thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.router.requests.preparation import SHORT_CHARS, ClientRequest, Preparation
from pdserve.text import prompt_preparer
from pdserve.text.prompt import ChatInput, TextInput, encode_prompt
from pdserve.text.tokenization.tokenizer import Tokenizer
from tests.support.run.waiting import eventually

SHORT, LONG = "a" * SHORT_CHARS, "a" * (SHORT_CHARS + 1)
TOOL = {"type": "function", "function": {"name": "look"}}


def chat(*texts, **fields):
    return ChatInput([{"role": "user", "content": text} for text in texts], **fields)


@pytest.fixture
def prepared(model_folder, monkeypatch):
    """(Preparation, threads in which prompts were encoded)."""
    threads: list[threading.Thread] = []

    def encode_here(*args, **kwargs):
        threads.append(threading.current_thread())
        return encode_prompt(*args, **kwargs)

    monkeypatch.setattr(prompt_preparer, "encode_prompt", encode_here)
    made = Preparation(Tokenizer.from_folder(model_folder), DEVELOPMENT_KEY, 1 << 20)
    yield made, threads
    made.close()


@pytest.mark.parametrize(
    ("prompt", "is_inline"),
    [
        (TextInput(SHORT), True),
        (TextInput(LONG), False),
        (chat("hi", "you"), True),
        (chat(SHORT), False),
        (chat(*["hi"] * 9), False),
        (chat("hi", tools=[TOOL]), False),
        (chat("hi", template_variables={"x": 1}), False),
        (ChatInput([{"role": "user", "content": [{"type": "text", "text": "hi"}]}]), False),
    ],
    ids=["text", "long text", "chat", "long chat", "many messages", "tools", "variables", "parts"],
)
async def test_only_short_plain_texts_take_no_thread(prepared, prompt, is_inline):
    made, threads = prepared
    await made.tokenize(ClientRequest(prompt=prompt, field="prompt"))
    assert [thread is threading.current_thread() for thread in threads] == [is_inline]


async def test_a_short_text_passes_no_text_that_waits(prepared):
    made, threads = prepared
    go_on = threading.Event()
    busy = [asyncio.create_task(made._threads.run("", go_on.wait)) for _ in range(3)]
    await eventually(lambda: made._threads.num_waiting == 1)
    short = asyncio.create_task(made.tokenize(ClientRequest(prompt=TextInput("hi"), field="prompt")))
    await eventually(lambda: made._threads.num_waiting == 2)
    assert not threads
    go_on.set()
    assert await short
    await asyncio.gather(*busy)
