"""`served_dtype`: the dtype of weights and KV blocks."""

from __future__ import annotations

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.json_object import JsonObject


def served_dtype(config: JsonObject, wanted: str) -> str:
    """A name of `TORCH_DTYPES`. wanted: `auto` for that of config.json. Raises: ConfigError, UnsupportedModel."""
    if wanted == "auto":
        name = config.text("dtype", config.text("torch_dtype", "float32")).removeprefix("torch.")
        if name not in TORCH_DTYPES:
            raise UnsupportedModel(f"{config.where}: dtype {name!r:.80}; supported: {', '.join(TORCH_DTYPES)}")
        return name
    if wanted not in TORCH_DTYPES:
        raise ConfigError(f"dtype must be auto, {', '.join(TORCH_DTYPES)}, not {wanted!r}")
    return wanted
