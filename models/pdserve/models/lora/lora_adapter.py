"""`LoraAdapter`: an adapter in main memory, read from a PEFT folder.

Both files are read once, within a bound that the base model and the rank give; digest and tensors come from the same bytes, so a
folder that changes meanwhile cannot have the fingerprint of one content and the weights of another.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from torch import Tensor

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.json_file import MAX_JSON_BYTES, parse_json_object, read_regular_file
from pdserve.models.lora.adapter_config import CONFIG_FILE, AdapterConfig
from pdserve.models.lora.lora_targets import LoraTarget, LoraTargets, LoraWeights
from pdserve.models.vision.vision_tower import PREFIX as VISION_PREFIX
from pdserve.models.weights.body_weights import image_model_name
from pdserve.models.weights.weight_loader import few, verify_finite
from pdserve.models.weights.weight_source import FLOATS

__all__ = ["CONFIG_FILE", "WEIGHTS_FILE", "LoraAdapter", "read_adapter"]

WEIGHTS_FILE = "adapter_model.safetensors"
_LARGEST_ITEM_BYTES = 4
_HEADER_BYTES_PER_TENSOR = 1024
_TENSOR_NAME = re.compile(r"base_model\.model\.(?P<module>[\w.]+)\.lora_(?P<side>[AB])\.weight")


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter's matrices in the served dtype, as the layers need them."""

    fingerprint: str
    """32 hex digits over both files: equal for equal content, whatever the adapter's name is."""
    rank: int
    weights: LoraWeights

    @property
    def nbytes(self) -> int:
        return sum(matrices.a.nbytes + matrices.b.nbytes for matrices in self.weights.values())


def read_adapter(folder: Path, targets: LoraTargets) -> LoraAdapter:
    """Read and check a PEFT folder against the base model: no tensor is built before its name, shape and dtype are known to fit.

    Raises: ConfigError naming the file, the field or tensor, and the value; UnsupportedModel for what is not served.
    """
    config_bytes, data = _read_files(folder, targets)
    config = AdapterConfig.parse(config_bytes, str(folder / CONFIG_FILE), targets.max_rank)
    modules = _modules(_header(data, folder / WEIGHTS_FILE), config, targets, folder / WEIGHTS_FILE)
    try:
        tensors = load_safetensors(data)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"{folder / WEIGHTS_FILE} is truncated or no safetensors file: {error!s:.300}") from error
    weights = {}
    for module, names in modules.items():
        a, b = (
            _converted(tensors[names[side]], scale, targets.dtype, f"{folder / WEIGHTS_FILE}: {names[side]}")
            for side, scale in (("A", 1.0), ("B", config.scale))
        )
        weights[module] = targets.by_name[module].matrices(a, b)
    return LoraAdapter(_fingerprint(config_bytes, data), config.rank, weights)


def _read_files(folder: Path, targets: LoraTargets) -> tuple[bytes, bytes]:
    if not (folder / WEIGHTS_FILE).exists() and (pickled := sorted(folder.glob("adapter_model.*"))):
        raise ConfigError(f"{folder} has {pickled[0].name}, only {WEIGHTS_FILE} is read")
    config = read_regular_file(folder / CONFIG_FILE, MAX_JSON_BYTES)
    return config, read_regular_file(folder / WEIGHTS_FILE, _max_bytes(targets))


def _max_bytes(targets: LoraTargets) -> int:
    """Bytes of the largest adapter of this model, in float32, with its header."""
    numbers = sum(target.in_size + target.out_size for target in targets.by_name.values()) * targets.max_rank
    largest = numbers * _LARGEST_ITEM_BYTES + 2 * len(targets.by_name) * _HEADER_BYTES_PER_TENSOR
    # matrices of a vision encoder too are read as far as their names, by which they are refused
    return (2 if targets.has_images else 1) * largest + MAX_JSON_BYTES


def _fingerprint(config: bytes, weights: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16, person=b"lora")
    for part in (config, weights):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _header(data: bytes, path: Path) -> dict[str, object]:
    """Tensor name -> its entry. Raises: ConfigError for a header that is too long, names a tensor twice or is no JSON object."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise ConfigError(f"{path} is truncated or no safetensors file: {len(data)} bytes, a header of {length}")
    header = parse_json_object(data[8 : 8 + length], f"{path}: the header")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _modules(
    header: Mapping[str, object], config: AdapterConfig, targets: LoraTargets, path: Path
) -> dict[str, dict[str, str]]:
    """Module -> side (A, B) -> tensor name. Raises: ConfigError, UnsupportedModel."""
    modules: dict[str, dict[str, str]] = {}
    names: set[str] = set()
    for name, entry in header.items():
        found = _TENSOR_NAME.fullmatch(name)
        if found is None:
            raise UnsupportedModel(
                f"{path}: {name[:120]} is no lora_A.weight or lora_B.weight of a linear layer; it is not served"
            )
        stored, side = found["module"], found["side"]
        module = image_model_name(stored) if targets.has_images else stored
        target = targets.by_name.get(module)
        if target is None:
            raise UnsupportedModel(f"{path}: {name[:120]}: {_refusal(module, stored, targets)}")
        _verify_entry(entry, _shape(target, side, config.rank), f"{path}: {name}")
        sides = modules.setdefault(module, {})
        if side in sides:
            raise ConfigError(f"{path}: {sides[side]} and {name} are for the same module")
        sides[side] = name
        names |= {module, stored}
    if not modules:
        raise ConfigError(f"{path} has no tensors")
    alone = [module for module, sides in modules.items() if len(sides) < 2]
    if alone:
        raise ConfigError(f"{path}: lora_A or lora_B is missing for {few(sorted(alone))}")
    for wanted in config.target_modules or ():
        if not any(name == wanted or name.endswith(f".{wanted}") for name in names):
            raise ConfigError(f"{path}: target_modules names {wanted[:80]!r}, and no tensor is for it")
    return modules


def _refusal(module: str, stored: str, targets: LoraTargets) -> str:
    """A clause that says why a module takes no adapter. module, stored: its names here and in the file."""
    if targets.has_images and module.startswith(VISION_PREFIX):
        part = "merger" if "merger" in module else "vision encoder"
        return (
            f"target_modules reaches {stored[:80]} in the {part}, and an image is encoded once for all adapters; only layers "
            "of the language model take one (PEFT: exclude_modules)"
        )
    return f"no adapter is served for this module; there are {_ends(targets)} of each layer"


def _ends(targets: LoraTargets) -> str:
    return ", ".join(dict.fromkeys(name.rsplit(".", 1)[1] for name in targets.by_name))


def _shape(target: LoraTarget, side: str, rank: int) -> list[int]:
    return [rank, target.in_size] if side == "A" else [target.out_size, rank]


def _verify_entry(entry: object, shape: list[int], where: str) -> None:
    """Raises: ConfigError for another shape or dtype."""
    found = entry if isinstance(entry, dict) else {}
    if found.get("shape") != shape:
        raise ConfigError(f"{where} has shape {found.get('shape')!s:.80}, the model and r need {shape}")
    if found.get("dtype") not in FLOATS:
        raise ConfigError(f"{where} has dtype {found.get('dtype')!s:.40}; read are {', '.join(FLOATS)}")


def _converted(source: Tensor, scale: float, dtype: torch.dtype, where: str) -> Tensor:
    tensor = (source.float() * scale).to(dtype)
    verify_finite(tensor, source, where)
    return tensor
