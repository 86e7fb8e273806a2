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


class DraftHeadModel:
    """A checkpoint whose last layer is that of its draft head."""

    def __init__(self, folder: Path, family: str = "deepseek_v3", **changes: Any) -> None:
        """Write it and its tokenizer. changes: fields of the configuration."""
        folder.mkdir(exist_ok=True)
        self.folder = folder
        fields = {**cases(family)[0], **changes}
        self.num_layers: int = fields.get("num_hidden_layers", 4)
        if "layer_types" in fields:
            fields["layer_types"] = [*fields["layer_types"], "full_attention"]
        model = make_family(folder, family, {**fields, "num_hidden_layers": self.num_layers + 1})
        prefix = "model.layers.{}" if "n_routed_experts" in fields else "mtp"
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
        weights = load_file(folder / "model.safetensors")
        full = prefix.format(self.num_layers)
        own = f"model.layers.{self.num_layers}."
        weights = {
            f"{full}{names[4]}.{name.removeprefix(own)}" if name.startswith(own) else name: weight
            for name, weight in weights.items()
        }
        parts = zip((names[0], names[1], names[3]), norms, strict=True)
        weights |= {f"{full}.{name}.weight": norm - offset for name, norm in parts}
        weights[f"{full}.{names[2]}.weight"] = projection
        save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        config["num_hidden_layers"] = self.num_layers
        for name in ("layer_types", "mlp_layer_types"):
            if name in config:
                config[name] = config[name][: self.num_layers]
        (folder / "config.json").write_text(json.dumps(config))
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
