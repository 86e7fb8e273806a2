"""Checkpoints with a draft head, and what it drafts by the layers of `transformers`, which has no such head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pdserve.common.settings.speculative_config import SpeculativeConfig
from tests.support.models.checkpoints import save_tokenizer
from tests.support.models.family_checkpoints import cases, make_family

_NAMES = {
    "model.layers.{}": ("enorm", "hnorm", "eh_proj", "shared_head.norm", ""),
    "mtp": ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", ".layers.0"),
}
_SMALL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")
_EMBEDDING = 6.0
_FACTOR = 0.1
"""Of what layers add: the next token then depends above all on the last one, and the head is often right."""


def add_mtp_head(folder: Path, layers: str, num_layers: int) -> None:
    """Make the last layer of a checkpoint that of a head with Qwen's names. layers: their prefix. num_layers: without the head."""
    hidden = load_file(folder / "model.safetensors")[f"{layers}.0.input_layernorm.weight"].shape[0]
    generator = torch.Generator().manual_seed(1)
    norm_1, norm_2, projection, norm_3, place = _NAMES["mtp"]
    of_head = {
        f"mtp.{name}.weight": 0.1 * torch.randn(hidden, generator=generator) for name in (norm_1, norm_2, norm_3)
    }
    of_head[f"mtp.{projection}.weight"] = 0.1 * torch.randn(hidden, 2 * hidden, generator=generator)
    _make_last_layer_a_head(folder, f"{layers}.{num_layers}.", f"mtp{place}.", of_head)


