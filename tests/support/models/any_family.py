"""Tiny random checkpoints of every causal language model in the installed `transformers`, and its logits beside ours."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pdserve.common.errors import UnsupportedModel
from pdserve.common.settings.worker_settings import ModelImpl
from pdserve.models.model_impl import load_model_decoder, read_model_config
from tests.support.kernels.paged_run import PagedRun
from tests.support.models.family_exactness import Logits, mean_errors
from tests.support.models.family_records import digest
from tests.support.models.oracle import NEAR_TIE

VOCAB_SIZE = 320
_SIZES: Mapping[tuple[str, ...], Any] = {
    ("vocab_size",): VOCAB_SIZE,
    ("hidden_size", "n_embd", "d_model", "embed_dim", "word_embed_proj_dim"): 64,
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"): 3,
    ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"): 4,
    ("num_key_value_heads", "num_kv_heads"): 2,
    ("head_dim", "attention_head_dim"): 16,
    ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim", "feed_forward_size"): 96,
    ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"): 256,
    ("sliding_window", "window_size", "attention_window_size"): 13,
    ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "expert_num"): 4,
    ("num_experts_per_tok", "moe_k", "moe_topk", "num_experts_per_token"): 2,
    ("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size", "shared_intermediate_size"): 32,
    ("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"): 1,
    ("q_lora_rank",): 24,
    ("kv_lora_rank",): 20,
    ("qk_nope_head_dim", "v_head_dim"): 16,
    ("qk_rope_head_dim",): 8,
    ("pad_token_id",): 0,
    ("bos_token_id",): 1,
    ("eos_token_id",): 2,
    ("use_cache", "return_dict", "scale_attn_weights", "is_decoder"): True,
}  # fmt: skip
"""Fields of configurations -> their values, in every class that has a field of this name with a value of this kind."""
FLOAT32 = 1e-3
"""Largest difference of a logit from that of `transformers`; the largest logits are near 10."""
_UNTIED = {"tie_word_embeddings": False}
"""Too few tokens differ if the embedding is the head."""
_WEIGHTS: Mapping[str, tuple[int, float]] = {
    "bert-generation": (0, 0.1),
    "camembert": (4, 0.25),
    "xlm-roberta": (4, 0.25),
}
"""Seed and standard deviation of matrices, where those of other families, 0 and 0.25, give one or two different tokens."""
_COMPASS = {kind: {"rope_type": "default", "rope_theta": 5000.0} for kind in ("full_attention", "sliding_attention")}
OWN: Mapping[str, Mapping[str, Any]] = {
    "biogpt": {"scale_embedding": False},
    "bert-generation": _UNTIED,
    "camembert": _UNTIED,
    "cohere_compass_text": {"rope_parameters": _COMPASS},
    "ctrl": {"dff": 160},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 5000.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_method": "greedy"},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"num_key_value_heads": 4},
    "electra": {"embedding_size": 64},
    "gemma4_assistant": {
        "text_config": {
            "model_type": "gemma4_text", "num_hidden_layers": 3, "num_kv_shared_layers": 3, "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0, "enable_moe_block": False, "use_double_wide_mlp": False,
        }
    },
    "gemma2": _UNTIED,
    "gemma3_text": _UNTIED,
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 8},
    "minimax_m3_vl_text": {"layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"]},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "olmo3": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "roc_bert": {
        **_UNTIED, "pronunciation_embed_dim": 8, "pronunciation_vocab_size": 20, "shape_embed_dim": 8, "shape_vocab_size": 20,
    },
    "xlm-roberta": _UNTIED,
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip
"""`model_type` -> values of its own, so that each kind of layer of published checkpoints is there."""
_WITHOUT_DEFAULTS = ("gemma4_assistant",)
"""Configurations that are valid with values of their own alone."""


def causal_families() -> Iterator[tuple[str, str]]:
    """`model_type` and architecture of each family; where two names have one configuration, the name that it writes."""
    for model_type, architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        written = CONFIG_MAPPING[model_type].model_type
        if written == model_type or written not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
            yield model_type, architecture


def tiny_config(model_type: str, **fields: Any) -> PreTrainedConfig:
    """A configuration of the family with small sizes. fields: values of the caller."""
    config_class = CONFIG_MAPPING[model_type]
    own = OWN.get(model_type, {})
    usual = config_class(**(own if model_type in _WITHOUT_DEFAULTS else {})).to_dict()
    given: dict[str, Any] = {}
    for names, value in _SIZES.items():
        for name in names:
            if name in usual and (usual[name] is not None or name.endswith("_token_id")):
                given[name] = value
    if "qk_rope_head_dim" in usual:  # multi-head latent attention
        given |= {name: size for name, size in (("head_dim", 8), ("num_key_value_heads", 4)) if name in usual}
    if "time_step_limit" in usual:
        given["time_step_limit"] = (0.0, 0.1)  # JSON has no infinity
    given |= {**own, **fields}
    return config_class(**deepcopy(given))


def configuration_digest(model_type: str) -> str:
    """The tiny configuration and its weights, as `tests.support.models.family_records` compares them."""
    own_weights = [_WEIGHTS[model_type]] if model_type in _WEIGHTS else []
    return digest(tiny_config(model_type).to_json_string(use_diff=False), *own_weights)


def refusal(folder: Path, model_type: str, architecture: str) -> str | None:
    """The reason for which a tiny model of the family is refused; None if it is served. Writes config.json into `folder`."""
    config = tiny_config(model_type)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    try:
        read_model_config(folder, "float32", "transformers")
    except UnsupportedModel as error:
        return error.message.partition(" is not served: ")[2] or error.message.partition("config.json: ")[2]
    return None


def make_any_family(folder: Path, model_type: str, dtype: str = "float32", **fields: Any) -> PreTrainedModel:
    """Write a random checkpoint into `folder`, without a tokenizer, and return the model, in float32 or rounded to `dtype`."""
    config = tiny_config(model_type, **fields)
    seed, std = _WEIGHTS.get(model_type, (0, 0.25))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")  # the default takes only sizes that are multiples of 8
        for name, weight in model.named_parameters():
            if weight.dim() >= 2:
                weight.normal_(std=std)
            elif name.endswith("bias"):
                weight.normal_(std=0.3)
            else:
                weight.add_(torch.empty_like(weight).uniform_(-0.4, 0.4))
    model.to(getattr(torch, dtype)).eval().save_pretrained(folder)
    return model


def float32_logits(folder: Path, model_type: str, model_impl: ModelImpl = "transformers", **fields: Any) -> Logits:
    """Logits of a new checkpoint in `folder`, as of `logits_of`."""
    return logits_of(folder, make_any_family(folder, model_type, **fields), model_impl)


def logits_of(folder: Path, model: PreTrainedModel, model_impl: ModelImpl = "transformers") -> Logits:
    """Logits of a greedy text of `generate`, beside another text in every step: two chunks each, and then token by token.

    model: of the checkpoint in `folder`, in float32.
    """
    prompt, other = (random.Random(seed).choices(range(3, VOCAB_SIZE), k=size) for seed, size in ((3, 48), (4, 51)))
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        text = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12, do_sample=False,
            eos_token_id=None, pad_token_id=0, use_cache=True,
        )[0].tolist()  # fmt: skip
        theirs = torch.cat([_whole(model, tokens) for tokens in (text, other)])
    best, chosen = theirs[47:59].max(-1).values, theirs[47:59].gather(1, torch.tensor(text[48:]).unsqueeze(1))
    assert (best - chosen.flatten() < NEAR_TIE).all(), "transformers differs from itself with its cache"
    run = PagedRun(load_model_decoder(folder, model_impl=model_impl), block_size=8)
    return Logits(_logits(run, text, other), theirs)


def _whole(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """With positions from 0 on, as in `generate`; without them a few families count from another."""
    positions = torch.arange(len(tokens)).unsqueeze(0)
    logits: Tensor = model(torch.tensor([tokens]), position_ids=positions, use_cache=False).logits[0].float()
    return logits


def _logits(run: PagedRun, text: list[int], other: list[int]) -> Tensor:
    steps = [
        run.step({}, {"b": other[:11]}),
        run.step({}, {"a": text[:37], "b": other[11:30]}),
        run.step({"b": other[30]}, {"a": text[37:48]}),
    ]
    steps += [run.step({"a": one, "b": two}, {}) for one, two in zip(text[48:59], other[31:42], strict=True)]
    steps += [run.step({"a": text[59]}, {"b": other[42:]})]
    return torch.cat([torch.cat([step[name] for step in steps if name in step]) for name in ("a", "b")])


def bfloat16_errors(folder: Path, model_type: str, **fields: Any) -> tuple[float, float]:
    """Mean error of a log-probability against the same rounded weights in float32: ours, that of `transformers`."""
    model = make_any_family(folder, model_type, "bfloat16", **fields)
    texts = [random.Random(seed).choices(range(VOCAB_SIZE), k=100) for seed in (3, 4)]
    return mean_errors(model, load_model_decoder(folder, model_impl="transformers"), texts)
