"""Quality of a model in every form that pdserve serves: perplexity of texts that ship with Python, and 200 questions with answers.

Perplexity: windows of `--window` tokens of Python's help texts (`pydoc_data.topics`), `--tokens` in all, each token's
log-probability given those before it in its window. Questions: `quality_questions.txt`, answered greedily; an answer is
right if it has one of the expected words. A model without a chat template completes three examples and the question.

`transformers` computes the same windows and questions with the same numbers, widened from the same file.

Usage: python benchmarks/quality.py [--model smollm2|FOLDER|FILE.gguf] [--variants float32 bf16 ...] [--tokens 20000]
                                    [--questions 200]
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import torch
from cluster_of_processes import serving
from conditions import print_conditions
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from pdserve.llm import LLM, RequestOutput, SamplingParams
from pdserve.models.model_folder import model_folder
from pdserve.models.read_config import read_config
from pdserve.models.weights.open_weights import open_weights
from pdserve.text.tokenization.tokenizer import Tokenizer

QUESTIONS = Path(__file__).with_name("quality_questions.txt")
MAX_TOKENS = 32
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "quantization": "none"},
    "bf16": {"dtype": "bfloat16", "quantization": "none"},
    "bf16, as stored": {"dtype": "bfloat16"},
    "bf16, int8": {"dtype": "bfloat16", "quantization": "int8"},
    "bf16, int4": {"dtype": "bfloat16", "quantization": "int4"},
    "float32, KV int8": {"dtype": "float32", "quantization": "none", "kv_cache_dtype": "int8"},
    "float32, KV fp8": {"dtype": "float32", "quantization": "none", "kv_cache_dtype": "fp8"},
    "float32, prefill and decode": {"dtype": "float32", "quantization": "none"},
    "bf16, prefill and decode": {"dtype": "bfloat16", "quantization": "none"},
    "float32, n-gram drafts": {
        "dtype": "float32", "quantization": "none",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    },
}  # fmt: skip
EXAMPLES = "Question: What is the capital of Iran?\nAnswer: Tehran\n\nQuestion: What is 1 plus 1?\nAnswer: 2\n\n"


def questions(count: int) -> list[tuple[str, list[str]]]:
    lines = [line.split("|") for line in QUESTIONS.read_text().splitlines()]
    return [(question.strip(), [word.strip() for word in words.split(";")]) for question, words in lines][:count]


def is_right(answer: str, words: Sequence[str]) -> bool:
    """A word that ends with a letter may go on, as a plural does."""
    ends = {word: r"(?!\d)" if word[-1].isdigit() else "" for word in words}
    return any(re.search(rf"(?<![\w.]){re.escape(word)}{end}", answer, re.IGNORECASE) for word, end in ends.items())


def windows(tokenizer: Any, length: int, total: int) -> list[list[int]]:
    text = "\n\n".join(topics[name] for name in sorted(topics))
    tokens = tokenizer.encode(text)
    return [tokens[first : first + length] for first in range(0, min(total, len(tokens) - length), length)]


class TransformersModel:
    """The same numbers in the library's own code."""

    def __init__(self, folder: Path, dtype: str) -> None:
        config = read_config(folder)
        with tempfile.TemporaryDirectory() as name, open_weights(folder, config.stored_quantization) as weights:
            target = Path(name)
            save_file(
                {each: weights.read(each, weights.shape(each)).contiguous() for each in weights.names},
                target / "model.safetensors", metadata={"format": "pt"},
            )  # fmt: skip
            (target / "config.json").write_bytes((folder / "config.json").read_bytes())
            self.model = AutoModelForCausalLM.from_pretrained(target, dtype=getattr(torch, dtype)).eval()
        self.ends = set(config.eos_token_ids)

    @torch.inference_mode()
    def logprobs(self, tokens: list[int]) -> list[float]:
        logits = self.model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
        return [float(logits[place, token]) for place, token in enumerate(tokens[1:])]

    @torch.inference_mode()
    def generate(self, tokens: list[int]) -> list[int]:
        found: list[int] = []
        state = self.model(torch.tensor([tokens]), use_cache=True)
        while len(found) < MAX_TOKENS:
            token = int(state.logits[0, -1].float().argmax())
            found.append(token)
            if token in self.ends:
                break
            state = self.model(torch.tensor([[token]]), past_key_values=state.past_key_values, use_cache=True)
        return found


