"""Cost of structured outputs: compile times, microseconds per step, and the delay of another stream by the first grammar.

Usage: python benchmarks/structured_outputs.py
Over the bundled model's vocabulary, and over one of 131,072 tokens made of random pieces of words.
"""

from __future__ import annotations

import asyncio
import json
import queue
import random
import statistics
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from conditions import print_conditions
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pdserve.common.errors import PdServeError
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.engine.request import Request
from pdserve.engine.runner.loading.loaded_model import model_folder
from pdserve.engine.sampling.grammar_mask import GrammarMask
from pdserve.engine.sampling.placed_arrays import PlacedArrays
from pdserve.engine.structured_outputs.grammar import Grammar, GrammarJob
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from pdserve.engine.structured_outputs.grammar_messages import GrammarLimits
from pdserve.engine.structured_outputs.structured_output_manager import StructuredOutputManager
from pdserve.llm import AsyncLLM, SamplingParams, StructuredOutputsParams

LARGE, BATCHES, NUM_STEPS = 131_072, (1, 16), 60
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "emails": {"type": "array", "items": {"type": "string", "format": "email"}, "maxItems": 5},
    },
    "required": ["name", "age", "emails"],
}
WIDE = {
    "type": "object",
    "properties": {f"field_{n}": PERSON for n in range(40)},
    "required": [f"field_{n}" for n in range(40)],
}
FORMS: dict[str, StructuredOutputsParams] = {
    "choice of 3": StructuredOutputsParams(choice=("positive", "negative", "neutral")),
    "regex, a date": StructuredOutputsParams(regex=r"\d{4}-\d{2}-\d{2}"),
    "json_object": StructuredOutputsParams(json_object=True),
    "json, 3 properties": StructuredOutputsParams(json=PERSON),
    "json, 40 x 3 properties": StructuredOutputsParams(json=WIDE),
    "json, string of 2000": StructuredOutputsParams(json={"type": "string", "maxLength": 2000}),
    "json, enum of 1000": StructuredOutputsParams(json={"enum": [f"value {n}" for n in range(1000)]}),
}


async def first_grammar() -> tuple[list[float], list[float], float]:
    """Gaps between a stream's tokens before the process's first grammar and while it is made, and its seconds."""
    async with AsyncLLM("demo") as llm:
        before, beside = list[float](), list[float]()
        compiling: asyncio.Task[None] | None = None

        async def ask() -> None:
            params = SamplingParams(max_tokens=1, structured_outputs=FORMS["json, 3 properties"])
            async for _ in llm.generate("A person:", params):
                pass

        started = took = 0.0
        last = time.perf_counter()
        params = SamplingParams(max_tokens=2000, ignore_eos=True)
        async for _ in llm.generate("Once upon a time", params):
            now = time.perf_counter()
            (before if compiling is None else beside).append(now - last)
            last = now
            if compiling is None and len(before) == 200:
                compiling, started = asyncio.create_task(ask()), now
            elif compiling is not None and compiling.done():
                took = now - started
                break
        return before[20:], beside, took


def large_vocabulary(folder: Path) -> Path:
    """A byte-level tokenizer.json of `LARGE` tokens."""
    draw = random.Random(1)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(["<|end|>", *alphabet])
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    while len(tokens) < LARGE:
        word = "".join(draw.choices(letters, range(26, 0, -1), k=draw.randint(2, 8)))
        # as in the vocabularies of trained models, few tokens hold a letter and a mark
        marked = draw.random() < 0.02
        before = draw.choice(['"', "Ġ{", "ĊĠĠ", "("]) if marked else draw.choice(["", "Ġ"])
        tokens.setdefault(before + word + (draw.choice(['":', ",", '",', "."]) if marked else ""))
    tokenizer = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


class Opened:
    """A compiler, and sequences opened in its processes."""

    def __init__(self, folder: Path, vocab_size: int, eos: int) -> None:
        self.compiler = GrammarCompiler(folder, vocab_size, GrammarLimits(compile_s=60.0))
        self._eos = eos

    def open(self, params: StructuredOutputsParams) -> Grammar:
        """Compiled, or found compiled."""
        results: queue.SimpleQueue[Grammar | PdServeError] = queue.SimpleQueue()
        self.compiler.submit(GrammarJob(params, (self._eos,), (), lambda: True, lambda: None, results.put))
        result = results.get()
        if isinstance(result, PdServeError):
            raise result
        return result


