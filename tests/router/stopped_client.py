"""A client of a session in a process of its own: one turn, a line on its input, another turn. Prints each answer."""

from __future__ import annotations

import queue
import sys

import grpc

from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2

REQUEST = inference_pb2.GenerateRequest(
    text=inference_pb2.TextPrompt(text="x"), sampling=request_pb2.SamplingParams(max_tokens=3), stream=True
)


def main(address: str) -> None:
    turns: queue.SimpleQueue[inference_pb2.GenerateRequest | None] = queue.SimpleQueue()
    with grpc.insecure_channel(address) as channel:
        responses = inference_pb2_grpc.InferenceServiceStub(channel).Session(iter(turns.get, None))
        for _ in range(2):
            turns.put(REQUEST)
            text = ""
            for response in responses:
                text += response.text
                if response.finish_reason:
                    break
            print(text, flush=True)
            sys.stdin.readline()
        turns.put(None)


if __name__ == "__main__":
    main(sys.argv[1])
