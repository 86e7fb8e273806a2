"""A decoder-only transformer over a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from pdserve.kernels.cpu.linear import OutputHead
from pdserve.kernels.layer_ops import LayerOps
from pdserve.kernels.layer_plans import LayerPlan, LayerSpec, attention_plan
from pdserve.kernels.layers.fused_layers import FusedLayers
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.kernels.layers.rotary import mrope_phases, rotary_phases
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.config.query_temperature import QueryTemperature
from pdserve.models.config.rope_parameters import RopeParameters
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.layers.classification_head import ClassificationHead
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.draft_head import DraftHead
from pdserve.models.layers.embedding import Embedding
from pdserve.models.layers.side_mixer import SideMixer
from pdserve.models.layers.token_inputs import TokenInputs
from pdserve.models.model_inputs import ModelInputs
from pdserve.models.vision.vision_tower import VisionTower


class _Rotation(NamedTuple):
    """Arguments of `rotary_phases` other than the positions; both `[D / 2]` float32."""

    inverse_frequencies: Tensor
    magnitude: Tensor
    axes: Tensor | None = None
    """`[D / 2]` int64: the axis of each pair, of a model whose positions may have three."""
    temperature: QueryTemperature | None = None
    """In place of `magnitude`, of layers that only scale their queries."""

    @classmethod
    def of(
        cls, rope: RopeParameters | None, head_dim: int, temperature: QueryTemperature | None, device: torch.device
    ) -> _Rotation:
        """rope None: every number is rotated by 0, which changes no bit."""
        if rope is None:
            nothing, ones = torch.zeros(head_dim // 2, device=device), torch.ones(head_dim // 2, device=device)
            return cls(nothing, ones, temperature=temperature)
        axes = None if rope.mrope is None else rope.mrope.axes(head_dim // 2).to(device)
        return cls(rope.inverse_frequencies(head_dim).to(device), rope.magnitudes(head_dim).to(device), axes)

    def phases(self, positions: Tensor) -> Tensor:
        """`[T]` or `[3, T]` -> `[T, 1, D / 2]`"""
        if self.temperature is not None:
            factors = self.temperature.factors(positions).view(-1, 1, 1)
            return rotary_phases(positions, self.inverse_frequencies, factors)
        if self.axes is None or positions.ndim == 1:
            return rotary_phases(positions, self.inverse_frequencies, self.magnitude)
        return mrope_phases(positions, self.axes, self.inverse_frequencies, self.magnitude)


class Decoder:
    """Computes hidden states from token ids or embeddings, and writes keys and values into the KV cache.

    The caller holds `torch.inference_mode`, and only one thread at a time calls `forward`.
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Embedding,
        layers: Sequence[DecoderLayer | SideMixer],
        final_norm: RmsNorm,
        lm_head: OutputHead | None,
        classifier: ClassificationHead | None = None,
        vision_tower: VisionTower | None = None,
        draft_head: DraftHead | None = None,
        token_inputs: TokenInputs | None = None,
    ) -> None:
        """lm_head: with float32 logits; None with a classifier, which takes its place. vision_tower: of a model with images.
        draft_head: that of `config.draft_head`. token_inputs: of a model whose layers read ids of tokens."""
        self._token_inputs = token_inputs
        self.vision_tower = vision_tower
        self.draft_head = draft_head
        self.config = config
        self.classifier = classifier
        """None: the model generates."""
        self._embedding = embedding
        self._layers = tuple(layers)
        self._final_norm = final_norm
        self._norms = (*(layer.input_norm for layer in self._layers), final_norm)
        self._lm_head = lm_head
        device = final_norm.weight.device
        self._device = device
        ropes = [(config.layer_rope(index), config.rotary_head_dim(index)) for index in range(len(self._layers))]
        temperature = config.family.temperature
        self._ropes = tuple(_Rotation.of(*rope, temperature, device) for rope in dict.fromkeys(ropes))
        self._rope_indices = [list(dict.fromkeys(ropes)).index(rope) for rope in ropes]
        specs: list[LayerSpec] = [layer.attention.spec for layer in self._layers]
        self._specs = tuple(dict.fromkeys(specs))
        self._spec_indices = [self._specs.index(spec) for spec in specs]
        self._draft_rotation: _Rotation | None = None
        if draft_head is not None:
            specs.append(draft_head.layer.attention.spec)
            rope = config.layer_rope(config.num_layers), config.rotary_head_dim(config.num_layers)
            self._draft_rotation = _Rotation.of(*rope, temperature, device)
        self._fused: tuple[LayerOps, FusedLayers | None] | None = None
        """The operations of the last step, and the result of their `fuse_layers`."""
        self.attention_specs: tuple[tuple[LayerSpec, ...], ...] = tuple(
            tuple(dict.fromkeys(specs[layer] for layer in group)) for group in config.kv_cache_group_layers
        )
        """Different specs of the layers, per KV cache group."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and hidden states."""
        return TORCH_DTYPES[self.config.dtype]

    @property
    def hidden_size(self) -> int:
        """Hidden size H."""
        return self.config.hidden_size

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def layers(self) -> tuple[DecoderLayer | SideMixer, ...]:
        return self._layers

    def with_layers(self, layers: Sequence[DecoderLayer | SideMixer]) -> Decoder:
        """The same decoder with other layers."""
        return Decoder(
            self.config, self._embedding, layers, self._final_norm, self._lm_head, self.classifier, self.vision_tower,
            self.draft_head, self._token_inputs,
        )  # fmt: skip

    def embed_input_ids(self, token_ids: Tensor) -> Tensor:
        """`[T]` int64 -> `[T, H]`."""
        return self._embedding(token_ids)

    def forward(self, inputs: ModelInputs) -> Tensor:
        """Write this step's keys and values into the cache and return the last hidden states `[N, H]` of `inputs.output_rows`.

        Raises: KeyError when a plan is missing, ValueError when `inputs` has token ids and embeddings, or neither, or no ids where
        layers read them.
        """
        plans = [inputs.plans[spec] for spec in self._specs]
        phases = [rotation.phases(inputs.positions) for rotation in self._ropes]
        residual = inputs.embedded(self.embed_input_ids)
        of_tokens: Sequence[Tensor | None] = [None] * len(self._layers)
        if self._token_inputs is not None:
            if inputs.token_ids is None:
                raise ValueError("layers read ids of tokens, and only embeddings are given")
            of_tokens = list(self._token_inputs(inputs.token_ids, residual))
        first_norm = self._norms[0]
        x = residual if first_norm is None else first_norm(residual)
        if (hidden := self._in_one_call(residual, x, phases, plans, inputs)) is not None:
            return hidden
        kinds = zip(self._spec_indices, self._rope_indices, strict=True)
        deepstack = iter(inputs.deepstack)
        last, carried = self._layers[-1], None
        tapped = iter(() if inputs.layer_inputs is None or self.draft_head is None else self.draft_head.tapped_layers)
        next_tap = next(tapped, None)
        each = zip(self._layers, self._norms[1:], kinds, of_tokens, strict=True)
        for index, (layer, next_norm, (spec, rope), of_layer) in enumerate(each):
            if inputs.before_layer is not None:
                inputs.before_layer()
            if index == next_tap and inputs.layer_inputs is not None:
                inputs.layer_inputs.append(residual.clone())  # the layer may overwrite it
                next_tap = next(tapped, None)
            added = next(deepstack, None)
            norm = next_norm if added is None else None
            rows = inputs.output_rows if layer is last and added is None else None
            if rows is not None and len(rows) == 0:
                layer.store(x, phases[rope], plans[spec], inputs.ops)
                return x[:0]
            residual, x, carried = layer.forward(
                residual, x, norm, phases[rope], plans[spec], inputs.ops, rows, carried, of_layer
            )
            if added is not None and inputs.deepstack_rows is not None:
                residual = residual.index_add(0, inputs.deepstack_rows, added)
                x = residual if next_norm is None else next_norm(residual)
        # a deepstack that reaches the last layer is added to all rows before
        return x if added is None else inputs.read_rows(x)

    def _in_one_call(
        self, residual: Tensor, x: Tensor, phases: Sequence[Tensor], plans: Sequence[LayerPlan], inputs: ModelInputs
    ) -> Tensor | None:
        """The last hidden states; None if the layers are to be called one by one. Arguments: of the first layer."""
        if inputs.is_by_layer or inputs.deepstack or inputs.layer_inputs is not None:
            return None
        if self._fused is None or self._fused[0] is not inputs.ops:
            kinds = zip(self._layers, self._norms[1:], self._rope_indices, strict=True)
            parts = [layer.parts(norm, rope) for layer, norm, rope in kinds]
            known = [part for part in parts if part is not None]
            self._fused = inputs.ops, inputs.ops.fuse_layers(known) if len(known) == len(parts) else None
        if (fused := self._fused[1]) is None:
            return None
        of_layers = [attention_plan(plans[index]) for index in self._spec_indices]
        return fused(residual, x, phases, of_layers, inputs.output_rows, inputs.before_layer)

    @property
    def is_capturable(self) -> bool:
        """False where a step's outputs are not only the last hidden states."""
        return self.draft_head is None or not self.draft_head.tapped_layers

    def draft(self, inputs: ModelInputs, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """`DraftHead.forward` of entries at `inputs.positions`, before the tokens `inputs.token_ids`; writes them into the cache.

        hidden `[T, H]`: as of `DraftHead.forward`. Raises: RuntimeError without a draft head.
        """
        if self.draft_head is None or self._draft_rotation is None:
            raise RuntimeError(f"{self.config.architecture} was loaded without a draft head")
        if inputs.before_layer is not None:
            inputs.before_layer()
        return self.draft_head.forward(
            inputs.embedded(self.draft_head.own_embedding or self.embed_input_ids),
            hidden,
            self._draft_rotation.phases(inputs.positions),
            inputs.plans[self.draft_head.layer.attention.spec],
            inputs.ops,
            inputs.output_rows,
        )

    def compute_draft_logits(self, normed: Tensor) -> Tensor:
        """As `compute_logits`, from the first result of `draft`."""
        logits = None if self.draft_head is None else self.draft_head.own_logits(normed)
        return self.compute_logits(normed) if logits is None else logits

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[N, H]` -> `[N, V]` float32; `[N, 0]` on ranks but 0 of several. Raises: RuntimeError with a classifier."""
        if self._lm_head is None:
            raise RuntimeError(f"{self.config.architecture} has a classification head and no language-model head")
        logits, family = self._lm_head(hidden), self.config.family
        if family.logits_scaling != 1.0:
            logits = logits / family.logits_scaling
        if family.logits_softcap is not None:
            logits = family.logits_softcap * torch.tanh(logits / family.logits_softcap)
        return logits
