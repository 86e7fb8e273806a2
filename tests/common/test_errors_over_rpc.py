"""Every error of the tree crosses a real call: same class, code and status at the client; and calls that just break."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pdserve.common import errors
from pdserve.common.errors import BY_CODE, InternalError, Overloaded, PdServeError, from_code
from pdserve.common.net.rpc import bind, from_rpc_error, make_channel, make_server

CLASSES = sorted({*BY_CODE.values()}, key=lambda error: error.__name__)


class _Handlers(grpc.GenericRpcHandler):
    """`/pdserve.test/<kind>`: raises what `raised` holds; all four kinds of call."""

    def __init__(self) -> None:
        self.raised: BaseException = PdServeError()

    def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        async def unary(request: object, context: object) -> bytes:
            raise self.raised

        async def stream(request: object, context: object) -> AsyncIterator[bytes]:
            yield b"first"
            raise self.raised

        make: Any = {
            "unary_unary": lambda: grpc.unary_unary_rpc_method_handler(unary),
            "stream_unary": lambda: grpc.stream_unary_rpc_method_handler(unary),
            "unary_stream": lambda: grpc.unary_stream_rpc_method_handler(stream),
            "stream_stream": lambda: grpc.stream_stream_rpc_method_handler(stream),
        }.get(details.method.rpartition("/")[2])
        return make() if make is not None else None


@pytest.fixture
async def handlers() -> AsyncIterator[tuple[_Handlers, grpc.aio.Channel]]:
    served = _Handlers()
    server = make_server()
    server.add_generic_rpc_handlers((served,))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    channel = make_channel(f"127.0.0.1:{port}")
    yield served, channel
    await channel.close()
    await server.stop(None)


async def call(channel: grpc.aio.Channel, kind: str) -> grpc.aio.AioRpcError:
    method = getattr(channel, kind)(f"/pdserve.test/{kind}")
    requests = iter([b"request"]) if kind.startswith("stream") else b"request"

    async def to_its_end() -> None:
        if kind.endswith("stream"):
            async for _ in method(requests):
                pass
        else:
            await method(requests)

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await to_its_end()
    return caught.value


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream", "stream_unary", "stream_stream"])
async def test_every_error_comes_back_as_itself(handlers: tuple[_Handlers, grpc.aio.Channel], kind: str) -> None:
    served, channel = handlers
    assert len(CLASSES) > 15
    for error in CLASSES:
        served.raised = error(f"what happened: {error.__name__}, größer")
        status = await call(channel, kind)
        back = from_rpc_error(status)
        assert type(back) is error
        assert (back.code, back.message) == (error.code, served.raised.args[0])
        assert status.code() is error.grpc_status
        assert back.retryable == error.retryable


async def test_overload_says_when_to_come_back(handlers: tuple[_Handlers, grpc.aio.Channel]) -> None:
    served, channel = handlers
    served.raised = Overloaded("full", retry_after_s=2.5)
    back = from_rpc_error(await call(channel, "unary_unary"))
    assert isinstance(back, Overloaded)
    assert back.retry_after_s == 2.5


@pytest.mark.parametrize("char", ["x", "ö", "\N{GRINNING FACE}", "\ud800"])
async def test_a_long_message_is_cut_and_keeps_its_status(
    handlers: tuple[_Handlers, grpc.aio.Channel], char: str
) -> None:
    served, channel = handlers
    served.raised = errors.NotFound("what " + char * 20_000)
    status = await call(channel, "unary_unary")
    assert status.code() is grpc.StatusCode.NOT_FOUND
    assert 400 < len(status.details() or "") <= 2000
    assert (status.details() or "").startswith("what ")


async def test_a_bug_is_logged_and_says_nothing_to_the_client(
    handlers: tuple[_Handlers, grpc.aio.Channel], caplog: pytest.LogCaptureFixture
) -> None:
    served, channel = handlers
    served.raised = KeyError("a secret detail")
    for kind in ("unary_unary", "unary_stream"):
        with caplog.at_level(logging.ERROR):
            status = await call(channel, kind)
        assert status.code() is grpc.StatusCode.INTERNAL
        assert type(from_rpc_error(status)) is InternalError
        assert "secret" not in (status.details() or "")
    assert caplog.text.count("a secret detail") == 2


async def test_a_peer_that_is_not_there_is_lost_and_a_status_of_the_channel_is_no_bug() -> None:
    channel = make_channel("127.0.0.1:1")
    lost = from_rpc_error(await call(channel, "unary_unary"))
    await channel.close()
    assert type(lost) is errors.WorkerLost


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, errors.WorkerLost),
        (grpc.StatusCode.DEADLINE_EXCEEDED, errors.DeadlineExceeded),
        (grpc.StatusCode.CANCELLED, errors.Cancelled),
        (grpc.StatusCode.INVALID_ARGUMENT, errors.InvalidRequest),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, errors.Overloaded),
        (grpc.StatusCode.UNKNOWN, errors.WorkerLost),
        (grpc.StatusCode.INTERNAL, errors.WorkerLost),
        (grpc.StatusCode.UNIMPLEMENTED, errors.PeerError),
    ],
)
def test_a_status_without_our_code_is_the_channels_own(status: grpc.StatusCode, expected: type[PdServeError]) -> None:
    metadata = grpc.aio.Metadata()
    assert type(from_rpc_error(grpc.aio.AioRpcError(status, metadata, metadata, "words"))) is expected


def test_codes_are_unique_and_unknown_ones_are_the_peers() -> None:
    tree = [PdServeError]
    for error in tree:
        tree += error.__subclasses__()
    # elsewhere there are further kinds of these; a client that does not know them reads them as the peer's error
    own = [error for error in tree if error.__module__ == errors.__name__]
    assert {error.code for error in own} == set(BY_CODE)
    codes = [error.code for error in own if error is not PdServeError]
    assert len(codes) == len(set(codes))
    unknown = from_code("of a newer release", "x")
    assert type(unknown) is errors.PeerError
    assert unknown.retryable
    assert "of a newer release" in unknown.message


async def test_an_address_in_use_is_named() -> None:
    first, second = make_server(), make_server()
    port = bind(first, "127.0.0.1", 0)
    with pytest.raises(errors.ConfigError, match=rf"127\.0\.0\.1:{port}"):
        bind(second, "127.0.0.1", port)
    await first.stop(None)
    await second.stop(None)
