"""An engine over a model that is only a shape: `config.json`, weights drawn on the device."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from pdserve.common.block_hash import BlockHasher
from pdserve.common.request.engine_types import EngineCoreOutput, EngineCoreRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DeploymentKey
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.config import EngineConfig
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.engine.runner.loading.loaded_model import LoadedModel, load_model

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}  # fmt: skip
"""The dimensions of Llama 3.1 8B."""
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The changes of a dry run."""
KEY = DeploymentKey(b"a key of measurements, which is no secret")


def write_shape(folder: Path, **changes: Any) -> Path:
    """Write a `config.json`: Llama 3.1 8B's with `changes`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_8B | changes, indent=1))
    return folder


def load_shape(folder: Path, device: torch.device, kernels: str, **settings: Any) -> tuple[LoadedModel, EngineConfig]:
    """settings: of `DecodeSettings`."""
    given = {"device": str(device), "load_format": "dummy", "kernels": kernels, "attention_backend": kernels} | settings
    made = DecodeSettings(**given)
    loaded = load_model(folder, made)
    return loaded, loaded.engine_config(made)


def has_graphs() -> bool:
    """True if this engine replays decode steps from CUDA graphs, and has a setting that turns it off."""
    return "enforce_eager" in {field.name for field in fields(EngineConfig)}


class Engine:
    """One engine in this thread, without transfers."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        self.vocab_size = loaded.decoder.config.vocab_size
        self._hasher = BlockHasher(KEY, config.block_size)
        self.core = make_engine_core(config, loaded.decoder, loaded.kv_caches, self._hasher, self.vocab_size)
        self._num_requests = 0

    def add(self, prompt: Sequence[int], **params: Any) -> str:
        """A greedy request that no token ends."""
        self._num_requests += 1
        root = self._hasher.root("fingerprint")
        request = EngineCoreRequest(
            request_id=f"r{self._num_requests}",
            prompt_token_ids=list(prompt),
            sampling_params=SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | params)),
            block_hashes=self._hasher.extend(root, list(prompt)),
            hash_root=root,
        )
        self.core.verify(request)
        self.core.add_request(request)
        return request.request_id

    def step(self) -> list[EngineCoreOutput]:
        return self.core.step().outputs

    def run(self) -> list[EngineCoreOutput]:
        """All steps until nothing is left. Raises: RuntimeError with the error of a request that failed."""
        outputs = []
        while self.core.has_work:
            outputs += self.step()
        for output in outputs:
            if output.error_code:
                raise RuntimeError(f"{output.request_id}: {output.error_code}: {output.error_message}")
        return outputs
