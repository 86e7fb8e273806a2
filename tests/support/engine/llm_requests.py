"""Prompts and parameters for tests of the offline API."""

from __future__ import annotations

import random
from typing import Any

from pdserve.engine.client.inproc_client import InprocClient
from pdserve.engine.engine_core import EngineCore
from pdserve.llm import LLM, AsyncLLM, SamplingParams
from tests.support.models.checkpoints import VOCAB_SIZE

TEXT = "The miller's daughter walked to the river"
MESSAGES = [{"role": "user", "content": "Where does the water go?"}]


def greedy(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0.0, "max_tokens": 12, "ignore_eos": True} | fields))


def sampled(**fields: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "ignore_eos": True} | fields))


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """Random prompts of these lengths, the same in every test."""
    generator = random.Random(0)
    return [[generator.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]


def core_of(llm: LLM | AsyncLLM) -> EngineCore:
    """The engine of one that has it in this process."""
    client = llm._client if isinstance(llm, AsyncLLM) else llm._engine and llm._engine.client
    assert isinstance(client, InprocClient)
    return client.core
