"""`LoRARequest`: names an adapter for requests of `LLM`, `AsyncLLM` and `LLMEngine`, by vLLM's name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.generation_request import LORA_NAME, LORA_NAME_RULE
from pdserve.engine.clients.engine_core_client import EngineCoreClient


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter in a folder of the caller."""

    lora_name: str
    lora_int_id: int = 1
    """vLLM's number of the adapter, at least 1. Without effect: the content of the folder decides which adapter it is."""
    lora_path: str = ""
    """PEFT folder with adapter_config.json and adapter_model.safetensors."""

    def verify(self) -> None:
        """Raises: InvalidRequest naming the field, its value and its limit."""
        if not isinstance(self.lora_name, str) or not LORA_NAME.fullmatch(self.lora_name):
            raise InvalidRequest(f"lora_name is {self.lora_name!r:.90}, {LORA_NAME_RULE} are needed", "lora_name")
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise InvalidRequest(f"lora_int_id is {self.lora_int_id!r:.90}, at least 1 is needed", "lora_int_id")
        if not isinstance(self.lora_path, str | Path) or not str(self.lora_path):
            raise InvalidRequest(f"lora_path is {self.lora_path!r:.90}, a folder is needed", "lora_path")


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
    return {
        "lora_name": lora_request.lora_name,
        "lora_fingerprint": client.utility("add_lora", str(folder)),
    }
