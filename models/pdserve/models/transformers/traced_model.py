"""`TracedModel`: how a model's layers attend, learned from one pass of its code without weights.

The model is on the meta device, where tensors have shapes and no numbers, so the pass costs no memory and finds before anything is
loaded what cannot be served. Masks are not computed either: the rule that the model's code gives for them is evaluated at some
positions, and must be that of causal attention or of a sliding window.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.utils.generic import ModelOutput

from pdserve.common.errors import UnsupportedModel
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.models.config.family_fields import words
from pdserve.models.transformers.attention_interface import (
    AttentionCall,
    MaskPattern,
    OtherState,
    StepCache,
    VisibleKeys,
    attention_step,
)

NO_INTERFACE = "its layers do not use the attention interface of transformers"
_OWN_MASKS = "its code makes attention masks of its own"
_FAR = 1 << 20
"""A position that no short context has."""
_WITHOUT_EFFECT = words(
    """
    dropout is_causal sliding_window position_ids position_embeddings cache_position use_cache past_key_values output_attentions
    output_hidden_states return_dict deterministic cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k num_items_in_batch
    logits_to_keep
    """
)
"""Arguments of attention that say what mask, scale and plan say already, or that change nothing."""


@dataclass(frozen=True, slots=True)
class TracedModel:
    """The result of a trace."""

    specs: tuple[AttentionSpec, ...]
    """Per layer. The size of heads is the larger of keys' and values'."""
    body: str
    """Name of the module in the model whose output its head reads."""
    output: type[ModelOutput]
    """Class of that output."""
    hidden_size: int
    vocab_size: int


def trace(model: PreTrainedModel, num_layers: int, num_tokens: int) -> TracedModel:
    """Run the model's code once.

    model: on the meta device. num_layers: of its configuration. num_tokens: of the row, which may have more than a sequence.
    Raises: UnsupportedModel, whose message is a clause: the reason for which the model is not served.
    """
    step, body = _TracedStep(num_tokens), _Body(model)
    ids = torch.zeros((1, num_tokens), dtype=torch.int64, device="meta")
    try:
        with torch.no_grad(), attention_step(step), body.watched(), _NothingFound():  # type: ignore[no-untyped-call]
            model(input_ids=ids, position_ids=ids, past_key_values=StepCache(), use_cache=False)
    except OtherState as error:
        raise UnsupportedModel(str(error)) from error
    except UnsupportedModel:
        raise
    except Exception as error:  # any code of any model
        raise UnsupportedModel(_failure(error)) from error
    specs = step.specs(num_layers)
    name, module, output = body.found()
    arguments = inspect.signature(module.forward).parameters
    missing = [name for name in ("position_ids", "inputs_embeds") if name not in arguments]
    if missing:
        raise UnsupportedModel(f"its code takes no {' and no '.join(missing)}")
    hidden = output.last_hidden_state[0]
    width = model.get_input_embeddings().weight.shape[-1]
    if width != hidden.shape[-1]:
        raise UnsupportedModel(f"its embeddings have {width} numbers and its hidden states {hidden.shape[-1]}")
    try:
        with torch.no_grad():
            logits = head_logits(model, module, type(output), hidden)
    except Exception as error:
        raise UnsupportedModel(f"its head does not read the last hidden states alone ({_line(error)})") from error
    if logits.dim() != 2 or len(logits) != num_tokens:
        raise UnsupportedModel(f"its logits have the shape {list(logits.shape)}")
    return TracedModel(specs, name, type(output), hidden.shape[-1], logits.shape[1])


def head_logits(model: PreTrainedModel, body: nn.Module, output_class: type[ModelOutput], hidden: Tensor) -> Tensor:
    """`[N, H]` -> `[N, V]`: the model's code after its body, whose output is replaced by `hidden`."""
    ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
    output = output_class(last_hidden_state=hidden.unsqueeze(0))
    # an attribute of the object comes before the method of its class
    body.forward = lambda *args, **kwargs: output
    try:
        logits: Tensor = model(input_ids=ids, position_ids=ids, use_cache=False).logits[0]
    finally:
        del body.forward
    return logits


