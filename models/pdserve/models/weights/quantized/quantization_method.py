"""`QuantizationMethod`: how a checkpoint stores its matrices, from `quantization_config` of config.json or ModelOpt's own file.

Which matrices are quantized shows in the weight files, by the tensors that stand next to each; lists of layers that are left out
say the same once more. The configuration says what the tensors do not: the number of bits, what zeros mean, blocks of scales.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.json_file import MAX_CONFIG_BYTES
from pdserve.models.json_object import JsonObject
from pdserve.models.weights.checkpoint import Checkpoint
from pdserve.models.weights.quantized.four_bit_floats import FourBitFloats, StackedFourBitFloats
from pdserve.models.weights.quantized.looked_up_matrix import STATE, LookedUpMatrix
from pdserve.models.weights.quantized.packed_integers import AwqMatrix, GptqMatrix, PackedRows
from pdserve.models.weights.quantized.scaled_matrix import ScaledMatrix
from pdserve.models.weights.quantized.stored_matrix import CheckpointMatrix

MODELOPT_FILE = "hf_quant_config.json"
"""Written next to config.json by NVIDIA's ModelOpt."""
_MAX_GROUPS = 64
_CACHE_SCALES = re.compile(r".*\.(k_scale|v_scale|kv_scale|q_scale|prob_scale)")
"""Of keys and values in an eight-bit cache."""


@dataclass(frozen=True)
class QuantizationMethod(ABC):
    """How one `quant_method` stores matrices."""

    has_cache_scales: bool = False
    """True: the checkpoint may have scales for keys and values in an eight-bit cache, which are not applied here."""

    @abstractmethod
    def matrices(self, checkpoint: Checkpoint) -> Mapping[str, CheckpointMatrix]:
        """Name of a widened weight -> the matrix. Raises: ConfigError, UnsupportedModel."""

    def unused(self, checkpoint: Checkpoint) -> set[str]:
        """Names of tensors that belong to no weight."""
        if not self.has_cache_scales:
            return set()
        return {name for name in checkpoint.names if _CACHE_SCALES.fullmatch(name)}


def read_quantization(config: JsonObject, folder: Path) -> QuantizationMethod | None:
    """None for weights that are not quantized. Raises: ConfigError; UnsupportedModel naming the method or the field."""
    stored = config.child("quantization_config")
    if stored is None:
        path = folder / MODELOPT_FILE
        if not path.exists():
            return None
        # as in vLLM, the file counts where config.json names no method
        found = JsonObject.read(path, MAX_CONFIG_BYTES)
        return _modelopt(found.child("quantization") or found)
    method = stored.get("quant_method")
    if method is None and stored.has("quant_algo"):
        method = "modelopt"
    if not isinstance(method, str) or method not in _METHODS:
        named = f"by {method[:80]}" if isinstance(method, str) else "by a method that it does not name (quant_method)"
        raise UnsupportedModel(f"{stored.where}: weights are quantized {named}; read are {', '.join(_METHODS)}")
    return _METHODS[method](stored)


def _stems(checkpoint: Checkpoint, ending: str) -> Iterator[str]:
    """Names that have this ending, without it."""
    for name in checkpoint.names:
        if name.endswith(ending):
            yield name.removesuffix(ending)


def _present(checkpoint: Checkpoint, stem: str, endings: Sequence[str]) -> list[str]:
    names = set(checkpoint.names)
    return [f"{stem}{ending}" for ending in endings if f"{stem}{ending}" in names]


def _refused(stored: JsonObject, name: str, read: str) -> UnsupportedModel:
    return UnsupportedModel(f"{stored.where}: {name} is {stored.shown(name)}; read is {read}")


def _group_size(stored: JsonObject, name: str) -> int:
    """Inputs of a group; 0 for -1, all inputs."""
    return 0 if stored.get(name) == -1 else stored.integer(name, 128)


@dataclass(frozen=True)
class ScaledFloats(QuantizationMethod):
    """Eight-bit floats with scales: `fp8` of DeepSeek V3 and others, `fbgemm_fp8`, FP8 of ModelOpt."""

    block: tuple[int, int] | None = None
    """Rows and columns of a scale; None: what the shape of the scales says."""

    @classmethod
    def read(cls, stored: JsonObject) -> ScaledFloats:
        block = stored.items("weight_block_size")
        if block is not None and not (
            len(block) == 2 and all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in block)
        ):
            raise stored.error("weight_block_size", "two positive numbers")
        if stored.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise _refused(stored, "fmt", '"e4m3"')
        for name in ("expert_dtype", "moe_quant_algo"):
            if stored.has(name):
                raise UnsupportedModel(f"{stored.where}: {name} is {stored.shown(name)}, which is not read")
        return cls(block=None if block is None else (int(str(block[0])), int(str(block[1]))))

    def matrices(self, checkpoint: Checkpoint) -> Mapping[str, CheckpointMatrix]:
        found: dict[str, CheckpointMatrix] = {}
        for ending in (".weight_scale_inv", ".weight_scale"):
            for stem in _stems(checkpoint, ending):
                weight = f"{stem}.weight"
                tensors = [
                    weight,
                    *_present(checkpoint, stem, (ending, ".input_scale", ".activation_scale", ".input_scale_ub")),
                ]
                # scales of a block do not show whether they are of rows
                block = (
                    self.block
                    if ending == ".weight_scale_inv" or len(checkpoint.shape(f"{stem}{ending}")) == 2
                    else None
                )
                found[weight] = ScaledMatrix(checkpoint, weight, f"{stem}{ending}", block, tensors)
        return found


