"""One prompt or many, with one value for all or one for each, as the calls of `LLM` take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.llm.requests.local_request import ValidRequest
from pdserve.llm.requests.prompts import is_one_prompt, named

P = TypeVar("P", bound=msgspec.Struct | int)


def many_prompts(prompts: object) -> tuple[Sequence[object], str | None]:
    """(prompts, label of a list or None for a single prompt). Raises: InvalidRequest."""
    if is_one_prompt(prompts):
        return [prompts], None
    if not isinstance(prompts, Sequence):
        raise InvalidRequest(f"prompts must be a prompt or a list of them, not {type(prompts).__name__}", "prompts")
    return prompts, "prompts"


def validated(
    values: Sequence[object], label: str | None, validate: Callable[[int, object], ValidRequest]
) -> list[ValidRequest]:
    """validate: takes a value's place, and the value. Raises: InvalidRequest, with the place if there is a label."""
    valid = []
    for place, value in enumerate(values):
        with named(None if label is None else f"{label}[{place}]"):
            valid.append(validate(place, value))
    return valid


def one_for_each(
    params: P | Sequence[P] | Sequence[P | None] | None, num_prompts: int, kind: type[P], name: str
) -> Sequence[P | None]:
    """One value per prompt. name: the caller's name of the argument. Raises: InvalidRequest."""
    if params is None or isinstance(params, kind):
        return [params] * num_prompts
    if not isinstance(params, Sequence):
        raise InvalidRequest(f"{name} must be {kind.__name__} or a list of them, not {type(params).__name__}", name)
    if len(params) != num_prompts:
        raise InvalidRequest(f"{name} has {len(params)} entries, one for each of {num_prompts} prompts is needed", name)
    return params
