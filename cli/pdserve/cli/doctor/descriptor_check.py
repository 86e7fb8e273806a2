"""File descriptors: the number of connections that a service may have open, and how to raise it."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from pdserve.cli.doctor.finding import Finding, failed, ok, warning
from pdserve.common.address.descriptors import ENOUGH_DESCRIPTORS, KEPT_BACK
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.worker_settings import WorkerSettings

FEW_DESCRIPTORS = 4096
_ADVICE = "raise the hard limit: `ulimit -Hn`, `LimitNOFILE=` of systemd, `ulimits: nofile` of a container"


@dataclass(frozen=True, slots=True)
class DescriptorCheck:
    """Checks the hard limit, to which a service raises its soft limit when it starts. Implements `Check`."""

    settings: WorkerSettings | RouterSettings
    name: str = "files"
    deadline_s: float = 5.0

    def run(self) -> list[Finding]:
        """See `Check.run`."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_DESCRIPTORS)
        wanted = 0
        if isinstance(self.settings, RouterSettings) and self.settings.max_connections is not None:
            wanted = 2 * self.settings.max_connections + KEPT_BACK
        if wanted > limit:
            return [
                failed(
                    f"at most {limit} files may be open, and max_connections of two front ends with what workers need "
                    f"are {wanted}",
                    f"lower max_connections, or {_ADVICE}",
                )
            ]
        if limit < FEW_DESCRIPTORS:
            return [warning(f"at most {limit} files may be open, and each connection is one", _ADVICE)]
        return [ok(f"{limit} files may be open")]
