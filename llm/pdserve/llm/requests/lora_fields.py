"""`lora_fields`: the fields of an engine's request with a caller's adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pdserve.common.errors import ConfigError, InvalidRequest
from pdserve.common.request.lora_request import LoRARequest
from pdserve.engine.client.engine_core_client import EngineCoreClient


def lora_fields(client: EngineCoreClient, lora_request: object) -> dict[str, Any]:
    """Fields of `GenerationRequest` for a request with this adapter, which the engine reads if it is new; {} for None.

    Raises: InvalidRequest naming the field, its value and its limit.
    """
    if lora_request is None:
        return {}
    if not isinstance(lora_request, LoRARequest):
        raise InvalidRequest(f"lora_request must be LoRARequest, not {type(lora_request).__name__}", "lora_request")
    lora_request.verify()
    folder = Path(lora_request.lora_path).expanduser().absolute()
    try:
        fingerprint = client.utility("add_lora", str(folder))
    except ConfigError as error:
        raise InvalidRequest(f"lora_request: {error.message}", "lora_request") from error
    return {"lora_name": lora_request.lora_name, "lora_fingerprint": fingerprint}
