"""gRPC without stubs: the services describe themselves by reflection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from tests.support.processes.up_cluster import UpCluster
from tests.support.run.waiting import HANG_S

SERVICE = "pdserve.v1.InferenceService"


class Reflected:
    """Services of one server, by their descriptions."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self.database)
        self._channel = channel

    def call(self, service: str, method: str, /, **fields: Any) -> Any:
        """Fields are those of the request. Returns the response, or an iterator of them."""
        described = self._pool.FindServiceByName(service).FindMethodByName(method)
        make = self._channel.unary_stream if described.server_streaming else self._channel.unary_unary
        stub: Any = make(
            f"/{service}/{method}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(described.output_type).FromString,
        )
        return stub(GetMessageClass(described.input_type)(**fields), timeout=HANG_S)


@pytest.fixture
def server(up: UpCluster) -> Iterator[Reflected]:
    with grpc.insecure_channel(up.grpc) as channel:
        yield Reflected(channel)


CHAT = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}


def test_services_are_listed(server: Reflected) -> None:
    assert {SERVICE, "grpc.health.v1.Health"} <= set(server.database.get_services())


def test_the_model_and_its_health(server: Reflected) -> None:
    assert server.call(SERVICE, "GetModel").model == "demo"
    assert server.call("grpc.health.v1.Health", "Check", service="ready").status == 1


def test_a_chat_streams(server: Reflected) -> None:
    messages = list(
        server.call(SERVICE, "Generate", chat=CHAT, sampling={"temperature": 0, "max_tokens": 16}, stream=True)
    )
    assert len(messages) > 2
    assert "".join(message.text for message in messages) == "The capital of France is Paris."
    last = messages[-1]
    assert last.DESCRIPTOR.fields_by_name["finish_reason"].enum_type.values_by_number[last.finish_reason].name == (
        "FINISH_REASON_STOP"
    )
    assert last.usage.completion_tokens > 0


def test_embeddings(server: Reflected) -> None:
    found = server.call(SERVICE, "Embed", inputs=[{"text": {"text": "Paris"}}, {"text": {"text": "Rome"}}])
    assert len(found.embeddings) == 2


@pytest.mark.parametrize(
    ("fields", "status", "said"),
    [
        ({"sampling": {"top_p": 2}}, grpc.StatusCode.INVALID_ARGUMENT, "top_p must be above 0 and at most 1, not 2"),
        ({"sampling": {"max_tokens": 10**6}}, grpc.StatusCode.INVALID_ARGUMENT, "4096"),
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "other"),
    ],
    ids=["range", "length", "model"],
)
def test_errors_name_the_field_and_its_limit(
    server: Reflected, fields: dict[str, Any], status: grpc.StatusCode, said: str
) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(server.call(SERVICE, "Generate", chat=CHAT, **fields))
    error: Any = refused.value
    assert error.code() == status
    assert said in error.details()
    assert "pdserve-error-code" in dict(error.trailing_metadata())
