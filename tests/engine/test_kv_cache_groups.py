"""A step over several KV cache groups: each has a pool, an attention back end, block tables and copies of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.common.request.sampling_params import SamplingParams
from pdserve.engine.config import EngineConfig
from pdserve.engine.runner.model_runner import ModelRunner
from pdserve.engine.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from pdserve.kernels.attention.attention_spec import AttentionSpec
from pdserve.kernels.torch_layer_ops import TorchLayerOps
from pdserve.models.model_inputs import ModelInputs
from tests.support.hash_model import VOCAB_SIZE, HashAttention, HashModel, greedy_answer, make_hash_cache

PROMPT = [5, 9, 2, 7, 1, 4]
SPECS = [AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0, window=window) for window in (None, 64)]


class TwoGroups(HashModel):
    """Stores and attends in both groups; the hashes must be equal."""

    attention_specs = ((SPECS[0],), (SPECS[1],))

    def forward(self, inputs: ModelInputs) -> Tensor:
        found = [
            super(TwoGroups, self).forward(ModelInputs(inputs.batch, {spec: inputs.plans[spec]}, inputs.token_ids))
            for spec in SPECS
        ]
        assert torch.equal(*found)
        return found[0]


def test_each_group_has_its_pool_tables_and_copies() -> None:
    caches = [make_hash_cache(8, 4), make_hash_cache(8, 4)]
    config = EngineConfig(block_size=4, num_blocks=8, max_model_len=32)
    attention = [HashAttention(cache) for cache in caches]
    runner = ModelRunner(config, TwoGroups(), attention, TorchLayerOps(), caches, VOCAB_SIZE)
    new = NewRequestData(
        req_id="a", token_ids=PROMPT, num_prompt_tokens=6, num_computed_tokens=0, block_ids=[[3, 1], [0, 5]],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=4),
    )  # fmt: skip
    steps = [
        SchedulerOutput(scheduled_new_reqs=[new], num_scheduled_tokens={"a": 6}),
        SchedulerOutput(num_scheduled_tokens={"a": 1}, block_copies=[[], [(5, 7)]]),
        SchedulerOutput(num_scheduled_tokens={"a": 1}),
        SchedulerOutput(scheduled_cached_reqs=CachedRequestData({"a": [[6], [2]]}), num_scheduled_tokens={"a": 1}),
    ]
    said = []
    for step in steps:
        runner.execute_model(step)
        [[token_id]] = runner.sample_tokens(None).result().sampled_token_ids
        said.append(token_id)
    assert said == greedy_answer(PROMPT, 4)
    written = [caches[0][[3, 1, 6]].flatten()[:9], caches[1][[0, 5, 2]].flatten()[:9]]
    assert torch.equal(*written)
    assert torch.equal(caches[1][7][:2], caches[1][5][:2])
    assert (caches[0][[0, 2, 4, 5, 7]] == make_hash_cache(1, 1)).all()
