"""`CallFailed`: the end of a worker's call with an error, and what it says about the worker."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from pdserve.common.errors import Cancelled, InternalError, PdServeError, PeerError, WorkerLost, WrongWorker
from pdserve.common.net.rpc import ERROR_CODE_KEY, from_rpc_error
from pdserve.common.net.service_channel import readable


class CallFailed(Exception):
    """A call ended with an error."""

    def __init__(self, error: PdServeError, died: bool, *, is_answer: bool = False) -> None:
        super().__init__(error.message)
        self.error = error
        self.died = died
        """True if the channel broke without an answer from the worker, or the worker reported that its engine failed."""
        self.is_answer = is_answer
        """True if the worker sent the error, and so may have admitted the request."""


def said_by_worker(error: PdServeError) -> CallFailed:
    """The failure of a call that the worker itself ended."""
    # a worker reports WorkerLost only about itself, if its engine has failed and its process exits; WrongWorker comes from
    # another epoch of the worker
    return CallFailed(error, died=isinstance(error, WorkerLost), is_answer=not isinstance(error, WrongWorker))


def call_failed(rpc_error: grpc.aio.AioRpcError) -> CallFailed:
    """The failure of a call, and whether the worker died."""
    error = from_rpc_error(rpc_error)
    if any(name == ERROR_CODE_KEY for name, _ in rpc_error.trailing_metadata() or ()):
        return said_by_worker(error)
    if isinstance(error, Cancelled):
        # a stopping server cancels its calls; the router did not cancel this one
        error = WorkerLost(f"the worker ended the call: {error.message}")
    return CallFailed(error, died=isinstance(error, WorkerLost))


async def next_message(call: Any, name: str) -> Any:
    """The next message of a gRPC call; None after the last one. name: of the call, in messages.

    Raises: CallFailed, also if the call was cancelled without the task that reads it.
    """
    try:
        message = await call.read()
    except grpc.aio.AioRpcError as error:
        raise call_failed(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise CallFailed(WorkerLost(f"{name} was cancelled, but not by this router"), died=True) from None
    except grpc.aio.UsageError as error:
        raise CallFailed(InternalError(f"{name} cannot be read: {error}"), died=False) from error
    if message is grpc.aio.EOF:
        return None
    try:
        return readable(message)
    except PeerError as error:
        raise CallFailed(error, died=False, is_answer=True) from error
