"""Hostile model folders: each loads and answers, or is refused with one `ConfigError`, within bounds.

`run(seconds, seed)` changes one file of a tiny checkpoint at a time, by structure and by bytes. The oracle: loading raises
nothing but `ConfigError`, in one short sentence that names the folder; a model that loads answers three tokens or ends the
request with an error of ours; no case takes long or much memory.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import hypothesis
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from pdserve.common.block_hash import BlockHasher
from pdserve.common.errors import ConfigError
from pdserve.common.request.engine_types import EngineCoreRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.common.settings.worker_settings import DecodeSettings
from pdserve.engine.make_engine_core import make_engine_core
from pdserve.engine.runner.loading.loaded_model import load_model
from pdserve.models.config.config_fields import HARMLESS, READ
from pdserve.models.config.family_fields import FAMILY_FIELDS
from pdserve.text.tokenization.tokenizer import Tokenizer

MAX_CASE_S = 5.0
"""CPU time of one case."""
MAX_GROWTH_BYTES = 256 << 20
"""Growth of the process, at its peak, over all cases."""
MAX_MESSAGE_CHARS = 1500
_EXAMPLES = 25
"""Cases between two looks at the clock."""
_WORDS = ["a", "b", "ab", "abab", "<s>", "</s>"]
_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": len(_WORDS), "hidden_size": 8,
    "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "torch_dtype": "float32",
    "eos_token_id": 5, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1000.0, "original_max_position_embeddings": 32},
}  # fmt: skip
_JSON: dict[str, dict[str, Any]] = {
    "config.json": _CONFIG,
    "generation_config.json": {"eos_token_id": [5], "temperature": 0.7, "top_k": 3, "do_sample": True},
    "tokenizer_config.json": {
        "eos_token": "</s>", "bos_token": {"content": "<s>"}, "chat_template": "{{ messages[0].content }}",
        "added_tokens_decoder": {"4": {"content": "<s>", "special": True}}, "additional_special_tokens": ["</s>"],
    },
    "special_tokens_map.json": {"eos_token": "</s>", "additional_special_tokens": [{"content": "<s>"}]},
}  # fmt: skip
_WEIGHTS, _INDEX, _SHARD = "model.safetensors", "model.safetensors.index.json", "model-1.safetensors"
_ROPE_FIELDS = ["type", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate",
                "short_factor", "long_factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"]  # fmt: skip
_ROPE_TYPES = ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "su"]
Case = tuple[str, bytes]
"""A file, and what stands in it."""


class Ran(NamedTuple):
    """Result of a run."""

    num_cases: int
    longest_s: float
    """CPU time of the longest case."""


def run(seconds: float, seed: int) -> Ran:
    """Run cases for about `seconds`, the same ones for the same `seed`.

    Raises: AssertionError, or what a case raised, with the smallest such case.
    """
    logger = logging.getLogger("pdserve")
    level = logger.level
    logger.setLevel(logging.ERROR)  # each odd field gives a warning
    ends_at = time.monotonic() + seconds
    count = num_loaded = 0
    longest_s = 0.0
    try:
        with tempfile.TemporaryDirectory() as name:
            folder = make_folder(Path(name) / "model")
            load_and_ask(folder)  # what the first use of everything takes is not a case's
            _reset_peak()
            before = _memory("VmRSS")
            while time.monotonic() < ends_at or count == 0:
                loaded, case_s = _cases(folder, seed + count)
                num_loaded += loaded
                longest_s = max(longest_s, case_s)
                count += _EXAMPLES
            growth = _memory("VmHWM") - before
    finally:
        logger.setLevel(level)
    assert growth < MAX_GROWTH_BYTES, f"{growth >> 20} MiB more at the peak"
    assert 0 < num_loaded < count, f"{num_loaded} of {count} folders loaded"
    return Ran(count, longest_s)


def make_folder(folder: Path) -> Path:
    """A whole checkpoint of some kilobytes."""
    folder.mkdir()
    for file, values in _JSON.items():
        (folder / file).write_text(json.dumps(values))
    backend = Backend(models.BPE({word: i for i, word in enumerate(_WORDS)}, [("a", "b"), ("ab", "ab")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_WORDS[4:])
    backend.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (6, 8),
        "lm_head.weight": (6, 8),
        "model.norm.weight": (8,),
    }
    for layer in range(2):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm.weight": (8,), f"{prefix}.post_attention_layernorm.weight": (8,),
            f"{prefix}.self_attn.q_proj.weight": (8, 8), f"{prefix}.self_attn.k_proj.weight": (4, 8),
            f"{prefix}.self_attn.v_proj.weight": (4, 8), f"{prefix}.self_attn.o_proj.weight": (8, 8),
            f"{prefix}.mlp.gate_proj.weight": (12, 8), f"{prefix}.mlp.up_proj.weight": (12, 8),
            f"{prefix}.mlp.down_proj.weight": (8, 12),
        }  # fmt: skip
    save_file({name: torch.randn(shape) for name, shape in shapes.items()}, folder / _WEIGHTS)
    return folder


def load_and_ask(folder: Path) -> bool:
    """True if the folder loads. Raises: AssertionError for an answer that is neither tokens nor an error of ours."""
    settings_of_worker = DecodeSettings(model=str(folder), block_size=4, num_blocks=16)
    try:
        tokenizer = Tokenizer.from_folder(folder)
        model = load_model(folder, settings_of_worker)
    except ConfigError as error:
        message = error.message
        assert str(folder) in message or "max_model_len" in message, message
        assert len(message) < MAX_MESSAGE_CHARS, message[:400]
        return False
    config = model.engine_config(settings_of_worker)
    hasher = BlockHasher(DEVELOPMENT_KEY, 4)
    core = make_engine_core(config, model.decoder, model.kv_caches, hasher, model.decoder.config.vocab_size)
    prompt = [token for token in tokenizer.encode("abab", add_special_tokens=True) if token < core.vocab_size] or [0]
    request = EngineCoreRequest(
        request_id="r",
        prompt_token_ids=prompt[: max(1, config.max_model_len - 3)],
        sampling_params=SamplingParams(max_tokens=3, seed=0, ignore_eos=True),
        eos_token_ids=tokenizer.eos_token_ids,
    )
    core.add_request(request)
    outputs = []
    while core.has_work:
        outputs += core.step().outputs
    token_ids = [token for output in outputs for token in output.new_token_ids]
    told = outputs[-1].error_message
    assert told or all(0 <= token < core.vocab_size for token in token_ids), (told, token_ids)
    return True


def _cases(folder: Path, seed: int) -> tuple[int, float]:
    """`_EXAMPLES` cases; returns how many folders loaded and the longest case, seconds. Whatever one changed is put back."""
    num_loaded = 0
    longest_s = 0.0

    @hypothesis.seed(seed)
    @settings(
        max_examples=_EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )
    @given(cases(folder))
    def check(case: Case) -> None:
        nonlocal num_loaded, longest_s
        with _changed(folder, *case):
            started_at = time.thread_time()
            num_loaded += load_and_ask(folder)
            took_s = time.thread_time() - started_at
            longest_s = max(longest_s, took_s)
            assert took_s < MAX_CASE_S

    check()
    return num_loaded, longest_s


@contextmanager
def _changed(folder: Path, file: str, content: bytes) -> Iterator[None]:
    """The folder with this file, for the time of a case. With an index, the weights are its only shard."""
    path, weights, shard = folder / file, folder / _WEIGHTS, folder / _SHARD
    original = path.read_bytes() if path.exists() else None
    path.write_bytes(content)
    if file == _INDEX:
        weights.rename(shard)
    try:
        yield
    finally:
        if original is None:
            path.unlink()
        else:
            path.write_bytes(original)
        if file == _INDEX:
            shard.rename(weights)


def cases(folder: Path) -> st.SearchStrategy[Case]:
    """Changed files, each with the name of its file."""
    files = [*_JSON, _WEIGHTS, "tokenizer.json"]
    changed: list[st.SearchStrategy[Case]] = [
        *(st.tuples(st.just(file), _changed_object(values)) for file, values in _JSON.items()),
        st.tuples(st.just("config.json"), _changed_rope()),
        st.tuples(st.just(_INDEX), _index()),
        st.tuples(st.just(_WEIGHTS), _changed_weights((folder / _WEIGHTS).read_bytes())),
        *(st.tuples(st.just(file), _changed_bytes((folder / file).read_bytes())) for file in files),
    ]
    return st.one_of(changed)


def _values() -> st.SearchStrategy[Any]:
    """JSON values that readers stumble on."""
    numbers = st.sampled_from([0, 1, -1, 2, 3, 4, 5, 7, 8, 63, 2**31, 2**63, 10**18, 10**400, 0.5, 1e-300, 1e300,
                               float("nan"), float("inf"), float("-inf"), -0.0])  # fmt: skip
    texts = st.sampled_from(["", "a", "\ud800", "silu", "\0", "../x", "{% for %}", "{{ 1/0 }}", "x" * 2000, "float16"])
    leaves = st.none() | st.booleans() | numbers | texts | st.integers() | st.floats()
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(texts | st.sampled_from(sorted(READ)), inner, max_size=4)
        ),
        max_leaves=8,
    )


def _changed_object(values: dict[str, Any]) -> st.SearchStrategy[bytes]:
    names = (
        st.sampled_from([*values, *sorted(READ)])
        | st.sampled_from(sorted(HARMLESS | FAMILY_FIELDS))
        | st.text(max_size=6)
    )

    def write(changes: dict[str, Any], removed: list[str]) -> bytes:
        changed = {name: value for name, value in (values | changes).items() if name not in removed}
        return _encoded(changed)

    return st.builds(
        write, st.dictionaries(names, _values(), max_size=3), st.lists(st.sampled_from([*values]), max_size=1)
    )


def _changed_rope() -> st.SearchStrategy[bytes]:
    fields = st.dictionaries(st.sampled_from([*_CONFIG["rope_parameters"], *_ROPE_FIELDS]), _values(), max_size=4)

    def write(kind: str, field: str, changes: dict[str, Any]) -> bytes:
        rope = _CONFIG["rope_parameters"] | {"rope_type": kind} | changes
        return _encoded(_CONFIG | {field: rope})

    return st.builds(write, st.sampled_from(_ROPE_TYPES), st.sampled_from(["rope_parameters", "rope_scaling"]), fields)


def _index() -> st.SearchStrategy[bytes]:
    """A map of weights to files, of which one is there."""
    files = st.sampled_from(
        [_SHARD, _SHARD, "model-2.safetensors", "../config.json", "/dev/zero", "", ".", "a\0b", "x" * 300]
    )
    named = st.dictionaries(st.sampled_from(["model.norm.weight", "lm_head.weight", ""]), files | _values(), max_size=3)
    return st.builds(lambda found: _encoded({"weight_map": found}), named | _values())


def _changed_weights(data: bytes) -> st.SearchStrategy[bytes]:
    """A header whose entries say something else, of the right or another length, before data that may be cut."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    entries = st.fixed_dictionaries(
        {},
        optional={
            "dtype": st.sampled_from(["F32", "F16", "BF16", "F64", "I8", "F4", "F8_E8M0", "C64", "?"]) | _values(),
            "shape": st.lists(st.sampled_from([0, 1, 6, 8, -1, 2**32, 2**62]), max_size=4) | _values(),
            "data_offsets": st.lists(st.sampled_from([0, 1, 16, 192, 2**40, 2**63, -8]), min_size=2, max_size=2)
            | _values(),
        },
    )
    names = st.sampled_from([name for name in header if name != "__metadata__"])
    lengths = st.none() | st.sampled_from([0, 1, 8, 2**20, 2**32, 2**63, 2**64 - 1])

    def write(changes: dict[str, dict[str, Any]], more: Any, new_length: int | None, cut: int, noise: bytes) -> bytes:
        changed = {name: entry | changes.get(name, {}) for name, entry in header.items()}
        if more is not None:
            changed["__metadata__"] = more
        text = _encoded(changed)
        new_body = noise + body[len(noise) : len(body) - cut]
        return (len(text) if new_length is None else new_length).to_bytes(8, "little") + text + new_body

    return st.builds(
        write, st.dictionaries(names, entries, max_size=3), st.none() | _values(), lengths,
        st.sampled_from([0, 0, 0, 1, 100]), st.binary(max_size=16),
    )  # fmt: skip


def _changed_bytes(data: bytes) -> st.SearchStrategy[bytes]:
    """Some bytes replaced, repeated or taken out."""

    def write(place: int, length: int, piece: bytes, times: int) -> bytes:
        place %= len(data) + 1
        return data[:place] + piece * times + data[place + length :]

    pieces = st.binary(max_size=8) | st.sampled_from([b"[", b'{"a":', b"\xff", b'"', b"}", b"1e9", b"-", b"\\ud800"])
    places = st.integers(min_value=0, max_value=1 << 16)
    return st.builds(write, places, st.integers(min_value=0, max_value=64), pieces, st.sampled_from([0, 1, 1, 1, 5000]))


def _encoded(value: Any) -> bytes:
    return json.dumps(value).encode()


def _memory(field: str) -> int:
    """Bytes of this process: `VmRSS` now, `VmHWM` at its peak."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) << 10


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
