"""`settings_with`: settings whose limits are given by their own names, as a command line has them."""

from __future__ import annotations

from typing import Any, TypeVar

from pdserve.common.settings.catalogue import limits_of
from pdserve.common.settings.service_settings import ServiceSettings
from pdserve.common.settings.settings import with_limits

S = TypeVar("S", bound=ServiceSettings)


def settings_with(kind: type[S], **values: Any) -> S:
    """Not verified."""
    nested = with_limits(kind, values)
    if "limits" in nested:
        nested["limits"] = limits_of(kind)(**nested["limits"])
    return kind(**nested)
