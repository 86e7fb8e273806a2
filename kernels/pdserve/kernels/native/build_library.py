"""Compiles the C++ sources in `sources` into one shared library: `python build_library.py [FOLDER]`.

Needs a C++ compiler (the variable CXX, else c++, g++ or clang++) and nothing else: no header of Python's or torch's, so one library
serves every version of both. The sources named `*_level.cpp` are compiled once per instruction set; the library chooses by the
processor that it runs on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

LIBRARY_FOLDER = Path(__file__).resolve().parent
SOURCES = LIBRARY_FOLDER / "sources"
ENTRY_SOURCES = (
    "attention/paged_decode",
    "attention/paged_prefill",
    "lora/lora_rows",
    "layers/layer_rows",
    "linear/int8_rows",
    "linear/bfloat_rows",
    "layers/fused_layers",
    "experts/expert_rows",
)
COMPILERS = ("c++", "g++", "clang++")
X86 = frozenset({"x86_64", "AMD64"})
_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti", "-fno-math-errno", "-fno-strict-aliasing",
)  # fmt: skip
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_AVX512_BF16 = (*_AVX512, "-mavx512bf16")
_X86_LEVELS = {"avx2": _AVX2, "avx512": _AVX512, "avx512_bf16": _AVX512_BF16}
_AMX = ("-mamx-tile", "-mamx-bf16")
_TILED_LEVELS = _X86_LEVELS | {"amx_bf16": (*_AVX512_BF16, *_AMX)}
"""For sources with code for AMX, and for the one that names the levels."""


class _LevelSource(NamedTuple):
    """A source that is compiled once per instruction set."""

    name: str
    flags: tuple[str, ...]
    x86_levels: Mapping[str, tuple[str, ...]]


_LEVEL_SOURCES = (
    _LevelSource("attention/decode_level", ("-ffp-contract=fast",), _TILED_LEVELS),
    _LevelSource("attention/prefill_level", ("-ffp-contract=fast",), _TILED_LEVELS),
    _LevelSource("lora/lora_level", ("-ffp-contract=fast",), _X86_LEVELS),
    _LevelSource("layers/layer_level", ("-ffp-contract=fast",), _X86_LEVELS),
    _LevelSource("experts/expert_level", ("-ffp-contract=fast",), _X86_LEVELS),
    _LevelSource("linear/bfloat_level", ("-ffp-contract=fast",), _TILED_LEVELS),
    # each operation is rounded by itself, as torch's are
    _LevelSource(
        "linear/int8_level", ("-ffp-contract=off",), {"avx2": _AVX2, "avx512_vnni": (*_AVX512, "-mavx512vnni")}
    ),
)
_TIMEOUT_S = 300


class BuildError(Exception):
    """There is no compiler, or it refused the sources."""


def library_name() -> str:
    """File name of the library that belongs to these sources on this kind of machine. Reads the sources."""
    digest = hashlib.sha256(platform.machine().encode())
    for path in sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h"), Path(__file__)]):
        digest.update(path.read_bytes())
    return f"native_kernels-{digest.hexdigest()[:12]}.so"


def find_compiler() -> list[str]:
    """Command of the C++ compiler. Raises: BuildError if there is none."""
    given = shlex.split(os.environ.get("CXX", ""))
    found = next((path for name in (given[:1] or COMPILERS) if (path := shutil.which(name))), None)
    if found is None:
        raise BuildError(f"no C++ compiler: looked for {', '.join(given[:1] or COMPILERS)}")
    return [found, *given[1:]]


def build(folder: Path = LIBRARY_FOLDER) -> Path:
    """Compile into `folder`, and remove libraries of other sources there; a library that is there already is not made again.

    Raises: BuildError with the compiler's words; OSError if the folder cannot be written.
    """
    target = folder / library_name()
    if target.exists():
        return target
    compiler = find_compiler()
    has_levels = platform.machine() in X86
    has_amx = has_levels and sys.platform == "linux" and _accepts(compiler, _AMX)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as room:
        command = [*compiler, *_FLAGS, "-I", str(SOURCES)]
        commands, objects = [], []

        def compile_source(source: str, made: str, *flags: str) -> None:
            objects.append(f"{room}/{Path(made).name}.o")
            commands.append([*command, *flags, "-c", str(SOURCES / f"{source}.cpp"), "-o", objects[-1]])

        for source in _LEVEL_SOURCES:
            for name, flags in {"baseline": (), **(source.x86_levels if has_levels else {})}.items():
                if name == "amx_bf16" and not has_amx:
                    continue
                names = f"-DLEVEL=LEVEL_{name.upper()}", f"-DLEVEL_NAME={name}"
                compile_source(source.name, f"{source.name}-{name}", *source.flags, *flags, *names)
        for entry in ENTRY_SOURCES:
            compile_source(entry, entry, *["-DHAS_X86_LEVELS"] * has_levels, *["-DHAS_AMX_LEVEL"] * has_amx)
        _run_all(commands)
        _run_all([[*compiler, "-shared", "-Wl,--as-needed", *objects, "-o", f"{room}/{target.name}"]])
        Path(room, target.name).replace(target)
    for other in folder.glob("native_kernels-*.so"):
        if other != target:
            other.unlink(missing_ok=True)
    return target


def _accepts(compiler: list[str], flags: tuple[str, ...]) -> bool:
    """True if the compiler knows the flags: GCC knows AMX from version 11 on."""
    command = [*compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, capture_output=True, check=False, timeout=_TIMEOUT_S).returncode == 0


def _run_all(commands: list[list[str]]) -> None:
    """Run the commands at once. Raises: BuildError with the output of the first that fails."""
    running = []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
            )
        for command, process in zip(commands, running, strict=True):
            said, _ = process.communicate(timeout=_TIMEOUT_S)
            if process.returncode:
                raise BuildError(f"{shlex.join(command)} failed:\n{said[-4000:]}")
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{shlex.join(error.cmd)} took more than {_TIMEOUT_S} s") from error
    except OSError as error:
        raise BuildError(f"the compiler cannot be run: {error}") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
            if process.stdout:
                process.stdout.close()


def main() -> None:
    try:
        print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else LIBRARY_FOLDER))
    except (BuildError, OSError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
