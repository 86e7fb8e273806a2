"""NIXL and UCX: whether they work here, over which transports, and which data plane the `connector` setting selects."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from pdserve.cli.doctor.child_process import ChildBroke, child
from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.kv_transfer.nixl.nixl_probe import NixlView, ReadView, UcxTransport

_PROBE = "pdserve.kv_transfer.nixl.nixl_probe"
_KINDS = ("shared memory", "RDMA", "CUDA IPC", "TCP")
_WITHOUT = "or set connector=tcp, and nothing looks for it"
_INSTALL = f"in pdserve's repository: .venv/bin/python deploy/install.py nixl; {_WITHOUT}"
_REPAIR = f"look at UCX_TLS, at drivers and at the installed package; {_WITHOUT}"
_AGAIN = f"the machine may be busy, or a driver hangs: run the doctor again when it is idle; {_WITHOUT}"
_DEVICE_S = 40.0
_NO_DEVICE = (
    "look at the driver, at UCX_TLS (CUDA IPC on one machine, RDMA between machines) and at PYTORCH_CUDA_ALLOC_CONF; or set "
    "connector=tcp"
)
_NO_READ = (
    "processes may have to share a user, a PID namespace and the right to trace each other (CAP_SYS_PTRACE in "
    "containers); or set connector=tcp"
)


def check_nixl(
    settings: WorkerSettings, environ: Mapping[str, str] | None = None, answer_s: float = 50.0
) -> Iterator[Finding]:
    """In child processes: a UCX that does not fit the machine may abort them. environ: added to this process's environment."""

    def cannot(what: str, advice: str) -> Finding:
        """Not usable at all."""
        if settings.connector == "nixl":
            return failed(what, advice)
        return warning(f"{what}; connector is auto, so blocks move over TCP", advice)

    if settings.connector == "tcp":
        yield ok("connector is tcp: NIXL is not used")
        return
    if settings.tls_cert_file is not None and not settings.nixl_plaintext:
        yield ok("TLS is configured, and NIXL encrypts nothing: it is not used (nixl_plaintext would allow it)")
        return
    try:
        view, read = probe("cpu", environ, answer_s)
    except ChildBroke as error:
        yield cannot(f"NIXL ends the process that starts it: {error}", _REPAIR)
        return
    except TimeoutError:
        yield cannot(f"NIXL did not answer within {answer_s:g} s", _AGAIN)
        return
    if view.why_not is not None:
        yield cannot(
            f"NIXL {view.nixl} cannot be used: {view.why_not}".replace("  ", " "), _REPAIR if view.nixl else _INSTALL
        )
        return
    yield ok(
        f"NIXL {view.nixl} with UCX {view.ucx or 'of unknown version'} makes an agent; "
        f"UCX_TLS is {view.tls!r}, {'as the environment says' if view.tls_is_given else 'our default'}"
    )
    yield ok(transports_text(view))
    if read.why_not is not None:
        yield cannot(f"two processes of this machine do not read each other over NIXL: {read.why_not}", _NO_READ)
        return
    yield ok(f"two processes of this machine read each other over NIXL ({_shown(read)})")
    yield _device_memory(settings, environ, cannot)
    yield choice(settings, view.used)
    yield from _locked_memory(settings, view.used)


def _device_memory(
    settings: WorkerSettings, environ: Mapping[str, str] | None, cannot: Callable[[str, str], Finding]
) -> Finding:
    """The same reads in memory of the device that the worker would use."""
    device = settings.device
    if device == "cpu":
        return ok("device is cpu: blocks are in memory of the host, and no GPU's is read over NIXL")
    try:
        view, read = probe(device, environ, _DEVICE_S)
    except ChildBroke as error:
        return cannot(f"memory of {device} ends the process that registers it with NIXL: {error}", _NO_DEVICE)
    except TimeoutError:
        return cannot(f"memory of {device} was not read over NIXL within {_DEVICE_S:g} s", _NO_DEVICE)
    if (why_not := view.why_not or read.why_not) is not None:
        return cannot(f"memory of {device} cannot be read over NIXL: {why_not}", _NO_DEVICE)
    return ok(f"two processes of this machine read each other's memory of {device} over NIXL ({_shown(read)})")


def _shown(read: ReadView) -> str:
    return f"{read.seconds * 1e3:.0f} ms with the connection, then {read.bytes_per_s / 1e9:.1f} GB/s with digests"


def probe(device: str, environ: Mapping[str, str] | None, answer_s: float) -> tuple[NixlView, ReadView]:
    """Reads between two processes whose pools are on a device. answer_s: limit for both processes together.

    Raises: ChildBroke, TimeoutError.
    """
    ends_at = time.monotonic() + answer_s
    with child(_PROBE, "source", device, environ=environ, timeout_s=answer_s) as source:
        view = source.answer(NixlView)
        if view.why_not is not None:
            return view, ReadView(None)
        metadata = source.answer(bytes)
        with child(_PROBE, "reader", device, environ=environ, timeout_s=ends_at - time.monotonic()) as reader:
            reader.send(metadata)
            return view, reader.answer(ReadView)


def transports_text(view: NixlView) -> str:
    """UCX's transports by kind, then those that are not used."""
    if not view.found:
        return "UCX does not tell which transports it finds"
    parts = []
    for kind in _KINDS:
        found = [one for one in view.found if one.kind == kind]
        names = dict.fromkeys(one.name if one.device == "memory" else f"{one.name} on {one.device}" for one in found)
        unused = "" if not found or any(one in view.used for one in found) else " (not used)"
        parts.append(f"{kind}: {', '.join(names) or 'none'}{unused}")
    return "UCX finds " + "; ".join(parts)


def choice(settings: WorkerSettings, used: Sequence[UcxTransport]) -> Finding:
    """The data plane that a worker with these settings would use, and the reason. Blocks are in host memory, also with a GPU."""
    kinds = {transport.kind for transport in used}
    if not kinds:
        return ok(f"connector is {settings.connector}: NIXL is tried first with every peer that has it, then TCP")
    near = next((kind for kind in ("shared memory", "RDMA", "TCP") if kind in kinds), None)
    far = next((kind for kind in ("RDMA", "TCP") if kind in kinds), None)
    shown = (
        f"connector is {settings.connector}: NIXL first, then TCP; peers on this machine over "
        f"{near or 'nothing that UCX may use'}, on others over {f'UCX {far}' if far else 'the tcp connector'}"
    )
    if far is None and not is_loopback(settings.host):
        return warning(
            f"{shown}: without RDMA the first read from each of those fails first",
            "set connector=tcp where workers are on several machines without RDMA",
        )
    return ok(shown)


def _locked_memory(settings: WorkerSettings, used: Sequence[UcxTransport]) -> Iterator[Finding]:
    """Check the limit of locked memory, since RDMA pins the memory that it accesses."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    too_low = limit != resource.RLIM_INFINITY and limit < (settings.pool_mib or settings.limits.kv_ring_mib) << 20
    if settings.num_blocks is None and too_low and any(transport.kind == "RDMA" for transport in used):
        what = f"RDMA must lock the KV pool, and only {limit >> 20} MiB may be locked"
        yield warning(what, "raise it: `ulimit -l unlimited`, `--ulimit memlock=-1` for containers")
