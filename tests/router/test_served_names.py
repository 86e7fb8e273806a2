"""Names of the model for clients: each is served, all are listed, and responses have the first."""

from __future__ import annotations

import pytest

from pdserve.common.errors import ConfigError
from pdserve.common.settings.router_settings import RouterSettings
from pdserve.common.settings.settings import load_settings
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
