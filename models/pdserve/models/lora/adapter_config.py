"""`AdapterConfig`: adapter_config.json of a PEFT folder. A field of other mathematics is refused by name."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.json_file import parse_json_object
from pdserve.models.config.family_fields import words
from pdserve.models.json_object import JsonObject

CONFIG_FILE = "adapter_config.json"
_READ = frozenset(
    {"peft_type", "r", "lora_alpha", "target_modules", "use_rslora", "task_type", "bias", "init_lora_weights"}
)
_HARMLESS = words(
    """
    auto_mapping base_model_name_or_path revision inference_mode peft_version lora_dropout exclude_modules
    layers_to_transform layers_pattern megatron_core eva_config runtime_config qalora_group_size
    """
)
"""Fields of training, of bookkeeping, and those that decide which modules have tensors, which the tensors show."""
_WITHOUT_OTHER_BASE = (True, False, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model as it is; others train with changed base weights."""
_CAUSAL = "CAUSAL_LM"


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """An adapter's settings."""

    rank: int
    """r, of every product."""
    scale: float
    """`lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora`."""
    target_modules: tuple[str, ...] | None
    """Names or ends of names of the modules that have tensors; None: a pattern, so that only the tensors show it."""

    @classmethod
    def parse(cls, data: bytes, where: str, max_rank: int) -> AdapterConfig:
        """where: the file, for messages. Raises: ConfigError naming field and value; UnsupportedModel for other mathematics."""
        config = JsonObject(parse_json_object(data, where), where)
        _refuse_others(config)
        rank = config.integer("r")
        if rank > max_rank:
            raise ConfigError(f"{config.where}: r is {rank}, max_lora_rank is {max_rank}")
        alpha = config.number("lora_alpha")
        rank_stabilized = config.boolean("use_rslora", False)
        return cls(rank, alpha / (math.sqrt(rank) if rank_stabilized else rank), _target_modules(config))


def _refuse_others(config: JsonObject) -> None:
    if config.get("peft_type") != "LORA":
        raise UnsupportedModel(f"{config.where}: peft_type is {config.shown('peft_type')}, only LORA is served")
    if config.get("task_type") not in (None, _CAUSAL):
        raise UnsupportedModel(f"{config.where}: task_type is {config.shown('task_type')}, only {_CAUSAL} is served")
    if config.get("bias") not in (None, "none"):
        raise UnsupportedModel(f"{config.where}: bias is {config.shown('bias')}, only none is served")
    if config.get("init_lora_weights") not in (None, *_WITHOUT_OTHER_BASE):
        raise UnsupportedModel(
            f"{config.where}: init_lora_weights is {config.shown('init_lora_weights')}, which changes the base model's weights; "
            "convert the adapter with PEFT (path_initial_model_for_weight_conversion)"
        )
    for name in config.names:
        value = config.get(name)
        if name not in _READ | _HARMLESS and value is not False and value not in (None, "", [], {}):
            raise UnsupportedModel(f"{config.where}: {name[:80]} is {config.shown(name)}, which is not served")


def _target_modules(config: JsonObject) -> tuple[str, ...] | None:
    value = config.get("target_modules")
    if value is None or isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise config.error("target_modules", "a list of names")
    return tuple(value)
