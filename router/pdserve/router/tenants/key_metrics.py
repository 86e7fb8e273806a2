"""`KeyMetrics`: counters per API key, in a separate registry, because only operators may see names of keys."""

from __future__ import annotations

from collections.abc import Collection

from prometheus_client import CollectorRegistry, Counter

from pdserve.router.tenants.client import Client


class KeyMetrics:
    """Counters per API key. The file of keys bounds the labels; series of removed keys are dropped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "pdserve_key_requests_total",
            "Prompts of an API key, by outcome.",
            ["key", "tenant", "outcome"],
            registry=registry,
        )
        self.tokens = Counter(
            "pdserve_key_tokens_total", "Tokens of an API key's prompts.", ["key", "tenant", "kind"], registry=registry
        )
        self._series: dict[str, set[tuple[Counter, tuple[str, ...]]]] = {}

    def ended(self, client: Client, outcome: str) -> None:
        """Count the end of a prompt. outcome: a finish reason, or the code of an error."""
        self._count(self.requests, client, outcome, 1)

    def used(self, client: Client, *, prompt: int, cached: int, output: int) -> None:
        """Count the tokens of a prompt whose output began."""
        for kind, number in (("prompt", prompt), ("cached", cached), ("output", output)):
            if number:
                self._count(self.tokens, client, kind, number)

    def keep(self, key_names: Collection[str]) -> None:
        """Drop the series of all other keys."""
        for name in self._series.keys() - set(key_names):
            for counter, labels in self._series.pop(name):
                counter.remove(*labels)

    def _count(self, counter: Counter, client: Client, label: str, number: int) -> None:
        if client.key_name:
            labels = (client.key_name, client.tenant, label)
            self._series.setdefault(client.key_name, set()).add((counter, labels))
            counter.labels(*labels).inc(number)
