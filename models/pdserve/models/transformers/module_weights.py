"""`load_module_weights`: weights of a checkpoint in the modules of a model of `transformers`.

Names in a checkpoint may be older or other ones than those of the modules, and one tensor of a module may be made of many in the
checkpoint (experts). `transformers` says how, per model; we read and check each tensor and apply its rules to it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.weights.dummy_weights import DummyWeights
from pdserve.models.weights.equal_weights import are_equal
from pdserve.models.weights.weight_loader import WeightLoader
from pdserve.models.weights.weight_source import FLOATS, WeightSource

log = logging.getLogger(__name__)

_IGNORED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
"""Weights that older checkpoints have and that are computed."""


@dataclass(slots=True)
class _Target:
    """A tensor of a module, or several that one conversion makes, and the tensors in the checkpoint of which they are made."""

    name: str
    """Name of the first."""
    converter: WeightConverter | None = None
    sources: list[tuple[str, str]] = field(default_factory=list)
    """Name in the checkpoint, and the converter's pattern that it matches."""


def ignored_weights(model: PreTrainedModel, names: Iterable[str]) -> set[str]:
    """Names of a checkpoint that the model's class says to ignore."""
    patterns = [*_IGNORED, *(model._keys_to_ignore_on_load_unexpected or ())]
    rule = re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
    return {name for name in names if rule.search(name)}


def load_module_weights(model: PreTrainedModel, source: WeightSource, weights: WeightLoader) -> None:
    """Read every weight. model: on the meta device, whose computed buffers are elsewhere. weights: reads `source`.

    Raises: ConfigError for a weight that is missing, has no place, or has another shape or type.
    """
    state: Mapping[str, Tensor] = model.state_dict()
    dtypes = _dtypes(model, state, weights.dtype)
    tied = _tied(model, state)
    targets = _drawn_targets(tied) if isinstance(source, DummyWeights) else _targets(model, state, source.names)
    group_of = {name: group for group in tied for name in group}
    kept: dict[str, Tensor] = {}
    for target in targets:
        alike = [kept[name] for name in group_of[target.name] if name in kept]
        if alike and target.converter is None and _repeats(target, alike[0], source, weights):
            continue
        for name, tensor in _tensors(target, model, state, dtypes, weights, source).items():
            if name not in state or tensor.shape != state[name].shape:
                expected = list(state[name].shape) if name in state else "no such weight"
                raise ConfigError(
                    f"{source.folder}: {name} has shape {list(tensor.shape)}, config.json says {expected}"
                )
            kept[name] = tensor
    for group in tied:
        there = [name for name in group if name in kept]
        if not there:
            raise ConfigError(f"{source.folder}: weight {group[0]} is missing")
        if len(there) > 1:
            log.warning("%s: %s are tied, but have other numbers, and are used", source.folder, " and ".join(there))
        for name in group:
            _put(model, name, kept[name if name in kept else there[0]])
    weights.check_all_read()
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta and not kept[next(iter(kept))].is_meta:
                raise UnsupportedModel(
                    f"{type(model).__name__} is not served: {path}.{name} is no buffer and has no values"
                )


def _repeats(target: _Target, other: Tensor, source: WeightSource, weights: WeightLoader) -> bool:
    """True if the weight has the numbers of `other`, with which it is tied; it then counts as read."""
    name = target.sources[0][0]
    if other.is_meta:  # no weight is read: the larger of both possible sizes
        return False
    stored = source.read(name, tuple(other.shape), FLOATS)
    is_equal = are_equal(stored, other.cpu(), weights.dtype)
    source.release(stored)
    if not is_equal:
        return False
    weights.skip(name)
    return True


