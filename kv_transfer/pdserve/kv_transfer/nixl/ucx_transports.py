"""Transports that the UCX loaded by NIXL finds on this machine, queried from UCX's own library, since NIXL does not report them.

Only for a probe's process: UCX may abort the calling process.
"""

from __future__ import annotations

import ctypes
import os
import re
import tempfile
from pathlib import Path

import msgspec

_FIELD_FEATURES, _FEATURE_RMA = 1, 2
_PARAMS_WORDS = 64
"""More than the structure has: UCX reads the fields that are named in its first word, and no others."""
_RESOURCE = re.compile(r"resource\s+\d+\s*:.*?(\w+)/(\S+)\s*$", re.MULTILINE)
_SHARED_MEMORY = frozenset({"sysv", "posix", "cma", "xpmem", "knem"})
_RDMA = ("rc", "dc", "ud", "ib", "gga", "srd")


class UcxTransport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way that UCX has to move bytes: `rc_mlx5` over `mlx5_0:1`, `cma` over `memory`."""

    name: str
    device: str

    @property
    def kind(self) -> str:
        """`shared memory`, `RDMA`, `CUDA IPC`, `CUDA copy`, `TCP`, `self` or `other`."""
        if self.name in _SHARED_MEMORY:
            return "shared memory"
        if self.name.split("_")[0] in _RDMA:
            return "RDMA"
        if self.name in ("tcp", "self"):
            return {"tcp": "TCP", "self": "self"}[self.name]
        if "ipc" in self.name:
            return "CUDA IPC"
        return "CUDA copy" if self.name.startswith(("cuda", "gdr")) else "other"


class Ucx:
    """The library as it is loaded in this process. Raises: OSError when there is none, AttributeError for one too old."""

    def __init__(self) -> None:
        self._ucp = ctypes.CDLL(_loaded_library("libucp"))
        self._libc = ctypes.CDLL(None)
        self._libc.fdopen.restype = ctypes.c_void_p
        self._libc.fclose.argtypes = [ctypes.c_void_p]
        self._ucp.ucp_context_print_info.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._ucp.ucp_config_release.argtypes = self._ucp.ucp_cleanup.argtypes = [ctypes.c_void_p]
        self._ucp.ucp_cleanup.restype = None

    @property
    def version(self) -> tuple[int, int, int]:
        major, minor, patch = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        self._ucp.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(patch))
        return major.value, minor.value, patch.value

    def transports(self, tls: str | None = None) -> list[UcxTransport]:
        """Transports that UCX would use. tls: instead of `UCX_TLS`; `all` excludes none. Raises: OSError without any."""
        config, context = ctypes.c_void_p(), ctypes.c_void_p()
        self._done(self._ucp.ucp_config_read(None, None, ctypes.byref(config)))
        try:
            if tls is not None:
                self._done(self._ucp.ucp_config_modify(config, b"TLS", tls.encode()))
            params = (ctypes.c_uint64 * _PARAMS_WORDS)(_FIELD_FEATURES, _FEATURE_RMA)
            major, minor, _ = self.version
            self._done(self._ucp.ucp_init_version(major, minor, params, config, ctypes.byref(context)))
        finally:
            self._ucp.ucp_config_release(config)
        try:
            return [UcxTransport(*found) for found in _RESOURCE.findall(self._printed(context))]
        finally:
            self._ucp.ucp_cleanup(context)

    def _printed(self, context: ctypes.c_void_p) -> str:
        with tempfile.TemporaryFile() as file:
            stream = self._libc.fdopen(os.dup(file.fileno()), b"w")
            self._ucp.ucp_context_print_info(context, stream)
            self._libc.fclose(stream)
            file.seek(0)
            return file.read().decode(errors="replace")

    @staticmethod
    def _done(status: int) -> None:
        if status != 0:
            raise OSError(f"UCX answered with status {ctypes.c_int8(status).value}")


def _loaded_library(name: str) -> str:
    """The file of a library that this process has loaded already; another copy would be another UCX."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.rpartition(" ")[2]
        if Path(path).name.startswith(name):
            return path
    raise OSError(f"{name} is not loaded")
