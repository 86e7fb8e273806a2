"""`tools/traced_request.py`: what its recorder counts in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.run.waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
TOY = """
import dataclasses
from typing import NamedTuple

@dataclasses.dataclass
class Question:
    text: str

@dataclasses.dataclass
class Packed:
    payload: bytes

class Tokens(NamedTuple):
    prompt_token_ids: list

@dataclasses.dataclass
class Answer:
    new_token_ids: tuple

@dataclasses.dataclass
class Blocks:
    block_ids: tuple

@dataclasses.dataclass
class Other:
    text: str

class Holder:
    def __init__(self, text):
        self.text = text

def ask(question): return pack(question)
def pack(question): return Packed(b"..capital of France..")
def tokens(packed): return Tokens([1, 2, 3, 901, 902, 903, 904, 905, 906])
def answer(tokens): return Answer((77,))
def others(): return blocks(Blocks((77,)), Other("something else"), Holder("capital of France"))
def blocks(*all_of_them): return None
"""
SERVE = """
import os, sys, time
from pdserve.toy import Question, answer, ask, others, tokens
rounds = open(sys.argv[2], "wb", buffering=0)
while not os.path.exists(sys.argv[1]):
    rounds.write(b".")
    answer(tokens(ask(Question("What is the capital of France?"))))
    others()
    time.sleep(0.01)
"""


def traced_request() -> Any:
    """The tool as a module."""
    spec = importlib.util.spec_from_file_location("traced_request", ROOT / "tools/traced_request.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def wait_for(process: subprocess.Popen[bytes], met: Callable[[], bool]) -> None:
    until = time.monotonic() + HANG_S
    while not met():
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.02)


def test_files_and_forms_of_a_process_are_recorded(tmp_path: Path) -> None:
    package = tmp_path / "code/pdserve"
    package.mkdir(parents=True)
    (package / "toy.py").write_text(TOY)
    (tmp_path / "code/sitecustomize.py").write_text(traced_request().RECORDER)
    marks, rounds = tmp_path / "marks", tmp_path / "rounds"
    marks.mkdir()
    environ = os.environ | {"PYTHONPATH": str(tmp_path / "code"), "TRACED_REQUEST": str(marks)}
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(tmp_path / "stop"), str(rounds), "decode"], env=environ
    )
    try:
        told = {
            "text": "capital of France",
            "answer": "Paris",
            "prompt": [901, 902, 903, 904, 905, 906],
            "tokens": [77],
            "bytes": [b"capital of France".hex()],
        }
        wait_for(process, rounds.exists)
        (marks / "new").write_text(json.dumps(told))
        (marks / "new").rename(marks / "busy.on")
        marked = rounds.stat().st_size
        wait_for(process, lambda: rounds.stat().st_size > marked + 100)
        (marks / "busy.on").unlink()
        wait_for(process, lambda: any(path.read_text() for path in marks.glob("busy.decode.*.json")))
    finally:
        (tmp_path / "stop").touch()
        process.wait(HANG_S)
    [found] = marks.glob("busy.decode.*.json")
    read = json.loads(found.read_text())
    assert [file.partition("/pdserve/")[2] for file in read["files"]] == ["toy.py"]
    assert sorted(read["forms"]) == ["toy.Answer", "toy.Packed", "toy.Question", "toy.Tokens"]