def compute_buffers(model: PreTrainedModel, device: str) -> None:
    """Give the buffers that no checkpoint has their values, by the code of the model. Raises: UnsupportedModel."""
    buffers = list(model.named_non_persistent_buffers())
    values: list[dict[str, Tensor]] = []
    for filled in (0, 1):
        for name, buffer in buffers:
            _put(model, name, torch.full(buffer.shape, filled, dtype=buffer.dtype, device=device))
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
        try:
            model.initialize_weights()  # weights are on the meta device, where this costs nothing
        except Exception as error:  # any code of any model
            shown = " ".join(str(error).split())[:160]
            raise UnsupportedModel(
                f"{type(model).__name__} is not served: its code does not compute its buffers ({shown})"
            ) from error
        values.append({name: buffer.clone() for name, buffer in model.named_non_persistent_buffers()})
    for name, value in values[0].items():
        if not torch.equal(value, values[1][name]):
            raise UnsupportedModel(
                f"{type(model).__name__} is not served: its code does not say what the buffer {name} holds"
            )


def _targets(model: PreTrainedModel, state: Mapping[str, Tensor], names: Sequence[str]) -> list[_Target]:
    """Names without a place are left out: the loader counts them."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    converter_of = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    targets: dict[str, _Target] = {}
    for name in sorted(names, key=dot_natural_key):
        there, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, state)
        if there not in state and name in state:
            there, pattern = rename_source_key(name, [], [], model.base_model_prefix, state)
        if there not in state:
            continue
        converter = None if pattern is None else deepcopy(converter_of[pattern])
        target = targets.setdefault(there, _Target(there, converter))
        target.sources.append((name, pattern or name))
    return list(targets.values())


def _drawn_targets(tied: Sequence[Sequence[str]]) -> list[_Target]:
    return [_Target(group[0], None, [(group[0], group[0])]) for group in tied]


def _tensors(
    target: _Target,
    model: PreTrainedModel,
    state: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    weights: WeightLoader,
    source: WeightSource,
) -> Mapping[str, Tensor]:
    """Name in the modules -> tensor on the device."""
    if target.converter is None:
        if len(target.sources) > 1:
            raise ConfigError(f"{source.folder}: {target.name} is stored {len(target.sources)} times")
        name = target.sources[0][0]
        return {target.name: weights.tensor(name, *state[target.name].shape, dtype=dtypes[target.name])}
    borrowed = set()
    for name, pattern in target.sources:
        # copies of a layer's experts would be in memory together with the tensor that is made of them, and leave holes there
        tensor = weights.borrowed(name, *source.shape(name), dtype=dtypes[target.name])
        borrowed.add(tensor.untyped_storage().data_ptr())
        target.converter.add_tensor(target.name, name, pattern, tensor)
    try:
        made: Mapping[str, Any] = target.converter.convert(target.name, model=model, config=model.config)
    except Exception as error:  # tensors of other shapes than it expects
        shown = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{source.folder}: {target.name} cannot be made of {len(target.sources)} weights: {shown}"
        ) from error
    tensors = {name: (value[0] if isinstance(value, list) else value).contiguous() for name, value in made.items()}
    return {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in borrowed else tensor
        for name, tensor in tensors.items()
    }


def _dtypes(model: PreTrainedModel, state: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Name -> dtype in which the weight is served: float32 for those whose model says so."""
    plan = {re.compile(_glob(pattern)): kept for pattern, kept in model._get_dtype_plan(dtype).items()}
    found = {}
    for name, tensor in state.items():
        matching = [kept for rule, kept in plan.items() if rule.search(name)]
        found[name] = matching[0] if matching else tensor.dtype
    return found


def _glob(pattern: str) -> str:
    return pattern.replace("*", ".*")


def _tied(model: PreTrainedModel, state: Mapping[str, Tensor]) -> list[list[str]]:
    """Names of each weight; several for one that modules share."""
    groups: dict[int, list[str]] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        if name in state:
            groups.setdefault(id(tensor), []).append(name)
    return list(groups.values())


def _put(model: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, last = name.rpartition(".")
    module = model.get_submodule(path)
    if last in module._parameters:
        module._parameters[last] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[last] = tensor
