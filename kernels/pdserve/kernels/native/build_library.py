"""Compiles the C++ sources in `sources` into one shared library: `python -m pdserve.kernels.native.build_library [FOLDER]`.

Needs a C++ compiler (the variable CXX, else c++, g++ or clang++) and nothing else: no header of Python's or torch's, so one library
serves every version of both. The sources named `*_level.cpp` are compiled once per instruction set; the library chooses by the
processor that it runs on. Nothing of pdserve but the neighbouring modules need be installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pdserve.kernels.native.compiler_jobs import JobError, JobTimeout, run_jobs

LIBRARY_FOLDER = Path(__file__).resolve().parent
SOURCES = LIBRARY_FOLDER / "sources"
ENTRY_SOURCES = (
    "attention/paged_decode",
    "attention/paged_prefill",
    "lora/lora_rows",
    "layers/layer_rows",
    "linear/int8_rows",
    "linear/bfloat_rows",
    "linear/grouped_rows",
    "layers/fused_layers",
    "experts/expert_rows",
    "state/state_rows",
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
    _LevelSource("state/state_level", ("-ffp-contract=fast",), _X86_LEVELS),
    _LevelSource("linear/bfloat_level", ("-ffp-contract=fast",), _TILED_LEVELS),
    _LevelSource("linear/grouped_level", ("-ffp-contract=fast",), _X86_LEVELS),
    # each operation is rounded by itself, as torch's are
    _LevelSource(
        "linear/int8_level", ("-ffp-contract=off",), {"avx2": _AVX2, "avx512_vnni": (*_AVX512, "-mavx512vnni")}
    ),
)
_ROOM = ".build-"
"""Beginning of the names of folders for objects."""


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
    with _alone_in(folder):
        if not target.exists():
            for left in folder.glob(f"{_ROOM}*"):
                # a build that was killed
                shutil.rmtree(left, ignore_errors=True)
            _compile(find_compiler(), target)
            for other in folder.glob("native_kernels-*.so"):
                if other != target:
                    other.unlink(missing_ok=True)
    return target


def _compile(compiler: list[str], target: Path) -> None:
    """Raises: BuildError; OSError."""
    has_levels = platform.machine() in X86
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_ROOM) as room:
        has_amx = has_levels and sys.platform == "linux" and _accepts(compiler, _AMX, Path(room))
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
        try:
            run_jobs(commands, Path(room))
            run_jobs([[*compiler, "-shared", "-Wl,--as-needed", *objects, "-o", f"{room}/{target.name}"]], Path(room))
        except JobError as error:
            raise BuildError(str(error)) from error
        Path(room, target.name).replace(target)


def _accepts(compiler: list[str], flags: tuple[str, ...], room: Path) -> bool:
    """True if the compiler knows the flags: GCC knows AMX from version 11 on. Raises: BuildError if it hangs."""
    try:
        run_jobs([[*compiler, *flags, "-x", "c++", "-fsyntax-only", os.devnull]], room)
    except JobTimeout as error:
        raise BuildError(str(error)) from error
    except JobError:
        return False
    return True


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Only one process at a time builds in a folder; another waits, and then finds the library."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        # also given back by the end of this process
        os.close(descriptor)


def main() -> None:
    """Build, and print in one line whether the library is there, and if not, why."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else LIBRARY_FOLDER
    try:
        print(f"kernels in C++: built, {build(folder)}")
    except (BuildError, OSError) as error:
        sys.exit(f"kernels in C++ are left out, torch computes instead: {error}")


if __name__ == "__main__":
    main()
