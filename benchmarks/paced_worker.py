"""`pdserve prefill` or `decode` without a model's arithmetic: each step takes the time of a simulated device.

Scheduler, pools, prefix cache and services are the real ones. With real arithmetic, several processes on a few cores would have a
capacity that depends on other processes; with simulated steps, a benchmark of queues measures the queues. Outputs have no meaning.

Usage: PACED_STEP_MS=25 PACED_TOKEN_MS=0.2 python benchmarks/paced_worker.py decode --port 50052 ...
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.cli.main import main
from pdserve.engine.runner.decoder_model import DecoderModel
from pdserve.engine.runner.model_runner import ModelRunner, PendingOutput
from pdserve.engine.scheduler_output import GrammarOutput, SchedulerOutput
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.models.layers.classification_head import ClassificationHead
from pdserve.models.model_inputs import ModelInputs

STEP_S = float(os.environ.get("PACED_STEP_MS", "25")) / 1e3
"""Seconds that each step takes, whatever is in it."""
TOKEN_S = float(os.environ.get("PACED_TOKEN_MS", "0.2")) / 1e3
"""Further seconds for each token that the step computes."""


class NoArithmetic:
    """A decoder whose hidden states are zeros."""

    def __init__(self, model: DecoderModel) -> None:
        self._model = model

    @property
    def hidden_size(self) -> int:
        return self._model.hidden_size

    @property
    def dtype(self) -> torch.dtype:
        return self._model.dtype

    @property
    def classifier(self) -> ClassificationHead | None:
        return self._model.classifier

    @property
    def attention_specs(self) -> Sequence[Sequence[AttentionSpec]]:
        return ((),)

    def forward(self, inputs: ModelInputs) -> Tensor:
        return inputs.read_rows(torch.zeros(len(inputs.positions), self.hidden_size))

    def embed_input_ids(self, token_ids: Tensor) -> Tensor:
        return self._model.embed_input_ids(token_ids)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self._model.compute_logits(hidden.to(torch.bfloat16))


def pace() -> None:
    """Make every step of this process take the simulated time."""
    execute, sample = ModelRunner.execute_model, ModelRunner.sample_tokens
    due_s = 0.0

    def paced(runner: ModelRunner, scheduled: SchedulerOutput) -> None:
        nonlocal due_s
        due_s = time.monotonic() + STEP_S + TOKEN_S * scheduled.total_num_scheduled_tokens
        if not isinstance(runner._model, NoArithmetic):
            runner._model = NoArithmetic(runner._model)
        execute(runner, scheduled)

    def awaited(runner: ModelRunner, grammar: GrammarOutput | None) -> PendingOutput:
        output = sample(runner, grammar)
        time.sleep(max(0.0, due_s - time.monotonic()))
        return output

    ModelRunner.execute_model, ModelRunner.sample_tokens = paced, awaited  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    pace()
    main()
