"""A form that every model ends: its strings and numbers have limits."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field


class City(BaseModel):
    """A city and its size."""

    city: Literal["Paris", "Rome"]
    remark: str = Field(max_length=12)
    size: int = Field(ge=1, le=99)
