"""Names of the model for clients: each is served, all are listed, and responses have the first."""

from __future__ import annotations

import grpc
import pytest
from openai import AsyncOpenAI, NotFoundError

from pdserve.common.errors import ConfigError
from pdserve.common.net.rpc import ERROR_CODE_KEY, ERROR_FIELD_KEY
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
from pdserve.router.http_front.fleet_http import ROLE_PATH
from pdserve.router.http_front.openapi import EXAMPLES
from pdserve.v1 import inference_pb2

NAMES = ("first", "org/second")


async def test_requests_under_any_name_are_served(cluster):
    await cluster.start(prefill=0, served_model_name=NAMES)
    for name in (*NAMES, None):
        response = await cluster.complete(**({} if name is None else {"model": name}))
        assert response.json()["model"] == "first"
    models = (await cluster.http.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == list(NAMES)
    assert (await cluster.http.get("/v1/models/org/second")).json() == models[1]
    assert (await cluster.grpc.GetModel(inference_pb2.GetModelRequest())).model == "first"
    refused = await cluster.complete(model="fake-model")
    assert refused.status_code == 404
    assert "this router serves 'first', 'org/second'" in refused.json()["error"]["message"]


@pytest.mark.few(4)
@pytest.mark.parametrize("path", sorted(set(EXAMPLES) - {ROLE_PATH}))
async def test_a_name_that_is_not_served_is_openais_error_everywhere(cluster, path):
    await cluster.start(served_model_name=NAMES)
    response = await cluster.http.post(path, json=EXAMPLES[path] | {"model": "other"})
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "model 'other' is not served here; this router serves 'first', 'org/second'" in error["message"]
    async with AsyncOpenAI(base_url=f"http://{cluster.addresses[0]}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(NotFoundError) as refused:
            await client.models.retrieve("other")
    assert (refused.value.code, refused.value.param) == ("model_not_found", "model")


async def test_a_sound_for_a_model_that_is_not_served(cluster):
    await cluster.start(served_model_name=NAMES)
    sound = {"file": ("a.wav", b"RIFF"), "model": (None, "other")}
    error = (await cluster.http.post("/v1/audio/transcriptions", files=sound)).json()["error"]
    assert (error["code"], error["param"]) == ("model_not_found", "model")


@pytest.mark.parametrize("call", ["Generate", "Embed", "Classify", "Score"])
async def test_a_name_that_is_not_served_over_grpc(cluster, call):
    await cluster.start(served_model_name=NAMES)
    inputs = [inference_pb2.EmbedInput(text=inference_pb2.TextPrompt(text="x"))]
    text = inference_pb2.TextPrompt(text="x")
    requests = {
        "Generate": inference_pb2.GenerateRequest(text=text, model="other"),
        "Embed": inference_pb2.EmbedRequest(inputs=inputs, model="other"),
        "Classify": inference_pb2.ClassifyRequest(inputs=inputs, model="other"),
        "Score": inference_pb2.ScoreRequest(text_1=["x"], text_2=["x"], model="other"),
    }
    answer = getattr(cluster.grpc, call)(requests[call])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (answer if isinstance(answer, grpc.aio.UnaryUnaryCall) else anext(aiter(answer)))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    trailing = dict(refused.value.trailing_metadata())
    assert (trailing[ERROR_CODE_KEY], trailing[ERROR_FIELD_KEY]) == ("model_not_found", "model")


async def test_entries_of_models_have_vllms_fields(cluster):
    await cluster.start(prefill=0, served_model_name=NAMES)
    first, second = (await cluster.http.get("/v1/models")).json()["data"]
    assert (first["root"], second["root"], first["parent"], second["parent"]) == ("first", "first", None, None)
    [permission] = second["permission"]
    assert permission["object"] == "model_permission"
    assert (permission["allow_sampling"], permission["allow_fine_tuning"]) == (True, False)
    assert permission["created"] == second["created"]


async def test_a_model_of_the_hub_has_its_name_there(cluster):
    await cluster.start(prefill=0, model="org/name")
    assert (await cluster.complete(model="org/name")).json()["model"] == "org/name"


def test_names_come_from_every_source(tmp_path):
    (tmp_path / "file.toml").write_text('served_model_name = ["a", "b c"]')
    assert load_settings(RouterSettings, toml=tmp_path / "file.toml", environ={}).served_model_name == ("a", "b c")
    assert load_settings(RouterSettings, environ={"PDSERVE_SERVED_MODEL_NAME": "a, b"}).served_model_name == ("a", "b")


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ((), "empty"),
        (("",), "''"),
        (("a\n",), r"'a\\n'"),
        (("m" * 257,), "1 to 256"),
        (("a", "a"), "'a' more than once"),
    ],
)
def test_names_that_cannot_be_served(names, told):
    with pytest.raises(ConfigError, match=f"served_model_name .*{told}"):
        load_settings(RouterSettings, flags={"served_model_name": names}, environ={})