def walk(opened: Opened, params: StructuredOutputsParams, vocab_size: int, num_rows: int) -> tuple[list[float], ...]:
    """Seconds in each step of random answers, all rows together.

    Engine time of asking for masks and taking them in; the wait for them, with nothing computed meanwhile; apply.
    """
    masks, rows, hosts = StructuredOutputManager(opened.compiler, 60.0), np.arange(num_rows), opened.compiler.hosts
    row_of = {str(row): row for row in range(num_rows)}
    requests = []
    for row in range(num_rows):
        request = Request(
            EngineCoreRequest(request_id=str(row), prompt_token_ids=[1], sampling_params=SamplingParams())
        )
        request.grammar = opened.open(params)
        requests.append(request)
    own, waits, applies = list[float](), list[float](), list[float]()
    logits = torch.empty(num_rows, vocab_size)
    generator = torch.Generator().manual_seed(3)
    for _ in range(NUM_STEPS):
        logits.normal_(generator=generator)
        start = time.perf_counter()
        for request in requests:
            assert request.grammar is not None
            assert request.grammar.allowed(time.monotonic() + 10.0) is not None
        waited = time.perf_counter()
        mask = GrammarMask.of_step(masks.grammar_output(requests, lambda req_id: 0), row_of, rows)
        assert mask is not None
        filled = time.perf_counter()
        mask.apply(logits, PlacedArrays().copy_to(mask.arrays(), logits.device))
        applied = time.perf_counter()
        tokens = logits.argmax(-1).tolist()
        chosen = time.perf_counter()
        for request, token in zip(requests, tokens, strict=True):
            assert request.grammar is not None
            assert request.grammar.accept(token)
        hosts.flush()
        own.append(time.perf_counter() - chosen + filled - waited)
        waits.append(waited - start)
        applies.append(applied - filled)
        for request in requests:
            if request.grammar is not None and request.grammar.has_ended:
                request.grammar.close()
                request.grammar = opened.open(params)
    for request in requests:
        if request.grammar is not None:
            request.grammar.close()
    hosts.flush()
    return own, waits, applies


def vocabulary_report(name: str, folder: Path, vocab_size: int, eos: int) -> None:
    opened = Opened(folder, vocab_size, eos)
    start = time.perf_counter()
    opened.open(StructuredOutputsParams(choice=("ready",))).close()
    print(f"\n{name}: {vocab_size:,} tokens, made ready in {time.perf_counter() - start:.2f} s")
    columns = [f"{what} {num_rows}" for num_rows in BATCHES for what in ("own", "wait", "apply")]
    print(f"{'':26}{'compile':>10}{'again':>10}" + "".join(f"{column:>10}" for column in columns))
    for form, params in FORMS.items():
        times = []
        for _ in range(2):
            start = time.perf_counter()
            opened.open(params).close()
            times.append(time.perf_counter() - start)
        cells = [f"{times[0] * 1e3:.1f} ms", f"{times[1] * 1e3:.2f} ms"]
        for num_rows in BATCHES:
            cells += [f"{statistics.median(each) * 1e6:.0f} us" for each in walk(opened, params, vocab_size, num_rows)]
        print(f"{form:26}" + "".join(f"{cell:>10}" for cell in cells))
    opened.compiler.close()


def main() -> None:
    # before anything else, as in a worker that has not seen a grammar yet
    before, beside, took = asyncio.run(first_grammar())
    print_conditions()
    print(f"{'xgrammar':<12} {version('xgrammar')}")
    print(f"\nthe first grammar of a process: {took:.2f} s to its token, imports and vocabulary in it")
    for name, gaps in (("alone", before), ("beside it", beside)):
        told = f"median {statistics.median(gaps) * 1e3:.1f} ms, longest {max(gaps) * 1e3:.0f} ms"
        print(f"  between tokens of another stream, {name}: {told} ({len(gaps)} tokens)")
    torch.set_num_threads(1)
    demo = model_folder("demo")
    vocabulary_report("bundled model", demo, json.loads((demo / "config.json").read_text())["vocab_size"], 2)
    with tempfile.TemporaryDirectory() as folder:
        vocabulary_report("large", large_vocabulary(Path(folder)), LARGE, 0)


if __name__ == "__main__":
    main()
