"""`ModelConfig`: a model's dimensions and options. `ModelFamily`: how one family reads its options and builds its layers."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch

from pdserve.common.errors import ConfigError
from pdserve.common.kv_layout import SCALE_BYTES, BlockShape, KvLayout
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.cpu.linear import make_linear
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.kernels.layers.rotary import HeadOrder
from pdserve.kernels.state.state_spec import StateSpec as LayerStateSpec
from pdserve.models.config.classifier_config import ClassifierConfig
from pdserve.models.config.draft_head_config import DraftHeadConfig
from pdserve.models.config.kv_cache_group_layers import kv_cache_group_layers
from pdserve.models.config.latent_shape import LatentShape
from pdserve.models.config.query_temperature import QueryTemperature
from pdserve.models.config.rope_parameters import DEFAULT_THETA, RopeParameters
from pdserve.models.config.state_shape import StateShape
from pdserve.models.config.vision_config import VisionConfig
from pdserve.models.json_object import JsonObject
from pdserve.models.kv_cache import (
    ChunkedLocalAttentionSpec,
    DraftHeadSpec,
    FullAttentionSpec,
    KVCacheGroupSpec,
    KVCacheSpec,
    SlidingWindowSpec,
    StateSpec,
    group_chunks,
    group_windows,
)
from pdserve.models.layers.decoder_layer import Attention, DecoderLayer, FeedForward
from pdserve.models.layers.draft_head import DraftNames, MtpHead
from pdserve.models.layers.latent_attention import LatentAttention
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.layers.side_mixer import SideMixer
from pdserve.models.layers.token_inputs import TokenInputs
from pdserve.models.weights.quantized.quantization_method import QuantizationMethod
from pdserve.models.weights.rank_shard import WHOLE, RankShard, verify_sharding
from pdserve.models.weights.weight_loader import WeightLoader

MAX_LAYERS = 4096
"""Of config.json: an upper limit that no known model reaches."""
_STATE, _DRAFT = (-1,) * 3, (-2,) * 3
"""In place of what `_heads_of` gives."""
SILU = ("silu", "swish")
"""Two names of one activation."""


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Names of a layer's norms in the checkpoint, by their fields in `DecoderLayer`; None: no norm."""

    input: str | None = "input_layernorm"
    mlp: str | None = "post_attention_layernorm"
    attention_post: str | None = None
    mlp_post: str | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A model's dimensions and options, read before its weights."""

    architecture: str
    family: FamilyLayers
    """The model's `ModelFamily`, if it is native, with the options that only this family has."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: RopeParameters
    """Rotary embedding of all layers that no other field names."""
    tie_word_embeddings: bool
    max_position_embeddings: int
    """Tokens of prompt and output together that are served if `max_model_len` is not set."""
    derived_max_model_len: int
    """Largest `max_model_len` that may be set: the length for which the rotary scaling was made."""
    dtype: str
    """Dtype of weights and KV blocks: `float32`, `bfloat16` or `float16`."""
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    unknown_fields: tuple[str, ...]
    """Names in config.json that are neither read nor in a list of harmless fields."""
    stored_quantization: QuantizationMethod | None = None
    """How the checkpoint's matrices are quantized; None: not at all."""
    is_body: bool = False
    """True: the checkpoint is of the architecture without its language-model head, which is the embedding."""
    local_rope: RopeParameters | None = None
    """Rotary embedding of layers with a window; None: `rope`."""
    classifier: ClassifierConfig | None = None
    """The classification head in place of the language-model head; None: the model generates."""
    vision: VisionConfig | None = None
    """The vision encoder; None: the model takes only text."""
    hybrid_kv_cache: bool = False
    """True: layers with a window and others are KV cache groups of their own, where that saves memory."""
    draft_head: DraftHeadConfig | None = None
    """The head with which the model is loaded, whose layer has the number `num_layers`, and a KV cache group of its own."""

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Per layer: number of tokens that a token attends to, itself included; None: all."""
        return self.family.sliding_windows + (None,) * (self.draft_head is not None)

    @property
    def latent(self) -> LatentShape | None:
        """Sizes of latent attention, whose rows are the one KV head; None: other attention."""
        return self.family.latent

    def rotary_head_dim(self, layer: int) -> int:
        """Numbers of a head to which `layer_rope` belongs."""
        if (own := self._own_head(layer)) is not None:
            return own.rotary_head_dim(0)
        return self.layer_head_dim(layer) if self.latent is None else self.latent.rope_dim

    @property
    def states(self) -> StateShape | None:
        """Sizes of layers with a state per sequence; None: there are none."""
        return self.family.states

    def has_state(self, layer: int) -> bool:
        return self.states is not None and layer < self.num_layers and self.states.layers[layer]

    @property
    def attends(self) -> bool:
        """False: every layer has a state, and none keys."""
        return self.states is None or not all(self.states.layers)

    def state_spec(self, layer: int) -> LayerStateSpec:
        """Of a layer with a state."""
        assert self.states is not None
        group = self.kv_cache_place(layer)[0]
        return LayerStateSpec(num_heads=self.states.num_heads, head_size=self.states.head_size, kv_cache_group=group)

    def attention_spec(self, layer: int) -> AttentionSpec:
        if (own := self._own_head(layer)) is not None:
            return replace(own.attention_spec(0), kv_cache_group=self.kv_cache_place(layer)[0])
        head_dim = self.layer_head_dim(layer)
        scale = self.family.attention_scale or head_dim**-0.5
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.layer_kv_heads(layer),
            head_dim=head_dim,
            scale=scale if self.latent is None else self.latent.scale(self.rope),
            value_dim=None if self.latent is None else self.latent.kv_lora_rank,
            window=self.sliding_windows[layer],
            chunk=self.layer_chunk(layer),
            softcap=self.family.attention_softcap,
            sinks=self.family.has_layer_sinks(layer),
            kv_cache_group=self.kv_cache_place(layer)[0],
        )

    def layer_chunk(self, layer: int) -> int | None:
        """Positions of a chunk, to whose tokens a token of it attends; None: to those of all chunks."""
        chunks = self.family.attention_chunks
        return chunks[layer] if layer < len(chunks) else None

    def layer_rope(self, layer: int) -> RopeParameters | None:
        """None: the layer does not rotate."""
        if (own := self._own_head(layer)) is not None:
            return own.rope
        if layer in self.family.unrotated_layers:
            return None
        return self.rope if self.sliding_windows[layer] is None or self.local_rope is None else self.local_rope

    @property
    def uses_long_factor(self) -> bool:
        """True: keys are rotated for sequences beyond the original length (longrope), by `max_model_len`."""
        return any(rope is not None and rope.uses_long_factor for rope in (self.rope, self.local_rope))

    @property
    def implementation(self) -> str:
        """The code that computes the model, if it is not ours: part of the fingerprint."""
        return ""

    def verify_options(self, quantization: str | None, enable_lora: bool) -> None:
        """Check settings that the code which computes the model may not have. Raises: UnsupportedModel naming the setting."""

    def head_order(self, layer: int) -> HeadOrder:
        head_dim, rope = self.layer_head_dim(layer), self.layer_rope(layer) or self.rope
        return HeadOrder(head_dim, head_dim - rope.unrotated_dim, self.family.rotates_neighbours)

    def layer_head_dim(self, layer: int) -> int:
        """Numbers of a layer's heads."""
        if (own := self._own_head(layer)) is not None:
            return own.head_dim
        sizes = self.family.layer_head_dims
        return sizes[layer] if layer < len(sizes) else self.head_dim

    def layer_kv_heads(self, layer: int) -> int:
        """KV heads of a layer, of all ranks."""
        if (own := self._own_head(layer)) is not None:
            return own.num_kv_heads
        numbers = self.family.layer_kv_heads
        return numbers[layer] if layer < len(numbers) else self.num_kv_heads

    def keys_of(self, layer: int) -> int:
        """The layer whose keys and values this one attends to: itself, or an earlier one."""
        owners = self.family.key_layers
        return owners[layer] if layer < len(owners) else layer

    def _own_head(self, layer: int) -> ModelConfig | None:
        """The configuration of a draft head with dimensions of its own, if the layer is that head's."""
        return None if self.draft_head is None or layer < self.num_layers else self.draft_head.own

    def _rows_per_token(self, layer: int) -> int:
        """1: a latent row; 2: a key and a value."""
        return 2 if self.latent is None or self._own_head(layer) is not None else 1

    def _heads_of(self, layer: int) -> tuple[int, int, int]:
        """KV heads, numbers of a head, and rows of a token."""
        return self.layer_kv_heads(layer), self.layer_head_dim(layer), self._rows_per_token(layer)

    def _shape_of(self, layer: int) -> tuple[int, int, int]:
        """Equal for layers whose blocks have one shape."""
        if layer == self.num_layers:
            return _DRAFT
        return _STATE if self.has_state(layer) else self._heads_of(layer)

    @cached_property
    def kv_cache_group_layers(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each KV cache group: of equal KV heads, and of one kind where windows, or chunks, are groups of their own."""
        shapes: dict[tuple[int, int, int], list[int]] = {}
        for layer in range(len(self.sliding_windows)):
            if self.keys_of(layer) == layer:
                shapes.setdefault(self._shape_of(layer), []).append(layer)
        groups: list[tuple[int, ...]] = []
        # routers learn only of the first group, which is to have every full block if any has: layers with a state come after
        # others. That of the draft head is the last, since a worker may lack it
        for kind, layers in sorted(
            shapes.items(), key=lambda each: (max(0, -each[0][0]), not self._keeps_all(each[1]))
        ):
            found: tuple[tuple[int, ...], ...] = (tuple(range(len(layers))),)
            if self.hybrid_kv_cache and kind not in (_STATE, _DRAFT) and not self._keeps_every_block:
                found = kv_cache_group_layers(
                    [self.sliding_windows[layer] or self.layer_chunk(layer) for layer in layers]
                )
            groups += [tuple(layers[place] for place in group) for group in found]
        return tuple(groups)

    def _keeps_all(self, layers: Sequence[int]) -> bool:
        """True if one of these layers attends to all earlier tokens."""
        return any(self.sliding_windows[layer] is None and self.layer_chunk(layer) is None for layer in layers)

    def kv_cache_place(self, layer: int) -> tuple[int, int]:
        """(number of the layer's KV cache group, the layer's index in the group's blocks); of the layer whose keys it uses."""
        layer = self.keys_of(layer)
        for group_id, layers in enumerate(self.kv_cache_group_layers):
            if layer in layers:
                return group_id, layers.index(layer)
        raise IndexError(f"layer {layer} of {self.num_layers}")

    def verify_sharding(self, size: int, folder: Path) -> None:
        """Check that `size` ranks can share the model. Raises: ConfigError naming the field of config.json."""
        dimensions = {"num_attention_heads": self.num_heads} if self.attends else {}
        dimensions |= {"vocab_size": self.vocab_size} | self.family.inner_sizes(self.intermediate_size)
        layers = [layer for layer in range(len(self.sliding_windows)) if not self.has_state(layer)]
        num_kv_heads = sorted({self.layer_kv_heads(layer) for layer in layers})
        verify_sharding(size, dimensions, num_kv_heads, f"{folder / 'config.json'}")

    def kv_cache_groups(
        self, block_size: int, model_fingerprint: str, shard: RankShard = WHOLE, cache_dtype: str | None = None
    ) -> tuple[KVCacheGroupSpec, ...]:
        """Arguments: as of `kv_layout`. Raises: as it."""
        layout = self.kv_layout(block_size, model_fingerprint, shard, cache_dtype)
        groups = zip(self.kv_cache_group_layers, self._kv_cache_specs(), layout.block_shapes, strict=True)
        return tuple(KVCacheGroupSpec(layers, spec, shape) for layers, spec, shape in groups)

    @property
    def _keeps_every_block(self) -> bool:
        """True with a draft head if all layers have windows or chunks: only the head's group would have every full block then, and
        not the first."""
        return self.draft_head is not None and not self._keeps_all(range(self.num_layers))

    @property
    def _group_shapes(self) -> list[int]:
        """Per KV cache group, the index of the shape of its blocks."""
        groups = [(self._shape_of(layers[0]), layers) for layers in self.kv_cache_group_layers]
        num_layers: dict[tuple[int, int, int], int] = {}
        for kind, layers in groups:
            num_layers[kind] = max(len(layers), num_layers.get(kind, 0))
        # a draft head's layer that has the heads of others has their blocks where those have one layer, too
        heads = [self._heads_of(layers[0]) if kind == _DRAFT else kind for kind, layers in groups]
        shapes = [(of_group, num_layers[kind]) for of_group, (kind, _) in zip(heads, groups, strict=True)]
        return [list(dict.fromkeys(shapes)).index(each) for each in shapes]

    def _kv_cache_specs(self) -> list[KVCacheSpec]:
        """Per KV cache group."""
        specs: list[KVCacheSpec] = []
        for layers, shape in zip(self.kv_cache_group_layers, self._group_shapes, strict=True):
            if self.has_state(layers[0]):
                specs.append(StateSpec(shape))
                continue
            if layers[0] == self.num_layers:
                specs.append(DraftHeadSpec(shape))
                continue
            windows = [window for layer in layers if (window := self.sliding_windows[layer]) is not None]
            chunks = {self.layer_chunk(layer) for layer in layers}
            if len(windows) == len(layers) and not self._keeps_every_block:
                specs.append(SlidingWindowSpec(max(windows), shape))
            elif len(chunks) == 1 and (chunk := chunks.pop()) is not None and not self._keeps_every_block:
                specs.append(ChunkedLocalAttentionSpec(chunk, shape))
            else:
                specs.append(FullAttentionSpec(shape))
        return specs

    def kv_layout(
        self, block_size: int, model_fingerprint: str, shard: RankShard = WHOLE, cache_dtype: str | None = None
    ) -> KvLayout:
        """The layout of one rank's blocks. cache_dtype: of keys and values; None: the model's.

        Raises: ConfigError for heads of a size whose scales would not be aligned.
        """
        if cache_dtype is not None and self.latent is not None:
            raise ConfigError(
                f"kv_cache_dtype {cache_dtype} rounds keys and values, and {self.architecture} caches latent rows"
            )
        if cache_dtype is not None and not self.attends:
            raise ConfigError(
                f"kv_cache_dtype {cache_dtype} rounds keys and values, and {self.architecture} has only states"
            )
        uneven = [size for size in map(self.layer_head_dim, range(len(self.sliding_windows))) if size % SCALE_BYTES]
        if cache_dtype is not None and uneven:
            raise ConfigError(
                f"kv_cache_dtype {cache_dtype} needs heads of a multiple of {SCALE_BYTES} numbers, the model's have {uneven[0]}"
            )
        of_shapes: dict[int, list[tuple[int, ...]]] = {}
        for shape, layers in zip(self._group_shapes, self.kv_cache_group_layers, strict=True):
            of_shapes.setdefault(shape, []).append(layers)
        shapes = []
        for groups in of_shapes.values():
            if self.has_state(groups[0][0]):
                shapes.append(self._state_block(len(groups[0]), shard))
                continue
            num_kv_heads = self.layer_kv_heads(groups[0][0])
            shapes.append(
                BlockShape(
                    num_layers=max(map(len, groups)),
                    num_kv_heads=len(shard.heads(num_kv_heads)),
                    total_num_kv_heads=num_kv_heads,
                    head_dim=self.layer_head_dim(groups[0][0]),
                    block_size=block_size,
                    dtype=cache_dtype or self.dtype,
                    rows_per_token=self._rows_per_token(groups[0][0]),
                )
            )
        return KvLayout(
            model_fingerprint=model_fingerprint,
            block_size=block_size,
            tp_rank=shard.rank,
            tp_size=shard.size,
            shapes=tuple(shapes),
            group_shapes=tuple(self._group_shapes),
            group_windows=group_windows(self._kv_cache_specs()),
            group_chunks=group_chunks(self._kv_cache_specs()),
            draft_head="" if self.draft_head is None else self.draft_head.name,
        )

    def _state_block(self, num_layers: int, shard: RankShard) -> BlockShape:
        """A block with the states of one sequence."""
        assert self.states is not None
        return BlockShape(
            num_layers=num_layers,
            num_kv_heads=len(shard.heads(self.states.num_heads)),
            total_num_kv_heads=self.states.num_heads,
            head_dim=self.states.head_size,
            block_size=1,
            dtype="float32",
            rows_per_token=1,
        )


@dataclass(frozen=True)
class FamilyLayers:
    """Options of a model's layers, and how weights become layers; by itself the defaults, with the windows of one model."""

    sliding_windows: tuple[int | None, ...]
    """Per layer, see `ModelConfig.sliding_windows`."""
    qkv_bias: bool = False
    """True: the projections of queries, keys and values have biases."""
    output_bias: bool = False
    """True: the projection after the attention has a bias."""
    mlp_bias: bool = False
    attention_scale: float | None = None
    """Factor of `q k^T`; None: `head_dim ** -0.5`."""
    attention_softcap: float | None = None
    """See `AttentionSpec.softcap`."""
    embedding_multiplier: float = 1.0
    """Factor of the embeddings of tokens."""
    residual_multiplier: float = 1.0
    """Factor of what attention and MLP add to the residual stream."""
    logits_scaling: float = 1.0
    """Divisor of the logits."""
    logits_softcap: float | None = None
    """Logits become `softcap * tanh(logit / softcap)`; None: no cap."""
    unrotated_layers: frozenset[int] = frozenset()
    """Layers without rotary positions."""
    latent: LatentShape | None = None
    """Sizes of a family with latent attention."""
    states: StateShape | None = None
    """Sizes of layers with a state per sequence, in a family that has them."""
    layer_kv_heads: tuple[int, ...] = ()
    """KV heads per layer; empty: all have `num_key_value_heads`."""
    layer_head_dims: tuple[int, ...] = ()
    """Numbers of a head per layer; empty: all have `head_dim`."""
    key_layers: tuple[int, ...] = ()
    """Per layer, see `ModelConfig.keys_of`; empty: each layer has keys and values of its own."""
    attention_chunks: tuple[int | None, ...] = ()
    """Per layer, see `ModelConfig.layer_chunk`; empty: no layer has chunks. A layer with chunks has no window."""
    temperature: QueryTemperature | None = None
    """Factor of queries in `unrotated_layers`; None: there is none."""

    model_type: ClassVar[str]
    """`model_type` in config.json, by which transformers chooses the class."""
    own_fields: ClassVar[frozenset[str]] = frozenset()
    """Fields of config.json that `read` reads, without those of all families. `config/config_fields.py` refuses every other field
    that changes the computation."""
    field_names: ClassVar[Mapping[str, str]] = {}
    """Fields that the family has by other names -> those names."""
    layers_field: ClassVar[str] = "num_hidden_layers"
    regroups_layers: ClassVar[bool] = False
    """True: a layer of config.json is not a layer here, so that numbers of layers mean others."""
    attentions_per_layer: ClassVar[int] = 1
    """Layers here per layer of config.json: each layer has one attention, and one place in a KV block."""
    intermediate_size_field: ClassVar[str] = "intermediate_size"
    has_attention: ClassVar[bool] = True
    """False: no model of the family has heads, an MLP or positions, and no limit of its length."""
    default_num_kv_heads: ClassVar[int | None] = None
    """Used if config.json has no `num_key_value_heads`; None: `num_attention_heads`."""
    default_head_dim: ClassVar[int | None] = None
    """Used if config.json has no `head_dim`; None: `hidden_size / num_attention_heads`."""
    norm_eps_field: ClassVar[str] = "rms_norm_eps"
    default_rms_norm_eps: ClassVar[float] = 1e-6
    default_tie_word_embeddings: ClassVar[bool] = False
    default_rope_theta: ClassVar[float] = DEFAULT_THETA
    default_rotary_factor: ClassVar[float] = 1.0
    """Used if config.json has no `partial_rotary_factor`."""
    rotates_part: ClassVar[bool] = False
    """True: `partial_rotary_factor` may be below 1."""
    rotates_neighbours: ClassVar[bool] = False
    """True: the checkpoint's numbers 2j and 2j + 1 of a head are rotated together; False: j and j + half of those rotated."""
    activation_field: ClassVar[str] = "hidden_act"
    activations: ClassVar[tuple[str, ...]] = SILU
    """Names of the activation in config.json; the first if the field is absent."""
    qk_norm: ClassVar[bool] = False
    """True: queries and keys of all models are normalised per head."""
    norms_projection: ClassVar[bool] = False
    """True: they are normalised over all heads."""
    norm_offset: ClassVar[float] = 0.0
    """Added to the weights of all norms."""
    gates_attention: ClassVar[bool] = False
    """True: `q_proj` has rows for a gate of each head's result, too."""
    norms: ClassVar[LayerNorms] = LayerNorms()
    default_latent: ClassVar[LatentShape | None] = None
    """Sizes of a family with latent attention that config.json may leave out."""
    other_model_types: ClassVar[frozenset[str]] = frozenset()
    """Of models with the code of this family."""
    has_draft_layers: ClassVar[bool] = False
    """True: checkpoints may have layers after the last one, which draft tokens (multi-token prediction)."""
    draft_names: ClassVar[DraftNames | None] = None
    """Of the first of them, if it can be computed."""
    has_sinks: ClassVar[bool] = False
    """See `AttentionSpec.sinks`."""
    has_images: ClassVar[bool] = False
    """True: the checkpoint has a vision encoder, too."""
    unserved_parts: ClassVar[tuple[str, ...]] = ()
    """Beginnings of names of weights, under their names here, of encoders that are not computed: the model takes only text."""
    takes_adapters: ClassVar[bool] = True
    """False: layers do not have the names and sizes that adapters know."""
    has_fused_qkv: ClassVar[bool] = False
    """True: `qkv_proj` holds queries, keys and values."""
    has_fused_mlp: ClassVar[bool] = False
    """True: `gate_up_proj` holds gate and up."""
    published_prefix: ClassVar[str | None] = None
    """Of the body's weights in published checkpoints, in place of `model.`; None: that is theirs."""
    embedding_name: ClassVar[str] = "model.embed_tokens.weight"
    final_norm_name: ClassVar[str] = "model.norm.weight"
    head_name: ClassVar[str] = "lm_head.weight"
    classifier_name: ClassVar[str] = "score.weight"

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """`embedding_multiplier` as it is multiplied with embeddings of this dtype."""
        return self.embedding_multiplier

    def loading_refusal(self, quantization: str | None, load_format: str) -> str | None:
        """A sentence about settings with which the family's weights are not loaded; None: they are."""
        return None

    @property
    def reads_token_ids(self) -> bool:
        """True: layers read ids of tokens, so that prompts cannot be embeddings."""
        return False

    @property
    def has_qk_norm(self) -> bool:
        """True: queries and keys are normalised per head."""
        return self.qk_norm

    def ignores(self, weight: str, num_layers: int) -> bool:
        """True for a weight of a part that is not computed."""
        if weight.startswith(self.unserved_parts):
            return True
        found = re.match(r"model\.layers\.(\d+)\.", weight) if self.has_draft_layers else None
        return found is not None and int(found[1]) >= num_layers

    def is_of_draft_head(self, weight: str, num_layers: int) -> bool:
        """True for a weight that `load_draft_head` reads."""
        names = self.draft_names
        if names is None or not weight.startswith(names.prefix.format(num_layers) + "."):
            return False
        return weight not in [names.full(copy, num_layers) for copy in names.copies]

    def load_draft_head(self, weights: WeightLoader, config: ModelConfig) -> MtpHead:
        """Raises: ConfigError."""
        names, hidden, number = self.draft_names, config.hidden_size, config.num_layers
        if names is None:
            raise ValueError(f"{type(self).__name__} has no draft head")

        def norm(name: str) -> RmsNorm:
            return self.load_norm(weights, f"{names.full(name, number)}.weight", config)

        layer = self.load_layer(weights, config, number, names.full(names.layer, number))
        assert isinstance(layer, DecoderLayer)
        return MtpHead(
            embedding_norm=norm(names.embedding_norm),
            hidden_norm=norm(names.hidden_norm),
            projection=make_linear(weights.matrix(names.full(names.projection, number), hidden, 2 * hidden)),
            layer=layer,
            final_norm=norm(names.final_norm),
            hidden_first=names.hidden_first,
            passes_normed=names.passes_normed,
        )

    def has_layer_sinks(self, layer: int) -> bool:
        """See `AttentionSpec.sinks`."""
        return self.has_sinks

    def inner_sizes(self, intermediate_size: int) -> dict[str, int]:
        """Field of config.json -> inner size I of an MLP or an expert, which ranks share."""
        return {self.intermediate_size_field: intermediate_size}

    def load_layer(
        self, weights: WeightLoader, config: ModelConfig, index: int, prefix: str | None = None
    ) -> DecoderLayer | SideMixer:
        """Read the weights of layer `index` by their names in the checkpoint. prefix: of these, if it is not that of its number.

        Raises: ConfigError.
        """
        prefix = prefix or f"model.layers.{index}"
        attention = self.load_attention(weights, f"{prefix}.self_attn", config, index)

        def norm(name: str | None) -> RmsNorm | None:
            return None if name is None else self.load_norm(weights, f"{prefix}.{name}.weight", config)

        return DecoderLayer(
            input_norm=norm(self.norms.input),
            attention=attention,
            mlp_norm=norm(self.norms.mlp),
            mlp=self.load_mlp(weights, f"{prefix}.mlp", config, index),
            attention_post_norm=norm(self.norms.attention_post),
            mlp_post_norm=norm(self.norms.mlp_post),
            attention_multiplier=self.residual_multiplier,
            mlp_multiplier=self.residual_multiplier,
        )

    def linked(self, layers: list[DecoderLayer | SideMixer]) -> list[DecoderLayer | SideMixer]:
        """All layers, those that use what others keep linked to them."""
        return layers

    def load_token_inputs(self, weights: WeightLoader, config: ModelConfig) -> TokenInputs | None:
        """What each layer adds of a token's id; None: layers add nothing. Raises: ConfigError."""
        return None

    def load_attention(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> Attention:
        """Raises: ConfigError."""
        place, spec, hidden = config.kv_cache_place(index)[1], config.attention_spec(index), config.hidden_size
        if self.latent is not None:
            return LatentAttention.load(weights, prefix, place, spec, self.latent, hidden, bias=self.qkv_bias)
        return SelfAttention.load(
            weights, prefix, place, spec, hidden,
            order=config.head_order(index), qkv_bias=self.qkv_bias, output_bias=self.output_bias,
            qk_norm_eps=config.rms_norm_eps if self.has_qk_norm or self.norms_projection else None,
            qk_norm_offset=self.norm_offset, norms_projection=self.norms_projection, is_fused=self.has_fused_qkv,
            is_gated=self.gates_attention,
        )  # fmt: skip

    def load_norm(self, weights: WeightLoader, name: str, config: ModelConfig) -> RmsNorm:
        """A norm over a token's hidden state. Raises: ConfigError."""
        return weights.norm(name, config.hidden_size, config.rms_norm_eps, self.norm_offset)

    def load_mlp(self, weights: WeightLoader, prefix: str, config: ModelConfig, index: int) -> FeedForward:
        """The part of layer `index` that follows the attention, in a layer that has one. Raises: ConfigError."""
        return Mlp.load(
            weights, prefix, config.hidden_size, config.intermediate_size,
            bias=self.mlp_bias, activation=self.activations[0], is_fused=self.has_fused_mlp,
        )  # fmt: skip


@dataclass(frozen=True)
class ModelFamily(FamilyLayers, ABC):
    """Models of one architecture, as folders have them. A subclass is a file of `families`; its fields are its own options."""

    @classmethod
    @abstractmethod
    def read(cls, config: JsonObject, num_layers: int) -> ModelFamily:
        """The family's options from config.json. Raises: ConfigError, UnsupportedModel."""

    @classmethod
    def read_num_layers(cls, config: JsonObject) -> int:
        """Layers here, each with one attention. Raises: ConfigError."""
        return config.integer(cls.layers_field, maximum=MAX_LAYERS) * cls.attentions_per_layer

    @classmethod
    def read_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters:
        """Raises: ConfigError, UnsupportedModel."""
        return RopeParameters.from_config(
            config, head_dim, max_positions, default_theta=cls.default_rope_theta,
            default_rotary_factor=cls.default_rotary_factor, may_be_partial=cls.rotates_part,
        )  # fmt: skip

    @classmethod
    def read_local_rope(cls, config: JsonObject, head_dim: int, max_positions: int) -> RopeParameters | None:
        """Rotary embedding of layers with a window; None: as in the other layers. Raises: ConfigError, UnsupportedModel."""
        return None
