"""The example and the lines of docs/llm.md, as somebody would run them, with the bundled model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.run.waiting import HANG_S

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
SENTENCE = "The capital of France is Paris."


def output_of(*arguments: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PDSERVE_")}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=HANG_S, check=False, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_offline_example() -> None:
    lines = output_of(str(ROOT / "examples/offline.py")).splitlines()
    assert lines[0].startswith(SENTENCE)
    assert re.fullmatch(r"The capital of Japan is Tokyo\.   \(\d+ tokens, stop\)", lines[1])
    assert lines[3] == SENTENCE
    grown = [line.removeprefix("What is the capital of France?").strip() for line in lines if "France?" in line]
    assert grown[-1] == SENTENCE
    assert all(SENTENCE.startswith(text) for text in grown)


def test_a_process_that_forgets_to_shut_down_ends_well() -> None:
    code = """
import asyncio
from pdserve.llm import AsyncLLM, SamplingParams

async def main():
    async for answer in llm.generate("The capital of", SamplingParams(max_tokens=4000, ignore_eos=True), "mine"):
        return

llm = AsyncLLM("demo", num_blocks=300)
asyncio.run(main())
print("left")
"""
    assert output_of("-c", code) == "left\n"


def test_the_page_is_true() -> None:
    section = (ROOT / "docs/llm.md").read_text().split("\n## A batch\n")[1].split("\n## ")[0]
    [(code, printed)] = re.findall(r"```python\n(.*?)```.*?```\n(.*?)```", section, re.DOTALL)
    assert output_of("-c", code) == printed
