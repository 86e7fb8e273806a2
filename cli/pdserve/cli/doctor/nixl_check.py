"""NIXL and UCX: whether they work here, over which transports, and which data plane the `connector` setting selects."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pdserve.cli.doctor.child_process import ChildBroke, child
from pdserve.cli.doctor.finding import Finding, Verdict, failed, ok, warning
from pdserve.common.security.deployment_key import is_loopback
from pdserve.common.settings.worker_settings import WorkerSettings
from pdserve.kv_transfer.nixl.nixl_probe import NixlView, ReadView
from pdserve.kv_transfer.nixl.ucx_transports import UcxTransport

_PROBE = "pdserve.kv_transfer.nixl.nixl_probe"
_KINDS = ("shared memory", "RDMA", "CUDA IPC", "TCP")
_INSTALL = "pip install 'pdserve[nixl]'; or set connector=tcp, and nothing looks for it"
_NO_READ = (
    "processes may have to share a user, a PID namespace and the right to trace each other (CAP_SYS_PTRACE in "
    "containers); or set connector=tcp"
)


@dataclass(frozen=True, slots=True)
class NixlCheck:
    """Checks NIXL in child processes, which a UCX that does not fit the machine may abort. Implements `Check`. environ: added to
    this process's environment."""

    settings: WorkerSettings
    environ: Mapping[str, str] = field(default_factory=dict)
    answer_s: float = 50.0
    name: str = "nixl"
    deadline_s: float = 60.0

    def run(self) -> list[Finding]:
        """See `Check.run`."""
        if self.settings.connector == "tcp":
            return [ok("connector is tcp: NIXL is not used")]
        if self.settings.tls_cert_file is not None and not self.settings.nixl_plaintext:
            return [ok("TLS is configured, and NIXL encrypts nothing: it is not used (nixl_plaintext would allow it)")]
        try:
            view, read = asyncio.run(self._probe())
        except ChildBroke as error:
            return [self._cannot(f"NIXL ends the process that starts it: {error}", _INSTALL)]
        except TimeoutError:
            return [self._cannot(f"NIXL did not answer within {self.answer_s:g} s", _INSTALL)]
        if view.why_not is not None:
            return [self._cannot(f"NIXL {view.nixl} cannot be used: {view.why_not}".replace("  ", " "), _INSTALL)]
        findings = [
            ok(
                f"NIXL {view.nixl} with UCX {view.ucx or 'of unknown version'} makes an agent; "
                f"UCX_TLS is {view.tls!r}, {'as the environment says' if view.tls_is_given else 'our default'}"
            ),
            ok(transports_text(view)),
        ]
        if read.why_not is not None:
            what = f"two processes of this machine do not read each other over NIXL: {read.why_not}"
            return [*findings, self._cannot(what, _NO_READ)]
        findings.append(ok(f"two processes of this machine read each other over NIXL ({read.seconds * 1e3:.0f} ms)"))
        findings.append(choice(self.settings, view.used))
        return [*findings, *_locked_memory(self.settings, view.used)]

    async def _probe(self) -> tuple[NixlView, ReadView]:
        async with asyncio.timeout(self.answer_s), child(_PROBE, "source", environ=self.environ) as source:
            view = await source.answer(NixlView)
            if view.why_not is not None:
                return view, ReadView(None)
            metadata = await source.answer(bytes)
            async with child(_PROBE, "reader", environ=self.environ) as reader:
                reader.tell(metadata)
                return view, await reader.answer(ReadView)

    def _cannot(self, what: str, advice: str) -> Finding:
        if self.settings.connector == "nixl":
            return failed(what, advice)
        return warning(f"{what}; connector is auto, so blocks move over TCP", advice)


def transports_text(view: NixlView) -> str:
    """UCX's transports by kind, then those that are not used."""
    if not view.found:
        return "UCX does not tell which transports it finds"
    parts = []
    for kind in _KINDS:
        found = [transport for transport in view.found if transport.kind == kind]
        names = ", ".join(dict.fromkeys(_shown(transport) for transport in found)) or "none"
        unused = "" if not found or any(transport in view.used for transport in found) else " (not used)"
        parts.append(f"{kind}: {names}{unused}")
    return "UCX finds " + "; ".join(parts)


def choice(settings: WorkerSettings, used: Sequence[UcxTransport]) -> Finding:
    """The data plane that a worker with these settings would use, and the reason. Blocks are in host memory, also with a GPU."""
    kinds = {transport.kind for transport in used}
    if not kinds:
        return ok(f"connector is {settings.connector}: NIXL is tried first with every peer that has it, then TCP")
    near = next((kind for kind in ("shared memory", "RDMA", "TCP") if kind in kinds), None)
    far = next((kind for kind in ("RDMA", "TCP") if kind in kinds), None)
    told = (
        f"connector is {settings.connector}: NIXL first, then TCP; peers on this machine over "
        f"{near or 'nothing that UCX may use'}, on others over {f'UCX {far}' if far else 'the tcp connector'}"
    )
    if far is None and not is_loopback(settings.host):
        return warning(
            f"{told}: without RDMA the first read from each of those fails first",
            "set connector=tcp where workers are on several machines without RDMA",
        )
    return ok(told)


def _locked_memory(settings: WorkerSettings, used: Sequence[UcxTransport]) -> list[Finding]:
    """Check the limit of locked memory, since RDMA pins the memory that it accesses."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    pool_bytes = settings.kv_cache_mib << 20
    if settings.num_blocks is not None:
        return []
    if all(transport.kind != "RDMA" for transport in used) or limit == resource.RLIM_INFINITY or limit >= pool_bytes:
        return []
    what = f"RDMA must lock the KV pool, and only {limit >> 20} MiB may be locked"
    return [Finding(Verdict.WARNING, what, "raise it: `ulimit -l unlimited`, `--ulimit memlock=-1` for containers")]


def _shown(transport: UcxTransport) -> str:
    return transport.name if transport.device == "memory" else f"{transport.name} on {transport.device}"
