"""EAGLE-3 heads: a folder with one layer that drafts for a certain model.

An entry is made of the inputs of three of the model's layers at its position and of the token after it. To draft further tokens,
the head takes its own hidden state. It may have a vocabulary of its own, of the model's most frequent tokens.
Source: EAGLE-3 (Li et al. 2025), section 3.
"""

from __future__ import annotations

from pathlib import Path

import torch

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.common.security.fingerprint import model_fingerprint
from pdserve.kernels.cpu.linear import make_linear, make_output_head
from pdserve.kernels.layers.rms_norm import RmsNorm
from pdserve.models.config.draft_head_config import DraftHeadConfig
from pdserve.models.config.model_config import ModelConfig
from pdserve.models.dtypes import TORCH_DTYPES
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.decoder_layer import DecoderLayer
from pdserve.models.layers.draft_head import EagleHead
from pdserve.models.layers.embedding import make_embedding
from pdserve.models.layers.mlp import Mlp
from pdserve.models.layers.self_attention import SelfAttention
from pdserve.models.read_config import read_config
from pdserve.models.weights.open_weights import open_weights
from pdserve.models.weights.rank_shard import RankShard
from pdserve.models.weights.weight_loader import WeightLoader

_LAYERS = ("midlayer", "layers.0")
"""Two names of the layer."""
_NUM_TAPS = 3


def read_eagle_config(folder: Path, model: ModelConfig) -> DraftHeadConfig:
    """The configuration of a head's folder. model: for which it drafts. Raises: ConfigError, UnsupportedModel."""
    own = read_config(folder, model.dtype, is_draft_head=True)
    config = JsonObject.of_model(folder)
    for name, here, there in (
        ("hidden_size", own.hidden_size, model.hidden_size),
        ("vocab_size", own.vocab_size, model.vocab_size),
        ("num_hidden_layers", own.num_layers, 1),
    ):
        if here != there:
            raise config.error(name, f"{there}, as the model needs it")
    options = config.child("eagle_config") or JsonObject({}, config.where)
    if config.boolean("norm_before_fc", False) or options.boolean("norm_before_fc", False):
        raise UnsupportedModel(f"{config.where}: norm_before_fc is true, and is not computed")
    if not options.boolean("use_aux_hidden_state", True):
        raise UnsupportedModel(f"{config.where}: use_aux_hidden_state is false, and other heads are not computed")
    if model.family.regroups_layers:
        raise UnsupportedModel(
            f"{config.where}: a head for {model.architecture}, whose layers are not computed one by one"
        )
    taps = _taps(config, options, model.num_layers)
    return DraftHeadConfig(
        name=f"eagle3{model_fingerprint(folder, model.dtype)}",
        folder=folder,
        own=own,
        taps=taps,
        vocab_size=config.integer("draft_vocab_size", own.vocab_size, maximum=own.vocab_size),
        norms_residual=config.boolean("norm_before_residual", options.boolean("norm_before_residual", False)),
    )


def _taps(config: JsonObject, options: JsonObject, num_layers: int) -> tuple[int, ...]:
    """Raises: ConfigError."""
    name = "eagle_aux_hidden_state_layer_ids"
    given = config.items(name) or options.items(name)
    if not given:
        if num_layers < 2 * _NUM_TAPS:
            raise ConfigError(f"{config.where}: {name} is missing, and the model has {num_layers} layers")
        return 2, num_layers // 2, num_layers - 3
    taps = tuple(tap for tap in given if isinstance(tap, int) and 0 <= tap < num_layers)
    if len(taps) != len(given) or len(taps) != _NUM_TAPS or list(taps) != sorted(set(taps)):
        raise config.error(name, f"{_NUM_TAPS} ascending numbers of the model's {num_layers} layers")
    return taps


def load_eagle_head(model: ModelConfig, device: str, shard: RankShard) -> EagleHead:
    """Read the weights of the model's `draft_head`. Raises: ConfigError, UnsupportedModel."""
    head = model.draft_head
    assert head is not None
    assert head.folder is not None
    assert head.own is not None
    own, hidden = head.own, model.hidden_size
    with open_weights(head.folder, own.stored_quantization) as checkpoint:
        names = set(checkpoint.names)
        ignored = {"t2d"}  # the inverse of d2t
        weights = WeightLoader(checkpoint, TORCH_DTYPES[model.dtype], device, ignored=ignored, shard=shard)
        prefix = next((each for each in _LAYERS if f"{each}.input_layernorm.weight" in names), _LAYERS[0])
        family = own.family
        spec = model.attention_spec(model.num_layers)

        def norm(name: str) -> RmsNorm:
            return family.load_norm(weights, f"{name}.weight", own)

        layer = DecoderLayer(
            input_norm=None,
            attention=SelfAttention.load(
                weights, f"{prefix}.self_attn", 0, spec, hidden,
                order=own.head_order(0), qkv_bias=family.qkv_bias, output_bias=family.output_bias, input_size=2 * hidden,
            ),
            mlp_norm=norm(f"{prefix}.post_attention_layernorm"),
            mlp=Mlp.load(weights, f"{prefix}.mlp", hidden, own.intermediate_size, bias=family.mlp_bias),
        )  # fmt: skip
        embedding = None
        if "embed_tokens.weight" in names:
            embedding = make_embedding(weights.tensor("embed_tokens.weight", model.vocab_size, hidden), 1.0, None)
        token_ids = None
        if "d2t" in names:
            offsets = checkpoint.read("d2t", (head.vocab_size,), ("I64",)).to(device).clone()
            weights.skip("d2t")
            token_ids = offsets + torch.arange(head.vocab_size, device=device)
            if device != "meta" and (int(token_ids.min()) < 0 or int(token_ids.max()) >= model.vocab_size):
                raise ConfigError(f"{checkpoint.where('d2t')}: tokens outside the vocabulary of {model.vocab_size}")
        elif head.vocab_size != model.vocab_size:
            raise ConfigError(
                f"{head.folder}: d2t is missing, and draft_vocab_size is {head.vocab_size} of {model.vocab_size} tokens"
            )
        found = EagleHead(
            layer=layer,
            final_norm=norm("norm"),
            embedding_norm=norm(f"{prefix}.input_layernorm"),
            hidden_norm=norm(f"{prefix}.hidden_norm"),
            combine=make_linear(weights.tensor("fc.weight", hidden, _NUM_TAPS * hidden)),
            lm_head=make_output_head(weights.tensor("lm_head.weight", head.vocab_size, hidden)),
            token_ids=token_ids,
            vocab_size=model.vocab_size,
            embedding=embedding,
            norms_residual=head.norms_residual,
            taps=head.taps,
        )
        weights.check_all_read()
    return found
