"""Classes and scores from real processes, by `transformers`' own class in float32; decode workers refuse such a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest
import torch

from pdserve.common.net.public_server import make_public_channel
from pdserve.text.tokenization.tokenizer import Tokenizer
from pdserve.v1 import inference_pb2, inference_pb2_grpc
from tests.support.models.checkpoints import make_classifier
from tests.support.processes.cluster_processes import running_cluster
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow]

FLAGS = ("--dtype=float32", "--num-blocks=128", "--max-num-batched-tokens=32")
QUERY, TEXTS = "Where does the water go?", ["To the sea, said the miller. " * 4, "one, two, three", "rain"]


def _scores(model: torch.nn.Module, pairs: list[list[int]]) -> list[float]:
    with torch.inference_mode():
        return [float(model(torch.tensor([pair])).logits[0].sigmoid()) for pair in pairs]


async def test_equal_to_transformers_over_both_front_ends(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    model, tokenizer = make_classifier(folder, "qwen2", num_labels=1), Tokenizer.from_folder(folder)
    pairs = [tokenizer.encode(QUERY) + tokenizer.encode(text) for text in TEXTS]
    expected = _scores(model, pairs)
    with running_cluster(tmp_path) as cluster:
        workers = [cluster.start_worker("prefill", "--model", str(folder), *FLAGS, name=name) for name in ("p0", "p1")]
        cluster.start_router("--model", str(folder), prefill=[worker.address for worker in workers])
        url = f"http://{cluster.router.http}"
        async with (
            httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as http,
            make_public_channel(cluster.router.address) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for _ in range(2):  # the second time a prefix cache has most of it
                scored = (await http.post("/v1/score", json={"text_1": QUERY, "text_2": TEXTS})).json()
                assert [entry["score"] for entry in scored["data"]] == pytest.approx(expected, abs=1e-4)
            by_grpc = await stub.Score(inference_pb2.ScoreRequest(text_1=[QUERY], text_2=TEXTS))
            assert list(by_grpc.scores) == pytest.approx(expected, abs=1e-4)
            assert by_grpc.usage.cached_tokens > 0
            ranked = (await http.post("/v1/rerank", json={"query": QUERY, "documents": TEXTS})).json()
            order = sorted(range(len(TEXTS)), key=lambda place: -expected[place])
            assert [result["index"] for result in ranked["results"]] == order
            classified = (await http.post("/classify", json={"input": [pairs[0]]})).json()
            assert classified["data"][0]["probs"] == pytest.approx(expected[:1], abs=1e-4)
            refused = await http.post("/v1/completions", json={"prompt": "x"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        cluster.check_pools()
        cluster.check_logs()


def test_a_decode_worker_refuses_it_at_start(tmp_path: Path) -> None:
    make_classifier(tmp_path)
    command = [sys.executable, "-m", "pdserve", "decode", "--model", str(tmp_path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert ended.returncode != 0
    assert "has a classification head and generates no text: prefill workers alone serve it" in ended.stderr
