"""Cost of authenticated calls: CPU time of each part, and of a whole gRPC call with and without a proof.

Usage: python benchmarks/call_proofs.py

Times are CPU time of one thread, the least of several runs, so that other processes do not count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from conditions import print_conditions

from pdserve.common.block_hash import BlockHasher
from pdserve.common.net.rpc import bind, make_channel, make_server
from pdserve.common.net.service_channel import MEET, STEP_STREAM, ServiceChannel
from pdserve.common.request.generation_request import GenerationRequest
from pdserve.common.request.wire.request_bytes import encode_request
from pdserve.common.security.call_guard import CallGuard
from pdserve.common.security.call_proof import CallSigner, CallVerifier
from pdserve.common.security.deployment_key import DEVELOPMENT_KEY
from pdserve.v1 import step_stream_pb2, worker_pb2
from pdserve.v1.worker_pb2_grpc import WorkerServiceServicer, WorkerServiceStub, add_WorkerServiceServicer_to_server

WORKER = ("decode-0", 1)
RUNS, CALLS = 20, 400


class Servicer(WorkerServiceServicer):
    async def Meet(self, request: Any, context: Any) -> Any:
        return worker_pb2.MeetResponse()


def micros(call: Callable[[], object], times: int) -> float:
    """CPU time of one call, microseconds."""
    best = float("inf")
    for _ in range(RUNS):
        started = time.thread_time()
        for _ in range(times):
            call()
        best = min(best, (time.thread_time() - started) / times)
    return best * 1e6


def parts(num_tokens: int) -> dict[str, float]:
    """Name -> microseconds, for a stream whose first request has this many prompt tokens."""
    tokens = [place * 7919 % 150_000 for place in range(num_tokens)]
    request = encode_request(GenerationRequest(request_id="r", prompt_token_ids=tokens, hash_root=b"r" * 16))
    message = step_stream_pb2.StepCommands(submissions=[step_stream_pb2.Submission(key=1, request=request)])
    raw, times = message.SerializeToString(), max(5, 20_000 // num_tokens)
    signer, verifier = CallSigner(DEVELOPMENT_KEY), CallVerifier(DEVELOPMENT_KEY, lambda: WORKER)
    hasher = BlockHasher(DEVELOPMENT_KEY, 16)
    hashes = hasher.extend(b"r" * 16, tokens)

    def verify() -> None:
        # each proof is valid once
        [(_, proof)] = signer.metadata(STEP_STREAM.path, WORKER, raw)
        verifier.verify_message(STEP_STREAM.path, verifier.verify(STEP_STREAM.path, proof), raw)

    sign = micros(lambda: signer.metadata(STEP_STREAM.path, WORKER, raw), times)
    return {
        "serialize": micros(message.SerializeToString, times),
        "sign": sign,
        "verify": micros(verify, times) - sign,
        "hash the blocks again at the worker": micros(lambda: hasher.extend(b"r" * 16, tokens), times),
        "request digest at the worker": micros(lambda: hasher.request_digest(b"r" * 16, hashes, tokens), times),
    }


async def whole_call(*, proof: bool) -> float:
    """CPU time of this process for a unary call to itself, both sides together, microseconds."""
    guards = [CallGuard(CallVerifier(DEVELOPMENT_KEY, lambda: WORKER))] if proof else []
    server = make_server(*guards)
    add_WorkerServiceServicer_to_server(Servicer(), server)  # type: ignore[abstract]
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    request, best = worker_pb2.MeetRequest(worker_id="w", epoch=1, address="127.0.0.1:1"), float("inf")
    async with make_channel(f"127.0.0.1:{port}") as channel:
        service = ServiceChannel(channel, CallSigner(DEVELOPMENT_KEY), WORKER)
        stub = WorkerServiceStub(channel)
        for _ in range(RUNS):
            started = time.thread_time()
            for _ in range(CALLS):
                await (service.unary_unary(MEET, request) if proof else stub.Meet(request))
            best = min(best, (time.thread_time() - started) / CALLS)
    await server.stop(None)
    return best * 1e6


def main() -> None:
    print_conditions()
    for num_tokens in (100, 12_000):
        print(f"\n{num_tokens:,} prompt tokens, microseconds")
        for name, spent in parts(num_tokens).items():
            print(f"  {name:<38} {spent:8.1f}")
    print("\na whole small call, caller and worker together, microseconds")
    for name, proof in (("without a proof", False), ("with a proof", True)):
        print(f"  {name:<38} {asyncio.run(whole_call(proof=proof)):8.1f}")


if __name__ == "__main__":
    main()
