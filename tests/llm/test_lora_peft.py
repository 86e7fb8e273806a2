"""Adapters that PEFT itself made and applies, where it is installed; `tests/llm/test_lora.py` needs no PEFT."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from pdserve.llm import LLM, LoRARequest, SamplingParams
from tests.support.inputs.random_prompts import prompt_of
from tests.support.models.oracle import NEAR_TIE


@pytest.mark.slow
@pytest.mark.parametrize("use_rslora", [False, True])
def test_the_text_is_pefts(folder: Path, tmp_path: Path, make_llm: Callable[..., LLM], use_rslora: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peft: Any = pytest.importorskip("peft")
    torch.manual_seed(7)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, lora_alpha=6, target_modules=targets, use_rslora=use_rslora, init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config).eval()
        model.save_pretrained(tmp_path)
    llm, prompt = make_llm(enable_lora=True), prompt_of(19)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = []
    for request in (None, LoRARequest("peft", 1, str(tmp_path))):
        [output] = llm.generate(prompt, params, lora_request=request, use_tqdm=False)
        texts.append(list(output.outputs[0].token_ids))
    assert texts[0] != texts[1], "an adapter without effect would prove nothing"
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *texts[1]]])).logits[0, len(prompt) - 1 : -1]
    for token_id, row in zip(texts[1], logits, strict=True):
        assert float(row.max() - row[token_id]) < NEAR_TIE
