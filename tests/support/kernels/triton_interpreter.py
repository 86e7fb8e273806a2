"""Runs Triton kernels on a CPU, and finds what Triton's own interpreter hides.

`interpreted` replaces the launch of every `@triton.jit` function while it is open, so it does not matter which module was imported
first, `TRITON_INTERPRET` is not needed, and kernels still compile after it. Beyond Triton's interpreter:

| check | finds |
|---|---|
| addresses | a load or store outside the tensors of the launch: `OutOfBounds` |
| races | a byte that two programs of one launch touch, one of them writing, or that one store names twice: `Race` |
| order | programs run in random order |
| bfloat16 | Triton computes on its bits as integers: here a product widens, a cast rounds to nearest even; else `Bfloat16Error` |
| float8 | Triton rounds some numbers wrongly: here a cast to e4m3 rounds to nearest even, and to the largest number |
| tf32 | a float32 product rounds its operands as tensor cores do, unless it names another precision |
| masked loads | without `other` their masked numbers are undefined: NaN, or the smallest integer |
| fresh tensors | `torch.empty` and the like return NaN, or the largest integer |
"""

from __future__ import annotations

import importlib
import mmap
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
from triton.runtime.jit import JITFunction


class KernelFault(Exception):
    """A kernel did what is wrong, or undefined, on a GPU."""


class OutOfBounds(KernelFault):
    """An address lies in no tensor of the launch."""


class Race(KernelFault):
    """The result depends on the order of programs."""


class Bfloat16Error(KernelFault):
    """Arithmetic on bfloat16 that the interpreter cannot do: convert to float32 first, which is free on a GPU."""


_NOBODY, _MANY = 0, -1
_MAP_NORESERVE = 0x4000
"""Linux's, which `mmap` names from Python 3.13 on."""
_LARGEST_FRESH = 1 << 24
"""Larger fresh tensors are left as they are: to fill them would make their pages resident."""


class LaunchMemory:
    """The bytes that one launch may touch, and which program read and wrote each. Programs are numbered from 1."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        spans: list[tuple[int, int]] = []
        for first, stop in sorted(_span(tensor) for tensor in tensors if tensor.numel()):
            if spans and first < spans[-1][1]:
                spans[-1] = (spans[-1][0], max(spans[-1][1], stop))
            else:
                spans.append((first, stop))
        self._firsts = np.array([first for first, _ in spans], np.int64)
        self._stops = np.array([stop for _, stop in spans], np.int64)
        sizes = self._stops - self._firsts
        self._bases = sizes.cumsum() - sizes
        self._readers, self._writers = (_zeros(int(sizes.sum())) for _ in range(2))

    def read(self, program: int, addresses: NDArray[np.int64], num_bytes: int) -> None:
        places = self._places(addresses, num_bytes)
        _refuse_other(self._writers[places], program, f"program {program} reads what program %d writes")
        readers = self._readers[places]
        self._readers[places] = np.where((readers == _NOBODY) | (readers == program), program, _MANY)

    def write(self, program: int, addresses: NDArray[np.int64], num_bytes: int) -> None:
        places = self._places(addresses, num_bytes)
        if len(np.unique(places)) < len(places):
            raise Race(f"program {program} stores to one address twice in one store")
        _refuse_other(self._writers[places], program, f"program {program} writes what program %d writes")
        _refuse_other(self._readers[places], program, f"program {program} writes what program %d reads")
        self._writers[places] = program

    def update(self, program: int, addresses: NDArray[np.int64], num_bytes: int) -> None:
        """Atomic operations are no race among themselves; beside plain loads and stores they are."""
        places = self._places(addresses, num_bytes)
        writers = self._writers[places]
        _refuse_other(np.where(writers == _MANY, _NOBODY, writers), program, "an atomic changes what program %d writes")
        _refuse_other(self._readers[places], program, "an atomic changes what program %d reads")
        self._writers[places] = _MANY

    def _places(self, addresses: NDArray[np.int64], num_bytes: int) -> NDArray[np.int64]:
        """Index into readers and writers of each byte."""
        if not len(addresses):
            return addresses
        spans = np.searchsorted(self._firsts, addresses, side="right") - 1
        outside = spans < 0
        outside |= addresses + num_bytes > self._stops[spans] if len(self._stops) else True
        if outside.any():
            raise OutOfBounds(f"{int(outside.sum())} of {len(addresses)} addresses lie in no tensor of the launch")
        starts = self._bases[spans] + addresses - self._firsts[spans]
        places: NDArray[np.int64] = np.add.outer(starts, np.arange(num_bytes)).reshape(-1)
        return places


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _zeros(size: int) -> NDArray[np.int32]:
    """Zeros of which only touched pages take memory, also where the system promises no more than it has."""
    if size < 1 << 20:
        return np.zeros(size, np.int32)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size * 4, flags=flags), np.int32)


def _refuse_other(programs: NDArray[np.int32], program: int, message: str) -> None:
    others = programs[(programs != _NOBODY) & (programs != program)]
    if len(others):
        raise Race(message % others[0])


class _Launches:
    """The launch under way. One thread launches."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.memory = LaunchMemory([])
        self.program = _NOBODY
        self.order: NDArray[np.int64] = np.arange(0)

    def begin(self, arguments: Sequence[Any]) -> None:
        self.memory = LaunchMemory(list(_tensors(arguments)))

    def shuffle(self, num_programs: int) -> None:
        self.order = self.random.permutation(num_programs)


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)
        elif hasattr(value, "base"):  # a tensor descriptor, or a tensor seen with another dtype
            yield from _tensors([value.base])