def _make_last_layer_a_head(folder: Path, own: str, full: str, of_head: dict[str, Tensor]) -> None:
    """Rename weights that begin with `own`, add those of the head, and take the layer out of the configuration."""
    file = folder / "model.safetensors"
    weights = {
        f"{full}{name.removeprefix(own)}" if name.startswith(own) else name: weight
        for name, weight in load_file(file).items()
    }
    save_file({name: weight.contiguous() for name, weight in (weights | of_head).items()}, file, {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    text = config.get("text_config", config)
    text["num_hidden_layers"] -= 1
    for name in ("layer_types", "mlp_layer_types"):
        if name in text:
            text[name].pop()
    (folder / "config.json").write_text(json.dumps(config))


class DraftHeadModel:
    """A checkpoint whose last layer is that of its draft head."""

    def __init__(self, folder: Path, family: str = "deepseek_v3", **changes: Any) -> None:
        """Write it and its tokenizer. changes: fields of the configuration."""
        folder.mkdir(exist_ok=True)
        self.folder = folder
        fields = {**cases(family)[0], **changes}
        self.num_layers: int = fields.get("num_hidden_layers", 4)
        prefix = "model.layers.{}" if "n_routed_experts" in fields else "mtp"
        self.shares_pool = prefix == "mtp"
        if prefix == "mtp":
            kinds = [
                "full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(self.num_layers)
            ]
            fields["layer_types"] = [*kinds, "full_attention"]
        model = make_family(folder, family, {**fields, "num_hidden_layers": self.num_layers + 1})
        names = _NAMES[prefix]
        self._passes_normed = prefix == "mtp"
        hidden = model.config.hidden_size
        generator = torch.Generator().manual_seed(5)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        offset = 0.0 if prefix != "mtp" else 1.0
        norms = [1.0 + 0.05 * drawn(hidden), 1.0 + 0.2 * drawn(hidden), model.model.norm.weight.detach() + offset]
        eye = torch.eye(hidden)
        projection = _EMBEDDING * (torch.cat((eye, 0.1 * eye), dim=1) + 0.01 * drawn(hidden, 2 * hidden))
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(_SMALL):
                    weight.mul_(_FACTOR)
            model.get_input_embeddings().weight.mul_(_EMBEDDING / 0.3)
        model.save_pretrained(folder)
        full = prefix.format(self.num_layers)
        parts = zip((names[0], names[1], names[3]), norms, strict=True)
        of_head = {f"{full}.{name}.weight": norm - offset for name, norm in parts}
        of_head[f"{full}.{names[2]}.weight"] = projection
        _make_last_layer_a_head(folder, f"model.layers.{self.num_layers}.", f"{full}{names[4]}.", of_head)
        save_tokenizer(folder)
        self._projection, self._norms = projection, norms
        self._eps = model.config.rms_norm_eps
        self._head: Any = model
        self._layers = deepcopy(model.model.layers)
        self._final = model.model.norm

    @torch.inference_mode()
    def drafts(self, token_ids: Sequence[int], count: int) -> list[int]:
        """What the head predicts, most likely first, after these tokens and each of its own drafts."""
        known = torch.tensor([list(token_ids)])
        body, embed = self._head.model, self._head.get_input_embeddings()
        states = self._run(list(self._layers[: self.num_layers]), embed(known[:, :-1]), self._final)
        streams = self._stream(embed(known[:, 1:]), states)
        found: list[int] = []
        while len(found) < count:
            before = self._run([self._layers[self.num_layers]], streams, nn.Identity())
            normed = self._norm(before, self._norms[2])
            found.append(int(self._head.lm_head(normed[0, -1]).argmax()))
            passed = (normed if self._passes_normed else before)[:, -1:]
            further = self._stream(embed(torch.tensor([[found[-1]]])), passed)
            streams = torch.cat((streams, further), dim=1)
        assert body is self._head.model
        return found

    def _stream(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        parts = (self._norm(embeddings, self._norms[0]), self._norm(hidden, self._norms[1]))
        return torch.cat(parts, dim=-1) @ self._projection.T

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._eps) * weight

    def _run(self, layers: list[nn.Module], embeds: Tensor, norm: nn.Module) -> Tensor:
        """The last hidden states of some layers."""
        body = self._head.model
        body.layers, body.norm = nn.ModuleList(layers), norm
        body.config.num_hidden_layers = len(layers)
        states: Tensor = body(inputs_embeds=embeds, use_cache=False).last_hidden_state
        return states


class EagleModel:
    """A Llama model, and an EAGLE-3 head for it in a folder of its own, computed here operation by operation."""

    VOCAB = 200
    """Tokens of the head."""
    shares_pool = False

    def __init__(self, folder: Path, head: Path, *, norms_residual: bool = False, **changes: Any) -> None:
        """Write both and their tokenizer. changes: fields of the model's configuration."""
        folder.mkdir(exist_ok=True)
        head.mkdir(exist_ok=True)
        self.folder, self.head = folder, head
        model = make_family(folder, "llama", {"num_hidden_layers": 7, "eos_token_id": 2, **changes})
        hidden, vocab = model.config.hidden_size, model.config.vocab_size
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if name.endswith(_SMALL):
                    weight.mul_(_FACTOR)
            model.get_input_embeddings().weight.mul_(_EMBEDDING / 0.3)
        model.save_pretrained(folder)
        save_tokenizer(folder)
        generator = torch.Generator().manual_seed(6)

        def drawn(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        self._heads, self._dim, inner = 4, hidden // 4, 40
        eye = torch.eye(hidden)
        ids = torch.randperm(vocab, generator=generator)[: self.VOCAB].sort().values
        queries = 0.5 * drawn(hidden, 2 * hidden)
        self.weights = {
            "fc.weight": 0.01 * drawn(hidden, 3 * hidden),
            "midlayer.input_layernorm.weight": 1.0 + 0.05 * drawn(hidden),
            "midlayer.hidden_norm.weight": 1.0 + 0.2 * drawn(hidden),
            "midlayer.post_attention_layernorm.weight": 1.0 + 0.2 * drawn(hidden),
            # a token sees itself best
            "midlayer.self_attn.q_proj.weight": queries,
            "midlayer.self_attn.k_proj.weight": queries.clone(),
            "midlayer.self_attn.v_proj.weight": torch.cat((eye, 0.02 * drawn(hidden, hidden)), dim=1),
            "midlayer.self_attn.o_proj.weight": _EMBEDDING * eye,
            "midlayer.mlp.gate_proj.weight": 0.2 * drawn(inner, hidden),
            "midlayer.mlp.up_proj.weight": 0.2 * drawn(inner, hidden),
            "midlayer.mlp.down_proj.weight": 0.1 * drawn(hidden, inner),
            "norm.weight": model.model.norm.weight.detach().clone(),
            "lm_head.weight": model.lm_head.weight.detach()[ids].clone(),
            "d2t": ids - torch.arange(self.VOCAB),
            "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill_(0, ids, True),
        }
        save_file(self.weights, head / "model.safetensors")
        config = {
            "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "hidden_size": hidden, "vocab_size": vocab,
            "num_hidden_layers": 1, "num_attention_heads": self._heads, "num_key_value_heads": self._heads,
            "intermediate_size": inner, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 500.0,
            "draft_vocab_size": self.VOCAB, "norm_before_residual": norms_residual, "eos_token_id": 2,
        }  # fmt: skip
        (head / "config.json").write_text(json.dumps(config))
        self._model, self._ids, self._norms_residual = model, ids, norms_residual
        self._taps = (2, 3, 4)

    @torch.inference_mode()
    def drafts(self, token_ids: Sequence[int], count: int) -> list[int]:
        """As `DraftHeadModel.drafts`."""
        known = torch.tensor([list(token_ids)])
        states = self._model.model(known[:, :-1], output_hidden_states=True).hidden_states
        embed = self._model.get_input_embeddings()
        taken = torch.cat([states[tap][0] for tap in self._taps], dim=-1) @ self.weights["fc.weight"].T
        embeddings = embed(known[0, 1:])
        found: list[int] = []
        while len(found) < count:
            residual = self._layer(embeddings, taken)
            logits = self._norm(residual, "norm")[-1] @ self.weights["lm_head.weight"].T
            found.append(int(self._ids[int(logits.argmax())]))
            taken = torch.cat((taken, residual[-1:]))
            embeddings = torch.cat((embeddings, embed(torch.tensor([found[-1]]))))
        return found

    def _layer(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        weights, num = self.weights, len(hidden)
        normed = self._norm(hidden, "midlayer.hidden_norm")
        x = torch.cat((self._norm(embeddings, "midlayer.input_layernorm"), normed), dim=-1)
        q, k, v = (
            (x @ weights[f"midlayer.self_attn.{name}_proj.weight"].T).view(num, self._heads, self._dim)
            for name in "qkv"
        )
        q, k = self._rotated(q), self._rotated(k)
        scores = torch.einsum("qhd,khd->hqk", q, k) * self._dim**-0.5
        scores += torch.full((num, num), -torch.inf).triu(1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        residual = (normed if self._norms_residual else hidden) + mixed @ weights["midlayer.self_attn.o_proj.weight"].T
        y = self._norm(residual, "midlayer.post_attention_layernorm")
        gate, up = (y @ weights[f"midlayer.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        found: Tensor = residual + (nn.functional.silu(gate) * up) @ weights["midlayer.mlp.down_proj.weight"].T
        return found

    def _rotated(self, x: Tensor) -> Tensor:
        frequencies = 500.0 ** (-torch.arange(0, self._dim, 2) / self._dim)
        angles = torch.arange(len(x))[:, None] * frequencies
        cos, sin = (torch.cat((part, part), dim=-1)[:, None] for part in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, dim=-1)
        turned: Tensor = x * cos + torch.cat((-second, first), dim=-1) * sin
        return turned

    def _norm(self, x: Tensor, name: str) -> Tensor:
        normed: Tensor = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weights[f"{name}.weight"]
        return normed


HeadModel = DraftHeadModel | EagleModel


def head_setting(model: HeadModel, num_tokens: int) -> SpeculativeConfig:
    """The setting with which a worker drafts by the model's head, whatever the number of sequences."""
    if isinstance(model, EagleModel):
        return SpeculativeConfig(
            method="eagle3", model=str(model.head), num_speculative_tokens=num_tokens, disable_by_batch_size=None
        )
    return SpeculativeConfig(method="mtp", num_speculative_tokens=num_tokens, disable_by_batch_size=None)
