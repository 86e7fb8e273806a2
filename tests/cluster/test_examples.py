"""The examples of the README and of the quickstart run: `pdserve up` with the bundled model, and the commands that ask."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from demo_image_model.conversations import BOTH, COLOUR, SHAPE, answer_to
from demo_image_model.evaluate import upright_pictures
from demo_image_model.pictures import Picture, draw
from tests.support.models.image_checkpoints import data_url
from tests.support.processes.up_cluster import ENVIRON, UpCluster, running_up
from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
PDSERVE = [sys.executable, "-m", "pdserve.cli.main"]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpCluster]:
    with running_up(tmp_path_factory.mktemp("up")) as cluster:
        yield cluster


def output_of(*command: str) -> str:
    """The output of a command, which must end well and in time."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False, env=ENVIRON)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "Traceback" not in done.stderr
    return done.stdout


@pytest.mark.slow
def test_openai_example(up: UpCluster) -> None:
    lines = output_of(sys.executable, str(ROOT / "examples/openai_client.py"), "--base-url", up.base_url).splitlines()
    assert lines[0].split() == ["model", "demo"]
    assert [line for line in lines if line.endswith(ANSWER)] == [
        f"chat              {ANSWER}",
        f"the same streamed {ANSWER}",
        f"response          {ANSWER}",
    ]
    assert "a streamed one    The capital of Peru is Lima." in lines
    # the stop string ends both completions
    sentence = ANSWER.removesuffix(".")
    assert [line for line in lines if line.endswith(sentence)] == [
        f"completion        {sentence}",
        f"the same streamed {sentence}",
    ]
    assert sum("usage" in line for line in lines) == 3


def test_grpc_example(up: UpCluster) -> None:
    printed = output_of(sys.executable, str(ROOT / "examples/grpc_client.py"), "--address", up.grpc)
    assert printed.startswith("demo: 4096 tokens at most")
    assert ANSWER in printed.splitlines()
    assert "FINISH_REASON_STOP" in printed
    moments = re.findall(r" ms  (\w+)$", printed, re.MULTILINE)
    assert moments[0] == "arrived"
    # the question was asked before, so decode may hold its blocks and need no transfer
    assert {"prefill_computed", "first_token", "decode_finished", "finished"} <= set(moments)


def test_grpc_example_names_what_is_wrong(up: UpCluster) -> None:
    too_long = [sys.executable, str(ROOT / "examples/grpc_client.py"), "Paris " * 5000, "--address", up.grpc]
    done = subprocess.run(too_long, capture_output=True, text=True, timeout=HANG_S, check=False, env=ENVIRON)
    assert done.returncode == 1
    assert done.stderr.startswith("prompt_too_long: ")
    assert "Traceback" not in done.stderr


def test_chat_and_generate(up: UpCluster) -> None:
    chat = output_of(*PDSERVE, "chat", "--url", up.grpc, "--timeline", "What is the capital of France?").splitlines()
    assert chat[0] == ANSWER
    # asked before: decode may hold its blocks and need no transfer
    assert {"prefill", "decode"} <= phases(chat)
    # how many tokens a word has is the tokenizer's business
    continued = output_of(*PDSERVE, "generate", "--url", up.grpc, "--max-tokens", "8", "The capital of France is")
    assert continued.startswith(" Paris.")


def test_up_once_answers_and_ends() -> None:
    lines = output_of(*PDSERVE, "up", "--once", "--port", "0", "--grpc-port", "0").splitlines()
    assert lines[lines.index("What is the capital of France?") + 1] == ANSWER
    assert {"prefill", "kv transfer", "decode"} <= phases(lines)


@pytest.mark.slow
def test_up_once_names_a_picture() -> None:
    image = str(ROOT / "examples/red_circle.png")
    lines = output_of(
        *PDSERVE, "up", "demo-image", "--once", "--port", "0", "--grpc-port", "0", "--image", image
    ).splitlines()
    assert lines[lines.index("What is in the picture?") + 1] == "A red circle."
    assert {"prefill", "kv transfer", "decode"} <= phases(lines)
    assert "demo-image: $(VENV)/.runtime" in (ROOT / "Makefile").read_text()


@pytest.mark.slow
def test_pictures_are_named_through_prefill_and_decode(tmp_path: Path) -> None:
    rng = random.Random(99)
    questions = [(BOTH[0], each) for each in upright_pictures()[1::3]]
    held_out = [(rng.choice((*BOTH, *COLOUR, *SHAPE)), draw(rng)) for _ in range(60)]
    with running_up(tmp_path, "demo-image", "--local-prefill", "never") as cluster:
        with httpx.Client(base_url=cluster.base_url, timeout=HANG_S, trust_env=False) as http:
            found = [named(http, *question) for question in questions + held_out]
        cluster.check_pools()
    right = [answer == answer_to(*question) for answer, question in zip(found, questions + held_out, strict=True)]
    assert sum(right[: len(questions)]) >= 0.9 * len(questions), found
    assert sum(right[len(questions) :]) >= 0.9 * len(held_out), found


def named(http: httpx.Client, question: str, picture: Picture) -> str:
    """The greedy answer, over OpenAI HTTP."""
    parts = [{"type": "text", "text": question}, {"type": "image_url", "image_url": {"url": data_url(picture.image)}}]
    body = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 16}
    answer = http.post("chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    content: str = answer.json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.slow
def test_up_takes_a_file_with_settings_and_secrets(tmp_path: Path) -> None:
    file = tmp_path / "up.toml"
    file.write_text(
        'deployment_key = "a secret of many characters"\n[router]\nport = 0\ngrpc_port = 0\n'
        'api_keys = ["a-key-of-many-characters"]\n[decode]\nnum_blocks = 99\n'
    )
    assert ANSWER in output_of(*PDSERVE, "up", "--once", "--config", str(file)).splitlines()


def phases(lines: list[str]) -> set[str]:
    """Names in the first column of the timeline, those with a time in the second."""
    return {match[1] for line in lines if (match := re.match(r"([a-z ]+?) +\d+\.\d\d\b", line))}
