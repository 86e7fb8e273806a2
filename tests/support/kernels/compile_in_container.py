"""Runs within the image for GPUs, without a GPU: compiles a kernel for sm_90, and a module in C as Triton does for its launchers.

Prints one JSON object. `tests/deploy/test_gpu_image.py` starts it; it imports nothing of the tests.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src

from pdserve.kernels.triton.swiglu import swiglu_rows

C_MODULE = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *args) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "probe", NULL, -1, methods};
PyMODINIT_FUNC PyInit_probe(void) { return PyModule_Create(&module); }
"""


def main() -> None:
    signature = {"gate_up": "*bf16", "out": "*bf16", "stride": "i64", "SIZE": "constexpr", "BLOCK": "constexpr"}
    source = ASTSource(fn=swiglu_rows, signature=signature, constexprs={"SIZE": 14336, "BLOCK": 1024})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    probe = compile_module_from_src(C_MODULE, "probe")
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    found = {
        "uid": os.getuid(),
        "triton": triton.__version__,
        "python": sys.version.split()[0],
        "machine_code_bytes": len(compiled.asm["cubin"]),
        "answer": probe.answer(),
        "module": str(probe.__file__),
        "files": {str(path): path.stat().st_mtime_ns for path in sorted(cache.rglob("*")) if path.is_file()},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