@dataclass(frozen=True)
class ModelOptMixed(ScaledFloats):
    """FP8 and NVFP4 of ModelOpt, by layer."""

    def matrices(self, checkpoint: Checkpoint) -> Mapping[str, CheckpointMatrix]:
        found: dict[str, CheckpointMatrix] = {}
        for stem in _stems(checkpoint, ".weight_scale"):
            weight, scales = f"{stem}.weight", f"{stem}.weight_scale"
            tensors = [weight, *_present(checkpoint, stem, (".weight_scale", ".weight_scale_2", ".input_scale"))]
            if _present(checkpoint, stem, (".pre_quant_scale",)):
                raise UnsupportedModel(
                    f"{checkpoint.where(weight)}: pre_quant_scale is there, which is not read (AWQ by ModelOpt)"
                )
            if f"{stem}.weight_scale_2" in tensors:
                factor = checkpoint.number(f"{stem}.weight_scale_2")
                found[weight] = FourBitFloats(checkpoint, weight, scales, factor, tensors)
            else:
                found[weight] = ScaledMatrix(checkpoint, weight, scales, None, tensors)
        return found


def _modelopt(stored: JsonObject) -> QuantizationMethod:
    """Source: ModelOpt's `hf_quant_config.json`, whose fields config.json repeats in newer folders; null says that matrices are not
    quantized."""
    if stored.is_null("quant_algo"):
        return ModelOptMixed(has_cache_scales=True)
    algorithm = stored.text("quant_algo")
    if algorithm not in ("FP8", "NVFP4", "MIXED_PRECISION"):
        raise _refused(stored, "quant_algo", "FP8, NVFP4 and MIXED_PRECISION of both")
    if stored.has("group_size") and algorithm != "FP8" and stored.integer("group_size") != 16:
        raise _refused(stored, "group_size", "16")
    has_scales = any(stored.has(name) for name in ("kv_cache_quant_algo", "kv_cache_scheme"))
    return ModelOptMixed(has_cache_scales=has_scales)


