"""instructor in its modes."""

from __future__ import annotations

from typing import Any

import instructor
import pytest
from instructor.core import IncompleteOutputException
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from tests.clients.forms import City

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def patched(base_url: str, mode: Any) -> Any:
    return instructor.from_openai(OpenAI(base_url=base_url, api_key="none", max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA], ids=str)
def test_a_form(base_url: str, mode: Any) -> None:
    found, completion = patched(base_url, mode).create_with_completion(
        model="demo", messages=QUESTION, temperature=0, response_model=City, max_retries=0
    )
    assert isinstance(found, City)
    assert completion.usage.completion_tokens > 0


class Defaults(BaseModel):
    city: str = "Paris"


def test_json_mode(base_url: str, only_braces: dict[str, Any]) -> None:
    found = patched(base_url, instructor.Mode.JSON).create(
        model="demo", messages=QUESTION, temperature=0, response_model=Defaults, extra_body=only_braces, max_retries=0
    )
    assert isinstance(found, Defaults)
    assert found.city == "Paris"


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.JSON], ids=str)
def test_an_answer_that_the_limit_cuts_off_is_told(base_url: str, mode: Any) -> None:
    with pytest.raises(IncompleteOutputException):
        patched(base_url, mode).create(
            model="demo", messages=QUESTION, temperature=0, response_model=City, max_tokens=4, max_retries=0
        )


async def test_partial_answers_stream(base_url: str) -> None:
    async with AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        create = instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).create_partial
        partial = [found async for found in create(model="demo", messages=QUESTION, temperature=0, response_model=City)]
    assert len(partial) > 2
    assert City.model_validate(partial[-1].model_dump())
