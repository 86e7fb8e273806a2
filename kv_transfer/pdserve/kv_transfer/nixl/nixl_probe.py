"""`python -m pdserve.kv_transfer.nixl.nixl_probe source|reader DEVICE`: tests NIXL between two processes of this machine.

source   prints a `NixlView`, then the metadata of a connector that serves a pool, and serves until its input ends
reader   reads that metadata from its input, pulls the pool over NIXL, checks every block, and prints a `ReadView`

DEVICE is where both pools are: `cpu`, or torch's name of a GPU.

Separate processes, since a UCX that does not fit the machine may abort its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import sys
import tempfile
import threading
from importlib import metadata
from pathlib import Path

import msgspec

from pdserve.common import clock
from pdserve.common.errors import PdServeError, TransferFailed
from pdserve.common.processes.child_answers import ChildAnswers
from pdserve.common.security.block_digest import XXH3
from pdserve.kv_transfer.connector import BlockToRead, ReadOrder, ReadOutcome
from pdserve.kv_transfer.memory.pool_memory import HostPool, PoolMemory
from pdserve.kv_transfer.nixl.nixl import NixlConnector
from pdserve.kv_transfer.nixl.nixl_agent import why_no_nixl

_FIELD_FEATURES, _FEATURE_RMA = 1, 2
_PARAMS_WORDS = 64
"""More words than the structure has; UCX reads only the fields that its first word names."""
_RESOURCE = re.compile(r"resource\s+\d+\s*:.*?(\w+)/(\S+)\s*$", re.MULTILINE)
_SHARED_MEMORY = frozenset({"sysv", "posix", "cma", "xpmem", "knem"})
_RDMA = ("rc", "dc", "ud", "ib", "gga", "srd")


NUM_BLOCKS = 64
BLOCK_BYTES = 1 << 20
NUM_TIMED = 3
"""Reads that are timed, after one that connects."""
_TOKEN = bytes(16)
_READ_S = 20.0


class UcxTransport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A transport of UCX and its device: `rc_mlx5` over `mlx5_0:1`, `cma` over `memory`."""

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


