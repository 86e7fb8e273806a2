"""The C++ kernels for CPUs: whether they are built, for which instruction sets of this machine, and which code multiplies."""

from __future__ import annotations

from collections.abc import Iterator

from pdserve.cli.doctor.finding import Finding, ok, warning
from pdserve.common.settings.worker_settings import WorkerSettings

_BUILD = "run `python -m pdserve.kernels.native.build_library`"


def check_native(settings: WorkerSettings) -> Iterator[Finding]:
    """Load the library as a worker does, and name the code that computes matrix products."""
    yield from _library(settings)
    if settings.device == "cpu":
        from pdserve.kernels.cpu.linear import products_by
        from pdserve.models.dtypes import TORCH_DTYPES

        # `auto` is the checkpoint's dtype, nearly always bfloat16
        name = "bfloat16" if settings.dtype == "auto" else settings.dtype
        yield ok(f"products of {name}: {products_by(TORCH_DTYPES[name])}")


def _library(settings: WorkerSettings) -> Iterator[Finding]:
    from pdserve.kernels.native.build_library import BuildError, find_compiler
    from pdserve.kernels.native.native_library import NativeLibraryError, load_library  # imports torch

    try:
        library = load_library()
    except NativeLibraryError as error:
        try:
            compiler, advice = f"{find_compiler()[0]} is here", _BUILD
        except BuildError as missing:
            compiler, advice = str(missing), f"install a C++ compiler, and {_BUILD}"
        if settings.device == "cpu":
            yield warning(f"no kernels in C++, torch computes instead, which is slower: {error}; {compiler}", advice)
        else:
            yield ok(f"no kernels in C++, which device {settings.device} does not need; {compiler}")
        return
    int8 = [level for level in library.int8_levels if level not in library.levels]
    shown = ", ".join(library.levels) + (f"; int8 matrices also {', '.join(int8)}" if int8 else "")
    yield ok(f"kernels in C++ are built; this CPU runs {shown}, the first where there is a choice")
