"""`NativeLibrary`: the compiled library, loaded into this process, or the reason why there is none."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from ctypes import POINTER, c_char_p, c_double, c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch

from pdserve.kernels.native.build_library import LIBRARY_FOLDER, library_name

NATIVE_DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""The dtypes that C++ reads -> their number in a call."""

_LOGGER = logging.getLogger(__name__)


class NativeLibraryError(Exception):
    """The library is not built, or cannot be loaded."""


class DecodeArguments(ctypes.Structure):
    """`DecodeArguments` of `paged_decode.h`, field by field."""

    _fields_ = (
        ("kv_cache", c_void_p), ("num_blocks", c_int64), ("num_kv_heads", c_int64), ("num_layers", c_int64),
        ("block_size", c_int64), ("head_dim", c_int64), ("dtype", c_int64),
        ("block_tables", c_void_p), ("table_stride", c_int64), ("table_width", c_int64), ("seq_lens", c_void_p),
        ("num_seqs", c_int64), ("group_size", c_int64), ("window", c_int64), ("chunk", c_int64),
        ("scale", c_double), ("softcap", c_double),
        ("q", c_void_p), ("q_stride", c_int64), ("q_head_stride", c_int64), ("out", c_void_p), ("layer", c_int64),
        ("piece_starts", c_void_p), ("partials", c_void_p), ("num_threads", c_int64), ("parallel", c_void_p),
    )  # fmt: skip


class PrefillArguments(ctypes.Structure):
    """`PrefillArguments` of `paged_prefill.h`, field by field."""

    _fields_ = (
        ("kv_cache", c_void_p), ("num_blocks", c_int64), ("num_kv_heads", c_int64), ("num_layers", c_int64),
        ("block_size", c_int64), ("head_dim", c_int64), ("dtype", c_int64),
        ("num_planes", c_int64), ("row_dim", c_int64), ("value_dim", c_int64), ("value_offset", c_int64),
        ("block_tables", c_void_p), ("table_stride", c_int64), ("table_width", c_int64),
        ("query_starts", c_void_p), ("seq_lens", c_void_p), ("num_chunks", c_int64),
        ("group_size", c_int64), ("window", c_int64), ("chunk", c_int64), ("is_causal", c_int64),
        ("scale", c_double), ("softcap", c_double),
        ("q", c_void_p), ("q_stride", c_int64), ("q_head_stride", c_int64), ("out", c_void_p), ("out_stride", c_int64),
        ("layer", c_int64), ("task_starts", c_void_p), ("rooms", c_void_p), ("piece_tokens", c_int64), ("partials", c_void_p),
        ("num_threads", c_int64), ("parallel", c_void_p),
    )  # fmt: skip


class LoraTokens(ctypes.Structure):
    """`LoraTokens` of `lora_rows.h`, field by field."""

    _fields_ = (("num_groups", c_int64), ("slots", c_void_p), ("starts", c_void_p), ("tokens", c_void_p))


class LoraCall(ctypes.Structure):
    """`LoraCall` of `lora_rows.h`, field by field."""

    _fields_ = (
        ("a", c_void_p), ("b", c_void_p), ("dtype", c_int64), ("in_size", c_int64), ("out_size", c_int64),
        ("num_products", c_int64), ("max_rank", c_int64), ("column_ends", c_void_p), ("ranks", c_void_p),
        ("x", c_void_p), ("y", c_void_p), ("x_stride", c_int64), ("y_stride", c_int64), ("tokens", POINTER(LoraTokens)),
        ("shrunk", c_void_p), ("num_threads", c_int64), ("parallel", c_void_p),
    )  # fmt: skip


class LayerCall(ctypes.Structure):
    """`LayerCall` of `layer_rows.h`, field by field."""

    _fields_ = (
        ("x", c_void_p), ("x_stride", c_int64), ("out", c_void_p), ("out_stride", c_int64),
        ("weight", c_void_p), ("phases", c_void_p), ("dtype", c_int64), ("weight_dtype", c_int64),
        ("num_rows", c_int64), ("num_heads", c_int64), ("size", c_int64), ("eps", c_double),
        ("num_threads", c_int64), ("parallel", c_void_p),
    )  # fmt: skip