@dataclass(frozen=True)
class CompressedTensors(QuantizationMethod):
    """All forms of compressed-tensors with weights that are widened, mixed by layer."""

    packed: tuple[tuple[int, int], ...] = ()
    """Bits of packed integers, and inputs of a group, 0 for a whole row, in the order of the configuration."""
    rounds_inputs: bool = False
    """True: inputs of int8 matrices are rounded too, per row, and products computed in integers."""
    block: tuple[int, int] | None = None

    @classmethod
    def read(cls, stored: JsonObject) -> CompressedTensors:
        for name in ("sparsity_config", "transform_config"):
            if stored.has(name) and stored.get(name) != {}:
                raise UnsupportedModel(f"{stored.where}: {name} is set, which is not read")
        groups = stored.child("config_groups")
        if groups is None or not 1 <= len(groups.names) <= _MAX_GROUPS:
            raise stored.error("config_groups", f"an object with 1 to {_MAX_GROUPS} groups")
        packed, rounding, blocks = [], set(), set()
        for name in groups.names:
            group = groups.child(name)
            weights = None if group is None else group.child("weights")
            if group is None or weights is None:
                raise groups.error(name, "a group with weights")
            form = group.text("format", stored.text("format"))
            if form not in _FORMATS:
                raise UnsupportedModel(f"{stored.where}: format is {form[:80]!r}; read are {', '.join(_FORMATS)}")
            kind, width = weights.text("type", "int"), weights.integer("num_bits", 8)
            if (kind, width) not in _FORMATS[form]:
                raise UnsupportedModel(
                    f"{weights.where}: {width} bits of type {kind}, which format {form} does not have"
                )
            if weights.get("dynamic") not in (None, False):
                raise _refused(weights, "dynamic", "false")
            if weights.text("strategy", "tensor") not in ("tensor", "channel", "group", "block", "tensor_group"):
                raise _refused(weights, "strategy", "tensor, channel, group, block or tensor_group")
            strategy = weights.text("strategy", "tensor")
            size = weights.integer("group_size") if strategy in ("group", "tensor_group") else 0
            if form == "pack-quantized":
                packed.append((width, size))
            elif not weights.boolean("symmetric", True):
                raise _refused(weights, "symmetric", "true")
            if strategy == "group" and width == 8 and form != "pack-quantized":
                blocks.add((1, size))
            if weights.has("block_structure") and strategy == "block":
                structure = (
                    weights.items("block_structure") if isinstance(weights.get("block_structure"), list) else None
                )
                if structure is None or len(structure) != 2 or not all(isinstance(size, int) for size in structure):
                    raise weights.error("block_structure", "two numbers")
                blocks.add((int(str(structure[0])), int(str(structure[1]))))
            rounding.add(_rounds_inputs(group, kind, width))
        if len(rounding) > 1 or len(blocks) > 1:
            raise UnsupportedModel(
                f"{groups.where}: groups are quantized in {max(len(rounding), len(blocks))} ways, one is read"
            )
        return cls(
            stored.has("kv_cache_scheme"),
            tuple(dict.fromkeys(packed)),
            rounding.pop(),
            blocks.pop() if blocks else None,
        )

    def matrices(self, checkpoint: Checkpoint) -> Mapping[str, CheckpointMatrix]:
        found: dict[str, CheckpointMatrix] = {}
        inputs = (".input_scale", ".input_global_scale", ".input_zero_point")
        for stem in _stems(checkpoint, ".weight_packed"):
            weight, packed = f"{stem}.weight", f"{stem}.weight_packed"
            if checkpoint.dtype(packed) == "U8":
                tensors = [
                    packed,
                    *_present(checkpoint, stem, (".weight_scale", ".weight_global_scale", ".weight_shape", *inputs)),
                ]
                divisor = f"{stem}.weight_global_scale"
                factor = 1.0 / checkpoint.number(divisor) if divisor in tensors else None
                found[weight] = FourBitFloats(checkpoint, packed, f"{stem}.weight_scale", factor, tensors)
                continue
            tensors = [
                packed,
                *_present(
                    checkpoint, stem, (".weight_scale", ".weight_shape", ".weight_zero_point", ".weight_g_idx", *inputs)
                ),
            ]
            found[weight] = PackedRows(checkpoint, stem, *self._packing_of(checkpoint, stem), tensors)
        for stem in _stems(checkpoint, ".weight_scale"):
            weight = f"{stem}.weight"
            if weight not in found:
                tensors = [weight, *_present(checkpoint, stem, (".weight_scale", ".weight_zero_point", *inputs))]
                rounds = self.rounds_inputs and checkpoint.dtype(weight) == "I8"
                found[weight] = ScaledMatrix(
                    checkpoint, weight, f"{stem}.weight_scale", self.block, tensors, rounds_inputs=rounds
                )
        return found

    def _packing_of(self, checkpoint: Checkpoint, stem: str) -> tuple[int, int]:
        """Bits and group of the configuration with which the matrix and its scales have these lengths."""
        columns = int(checkpoint.read(f"{stem}.weight_shape", (2,), ("I32", "I64"))[1])
        length = checkpoint.shape(f"{stem}.weight_packed")[1]
        fitting = [(bits, size) for bits, size in self.packed if -(-columns // (32 // bits)) == length]
        groups = checkpoint.shape(f"{stem}.weight_scale")[-1]
        for bits, size in fitting:
            if -(-columns // (size or columns)) == groups:
                return bits, size
        if fitting:
            return fitting[0]
        raise ConfigError(
            f"{checkpoint.where(f'{stem}.weight_packed')} has {length} numbers in a row, which {columns} numbers of "
            f"{' or '.join(str(bits) for bits, _ in self.packed)} bits do not fill"
        )


_FORMATS: Mapping[str, set[tuple[str, int]]] = {
    "int-quantized": {("int", 8)},
    "float-quantized": {("float", 8)},
    "naive-quantized": {("int", 8), ("float", 8)},
    "pack-quantized": {("int", 4), ("int", 8)},
    "nvfp4-pack-quantized": {("float", 4)},
    "mxfp4-pack-quantized": {("float", 4)},
    "mixed-precision": {("int", 8), ("float", 8), ("int", 4), ("float", 4)},
}
"""Format -> (type, bits) of its numbers."""


def _rounds_inputs(group: JsonObject, kind: str, width: int) -> bool:
    """True: products of int8 numbers are computed in integers; rounding of inputs to other numbers saves time on some GPUs only."""
    inputs = group.child("input_activations")
    if inputs is None or (kind, width) != ("int", 8) or group.get("format") == "pack-quantized":
        return False
    if (inputs.text("type", "int"), inputs.integer("num_bits", 8)) != ("int", 8):
        return False
    if not (inputs.boolean("dynamic", False) and inputs.text("strategy") == "token"):
        raise UnsupportedModel(
            f"{inputs.where}: strategy {inputs.shown('strategy')}, dynamic {inputs.shown('dynamic')}; "
            "inputs of int8 weights are rounded per token, dynamically, or not at all"
        )
    return True


@dataclass(frozen=True)
class Gptq(QuantizationMethod):
    """GPTQ, in the first and the second form."""

    bits: int = 4
    group_size: int = 0
    """0: all inputs."""
    zero_offset: int = 1
    """Added to stored zeros."""

    @classmethod
    def read(cls, stored: JsonObject) -> Gptq:
        bits = stored.integer("bits")
        if bits not in (2, 4, 8):
            raise _refused(stored, "bits", "2, 4 and 8")
        form = stored.text("checkpoint_format", "gptq")
        if form not in ("gptq", "gptq_v2"):
            raise _refused(stored, "checkpoint_format", "gptq and gptq_v2")
        return cls(bits=bits, group_size=_group_size(stored, "group_size"), zero_offset=int(form == "gptq"))

    def matrices(self, checkpoint: Checkpoint) -> Mapping[str, CheckpointMatrix]:
        return {
            f"{stem}.weight": GptqMatrix(
                checkpoint, stem, self.bits, self.group_size, self.zero_offset,
                _present(checkpoint, stem, (".qweight", ".qzeros", ".scales", ".g_idx")),
            )
            for stem in _stems(checkpoint, ".qweight")
        }  # fmt: skip


@dataclass(frozen=True)
class Awq(QuantizationMethod):
    """AWQ, in the order of its GEMM kernel."""

    group_size: int = 0
    """0: all inputs."""

    @classmethod
    def read(cls, stored: JsonObject) -> Awq:
        if stored.integer("bits", stored.integer("w_bit", 4)) != 4:
            raise _refused(stored, "bits", "4")
        if stored.text("version", "gemm").lower() != "gemm":
            raise _refused(stored, "version", '"gemm"')
        if not stored.boolean("zero_point", True):
            raise _refused(stored, "zero_point", "true")
        return cls(group_size=_group_size(stored, "q_group_size" if stored.has("q_group_size") else "group_size"))

    def matrices(self, checkpoint: Checkpoint) -> Mapping[str, CheckpointMatrix]:
        return {
            f"{stem}.weight": AwqMatrix(
                checkpoint, stem, self.group_size, _present(checkpoint, stem, (".qweight", ".qzeros", ".scales"))
            )
            for stem in _stems(checkpoint, ".qweight")
        }


@dataclass(frozen=True)
class BitsAndBytes(QuantizationMethod):
    """Four bits as bitsandbytes stores them."""

    @classmethod
    def read(cls, stored: JsonObject) -> BitsAndBytes:
        if not stored.boolean("load_in_4bit", stored.boolean("_load_in_4bit", False)):
            raise UnsupportedModel(
                f"{stored.where}: load_in_4bit is {stored.shown('load_in_4bit')}; read are weights that are stored in four bits"
            )
        return cls()

    def matrices(self, checkpoint: Checkpoint) -> Mapping[str, CheckpointMatrix]:
        found: dict[str, CheckpointMatrix] = {}
        for name in checkpoint.names:
            weight, separator, _ = name.partition(f".{STATE}")
            if separator:
                others = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
                found[weight] = LookedUpMatrix(
                    checkpoint, weight, name, [weight, name, *_present(checkpoint, weight, others)]
                )
        return found


@dataclass(frozen=True)
class Mxfp4(QuantizationMethod):
    """Stacked experts of gpt-oss."""

    @classmethod
    def read(cls, stored: JsonObject) -> Mxfp4:
        return cls()

    def matrices(self, checkpoint: Checkpoint) -> Mapping[str, CheckpointMatrix]:
        return {
            stem: StackedFourBitFloats(
                checkpoint, f"{stem}_blocks", f"{stem}_scales", [f"{stem}_blocks", f"{stem}_scales"]
            )
            for stem in _stems(checkpoint, "_blocks")
        }


_METHODS: Mapping[str, Callable[[JsonObject], QuantizationMethod]] = {
    "compressed-tensors": CompressedTensors.read,
    "fp8": ScaledFloats.read,
    "fbgemm_fp8": ScaledFloats.read,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "awq": Awq.read,
    "gptq": Gptq.read,
    "bitsandbytes": BitsAndBytes.read,
    "mxfp4": Mxfp4.read,
}
"""`quant_method` -> its reader."""
