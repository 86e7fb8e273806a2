"""Typed interface to NIXL; the only file that uses NIXL's untyped bindings.

Two defaults of NIXL's Python class do not fit, so the bindings are used directly: its progress thread spins (half a core per idle
agent), and its UCX endpoints monitor their peers, for which UCX disables shared memory. Handles are plain numbers here, so that an
agent has a single reference, and dropping it destroys the agent.

UCX uses TCP only if `UCX_TLS` allows it. Over TCP a read needs the source's participation, and a source that was stopped while its
reader gave up aborts in UCX when it continues ("unexpected error: Endpoint timeout"): a reader could end a prefill worker. The TCP
connector does not have this problem, and is faster.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import importlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from pdserve.common.errors import TransferFailed

PROGRESS_WAKE_US = 1000
"""Microseconds after which the progress thread wakes without work of its transport."""
_BACKEND = "UCX"
_BACKEND_OPTIONS = {"ucx_error_handling_mode": "none"}
"""`none` and not `peer`, which disables shared memory. An ended peer is detected by the deadline of a read."""
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_ENVIRONMENT = {
    "UCX_TLS": "^tcp",
    # UCX warns of each unfinished read of a destroyed agent, although ending such reads is the purpose
    "UCX_LOG_LEVEL": "error",
}
"""Default environment variables of UCX."""


_DEVICE_ENVIRONMENT = {
    # forbid UCX's host-copy emulation, which is slower than TCP; reads then fail over to TCP
    "UCX_PROTO_EMULATION_ENABLE": "n",
    # else UCX refuses to read between the processes of a GPU that has no NVLink, such as the only one of a virtual machine
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "y",
}
"""Default environment variables of UCX where memory of a device is registered."""


class MemoryKind(enum.Enum):
    """Memory kind of a region."""

    DRAM = "DRAM"
    VRAM = "VRAM"


@dataclass(frozen=True, slots=True)
class Region:
    """Contiguous memory of one process: `count` pieces of `piece_bytes` bytes."""

    address: int
    piece_bytes: int
    count: int
    kind: MemoryKind = MemoryKind.DRAM
    device_id: int = 0

    @property
    def num_bytes(self) -> int:
        return self.piece_bytes * self.count

    def divided(self, piece_bytes: int) -> Region:
        """The same memory in pieces of `piece_bytes`, a divisor of its own pieces' size."""
        return replace(self, piece_bytes=piece_bytes, count=self.num_bytes // piece_bytes)


class ReadStatus(enum.Enum):
    UNDER_WAY = "under way"
    DONE = "done"
    FAILED = "failed"


class AgentRead(Protocol):
    """A posted read. It cannot be cancelled: it may write until it is DONE or its agent is destroyed."""

    def status(self) -> ReadStatus:
        """State of the read. A failed read may still write until its agent is destroyed."""

    def release(self) -> None:
        """Free the handle. Only if the read is DONE."""


class Agent(Protocol):
    """One NIXL agent, used by one thread at a time. All methods may raise TransferFailed."""

    def register(self, region: Region) -> None:
        """Register a region for reads and writes. The memory must outlive the agent."""

    @property
    def metadata(self) -> bytes:
        """Metadata that another agent loads to read the registered memory."""

    def load(self, name: str, metadata: bytes) -> None:
        """Load the metadata of the peer with that name. At most once."""

    def pair(self, local: Region, remote: Region) -> int:
        """Prepare reads from the loaded peer's region into a registered one; returns the pair's number."""

    def read(self, pair: int, local_pieces: Sequence[int], remote_pieces: Sequence[int]) -> AgentRead:
        """Post a read of these pieces of the remote region into those of the local one."""

    def destroy(self) -> None:
        """Destroy the agent; none of its reads writes after this returns."""


class AgentMaker(Protocol):
    """Makes agents: `UcxAgent`, or a fake with faults in tests."""

    def __call__(self, name: str) -> Agent: ...


class UcxAgent:
    """The `Agent` of the installed NIXL, over UCX. Raises: TransferFailed if it cannot be made."""

    def __init__(self, name: str) -> None:
        self._nixl = _bindings()
        self._pairs: list[tuple[int, int]] = []
        self._peer: str | None = None
        try:
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = PROGRESS_WAKE_US
            config.useListenThread = False
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
            self._agent: Any = self._nixl.nixlAgent(name, config)
            self._backend = self._agent.createBackend(_BACKEND, _BACKEND_OPTIONS)
        except Exception as error:
            raise TransferFailed(f"NIXL cannot start {_BACKEND}: {_reason(error)}") from error

    def register(self, region: Region) -> None:
        """As `Agent.register`."""
        descriptor = (region.address, region.num_bytes, region.device_id, "")
        try:
            regions = self._nixl.nixlRegDList(self._kind(region), [descriptor])
            self._agent.registerMem(regions, [self._backend])
        except Exception as error:
            raise TransferFailed(f"NIXL cannot register {region.num_bytes} bytes: {_reason(error)}") from error

    @property
    def metadata(self) -> bytes:
        """As `Agent.metadata`."""
        return bytes(self._agent.getLocalMD())

    def load(self, name: str, metadata: bytes) -> None:
        """As `Agent.load`."""
        try:
            loaded = self._agent.loadRemoteMD(metadata)
        except Exception as error:
            raise TransferFailed(f"the agent {name} cannot be reached: {_reason(error)}") from error
        if loaded != name.encode():
            raise TransferFailed(f"the metadata for the agent {name} belongs to another agent")
        self._peer = name

    def pair(self, local: Region, remote: Region) -> int:
        """As `Agent.pair`."""
        try:
            self._pairs.append(
                (self._list(self._nixl.NIXL_INIT_AGENT, local), self._list(self._peer or "", remote))
            )  # fmt: skip
        except Exception as error:
            raise TransferFailed(
                f"the agent {self._peer} has no {remote.count} pieces of {remote.piece_bytes} bytes there: "
                f"{_reason(error)}"
            ) from error
        return len(self._pairs) - 1

    def read(self, pair: int, local_pieces: Sequence[int], remote_pieces: Sequence[int]) -> AgentRead:
        """As `Agent.read`."""
        local, remote = self._pairs[pair]
        try:
            handle = self._agent.makeXferReq(
                self._nixl.NIXL_READ,
                local,
                np.asarray(local_pieces, dtype=np.int32),
                remote,
                np.asarray(remote_pieces, dtype=np.int32),
                b"",
                [self._backend],
                False,
            )
        except Exception as error:
            raise TransferFailed(f"reading from the agent {self._peer}: {_reason(error)}") from error
        return _UcxRead(self, handle)

    def destroy(self) -> None:
        """As `Agent.destroy`. Takes up to some 100 ms; call it in a thread that may block."""
        self._agent = None

    def _list(self, owner: str, region: Region) -> int:
        # one strided row describes all pieces, so nothing is built per block, and nothing from a peer is deserialized
        row = [[region.address, region.piece_bytes, region.device_id, region.piece_bytes, region.count]]
        strided = np.array(row, dtype=np.uint64)
        return int(self._agent.prepXferDlist(owner, self._kind(region), strided, [self._backend]))

    def _kind(self, region: Region) -> Any:
        return self._nixl.VRAM_SEG if region.kind is MemoryKind.VRAM else self._nixl.DRAM_SEG


class _UcxRead:
    """A read without a reference to the agent, so that dropping the agent's reference destroys it."""

    def __init__(self, owner: UcxAgent, handle: int) -> None:
        self._owner = owner
        self._handle = handle
        self._status = self._ask(lambda agent: agent.postXferReq(handle, b""))

    def status(self) -> ReadStatus:
        if self._status is ReadStatus.UNDER_WAY:
            self._status = self._ask(lambda agent: agent.getXferStatus(self._handle))
        return self._status

    def release(self) -> None:
        self._owner._agent.releaseXferReq(self._handle)

    def _ask(self, call: Any) -> ReadStatus:
        nixl = self._owner._nixl
        try:
            status = call(self._owner._agent)
        except Exception:
            return ReadStatus.FAILED
        if status == nixl.NIXL_SUCCESS:
            return ReadStatus.DONE
        return ReadStatus.UNDER_WAY if status == nixl.NIXL_IN_PROG else ReadStatus.FAILED


def prepare_device_memory() -> None:
    """Call before memory of a device is registered, and before its agents are made.

    Raises: TransferFailed if torch's allocator hands out memory that UCX cannot share with other processes.
    """
    for variable in _ALLOCATOR_VARIABLES:
        for option in os.environ.get(variable, "").split(","):
            name, _, value = option.partition(":")
            if name.strip() == "expandable_segments" and value.strip().lower() == "true":
                raise TransferFailed(
                    f"{variable} is {os.environ[variable][:200]!r}: NIXL cannot share expandable segments with other "
                    "processes; set expandable_segments:False"
                )
    for variable, value in _DEVICE_ENVIRONMENT.items():
        os.environ.setdefault(variable, value)


def enter_device(region: Region) -> None:
    """Make the region's device current in this thread, unless it is the host's memory: UCX uses the calling thread's context."""
    if region.kind is MemoryKind.VRAM:
        import torch  # a process with memory of the host needs none of it

        torch.cuda.set_device(region.device_id)


_probe_lock = threading.Lock()
_probed: list[str | None] = []


def why_no_nixl() -> str | None:
    """The reason why NIXL cannot be used in this process; None if it can. Tries once, which takes about 1 s."""
    with _probe_lock:
        if not _probed:
            _probed.append(_probe())
        return _probed[0]


def _probe() -> str | None:
    try:
        UcxAgent("pdserve-probe").destroy()
    except TransferFailed as error:
        return error.message
    return None


def _bindings() -> Any:
    for variable, value in _ENVIRONMENT.items():
        os.environ.setdefault(variable, value)
    try:
        bindings = importlib.import_module("nixl")._bindings
    except Exception as error:  # a broken wheel may raise any exception of its libraries
        raise TransferFailed(f"the package nixl cannot be imported: {_reason(error)}") from error
    _exit_without_finalizers()
    return bindings


@functools.cache
def _exit_without_finalizers() -> None:
    """Let this process exit with its status before the finalizers of C libraries run.

    NIXL's wheel brings a libnl, and UCX loads the system's as well where rdma-core is installed with its providers (`libefa`). Both
    then unregister from the same list, and the process would end with SIGSEGV after all else is done.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