class NixlView(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """NIXL and UCX as found by a worker on this machine."""

    why_not: str | None
    """Reason why no agent could be made; None if one was made."""
    nixl: str
    """Version of the package; empty if it is not installed."""
    ucx: str = ""
    tls: str = ""
    """`UCX_TLS` in a worker's environment."""
    tls_is_given: bool = False
    """True if the environment sets `UCX_TLS`; False if it is the default."""
    found: list[UcxTransport] = []
    """All transports that UCX finds."""
    used: list[UcxTransport] = []
    """The transports that `tls` allows."""


class ReadView(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Result of the read between two processes."""

    why_not: str | None
    seconds: float = 0.0
    """Duration of the first read, including the connection."""
    bytes_per_s: float = 0.0
    """Rate of the fastest of `NUM_TIMED` further reads, digests included."""


class _Ucx:
    """The UCX library that is loaded in this process. Raises: OSError if there is none, AttributeError if it is too old.

    NIXL does not report its transports, so they are read from what UCX's own library prints.
    """

    def __init__(self) -> None:
        # the file that is loaded already: another copy would be another UCX
        mapped = (line.rpartition(" ")[2] for line in Path("/proc/self/maps").read_text().splitlines())
        path = next((path for path in mapped if Path(path).name.startswith("libucp")), None)
        if path is None:
            raise OSError("libucp is not loaded")
        self._ucp, self._libc = ctypes.CDLL(path), ctypes.CDLL(None)
        self._libc.fdopen.restype = ctypes.c_void_p
        self._libc.fclose.argtypes = [ctypes.c_void_p]
        self._ucp.ucp_context_print_info.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        self._ucp.ucp_config_release.argtypes = self._ucp.ucp_cleanup.argtypes = [ctypes.c_void_p]
        self._ucp.ucp_cleanup.restype = None
        version = (ctypes.c_uint * 3)()
        step = ctypes.sizeof(ctypes.c_uint)
        self._ucp.ucp_get_version(*(ctypes.byref(version, place * step) for place in range(3)))
        self.version: tuple[int, ...] = tuple(version)

    def transports(self, tls: str | None = None) -> list[UcxTransport]:
        """Transports that UCX would use. tls: replaces `UCX_TLS`; `all` for all transports. Raises: OSError if there are none."""
        config, context = ctypes.c_void_p(), ctypes.c_void_p()
        _done(self._ucp.ucp_config_read(None, None, ctypes.byref(config)))
        try:
            if tls is not None:
                _done(self._ucp.ucp_config_modify(config, b"TLS", tls.encode()))
            params = (ctypes.c_uint64 * _PARAMS_WORDS)(_FIELD_FEATURES, _FEATURE_RMA)
            _done(self._ucp.ucp_init_version(*self.version[:2], params, config, ctypes.byref(context)))
        finally:
            self._ucp.ucp_config_release(config)
        try:
            with tempfile.TemporaryFile() as file:
                stream = self._libc.fdopen(os.dup(file.fileno()), b"w")
                self._ucp.ucp_context_print_info(context, stream)
                self._libc.fclose(stream)
                file.seek(0)
                return [UcxTransport(*found) for found in _RESOURCE.findall(file.read().decode(errors="replace"))]
        finally:
            self._ucp.ucp_cleanup(context)


def _done(status: int) -> None:
    if status != 0:
        raise OSError(f"UCX answered with status {ctypes.c_int8(status).value}")


def nixl_view() -> NixlView:
    """Examine NIXL and UCX. UCX may abort this process."""
    try:
        version = metadata.version("nixl")
    except metadata.PackageNotFoundError:
        version = ""
    tls_is_given = "UCX_TLS" in os.environ
    reason = why_no_nixl()
    view = NixlView(why_not=reason, nixl=version, tls=os.environ.get("UCX_TLS", ""), tls_is_given=tls_is_given)
    if reason is not None:
        return view
    # UCX's report has no fixed format; with an unknown one only the list is missing
    with contextlib.suppress(OSError, AttributeError):
        ucx = _Ucx()
        view = msgspec.structs.replace(
            view, ucx=".".join(map(str, ucx.version)), found=ucx.transports("all"), used=ucx.transports()
        )
    return view


class NoDevice(Exception):
    """The device is not there; the text says what is."""


def make_pool(device: str) -> PoolMemory:
    """`NUM_BLOCKS` blocks of zeros on a device. Raises: NoDevice."""
    if device == "cpu":
        return HostPool(memoryview(bytearray(NUM_BLOCKS * BLOCK_BYTES)), BLOCK_BYTES, NUM_BLOCKS)
    import torch  # a process that reads memory of the host needs none of it

    from pdserve.kv_transfer.memory.device_digests import device_digests
    from pdserve.kv_transfer.memory.device_pool import DevicePool

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise NoDevice(f"torch {torch.__version__} sees no GPU here")
    blocks = torch.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8, device=device)
    return DevicePool(blocks, NUM_BLOCKS, NUM_BLOCKS, _READ_S, device_digests(blocks, "auto"))


def fill(pool: PoolMemory) -> None:
    """Give each block bytes of its own."""
    if isinstance(pool, HostPool):
        for number in range(NUM_BLOCKS):
            pool.block(number)[:] = content(number)
        return
    import torch

    from pdserve.kv_transfer.memory.device_pool import DevicePool

    assert isinstance(pool, DevicePool)
    rows = torch.arange(1, NUM_BLOCKS + 1, dtype=torch.uint8).repeat_interleave(BLOCK_BYTES).view(NUM_BLOCKS, -1)
    pool.move_in(rows, range(NUM_BLOCKS), range(NUM_BLOCKS))


def content(block: int) -> bytes:
    return bytes([block + 1]) * BLOCK_BYTES


def serve_source(answers: ChildAnswers, device: str) -> None:
    view = nixl_view()
    if view.why_not is not None:
        answers.send(view)
        return
    try:
        pool = make_pool(device)
        fill(pool)
        connector = NixlConnector()
        connector.serve(pool)
    except (NoDevice, PdServeError, RuntimeError) as error:  # RuntimeError: of the device's driver
        answers.send(msgspec.structs.replace(view, why_not=str(error)))
        return
    answers.send(view)
    answers.send(connector.metadata)
    sys.stdin.buffer.read()
    connector.close()


class _Listener:
    def __init__(self) -> None:
        self.over = threading.Event()
        self.why_not: str | None = "it did not end"

    def landed(self, first: int, count: int) -> None: ...

    def ended(self, outcome: ReadOutcome, cause: TransferFailed | None) -> None:
        self.why_not = None if outcome is ReadOutcome.DONE else (cause.message if cause else outcome.value)
        self.over.set()


def read_source(answers: ChildAnswers, device: str) -> None:
    source = msgspec.json.decode(sys.stdin.buffer.readline(), type=bytes)
    connector = NixlConnector()
    connector.serve(make_pool(device))
    answers.send(timed_reads(connector, source))
    connector.close()


def timed_reads(connector: NixlConnector, source: bytes) -> ReadView:
    """Read the whole pool of a source several times. source: its metadata."""
    blocks = [
        BlockToRead(index, XXH3.of(memoryview(content(index)), index), index, index) for index in range(NUM_BLOCKS)
    ]
    durations: list[float] = []
    for _ in range(1 + NUM_TIMED):
        listener = _Listener()
        started = clock.monotonic()
        connector.read(ReadOrder(source, _TOKEN, blocks), listener)
        listener.over.wait(_READ_S)
        if listener.why_not is not None:
            return ReadView(listener.why_not)
        durations.append(clock.monotonic() - started)
    first, *others = durations
    return ReadView(None, first, NUM_BLOCKS * BLOCK_BYTES / max(min(others), 1e-9))


if __name__ == "__main__":
    {"source": serve_source, "reader": read_source}[sys.argv[1]](ChildAnswers(), sys.argv[2])
