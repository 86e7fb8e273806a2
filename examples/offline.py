"""Answers without any service: one engine in this process, a batch through `LLM`, then streams through `AsyncLLM`.

.venv/bin/python examples/offline.py
"""

from __future__ import annotations

import argparse
import asyncio

from pdserve.llm import LLM, AsyncLLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=24)
TEXTS = ["The capital of France is", "The capital of Japan is", "The capital of Peru is"]
QUESTIONS = ["What is the capital of France?", "What is 7 plus 5?"]


def batch(model: str) -> None:
    """Texts to continue, each with its own parameters, then conversations."""
    with LLM(model, num_blocks=256) as llm:
        one_sentence = SamplingParams(temperature=0, max_tokens=8, stop=(".",), include_stop_str_in_output=True)
        for answer in llm.generate(TEXTS, [GREEDY, one_sentence, one_sentence]):
            sequence = answer.outputs[0]
            print(f"{answer.prompt}{sequence.text}   ({len(sequence.token_ids)} tokens, {sequence.finish_reason})")
        for answer in llm.chat([[{"role": "user", "content": question}] for question in QUESTIONS], GREEDY):
            print(answer.outputs[0].text)


async def streams(model: str) -> None:
    """The same questions at once, each printed as it grows."""
    async with AsyncLLM(model, num_blocks=256) as llm:

        async def ask(question: str) -> None:
            async for answer in llm.chat([{"role": "user", "content": question}], GREEDY):
                print(f"{question:32} {answer.outputs[0].text}")

        await asyncio.gather(*map(ask, QUESTIONS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a checkpoint's folder, or the bundled model")
    model = parser.parse_args().model
    batch(model)
    asyncio.run(streams(model))


if __name__ == "__main__":
    main()
