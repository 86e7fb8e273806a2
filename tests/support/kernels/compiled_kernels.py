"""Compiles the launches of Triton kernels for GPUs that are not there, and reads the machine code. Needs no driver.

`recorded_launches` collects what launchers would launch, on tensors without memory (`device="meta"`), so tile sizes, strides and
options are those of the product; `compile_launch` makes the code of one for one architecture.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_86": GPUTarget("cuda", 86, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED_BYTES = {
    "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "sm_120": 99 << 10, "gfx942": 64 << 10,
}  # fmt: skip
"""Shared memory of one program at most."""
_TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int32: "i32", torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv", torch.uint8: "u8", torch.int8: "i8", torch.bool: "i1",
}  # fmt: skip
_NVIDIA = (
    r"\b(U?TCHMMA|UTCHMMA|HGMMA|HMMA|UTCQMMA|QGMMA|QMMA|UTMALDG|LDGSTS\.E\.BYPASS\.(?:LTC128B\.)?128|LDGSTS|LDL|STL|"
    r"LDG\.E(?:\.[A-Z0-9]+)*\.128|STG\.E(?:\.[A-Z0-9]+)*\.128)\b"
)
_AMD = r"\b(v_mfma\w+|(?:global|buffer)_load_dwordx4|(?:global|buffer)_store_dwordx4|scratch_load|scratch_store)"


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a kernel, with all arguments by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]
    """`num_warps` and the like."""


@dataclass(frozen=True, slots=True)
class MachineCode:
    shared_bytes: int
    """Shared memory of one program."""
    registers: int
    """Registers of one thread."""
    spilled: bool
    """Registers are kept in memory."""
    operations: frozenset[str]
    """Memory operations of 16 bytes, and operations of tensor cores."""

    def has(self, pattern: str) -> bool:
        """True if an operation begins with `pattern`, a regular expression."""
        return any(re.match(pattern, operation) for operation in self.operations)


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Launch nothing while it is open, and list what was to be launched."""
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        names = set(self.signature.parameters)
        given = self.signature.bind(*args, **{name: value for name, value in kwargs.items() if name in names})
        launches.append(Launch(self, grid, given.arguments, {n: v for n, v in kwargs.items() if n not in names}))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        yield launches


def compile_launch(launch: Launch, architecture: str) -> MachineCode:
    """Compile for a key of `TARGETS`, with the specialisation that a launch on that GPU would have."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        specialised = not parameter.do_not_specialize
        if parameter.is_constexpr or (specialised and isinstance(value, int) and value == 1):
            signature[parameter.name] = "constexpr"
            constants[index,] = value
            continue
        signature[parameter.name] = _type_of(value)
        if specialised and (isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0)):
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    with tempfile.TemporaryDirectory() as folder, triton.knobs.cache.scope():
        triton.knobs.cache.dir = folder
        compiled = triton.compile(source, target=TARGETS[architecture], options=dict(launch.options))
    read = _amd_code if architecture.startswith("gfx") else _nvidia_code
    return read(compiled)


def _type_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"*{_TYPES[value.dtype]}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _nvidia_code(compiled: Any) -> MachineCode:
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage, code = (
            subprocess.run([tools / tool, *options, file.name], capture_output=True, text=True, check=True).stdout
            # without the analysis of data flow, which adds nothing to these instructions and takes 0.1 s
            for tool, options in (("cuobjdump", ["-res-usage"]), ("nvdisasm", ["-c", "-ndf"]))
        )
    [registers] = re.findall(r"REG:(\d+)", usage)
    operations = frozenset(re.findall(_NVIDIA, code))
    spilled = not operations.isdisjoint({"LDL", "STL"})
    return MachineCode(compiled.metadata.shared, int(registers), spilled, operations)


def _amd_code(compiled: Any) -> MachineCode:
    assembly = compiled.asm["amdgcn"]
    numbers = {key: int(value) for key, value in re.findall(r"\.(\w+):\s+(\d+)", assembly)}
    # a scalar register is kept in a lane of a vector register, not in memory
    spilled = numbers["vgpr_spill_count"] + numbers["private_segment_fixed_size"] > 0
    return MachineCode(compiled.metadata.shared, numbers["vgpr_count"], spilled, frozenset(re.findall(_AMD, assembly)))
