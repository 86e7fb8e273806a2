"""A client of `pdserve.v1.InferenceService` with nothing but grpc and the generated stubs.

Start a cluster with `make up`, then: .venv/bin/python examples/grpc_client.py "What is 7 plus 5?"
"""

from __future__ import annotations

import argparse
import os
import sys

import grpc

from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2

Metadata = tuple[tuple[str, str], ...]


def ask(stub: inference_pb2_grpc.InferenceServiceStub, question: str, metadata: Metadata) -> None:
    """Print the answer as it streams, then what the last message tells about it."""
    request = inference_pb2.GenerateRequest(
        chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content=question)]),
        sampling=request_pb2.SamplingParams(temperature=0, max_tokens=64),
        stream=True,
    )
    last = inference_pb2.GenerateResponse()
    for last in stub.Generate(request, metadata=metadata, timeout=60):
        print(last.text, end="", flush=True)
    usage = last.usage
    print(f"\n\n{request_pb2.FinishReason.Name(last.finish_reason)}, request {last.request_id}")
    print(f"{usage.prompt_tokens} prompt tokens ({usage.cached_tokens} cached), {usage.completion_tokens} new")
    # moments are wall-clock nanoseconds of whichever service saw them; common/timeline.py defines each
    moments = sorted(last.moments, key=lambda moment: moment.unix_ns)
    for moment in moments:
        print(f"{(moment.unix_ns - moments[0].unix_ns) / 1e6:9.2f} ms  {moment.name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--address", default="127.0.0.1:50051", help="the router's gRPC front end")
    options = parser.parse_args()
    key = os.environ.get("PDSERVE_API_KEY")
    metadata: Metadata = (("authorization", f"Bearer {key}"),) if key else ()
    with grpc.insecure_channel(options.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            model = stub.GetModel(inference_pb2.GetModelRequest(), metadata=metadata, timeout=5)
            print(f"{model.model}: {model.max_model_len} tokens at most, vocabulary of {model.vocab_size}\n")
            ask(stub, options.question, metadata)
        except grpc.RpcError as error:
            # the code of common/errors.py comes in the trailing metadata; without it the router itself was not reached
            trailing = {item.key: item.value for item in error.trailing_metadata() or ()}
            print(f"{trailing.get('pdserve-error-code', error.code().name)}: {error.details()}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