class Int8Call(ctypes.Structure):
    """`Int8Call` of `int8_rows.h`, field by field."""

    _fields_ = (
        ("values", c_void_p), ("offsets", c_void_p), ("scales", c_void_p), ("bias", c_void_p),
        ("num_inputs", c_int64), ("num_outputs", c_int64), ("padded", c_int64), ("dtype", c_int64),
        ("x", c_void_p), ("num_rows", c_int64), ("x_stride", c_int64), ("out", c_void_p), ("out_stride", c_int64),
        ("adds", c_int64), ("rows", c_void_p), ("row_scales", c_void_p), ("num_threads", c_int64), ("parallel", c_void_p),
    )  # fmt: skip


class GroupedCall(ctypes.Structure):
    """`GroupedCall` of `grouped_rows.h`, field by field."""

    _fields_ = (
        ("words", c_void_p), ("scales", c_void_p), ("offsets", c_void_p), ("bias", c_void_p),
        ("bits", c_int64), ("num_inputs", c_int64), ("num_outputs", c_int64), ("group_size", c_int64), ("dtype", c_int64),
        ("x", c_void_p), ("num_rows", c_int64), ("x_stride", c_int64), ("out", c_void_p), ("float_out", c_void_p),
        ("out_stride", c_int64), ("adds", c_int64), ("rows", c_void_p), ("sums", c_void_p), ("num_threads", c_int64),
        ("parallel", c_void_p),
    )  # fmt: skip


class GroupedWeights(ctypes.Structure):
    """`GroupedWeights` of `grouped_rows.h`, field by field."""

    _fields_ = (
        ("first_block", c_int64), ("num_blocks", c_int64), ("out", c_void_p), ("stride", c_int64), ("dtype", c_int64),
    )  # fmt: skip


class BfloatMatrix(ctypes.Structure):
    """`BfloatMatrix` of `bfloat_rows.h`, field by field."""

    _fields_ = (
        ("values", c_void_p), ("bias", c_void_p), ("num_inputs", c_int64), ("num_outputs", c_int64), ("padded", c_int64),
    )  # fmt: skip


class BfloatCall(ctypes.Structure):
    """`BfloatCall` of `bfloat_rows.h`, field by field."""

    _fields_ = (
        ("matrix", BfloatMatrix), ("x", c_void_p), ("x_stride", c_int64), ("out", c_void_p),
        ("float_out", c_void_p), ("out_stride", c_int64), ("num_rows", c_int64), ("adds", c_int64),
        ("num_threads", c_int64), ("parallel", c_void_p),
    )  # fmt: skip


class ExpertsCall(ctypes.Structure):
    """`ExpertsCall` of `expert_rows.h`, field by field."""

    _fields_ = (
        ("gates", c_void_p), ("ups", c_void_p), ("downs", c_void_p), ("inner_biases", c_void_p), ("biases", c_void_p),
        ("num_experts", c_int64), ("hidden_size", c_int64), ("inner_size", c_int64), ("dtype", c_int64),
        ("alpha", c_float), ("limit", c_float), ("shift", c_float), ("parts", c_int32),
        ("x", c_void_p), ("num_tokens", c_int64), ("x_stride", c_int64), ("top_k", c_int64),
        ("experts", c_void_p), ("weights", c_void_p), ("out", c_void_p), ("starts", c_void_p), ("places", c_void_p),
        ("used", c_void_p), ("inner", c_void_p), ("sums", c_void_p), ("int8_gate_ups", c_void_p), ("int8_downs", c_void_p),
        ("rows", c_void_p), ("row_scales", c_void_p), ("num_threads", c_int64), ("parallel", c_void_p),
    )  # fmt: skip


class FusedNorm(ctypes.Structure):
    """`FusedNorm` of `fused_layers.h`, field by field."""

    _fields_ = (("weight", c_void_p), ("weight_dtype", c_int64), ("eps", c_double))


class FusedLayer(ctypes.Structure):
    """`FusedLayer` of `fused_layers.h`, field by field."""

    _fields_ = (
        ("qkv", BfloatMatrix), ("output", BfloatMatrix), ("gate_up", BfloatMatrix), ("down", BfloatMatrix),
        ("qk_norm", FusedNorm), ("mlp_norm", FusedNorm), ("next_norm", FusedNorm),
        ("spec", c_int64), ("rope", c_int64), ("index", c_int64), ("is_gated", c_int64),
    )  # fmt: skip


