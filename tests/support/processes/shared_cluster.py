"""A cluster that tests share which differ only in what they ask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.support.models.oracle import Oracle
from tests.support.processes.cluster_processes import Cluster, Service

# chunks of 64 tokens: longer prompts are published while later chunks still compute
FLAGS = ("--dtype=float32", "--num-blocks=256", "--max-num-batched-tokens=64")
# what decode holds would be prefilled there, and these tests are about the way through both
THROUGH_BOTH = ("--local-prefill", "never")


@dataclass
class SharedCluster:
    """A router, one prefill and one decode worker, and further routers to the same workers."""

    processes: Cluster
    model: Path
    oracle: Oracle

    def router(self, name: str, *flags: str, prefill: bool = True) -> Service:
        """A router with these flags, started when it is asked for first. prefill: whether it knows the prefill worker."""
        if name not in self.processes.services:
            source, sink = (self.processes.services[role].address for role in ("prefill", "decode"))
            sources = [source] if prefill else []
            self.processes.start_router("--model", str(self.model), *flags, prefill=sources, decode=[sink], name=name)
        return self.processes.services[name]

    @property
    def router_of_decode(self) -> Service:
        """It knows no prefill worker: what it asks is computed by one engine."""
        return self.router("router-of-decode", prefill=False)
