"""Calls that the OpenAI front end answers: models, chat, responses and completions, whole and streamed, with usage.

Start a cluster with `make up`, then: .venv/bin/python examples/openai_client.py
"""

from __future__ import annotations

import argparse
import os

from openai import OpenAI
from openai.types.chat import ChatCompletionUserMessageParam

QUESTION: ChatCompletionUserMessageParam = {"role": "user", "content": "What is the capital of France?"}
TEXT = "The capital of France is"
MAX_TOKENS = 24


def chat(client: OpenAI, model: str) -> None:
    """One answer, then the same answer as it streams."""
    whole = client.chat.completions.create(model=model, messages=[QUESTION], temperature=0, max_tokens=MAX_TOKENS)
    print(f"chat              {whole.choices[0].message.content}")
    print(f"  finish reason   {whole.choices[0].finish_reason}")
    if whole.usage is not None:
        print(f"  usage           {whole.usage.prompt_tokens} prompt + {whole.usage.completion_tokens} new tokens")

    print("the same streamed ", end="")
    stream = client.chat.completions.create(
        model=model,
        messages=[QUESTION],
        temperature=0,
        max_tokens=MAX_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:  # the last chunk: no choices, only usage
            print(f"\n  usage           {chunk.usage.total_tokens} tokens")


def responses(client: OpenAI, model: str) -> None:
    """A question, and another that the router answers with the first in mind."""
    first = client.responses.create(model=model, input=str(QUESTION["content"]), temperature=0)
    print(f"response          {first.output_text}")

    print("a streamed one    ", end="")
    stream = client.responses.create(
        model=model,
        input="What is the capital of Peru?",
        previous_response_id=first.id,
        temperature=0,
        stream=True,
    )
    for event in stream:
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
        elif event.type == "response.completed" and event.response.usage is not None:
            print(f"\n  usage           {event.response.usage.total_tokens} tokens")


def completions(client: OpenAI, model: str) -> None:
    """The same for a text that is continued as it stands."""
    whole = client.completions.create(model=model, prompt=TEXT, temperature=0, max_tokens=MAX_TOKENS, stop=".")
    print(f"completion        {TEXT}{whole.choices[0].text}")

    print(f"the same streamed {TEXT}", end="")
    stream = client.completions.create(model=model, prompt=TEXT, temperature=0, max_tokens=8, stop=".", stream=True)
    for chunk in stream:
        print(chunk.choices[0].text, end="", flush=True)
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    options = parser.parse_args()
    # without `api_keys` in the router's settings any key will do, but the package insists on one
    client = OpenAI(base_url=options.base_url, api_key=os.environ.get("PDSERVE_API_KEY", "none"))
    model = client.models.list().data[0].id
    print(f"model             {model}")
    chat(client, model)
    responses(client, model)
    completions(client, model)


if __name__ == "__main__":
    main()
