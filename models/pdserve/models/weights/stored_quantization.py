"""`StoredQuantization`: how a checkpoint's matrices are quantized, from `quantization_config` of config.json.

One method is read, `compressed-tensors`, in the forms with one number per weight: eight bits, symmetric, one scale per output
channel or per matrix. Which matrices are quantized shows in the weight files: `NAME.weight_scale` stands next to `NAME.weight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdserve.common.errors import UnsupportedModel
from pdserve.common.json_file import MAX_CONFIG_BYTES
from pdserve.models.json_object import JsonObject

MODELOPT_FILE = "hf_quant_config.json"
"""Written next to config.json by NVIDIA's ModelOpt."""
METHOD = "compressed-tensors"
MXFP4 = "mxfp4"
"""Method of families that unpack their experts themselves."""
_FORMATS = {"int-quantized": "int", "float-quantized": "float", "naive-quantized": None}
"""Format -> type of its numbers; None: the groups say."""
_MAX_GROUPS = 64
_NOT_READ = ("kv_cache_scheme", "sparsity_config", "transform_config")
"""Parts that change the computation; empty or absent in what is read."""


@dataclass(frozen=True, slots=True)
class StoredQuantization:
    """Quantization of a checkpoint's matrices."""

    values: Literal["int8", "float8"]
    rounds_inputs: bool
    """True: inputs of int8 matrices are rounded too, per row, and products computed in integers; False: weights are widened to the
    served dtype at loading."""

    @classmethod
    def read(cls, config: JsonObject) -> StoredQuantization | None:
        """None for weights that are not quantized. Raises: ConfigError; UnsupportedModel naming the method or the field."""
        stored = config.child("quantization_config")
        if stored is None:
            return None
        method = stored.get("quant_method")
        if method != METHOD:
            named = (
                f"by {method[:80]}" if isinstance(method, str) else "by a method that it does not name (quant_method)"
            )
            raise UnsupportedModel(
                f"{stored.where}: weights are quantized {named}; {METHOD} is the method that is read"
            )
        for name in _NOT_READ:
            if stored.has(name) and stored.get(name) != {}:
                raise UnsupportedModel(f"{stored.where}: {name} is set, which is not read")
        form = stored.text("format")
        if form not in _FORMATS:
            raise UnsupportedModel(f"{stored.where}: format is {form[:80]!r}; read are {', '.join(_FORMATS)}")
        groups = stored.child("config_groups")
        if groups is None or not 1 <= len(groups.names) <= _MAX_GROUPS:
            raise stored.error("config_groups", f"an object with 1 to {_MAX_GROUPS} groups")
        found = {cls._group(group) for name in groups.names if (group := groups.child(name)) is not None}
        if len(found) != 1:
            raise UnsupportedModel(f"{groups.where}: groups are quantized in {len(found)} ways, one is read")
        [quantization] = found
        if _FORMATS[form] not in (None, quantization.values.removesuffix("8")):
            raise UnsupportedModel(f"{stored.where}: format is {form}, but weights are {quantization.values}")
        return quantization

    @classmethod
    def _group(cls, group: JsonObject) -> StoredQuantization:
        if group.get("targets") != ["Linear"]:
            raise _unread(group, "targets", '["Linear"]')
        weights = group.child("weights")
        if weights is None:
            raise group.error("weights", "an object")
        kind = _eight_bits(weights)
        if weights.text("strategy") not in ("channel", "tensor"):
            raise _unread(weights, "strategy", "channel and tensor")
        if weights.boolean("dynamic", False):
            raise _unread(weights, "dynamic", "false")
        inputs = group.child("input_activations")
        if inputs is not None and _eight_bits(inputs) != kind:
            raise _unread(inputs, "type", f"that of the weights, {kind}")
        if kind == "float":
            # rounding of inputs to eight-bit floats saves time on some GPUs, and nothing here
            return cls("float8", rounds_inputs=False)
        if inputs is not None and not (inputs.boolean("dynamic", False) and inputs.text("strategy") == "token"):
            raise UnsupportedModel(
                f"{inputs.where}: strategy {inputs.shown('strategy')}, dynamic {inputs.shown('dynamic')}; "
                "inputs of int8 weights are rounded per token, dynamically, or not at all"
            )
        return cls("int8", rounds_inputs=inputs is not None)


def _eight_bits(scheme: JsonObject) -> str:
    """The type of its numbers, `int` or `float`. Raises: UnsupportedModel for other numbers than symmetric ones of eight bits."""
    if scheme.integer("num_bits", 8) != 8:
        raise _unread(scheme, "num_bits", "8")
    if not scheme.boolean("symmetric", True):
        raise _unread(scheme, "symmetric", "true")
    kind = scheme.text("type", "int")
    if kind not in ("int", "float"):
        raise _unread(scheme, "type", "int and float")
    return kind


def _unread(scheme: JsonObject, name: str, values: str) -> UnsupportedModel:
    return UnsupportedModel(f"{scheme.where}: {name} is {scheme.shown(name)}; read is {values}")


def refuse_modelopt(folder: Path, config: JsonObject) -> None:
    """Refuse weights that ModelOpt has quantized, of which config.json may say nothing.

    Raises: UnsupportedModel naming the file and the field; ConfigError for a file that is not a JSON object.
    """
    path = folder / MODELOPT_FILE
    # as in vLLM, the file counts where config.json names no method
    if config.has("quantization_config") or not path.exists():
        return
    found = JsonObject.read(path, MAX_CONFIG_BYTES)
    stored = found.child("quantization") or found
    for name in ("quant_algo", "kv_cache_quant_algo"):
        if stored.has(name):
            raise UnsupportedModel(
                f"{stored.where}: {name} is {stored.shown(name)}: the folder was quantized by ModelOpt, which is not read; "
                f"{METHOD} is the method that is read"
            )
    if not stored.is_null("quant_algo"):
        raise UnsupportedModel(
            f"{stored.where}: quant_algo is missing: the folder was quantized by ModelOpt, and how is not said"
        )