class FusedCall(ctypes.Structure):
    """`FusedCall` of `fused_layers.h`, field by field."""

    _fields_ = (
        ("layers", POINTER(FusedLayer)), ("num_layers", c_int64), ("num_rows", c_int64), ("hidden_size", c_int64),
        ("decodes", POINTER(POINTER(DecodeArguments))), ("chunks", POINTER(POINTER(PrefillArguments))),
        ("slots", POINTER(c_void_p)), ("phases", POINTER(c_void_p)), ("residual", c_void_p), ("x", c_void_p),
        ("output_rows", c_void_p),
        ("num_outputs", c_int64), ("qkv", c_void_p), ("attended", c_void_p), ("gate_up", c_void_p), ("inner", c_void_p),
        ("chosen", c_void_p), ("sums", c_void_p), ("num_threads", c_int64), ("parallel", c_void_p), ("barrier", c_void_p),
    )  # fmt: skip


class StatePool(ctypes.Structure):
    """`StatePool` of `state_rows.h`, field by field."""

    _fields_ = (
        ("states", c_void_p), ("num_heads", c_int64), ("num_layers", c_int64), ("head_size", c_int64), ("layer", c_int64),
        ("before", c_void_p), ("after", c_void_p), ("num_rows", c_int64), ("num_threads", c_int64), ("parallel", c_void_p),
    )  # fmt: skip


class ConvCall(ctypes.Structure):
    """`ConvCall` of `state_rows.h`, field by field."""

    _fields_ = (
        ("pool", StatePool), ("columns", c_void_p), ("columns_stride", c_int64), ("out", c_void_p), ("out_stride", c_int64),
        ("weight", c_void_p), ("bias", c_void_p), ("dtype", c_int64), ("taps", c_int64), ("num_channels", c_int64),
        ("has_silu", c_int64), ("runs", c_void_p), ("num_runs", c_int64),
    )  # fmt: skip


_RULE_INPUTS = 5
"""`MAX_RULE_INPUTS` of `state_rows.h`."""


class RuleCall(ctypes.Structure):
    """`RuleCall` of `state_rows.h`, field by field."""

    _fields_ = (
        ("pool", StatePool), ("first", c_int64), ("per_head", c_int64), ("matrix_rows", c_int64), ("matrix_columns", c_int64),
        ("num_decays", c_int64), ("inputs", c_void_p * _RULE_INPUTS), ("row_strides", c_int64 * _RULE_INPUTS),
        ("strides", c_int64 * _RULE_INPUTS), ("out", c_void_p),
    )  # fmt: skip


