"""The training loop: plain torch, AdamW, a cosine schedule, fixed seeds."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from transformers import Qwen3Config, Qwen3ForCausalLM

from demo_model.chat import CONTEXT, END_OF_TEXT, MESSAGE_END, VOCABULARY, ChatEncoder, rows

PROMPT_WEIGHT = 0.05

# Row length in tokens, and how often a step uses it. Mostly short rows, because facts are learned there; enough long
# ones that distance and many turns do not confuse the model, up to the full context.
LENGTHS: tuple[tuple[int, float], ...] = (
    (128, 0.52),
    (256, 0.22),
    (512, 0.10),
    (1024, 0.10),
    (2048, 0.04),
    (4096, 0.02),
)


@dataclass(frozen=True)
class Schedule:
    """How long and how fast to train; ``tokens`` is how many tokens a step reads (more if one row is longer)."""

    steps: int = 3200
    tokens: int = 2048
    peak_rate: float = 2e-3
    warmup: int = 100
    decay: float = 0.05
    seed: int = 7

    def rate(self, step: int) -> float:
        """The learning rate at a step: a linear start, then half a cosine down to a hundredth of the peak."""
        if step < self.warmup:
            return self.peak_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return self.peak_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


def network(encoder: ChatEncoder, seed: int) -> Any:
    """A fresh network: Qwen3's layout with grouped query attention and tied embeddings, 4.2 million parameters."""
    torch.manual_seed(seed)
    (end_of_text,) = encoder.ids(END_OF_TEXT)
    (message_end,) = encoder.ids(MESSAGE_END)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=message_end,
        pad_token_id=end_of_text,
        attn_implementation="sdpa",
    )
    return Qwen3ForCausalLM(config)


def make_optimizer(model: Any, schedule: Schedule) -> torch.optim.Optimizer:
    """AdamW; vectors have no weight decay."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": schedule.decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=schedule.peak_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


def train(model: Any, encoder: ChatEncoder, schedule: Schedule, half: bool) -> float:
    """Trains the model in place and returns the seconds it took; ``half`` multiplies matrices in bfloat16."""
    rng = random.Random(schedule.seed)
    optimizer = make_optimizer(model, schedule)
    model.train()
    started = printed = time.monotonic()
    smooth = 0.0
    seen = 0  # tokens
    for step in range(schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        (length,) = rng.choices([n for n, _ in LENGTHS], weights=[w for _, w in LENGTHS])
        ids, weights = rows(encoder, rng, max(schedule.tokens // length, 1), length)
        inputs = torch.tensor(ids)
        seen += inputs.numel()
        # Position i is scored by how well it predicts token i + 1.
        weight = torch.tensor(weights)[:, 1:].reshape(-1)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            logits = model(input_ids=inputs, use_cache=False).logits[:, :-1]
        losses = F.cross_entropy(logits.reshape(-1, VOCABULARY).float(), inputs[:, 1:].reshape(-1), reduction="none")
        loss = (losses * weight).sum() / weight.sum()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        smooth = loss.item() if step == 0 else 0.95 * smooth + 0.05 * loss.item()
        now = time.monotonic()
        if now - printed >= 10 or step + 1 == schedule.steps:
            printed = now
            print(
                f"step {step + 1}/{schedule.steps}  loss {smooth:.4f}  rate {schedule.rate(step):.1e}  "
                f"{seen / (now - started):,.0f} tokens/s  {now - started:.0f} s",
                flush=True,
            )
    model.eval()
    return time.monotonic() - started
