"""Cost of recording spans: CPU time of router and workers for requests with and without tracing.

One cluster gets one request at a time; every second request has a trace context that is not sampled, so that other processes of the
machine affect both kinds equally. CPU time is the kernel's count for all threads of the cluster. Spans are exported later by
separate threads, which affects both kinds. The total cost is therefore also measured separately: the spans of a request are
repeatedly made, exported and received in this process. That is an upper bound, because it includes the collector.

Usage: python benchmarks/tracing_cost.py [--pairs 300] [--prompt-tokens 128] [--output-tokens 32]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
from cluster_of_processes import serving
from conditions import print_conditions
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from pdserve.common.telemetry.telemetry import make_telemetry
from pdserve.common.telemetry.tracing import Event
from pdserve.common.timeline import PATH_PHASES, now_unix_ns
from pdserve.models.model_folder import model_folder

SETTLE_S = 0.01
"""Seconds in which workers make the spans of an answered request."""
LAST_EXPORT_S = 3.0
WARM_UP = 20
WORKER_SPANS = ("prefill.queue", "prefill.compute", "decode.reserve", "kv.transfer", "decode.queue", "decode.generate")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Counts spans and forgets them."""

    def __init__(self) -> None:
        self.num_spans = 0

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.num_spans += sum(len(scope.spans) for spans in request.resource_spans for scope in spans.scope_spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector, to which services that begin meanwhile send their spans."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    os.environ |= {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
        "OTEL_BSP_SCHEDULE_DELAY": "2000",
    }
    try:
        yield collector
    finally:
        server.stop(1).wait()


@contextmanager
def cluster(folder: Path, *flags: str) -> Iterator[tuple[str, list[int]]]:
    """A cluster's URL and the ids of its processes."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    with serving(folder, flags) as url:
        yield url, [child.pid for child in psutil.Process().children(recursive=True) if child.pid not in before]


def processor_s(pids: list[int]) -> float:
    """CPU seconds of all threads so far."""
    files = (path for pid in pids for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(path.read_text().split()[0]) for path in files) / 1e9


def request_ms(client: httpx.Client, url: str, body: dict[str, Any], pids: list[int], *, sampled: bool) -> float:
    """CPU milliseconds of one request, with what is done after its answer."""
    trace = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{'01' if sampled else '00'}"
    start = processor_s(pids)
    client.post(f"{url}/v1/completions", json=body, headers={"traceparent": trace}).raise_for_status()
    time.sleep(SETTLE_S)
    return (processor_s(pids) - start) * 1e3


def spans_alone_ms(num_requests: int = 3000) -> float:
    """Processor milliseconds of this process for the spans of one request, the collector's part among them."""
    telemetry = make_telemetry("router", "benchmark")
    if telemetry is None:
        raise RuntimeError("nothing is traced")
    start = time.process_time()
    for _ in range(num_requests):
        began = now_unix_ns()
        request = telemetry.tracing.root(
            "request", {}, began, {"pdserve.request.id": "a" * 32, "gen_ai.request.model": "m"}
        )
        request.add("tokenize", began, began + 1, {"gen_ai.usage.input_tokens": 128})
        candidates = ["prefill prefill-0: overlap 0, cost 8", "decode decode-0: overlap 0, cost 8"]
        request.add("route", began, began + 1, {"pdserve.route.kind": "remote", "pdserve.route.candidates": candidates})
        attempt = request.start("attempt", began, {"pdserve.attempt.number": 0})
        below = telemetry.tracing.below(attempt.headers)
        if below is None:
            raise RuntimeError("nothing is sampled")
        for name in WORKER_SPANS:
            attributes: dict[str, str | int] = {
                "pdserve.worker.id": "worker-0",
                "pdserve.prompt.tokens": 128,
                "pdserve.kv.bytes": 1 << 20,
            }
            below.add(name, began, began + 1, attributes, [Event("landing", began)])
        attempt.end(began + 1)
        request.end(began + 1, {f"pdserve.phase.{phase}_s": 0.001 for phase in PATH_PHASES})
    telemetry.tracing.close()
    return (time.process_time() - start) / num_requests * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--pairs", type=int, default=300)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    options = parser.parse_args()
    folder = model_folder(options.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    print_conditions()
    print(
        f"{'load':<12} {options.pairs} pairs of requests, one at a time, "
        f"{options.prompt_tokens} + {options.output_tokens} tokens\n"
    )
    draw = random.Random(1)
    costs: dict[bool, list[float]] = {False: [], True: []}
    with collecting() as collector, cluster(folder) as (url, pids), httpx.Client() as client:
        for pair in range(-WARM_UP, options.pairs):
            for sampled in (True, False) if pair % 2 else (False, True):
                prompt = [draw.randrange(10, vocabulary) for _ in range(options.prompt_tokens)]
                body = {"prompt": prompt, "max_tokens": options.output_tokens, "temperature": 0, "ignore_eos": True}
                cost = request_ms(client, url, body | {"model": folder.name}, pids, sampled=sampled)
                if pair >= 0:
                    costs[sampled].append(cost)
        time.sleep(LAST_EXPORT_S)
        num_spans = collector.num_spans
        alone_ms = spans_alone_ms()
    print(f"load after   {os.getloadavg()[0]:.2f}")
    for sampled, each in costs.items():
        quartiles = statistics.quantiles(each, n=4)
        print(
            f"recording {'on ' if sampled else 'off'} {quartiles[1]:8.2f} ms CPU time a request "
            f"(quartiles {quartiles[0]:.2f} to {quartiles[2]:.2f})"
        )
    off_ms = statistics.median(costs[False])
    more = sorted(on_ms - off for on_ms, off in zip(costs[True], costs[False], strict=True))
    # the median's own uncertainty, from order statistics: two standard deviations of a binomial
    reach = round(len(more) ** 0.5)
    low, high = more[len(more) // 2 - reach], more[len(more) // 2 + reach]
    print(
        f"difference   {statistics.median(more) / off_ms:+8.2%} median of pairs "
        f"(95 % between {low / off_ms:+.2%} and {high / off_ms:+.2%})"
    )
    print(f"spans        {num_spans / (options.pairs + WARM_UP):8.1f} a request")
    print(f"spans alone  {alone_ms:8.2f} ms CPU time a request, export and collector included: {alone_ms / off_ms:.2%}")


if __name__ == "__main__":
    main()