class NativeLibrary:
    """Functions of one library. Calls release the interpreter's lock."""

    def __init__(self, path: str) -> None:
        """path: of the library. Raises: NativeLibraryError."""
        try:
            library = ctypes.CDLL(path)
            self.plan_decode = library.pdserve_plan_decode
            self.paged_decode = library.pdserve_paged_decode
            self.plan_prefill = library.pdserve_plan_prefill
            self.paged_prefill = library.pdserve_paged_prefill
            self.prefill_room = library.pdserve_prefill_room
            self.prefill_partial = library.pdserve_prefill_partial
            self.add_lora = library.pdserve_add_lora
            self.layer_rows = library.pdserve_layer_rows
            self.multiply_rows = library.pdserve_multiply_rows
            self.multiply_bfloats = library.pdserve_multiply_bfloats
            self.multiply_grouped = library.pdserve_multiply_grouped
            self.widen_grouped = library.pdserve_widen_grouped
            self.fused_layers = library.pdserve_fused_layers
            self.fused_sum_rows = library.pdserve_fused_sum_rows
            self.apply_experts = library.pdserve_apply_experts
            self.convolve_states = library.pdserve_convolve_states
            self.change_states = library.pdserve_change_states
            level_names = library.pdserve_level_name, library.pdserve_int8_level_name
            sizes = {
                DecodeArguments: library.pdserve_call_size,
                PrefillArguments: library.pdserve_prefill_call_size,
                LoraCall: library.pdserve_lora_call_size,
                LayerCall: library.pdserve_layer_call_size,
                Int8Call: library.pdserve_int8_call_size,
                BfloatCall: library.pdserve_bfloat_call_size,
                GroupedCall: library.pdserve_grouped_call_size,
                GroupedWeights: library.pdserve_grouped_weights_size,
                FusedLayer: library.pdserve_fused_layer_size,
                FusedCall: library.pdserve_fused_call_size,
                ExpertsCall: library.pdserve_experts_call_size,
                ConvCall: library.pdserve_conv_call_size,
                RuleCall: library.pdserve_rule_call_size,
            }
        except (OSError, AttributeError) as error:
            raise NativeLibraryError(f"{path} cannot be loaded: {error}") from error
        self.plan_decode.argtypes, self.plan_decode.restype = [POINTER(DecodeArguments)], c_int64
        self.paged_decode.argtypes, self.paged_decode.restype = [POINTER(DecodeArguments), c_int64], c_int64
        self.plan_prefill.argtypes, self.plan_prefill.restype = [POINTER(PrefillArguments)], c_int64
        self.paged_prefill.argtypes, self.paged_prefill.restype = [POINTER(PrefillArguments), c_int64], c_int64
        self.prefill_room.argtypes, self.prefill_room.restype = [c_int64, c_int64], c_int64
        self.prefill_partial.argtypes, self.prefill_partial.restype = [c_int64], c_int64
        self.add_lora.argtypes, self.add_lora.restype = [POINTER(LoraCall), c_int64], None
        self.layer_rows.argtypes, self.layer_rows.restype = [POINTER(LayerCall), c_int64, c_int64], None
        self.multiply_rows.argtypes, self.multiply_rows.restype = [POINTER(Int8Call), c_int64], None
        self.multiply_bfloats.argtypes, self.multiply_bfloats.restype = [POINTER(BfloatCall), c_int64], None
        self.multiply_grouped.argtypes, self.multiply_grouped.restype = [POINTER(GroupedCall), c_int64], None
        self.widen_grouped.argtypes = [POINTER(GroupedCall), POINTER(GroupedWeights), c_int64]
        self.widen_grouped.restype = None
        self.fused_layers.argtypes, self.fused_layers.restype = [POINTER(FusedCall), c_int64], c_int64
        self.fused_sum_rows.argtypes, self.fused_sum_rows.restype = [c_int64], c_int64
        self.apply_experts.argtypes, self.apply_experts.restype = [POINTER(ExpertsCall), c_int64, c_int64], c_int64
        self.convolve_states.argtypes, self.convolve_states.restype = [POINTER(ConvCall), c_int64], None
        self.change_states.argtypes, self.change_states.restype = [POINTER(RuleCall), c_int64, c_int64], None
        for call, size in sizes.items():
            size.argtypes, size.restype = [], c_int64
            if size() != ctypes.sizeof(call):
                raise NativeLibraryError(f"{path} has arguments of {size()} bytes, not {ctypes.sizeof(call)}")
        self.levels, self.int8_levels = map(_names, level_names)
        """Instruction sets that this CPU has, the fastest first; `int8_levels` are those of products with int8 matrices."""
        self.parallel, self.barrier = _of_libgomp("GOMP_parallel"), _of_libgomp("GOMP_barrier")
        """Addresses of libgomp's functions; None: calls use one thread."""


def _names(level_name: Callable[[int], bytes | None]) -> list[str]:
    level_name.argtypes, level_name.restype = [c_int64], c_char_p  # type: ignore[attr-defined]
    found: list[str] = []
    while name := level_name(len(found)):
        found.append(name.decode())
    return found


def _of_libgomp(name: str) -> int | None:
    # torch has loaded OpenMP for all to see: its threads are used, since a second set of threads would compete for the cores
    try:
        return ctypes.cast(getattr(ctypes.CDLL(None), name), c_void_p).value
    except (OSError, AttributeError):
        return None


@cache
def load_library() -> NativeLibrary:
    """The library that was built of `sources`. Raises: NativeLibraryError saying why there is none."""
    path = LIBRARY_FOLDER / library_name()
    if not path.is_file():
        raise NativeLibraryError(
            "the native library is not built: install a C++ compiler, and run `python -m pdserve.kernels.native.build_library`"
        )
    return NativeLibrary(str(path))


def built_library() -> NativeLibrary | None:
    """`load_library`, or None where it is not built, with the reason in the log once per process."""
    try:
        return load_library()
    except NativeLibraryError as error:
        _log_reason(str(error))
        return None


@cache
def _log_reason(reason: str) -> None:
    _LOGGER.warning("products of experts and int8 matrices without C++, which is slower: %s", reason)