class FreshIsNan(TorchFunctionMode):
    """Fills what torch leaves uninitialized, so that a result that no kernel wrote shows."""

    FRESH = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in self.FRESH and made.numel() <= _LARGEST_FRESH:
            dtype = made.dtype
            made.fill_(torch.nan if dtype.is_floating_point else dtype == torch.bool or torch.iinfo(dtype).max)
        return made


_active: dict[int, _Launches] = {}
"""At 0, while `interpreted` is open."""


@contextmanager
def interpreted(seed: int = 0) -> Iterator[None]:
    """Launch every kernel in the interpreter, with all checks.

    seed: of the order of programs; within another `interpreted`, that is all that changes. Raises, from a launch: KernelFault.
    """
    if _active:
        outer, _active[0].random = _active[0].random, np.random.default_rng(seed)
        try:
            yield
        finally:
            _active[0].random = outer
        return
    _import_kernels()
    launches = _Launches(seed)
    with (
        pytest.MonkeyPatch.context() as patch,
        triton.knobs.runtime.scope(),
        _interpreted_language(patch),
        FreshIsNan(),
    ):
        triton.knobs.runtime.interpret = True
        patch.setitem(_active, 0, launches)
        _patch_launches(patch, launches)
        _patch_memory(patch, launches)
        _patch_numbers(patch)
        yield


def _import_kernels() -> None:
    """Import all kernels of the product now: one that is decorated while `interpret` is set would never compile."""
    try:
        package = importlib.import_module("pdserve.kernels.triton")
    except ModuleNotFoundError:
        return
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)