class _TracedStep:
    """Implements `AttentionStep`."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._specs: list[AttentionSpec] = []
        self._keys: list[Tensor] = []

    def mask(self, visible: VisibleKeys, window: int | None) -> MaskPattern:
        if not _is_window(visible, window):
            raise UnsupportedModel("its attention mask is neither causal nor a sliding window")
        return MaskPattern(window)

    def attend(self, call: AttentionCall) -> Tensor:
        layer, index = len(self._specs), getattr(call.module, "layer_idx", None)
        if index != layer:
            raise UnsupportedModel(f"attention {layer} belongs to layer {index}: {_other_layer(index, layer)}")
        if not isinstance(call.mask, MaskPattern):
            raise UnsupportedModel(_OWN_MASKS)
        unknown = [
            name
            for name, value in call.others.items()
            if name not in _WITHOUT_EFFECT and value is not None and value is not False
        ]
        if unknown:
            raise UnsupportedModel(f"its attention has {', '.join(sorted(unknown))}")
        if any(call.key is key for key in self._keys):
            raise UnsupportedModel("layers share keys and values")
        self._keys.append(call.key)
        batch, num_heads, num_tokens, head_dim = call.query.shape
        num_kv_heads, value_dim = call.key.shape[1], call.value.shape[3]
        if (batch, num_tokens) != (1, self._num_tokens) or call.key.shape != (1, num_kv_heads, num_tokens, head_dim):
            raise UnsupportedModel(
                f"its attention has queries {list(call.query.shape)} and keys {list(call.key.shape)} for {self._num_tokens} tokens"
            )
        if call.value.shape[:3] != call.key.shape[:3] or num_heads % num_kv_heads:
            raise UnsupportedModel(f"its attention has keys {list(call.key.shape)} and values {list(call.value.shape)}")
        self._specs.append(
            AttentionSpec(
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=max(head_dim, value_dim),
                scale=float(head_dim**-0.5 if call.scale is None else call.scale),
                window=call.mask.window,
                softcap=call.softcap,
                sinks=call.sinks is not None,
            )
        )
        return call.value.new_empty((1, num_tokens, num_heads, value_dim))

    def specs(self, num_layers: int) -> tuple[AttentionSpec, ...]:
        """Raises: UnsupportedModel."""
        found = self._specs
        if not found:
            raise UnsupportedModel(NO_INTERFACE)
        if len(found) != num_layers:
            raise UnsupportedModel(f"{len(found)} of its {num_layers} layers keep keys and values")
        kinds = sorted({(spec.num_kv_heads, spec.head_dim) for spec in found})
        if len(kinds) > 1:
            shown = ", ".join(f"{heads} of {size} numbers" for heads, size in kinds)
            raise UnsupportedModel(f"its layers have different KV heads ({shown}), and a KV pool has one kind")
        return tuple(found)


def _is_window(visible: VisibleKeys, window: int | None) -> bool:
    """True if a query sees the keys up to itself, and with a window only the last `window` of them."""
    size = window or 7
    queries = torch.tensor([0, 1, size - 1, size, size + 1, 2 * size - 1, 2 * size, 2 * size + 1, 5 * size + 3, _FAR])
    offsets = torch.tensor([-2 * size, -size - 1, -size, -size + 1, -1, 0, 1, size])
    queries = queries.unsqueeze(1).expand(-1, len(offsets)).flatten()
    keys = queries + offsets.repeat(len(queries) // len(offsets))
    queries, keys = queries[keys >= 0], keys[keys >= 0]
    expected = keys <= queries
    if window is not None:
        expected &= keys > queries - window
    zero = torch.zeros((), dtype=torch.int64)
    return torch.equal(visible(zero, zero, queries, keys).expand(len(queries)), expected)


class _NothingFound(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A search for the numbers of a tensor that are not 0 finds none where there are no numbers.

    Code that goes through the experts that some token chose then computes no expert; its result has the same shape.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return torch.empty((0, args[0].dim()), dtype=torch.int64, device="meta")
        return func(*args, **(kwargs or {}))


class _Body:
    """Finds the module that the model's own forward pass calls for the last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._depth = 0
        self._outputs: list[tuple[nn.Module, ModelOutput]] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch all calls of modules meanwhile."""
        modules = [module for module in self._model.modules() if module is not self._model]
        handles = [module.register_forward_pre_hook(self._begin) for module in modules]
        handles += [module.register_forward_hook(self._end) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._depth += 1

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= 1
        if self._depth == 0 and isinstance(getattr(output, "last_hidden_state", None), Tensor):
            self._outputs.append((module, output))

    def found(self) -> tuple[str, nn.Module, Any]:
        """Name, module and output. Raises: UnsupportedModel."""
        if len(self._outputs) != 1:
            raise UnsupportedModel(
                f"{len(self._outputs)} of its modules return hidden states to its head, one is needed"
            )
        found, output = self._outputs[0]
        [name] = [name for name, module in self._model.named_modules() if module is found]
        return name, found, output


def _other_layer(index: object, expected: int) -> str:
    """A clause that says why a layer other than the expected one attends."""
    if isinstance(index, int) and index < expected:
        return "a layer attends more than once"
    return "layers between keep another state, or share keys and values"


def _failure(error: Exception) -> str:
    """A clause for an error of the model's code."""
    if isinstance(error, AttributeError) and isinstance(error.obj, MaskPattern):
        return _OWN_MASKS
    if isinstance(error, NotImplementedError) and "meta" in str(error):
        return "its code reads numbers of tensors to decide what it computes, and a trace without weights has none"
    return f"its code does not run without weights ({_line(error)})"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
