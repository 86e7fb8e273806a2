"""`TransformersDecoder`: a model computed by its own code in `transformers`, with attention over our pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from pdserve.kernels.attention.attention_backend import AttentionPlan
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import make_output_head
from pdserve.kernels.layer_plans import attention_plan
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.layers.classification_head import ClassificationHead
from pdserve.models.model_inputs import ModelInputs
from pdserve.models.transformers.attention_interface import (
    AttentionCall,
    MaskPattern,
    StepCache,
    VisibleKeys,
    attention_step,
)
from pdserve.models.transformers.fixed_rope import fix_rope
from pdserve.models.transformers.module_weights import compute_buffers, ignored_weights, load_module_weights
from pdserve.models.transformers.read_transformers_config import build_on_meta
from pdserve.models.transformers.traced_model import head_logits
from pdserve.models.transformers.transformers_config import TransformersConfig
from pdserve.models.weights.dummy_weights import DummyWeights
from pdserve.models.weights.open_weights import open_weights
from pdserve.models.weights.weight_loader import LoadProgress, WeightLoader
from pdserve.models.weights.weight_source import WeightSource

Progress = Callable[[LoadProgress], None]


class TransformersDecoder:
    """Computes hidden states from token ids or embeddings, and writes keys and values into the KV cache.

    The caller holds `torch.inference_mode`, and only one thread at a time calls `forward`.
    """

    is_capturable = False
    """The code of `transformers` may read from the device, which a captured graph cannot."""
    classifier: ClassificationHead | None = None
    """None: the model generates."""

    def __init__(self, config: TransformersConfig, model: PreTrainedModel, device: torch.device) -> None:
        self.config = config
        self._model = model
        self._body = model.get_submodule(config.traced.body)
        self._device = device
        self._cache = StepCache()
        self._specs = config.traced.specs
        self.attention_specs: tuple[tuple[AttentionSpec, ...], ...] = tuple(
            tuple(dict.fromkeys(self._specs[layer] for layer in group)) for group in config.kv_cache_group_layers
        )
        """Different specs of the layers, per KV cache group."""

    @classmethod
    def load(
        cls,
        folder: Path,
        config: TransformersConfig,
        *,
        device: str = "cpu",
        load_format: str = "auto",
        progress: Progress | None = None,
    ) -> TransformersDecoder:
        """Read the weights. Arguments: as of `load_decoder`. Raises: ConfigError, UnsupportedModel."""
        if load_format == "dummy":
            weights = DummyWeights.of_model(
                folder, TORCH_DTYPES[config.dtype], device, lambda shapes: cls._loaded(config, shapes, "meta", None)
            )
            return cls._loaded(config, weights, device, progress)
        with open_weights(folder, config.stored_quantization) as checkpoint:
            return cls._loaded(config, checkpoint, device, progress)

    @classmethod
    def _loaded(
        cls, config: TransformersConfig, source: WeightSource, device: str, progress: Progress | None
    ) -> TransformersDecoder:
        model = build_on_meta(config.hf, config.dtype)
        if device != "meta":
            compute_buffers(model, device)
        fix_rope(model)
        ignored = ignored_weights(model, source.names)
        weights = WeightLoader(source, TORCH_DTYPES[config.dtype], device, ignored=ignored, progress=progress)
        with torch.inference_mode():
            load_module_weights(model, source, weights)
            _keep_sums(model)
        return cls(config, model, torch.device(device))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of hidden states and KV blocks."""
        return TORCH_DTYPES[self.config.dtype]

    @property
    def hidden_size(self) -> int:
        """Hidden size H."""
        return self.config.hidden_size

    @property
    def device(self) -> torch.device:
        return self._device

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Write this step's keys and values into the cache and return the last hidden states `[N, H]` of
        `inputs.output_rows`.

        Raises: KeyError when a plan is missing, ValueError when `inputs` has token ids and embeddings, or neither; RuntimeError
        when the model's code does not attend as in its trace.
        """
        step = _PagedStep(self._specs, inputs, self.dtype)
        if (inputs.token_ids is None) == (inputs.inputs_embeds is None):
            raise ValueError("exactly one of token_ids and inputs_embeds must be given")
        given = (
            {"input_ids": inputs.token_ids.unsqueeze(0)}
            if inputs.token_ids is not None
            else {"inputs_embeds": inputs.inputs_embeds.unsqueeze(0)}  # type: ignore[union-attr]
        )
        with attention_step(step):
            output = self._body(
                **given, position_ids=inputs.positions.unsqueeze(0), past_key_values=self._cache, use_cache=False
            )
        step.verify_end()
        hidden: Tensor = output.last_hidden_state[0]
        return inputs.read_rows(hidden).to(self.dtype)

    def embed_input_ids(self, token_ids: Tensor) -> Tensor:
        """`[T]` int64 -> `[T, H]`, a copy: what the model's code takes in place of token ids."""
        embedded: Tensor = self._model.get_input_embeddings()(token_ids)
        return embedded

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[N, H]` -> `[N, V]` float32."""
        return head_logits(self._model, self._body, self.config.traced.output, hidden).float()


def _keep_sums(model: PreTrainedModel) -> None:
    """Let the model's head return float32 (`make_output_head`). A head that is no linear layer computes in its own dtype."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        return
    project = make_output_head(head.weight, head.bias)
    # an attribute of the object comes before the method of its class
    head.forward = lambda hidden: project(hidden.flatten(0, -2)).view(*hidden.shape[:-1], -1)  # type: ignore[method-assign, assignment]


class _PagedStep:
    """Implements `AttentionStep` over the plans of one step."""

    def __init__(self, specs: tuple[AttentionSpec, ...], inputs: ModelInputs, dtype: torch.dtype) -> None:
        self._specs = specs
        self._plans: list[AttentionPlan] = [attention_plan(inputs.plans[spec]) for spec in specs]
        self._before_layer = inputs.before_layer
        self._dtype = dtype
        self._layer = 0

    def mask(self, visible: VisibleKeys, window: int | None) -> MaskPattern:
        return MaskPattern(window)

    def attend(self, call: AttentionCall) -> Tensor:
        layer = self._layer
        self._layer += 1
        if layer == len(self._specs):
            raise RuntimeError(f"the model attends more often than in its {layer} layers")
        spec = self._specs[layer]
        if not isinstance(call.mask, MaskPattern) or call.mask.window != spec.window:
            raise RuntimeError(f"layer {layer} has the mask {call.mask}, and the window {spec.window} in its trace")
        if self._before_layer is not None:
            self._before_layer()
        q, k, v = (self._rows(tensor, spec.head_dim) for tensor in (call.query, call.key, call.value))
        plan = self._plans[layer]
        plan.store(layer, k, v)
        sinks = () if call.sinks is None else (call.sinks,)
        out = plan.attend(layer, q, k, v, *sinks)
        num_tokens, value_dim = len(q), call.value.shape[-1]
        return out.view(1, num_tokens, spec.num_heads, spec.head_dim)[..., :value_dim].to(call.query.dtype)

    def _rows(self, tensor: Tensor, head_dim: int) -> Tensor:
        """`[1, heads, T, d]` -> `[T, heads, D]` in the cache's dtype; numbers beyond d are 0, which changes no score."""
        rows = tensor[0].transpose(0, 1).to(self._dtype)
        missing = head_dim - rows.shape[-1]
        return F.pad(rows, (0, missing)) if missing else rows

    def verify_end(self) -> None:
        """Raises: RuntimeError."""
        if self._layer != len(self._specs):
            raise RuntimeError(f"the model attended in {self._layer} of its {len(self._specs)} layers")
