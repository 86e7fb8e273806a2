"""`LoRARequest`: names an adapter in a caller's folder, by vLLM's name."""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.generation_request import LORA_NAME, LORA_NAME_RULE


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter in a folder of the caller; for `LLM`, `AsyncLLM` and `LLMEngine`."""

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