@contextmanager
def _interpreted_language(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """`tl.load` and the like work on numbers. Replaced once: Triton replaces them at each call of a jit function by another, which
    takes most of its time, and never restores them."""
    scope = interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    # Triton 3.6 makes an integer of an array of one number, which numpy 2.4 refuses
    scope.set_attr(tl.core.tensor, "__index__", lambda self: int(self.handle.data.squeeze()))
    patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
    try:
        yield
    finally:
        scope.restore()


def _patch_launches(patch: pytest.MonkeyPatch, launches: _Launches) -> None:
    set_grid_dim, set_grid_idx = InterpreterBuilder.set_grid_dim, InterpreterBuilder.set_grid_idx

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.begin([*args, *kwargs.values()])
        function = interpreter.InterpretedFunction(self.fn).rewrite()
        try:
            with np.errstate(all="ignore"):
                interpreter.GridExecutor(function, self.arg_names, grid)(*args, **kwargs)
        except InterpreterError as error:
            cause = error.__cause__
            if isinstance(cause, KernelFault):
                raise cause from None
            raise

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return interpreter.InterpretedFunction(self.fn).rewrite()(*args, **kwargs)

    def set_dim(self: Any, nx: int, ny: int, nz: int) -> None:
        set_grid_dim(self, nx, ny, nz)
        launches.shuffle(nx * ny * nz)

    def set_index(self: Any, x: int, y: int, z: int) -> None:
        _, ny, nz = self.grid_dim
        number = int(launches.order[(x * ny + y) * nz + z])
        launches.program = number + 1
        set_grid_idx(self, number // (ny * nz), number // nz % ny, number % nz)

    patch.setattr(JITFunction, "run", run)
    patch.setattr(JITFunction, "__call__", call)
    patch.setattr(InterpreterBuilder, "set_grid_dim", set_dim)
    patch.setattr(InterpreterBuilder, "set_grid_idx", set_index)


def _patch_memory(patch: pytest.MonkeyPatch, launches: _Launches) -> None:
    builder = InterpreterBuilder
    load, store, rmw, cas = (
        builder.create_masked_load,
        builder.create_masked_store,
        builder.create_atomic_rmw,
        builder.create_atomic_cas,
    )

    def active(pointers: Any, mask: Any) -> tuple[int, NDArray[np.int64], int]:
        addresses = pointers.data.astype(np.int64)
        if mask is not None:
            addresses = addresses[np.broadcast_to(mask.data, addresses.shape).astype(bool)]
        return launches.program, addresses.reshape(-1), max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def masked_load(self: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        launches.memory.read(*active(pointers, mask))
        # Triton takes an `other` of one number that is 0 for none, since its truth is asked for: such a load cannot be judged
        if other is None and not mask.data.all() and mask.data.size > 1:
            dtype = pointers.get_element_ty()
            kind = interpreter._get_np_dtype(dtype)
            bits = 0x7FC0 if dtype == tl.bfloat16 else np.iinfo(kind).min if kind.kind in "iu" else kind.type(np.nan)
            other = TensorHandle(np.full(pointers.data.shape, bits, kind), dtype)
        return load(self, pointers, mask, other, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches.memory.write(*active(pointers, mask))
        return store(self, pointers, value, mask, *rest)

    def atomic_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launches.memory.update(*active(pointers, mask))
        return rmw(self, operation, pointers, value, mask, *rest)

    def atomic_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        launches.memory.update(*active(pointers, None))
        return cas(self, pointers, *rest)

    patch.setattr(builder, "create_masked_load", masked_load)
    patch.setattr(builder, "create_masked_store", masked_store)
    patch.setattr(builder, "create_atomic_rmw", atomic_rmw)
    patch.setattr(builder, "create_atomic_cas", atomic_cas)


def _is_bfloat16(value: Any) -> bool:
    if isinstance(value, tl.core.tensor):
        value = value.handle
    return isinstance(value, TensorHandle) and value.dtype.scalar == tl.bfloat16


def _wide(handle: Any) -> Any:
    """The same number in float32, if it is a bfloat16."""
    if not _is_bfloat16(handle):
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << np.uint32(16)).view(np.float32), tl.float32)


def _rounded(data: NDArray[np.float32], num_bits: int) -> NDArray[np.uint32]:
    """Bits of float32 numbers with the last `num_bits` rounded away: to nearest, ties to even."""
    bits = np.ascontiguousarray(data, np.float32).view(np.uint32).astype(np.uint64)
    half = np.uint64((1 << (num_bits - 1)) - 1)
    near = (bits + half + ((bits >> np.uint64(num_bits)) & np.uint64(1))) >> np.uint64(num_bits) << np.uint64(num_bits)
    return np.where(np.isnan(data), np.uint64(0x7FC00000), near).astype(np.uint32)


def to_bfloat16(data: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Bits of the nearest bfloat16, ties to even."""
    return (_rounded(data, 16) >> np.uint32(16)).astype(np.uint16)


def _patch_numbers(patch: pytest.MonkeyPatch) -> None:
    builder = InterpreterBuilder
    dot, cast, fp_to_fp = builder.create_dot, builder.cast_impl, builder.create_fp_to_fp

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        a, b = _wide(a), _wide(b)
        if precision == ir.INPUT_PRECISION.TF32 and a.dtype.scalar == tl.float32:
            a, b = (TensorHandle(_rounded(value.data, 13).view(np.float32), tl.float32) for value in (a, b))
        return dot(self, a, b, d, precision, *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        source = _wide(source)
        if target.scalar != tl.bfloat16:
            return cast(self, source, target)
        return TensorHandle(to_bfloat16(source.data.astype(np.float32)), tl.bfloat16)

    def create_fp_to_fp(self: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.scalar == tl.float8e4nv and source.dtype.scalar == tl.float32:
            values = torch.from_numpy(source.data.astype(np.float32)).clamp(-448.0, 448.0)
            return TensorHandle(values.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), target.scalar)
        if tl.bfloat16 in (source.dtype.scalar, target.scalar) and rounding != ir.ROUNDING_MODE.RTZ:
            if source.dtype.scalar.is_fp8():
                source = fp_to_fp(self, source, tl.float32, rounding)
            return cast_impl(self, source, target)
        return fp_to_fp(self, source, target, rounding)

    patch.setattr(builder, "create_dot", create_dot)
    patch.setattr(builder, "cast_impl", cast_impl)
    patch.setattr(builder, "create_fp_to_fp", create_fp_to_fp)
    for name in ("binary_op", "unary_op", "ternary_op", "create_fma", "create_rsqrt", "create_erf"):
        patch.setattr(builder, name, _refusing_bfloat16(name, getattr(builder, name)))
    for operation in (interpreter.ReduceOps, interpreter.ScanOps):
        name = operation.__name__
        patch.setattr(operation, "apply_impl", _refusing_bfloat16(name, operation.apply_impl))


def _refusing_bfloat16(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any) -> Any:
        values = args[0] if args and isinstance(args[0], tuple) else args
        operation = getattr(args[-1], "__name__", name)
        # a choice between two numbers computes nothing
        if operation != "where" and any(_is_bfloat16(value) for value in values):
            raise Bfloat16Error(f"{operation} on bfloat16: convert to float32 first")
        return original(self, *args)

    return refuse