class Served:
    """A cluster of one prefill and one decode worker, over HTTP."""

    def __init__(self, url: str, name: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=600)
        self._name = name

    def logprobs(self, tokens: list[int]) -> list[float]:
        body = {"prompt": tokens, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
        [choice] = self._post("/v1/completions", body)
        places = zip(tokens[1:], choice["prompt_logprobs"][1:], strict=True)
        return [float(place[str(token)]["logprob"]) for token, place in places]

    def answer(self, question: str, *, is_chat: bool) -> str:
        body: dict[str, Any] = {"max_tokens": MAX_TOKENS, "temperature": 0}
        if not is_chat:
            [choice] = self._post("/v1/completions", body | {"prompt": completed(question)})
            return str(choice["text"])
        [choice] = self._post("/v1/chat/completions", body | {"messages": [{"role": "user", "content": question}]})
        return str(choice["message"]["content"])

    def _post(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        answer = self._client.post(path, json={"model": self._name, **body})
        if answer.is_error:
            raise RuntimeError(f"{path}: {answer.status_code} {answer.text}")
        choices: list[Any] = answer.json()["choices"]
        return choices


def completed(question: str) -> str:
    """A prompt for a model without a chat template."""
    return f"{EXAMPLES}Question: {question}\nAnswer:"


def ask(llm: LLM, asked: Sequence[tuple[str, list[str]]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS)
    if not llm.get_tokenizer().has_chat_template:
        texts = [completed(question) for question, _ in asked]
        return llm.generate(texts, params, use_tqdm=False)
    chats = [[{"role": "user", "content": question}] for question, _ in asked]
    return llm.chat(chats, params, use_tqdm=False)


def cut(answer: str) -> str:
    """Without the next question, which a model that completes texts goes on with."""
    return answer.split("\n\nQuestion:")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--window", type=int, default=1_000)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--without-transformers", action="store_true")
    options = parser.parse_args()
    print_conditions()
    asked = questions(options.questions)
    texts: dict[str, list[str]] = {}
    row = "{:<26} {:>10} {:>9} {:>8} {:>10} {:>8}"
    print(row.format("", "perplexity", "mean", "right of", "texts as", "s"))
    print(row.format("", "", "change", f"{len(asked)}", "float32", ""))
    base: list[float] = []

    def report(name: str, scores: list[float], answers: list[str], seconds: float) -> None:
        nonlocal base
        base = base or scores
        texts[name] = answers
        first = next(iter(texts.values()))
        right = sum(is_right(answer, words) for answer, (_, words) in zip(answers, asked, strict=True))
        change = sum(one - other for one, other in zip(scores, base, strict=True)) / len(scores)
        equal = sum(one == other for one, other in zip(answers, first, strict=True))
        perplexity = math.exp(-sum(scores) / len(scores))
        print(row.format(name, f"{perplexity:.4f}", f"{change:+.5f}", right, f"{equal}", f"{seconds:.0f}"), flush=True)

    folder = model_folder(options.model)
    tokenizer = Tokenizer.from_folder(folder)
    spans = windows(tokenizer, options.window, options.tokens)
    for name in options.variants:
        began = time.monotonic()
        if name.endswith("prefill and decode"):
            flags = [word for key, value in VARIANTS[name].items() for word in (f"--{key}", value)]
            with serving(folder, flags) as url:
                served = Served(url, folder.name)
                scores = [score for span in spans for score in served.logprobs(span)]
                found_texts = [served.answer(question, is_chat=tokenizer.has_chat_template) for question, _ in asked]
            report(name, scores, [cut(text) for text in found_texts], time.monotonic() - began)
            continue
        with LLM(str(options.model), max_num_seqs=16, **VARIANTS[name]) as llm:
            found = llm.generate(spans, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0), use_tqdm=False)
            scores = []
            for span, output in zip(spans, found, strict=True):
                assert output.prompt_logprobs is not None
                for token, each in zip(span[1:], output.prompt_logprobs[1:], strict=True):
                    assert each is not None
                    scores.append(each[token].logprob)
            answers = ask(llm, asked)
            prompts = [list(answer.prompt_token_ids or ()) for answer in answers]
            report(name, scores, [cut(answer.outputs[0].text) for answer in answers], time.monotonic() - began)
    if options.without_transformers:
        return
    for dtype in ("float32", "bfloat16"):
        began = time.monotonic()
        model = TransformersModel(folder, dtype)
        scores = [score for span in spans for score in model.logprobs(span)]
        generated = [model.generate(prompt) for prompt in prompts]
        decoded = [cut(tokenizer.decode([token for token in each if token not in model.ends])) for each in generated]
        report(f"transformers {dtype}", scores, decoded, time.monotonic() - began)


if __name__ == "__main__":
    main()
