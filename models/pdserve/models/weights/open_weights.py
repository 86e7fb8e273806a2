"""`open_weights`: the weights of a model folder, in whatever form they are stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pdserve.models.gguf.gguf_tensors import INDEX_FILE
from pdserve.models.weights.checkpoint import open_checkpoint
from pdserve.models.weights.gguf_weights import GgufWeights
from pdserve.models.weights.quantized.quantization_method import QuantizationMethod
from pdserve.models.weights.quantized.widened_weights import WidenedWeights
from pdserve.models.weights.weight_source import WeightSource


@contextmanager
def open_weights(folder: Path, method: QuantizationMethod | None) -> Iterator[WeightSource]:
    """Open all weight files. method: how matrices are quantized. Raises: ConfigError naming the file, UnsupportedModel."""
    if (folder / INDEX_FILE).is_file():
        yield GgufWeights.open(folder)
        return
    with open_checkpoint(folder) as checkpoint:
        yield checkpoint if method is None else WidenedWeights(checkpoint, method)
