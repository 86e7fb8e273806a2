"""A gRPC client for tests: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import grpc.aio

from pdserve.common.errors import Overloaded
from pdserve.common.net.public_server import make_public_channel
from pdserve.common.net.rpc import from_rpc_error
from pdserve.common.security.tls import ClientTls
from pdserve.v1 import inference_pb2, inference_pb2_grpc, request_pb2
from tests.support.run.waiting import HANG_S


@dataclass
class Answer:
    """One finished stream."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: int = 0
    cached_tokens: int = 0
    moments: set[str] = field(default_factory=set)


Prompt = Sequence[int] | inference_pb2.ChatPrompt | inference_pb2.AudioPrompt


REFUSED_S = 0.05
"""Pause before a call that was refused is sent again."""


def _was_refused(error: grpc.aio.AioRpcError) -> bool:
    """True for a call beyond those that a connection may have open, which no handler has seen."""
    return error.code() is grpc.StatusCode.UNAVAILABLE and isinstance(from_rpc_error(error), Overloaded)


class InferenceClient:
    """`async with InferenceClient(address) as client: answer = await client.ask(tokens, max_tokens=8)`"""

    def __init__(self, address: str, tls: ClientTls | None = None, api_key: str = "") -> None:
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._channel = make_public_channel(address, tls)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    async def __aenter__(self) -> InferenceClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._channel.close()

    def start(
        self,
        prompt: Prompt,
        timeout: float = HANG_S,
        cache_salt: str = "",
        model: str = "",
        speculative_tokens: int | None = None,
        **sampling: Any,
    ) -> grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]:
        """The raw call. sampling: fields of the proto's `SamplingParams`."""
        request = _request(prompt, cache_salt, sampling, model, speculative_tokens)
        return self._stub.Generate(request, timeout=timeout, metadata=self._metadata, wait_for_ready=True)

    async def converse(
        self,
        turns: Sequence[tuple[Sequence[int], Mapping[str, Any]]],
        timeout: float = HANG_S,
        cache_salt: str = "",
        models: Sequence[str] = (),
        speculative_tokens: int | None = None,
    ) -> list[list[int]]:
        """A session: the answer to each turn. turns: prompt and fields of `SamplingParams`. models: of the first turns.

        Raises: grpc.aio.AioRpcError.
        """
        answers: list[list[int]] = []
        message: Any
        call = self._stub.Session(timeout=timeout, metadata=self._metadata, wait_for_ready=True)
        try:
            for number, (prompt, sampling) in enumerate(turns):
                with contextlib.suppress(asyncio.InvalidStateError):  # it has ended: `read` says how
                    model = models[number] if number < len(models) else ""
                    drafts = None if number else speculative_tokens
                    await call.write(_request(prompt, "" if number else cache_salt, sampling, model, drafts))
                answers.append([])
                while (message := await call.read()) is not grpc.aio.EOF:
                    answers[-1] += message.token_ids
                    if message.finish_reason:
                        break
            await call.done_writing()
            while await call.read() is not grpc.aio.EOF:
                pass
        finally:
            call.cancel()
        return answers

    async def ask(
        self, prompt: Prompt, timeout: float = HANG_S, cache_salt: str = "", model: str = "", **sampling: Any
    ) -> Answer:
        """Read a stream to its end. Raises: grpc.aio.AioRpcError."""
        answer = Answer()
        async for message in self.start(prompt, timeout, cache_salt, model, **sampling):
            answer.token_ids += message.token_ids
            answer.text += message.text
            if message.finish_reason:
                answer.finish_reason = message.finish_reason
                answer.cached_tokens = message.usage.cached_tokens
                answer.moments = {moment.name for moment in message.moments}
        return answer

    async def ask_within(self, patience_s: float | None, prompt: Prompt, **fields: Any) -> tuple[list[int], bool]:
        """Token ids that come within `patience_s` seconds, or in any time, and whether the stream has ended; else it is cancelled.

        fields: of `start`. A call that gRPC has refused is sent again: cancelled ones count until the router has ended them.
        Raises: grpc.aio.AioRpcError.
        """
        while True:
            call, token_ids = self.start(prompt, **fields), list[int]()
            try:
                async with asyncio.timeout(patience_s):
                    async for message in call:
                        token_ids += message.token_ids
                return token_ids, True
            except TimeoutError:
                call.cancel()
                return token_ids, False
            except grpc.aio.AioRpcError as error:
                if token_ids or not _was_refused(error):
                    raise
                await asyncio.sleep(REFUSED_S)

    async def ask_choices(self, prompt: Sequence[int], n: int, **sampling: Any) -> list[list[int]]:
        """Token ids of each of n sequences."""
        token_ids: list[list[int]] = [[] for _ in range(n)]
        async for message in self.start(prompt, n=n, **sampling):
            token_ids[message.index] += message.token_ids
        return token_ids

    async def ask_all(self, prompts: Sequence[Prompt], **sampling: Any) -> list[Answer]:
        return await asyncio.gather(*(self.ask(prompt, **sampling) for prompt in prompts))


def _request(
    prompt: Prompt,
    cache_salt: str,
    sampling: Mapping[str, Any],
    model: str = "",
    speculative_tokens: int | None = None,
) -> inference_pb2.GenerateRequest:
    given: dict[str, Any]
    match prompt:
        case inference_pb2.ChatPrompt():
            given = {"chat": prompt}
        case inference_pb2.AudioPrompt():
            given = {"audio": prompt}
        case _:
            given = {"tokens": inference_pb2.TokenPrompt(token_ids=prompt)}
    return inference_pb2.GenerateRequest(
        **given,
        sampling=request_pb2.SamplingParams(**({"temperature": 0.0, "ignore_eos": True} | dict(sampling))),
        stream=True,
        cache_salt=cache_salt,
        model=model,
        speculative_tokens=speculative_tokens,
    )
