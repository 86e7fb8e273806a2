"""Adapters and n-gram drafts with images through router, prefill and decode: the answers of `LLM` with the same settings."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from pdserve.llm import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from tests.support.engine.llm_requests import greedy, sampled
from tests.support.models.features import DRAFTS, settings_of
from tests.support.models.image_checkpoints import FAMILIES, chat_of, chat_text, make_image_checkpoint, picture
from tests.support.models.lora_adapters import adapter_flags
from tests.support.processes.cluster_processes import Cluster, pd_cluster
from tests.support.run.waiting import HANG_S

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]

Part = str | Image.Image
COMMON: dict[str, Any] = {"dtype": "float32", "max_num_batched_tokens": 48, "max_model_len": 320}
ADAPTERS = ("first", "second")
PROMPTS: Sequence[Sequence[Part]] = (
    ("Compare ", picture(1), " with ", picture(2, 64, 48), " and compare ", picture(1), "!"),
    ("No picture here, no picture there.",),
    ("One more: ", picture(3, 16, 64)),
)
MANY = 140
"""Output tokens: more than those for which decode keeps room, so that sequences outgrow a small pool."""
REGEX = "[A-C]{2}-[0-9]{3}(x|yz)"
PARAMS: dict[str, SamplingParams] = {
    "greedy": greedy(max_tokens=MANY),
    "sampled": sampled(n=2, seed=5, temperature=0.9, top_p=0.95, max_tokens=20),
    "form": SamplingParams(
        seed=3, temperature=0.8, max_tokens=24, structured_outputs=StructuredOutputsParams(regex=REGEX)
    ),
}
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": {"max_tokens": MANY, "temperature": 0, "ignore_eos": True},
    "sampled": {"n": 2, "seed": 5, "temperature": 0.9, "top_p": 0.95, "max_tokens": 20, "ignore_eos": True},
    "form": {"seed": 3, "temperature": 0.8, "max_tokens": 24, "structured_outputs": {"regex": REGEX}},
}
"""The same parameters in a body of OpenAI HTTP."""
Case = tuple[int, str, str]
"""Place in `PROMPTS`, adapter or "", key of `PARAMS`."""
CASES: Sequence[Case] = [
    (place, name, kind) for kind in PARAMS for place in range(len(PROMPTS)) for name in ("", *ADAPTERS)
]


def answers_of(model: Path, adapters: Path) -> dict[Case, list[list[int]]]:
    """Tokens of `LLM`, with adapters and drafts."""
    options = settings_of(("`enable_lora`", "`speculative_config`"))
    requests = {name: LoRARequest(name, number, str(adapters / name)) for number, name in enumerate(ADAPTERS, 1)}
    found: dict[Case, list[list[int]]] = {}
    with LLM(str(model), **COMMON, num_blocks=256, **options) as llm:
        for place, name, kind in CASES:
            images = [part for part in PROMPTS[place] if isinstance(part, Image.Image)]
            given: Any = {"prompt": chat_text(*PROMPTS[place])}
            given |= {"multi_modal_data": {"image": images}} if images else {}
            [answer] = llm.generate(given, PARAMS[kind], lora_request=requests.get(name), use_tqdm=False)
            found[place, name, kind] = [list(output.token_ids) for output in answer.outputs]
    texts = {str(found[place, name, "greedy"]) for place in range(len(PROMPTS)) for name in ("", *ADAPTERS)}
    assert len(texts) == len(PROMPTS) * (1 + len(ADAPTERS)), "adapters without effect would prove nothing"
    return found


async def ask(http: httpx.AsyncClient, case: Case) -> tuple[list[list[int]], int]:
    """Token ids of each choice, and cached tokens of the prompt."""
    place, name, kind = case
    body = {"messages": chat_of(*PROMPTS[place]), "return_token_ids": True, **FIELDS[kind]}
    answer = await http.post("/v1/chat/completions", json=body | ({"model": name} if name else {}))
    assert answer.status_code == 200, answer.text
    found = answer.json()
    choices = sorted(found["choices"], key=lambda choice: choice["index"])
    cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return [choice["token_ids"] for choice in choices], cached


@pytest.mark.parametrize(("family", "engine_process"), [(FAMILIES[0], False), (FAMILIES[1], True)])
async def test_i1_adapters_and_drafts_change_no_answer(tmp_path: Path, family: str, engine_process: bool) -> None:
    model = make_image_checkpoint(tmp_path / "model", family)
    settings = COMMON | {"connector": "tcp", "engine_process": engine_process}
    both = [f"--{name}={_as_text(value)}" for name, value in settings.items()]
    both += [f"--speculative-config={json.dumps(DRAFTS)}"]
    both += adapter_flags(tmp_path / "adapters", model, *ADAPTERS)
    # few blocks at decode: sequences are evicted and placed again, and go through the encoder again
    decode = ("--num-blocks=24",)
    expected = answers_of(model, tmp_path / "adapters")
    with pd_cluster(tmp_path, model, both=both, decode=decode, router=("--local-prefill", "never")) as cluster:
        async with httpx.AsyncClient(base_url=f"http://{cluster.router.http}", timeout=HANG_S, trust_env=False) as http:
            for case in CASES:  # one after the other, each adapter from a cold prompt
                tokens, cached = await ask(http, case)
                assert tokens == expected[case], case
                assert (cached > 0) is (case[2] != "greedy"), (case, cached)
            at_once = [case for case in CASES if case[2] == "greedy"]
            answers = await asyncio.gather(*(ask(http, case) for case in at_once))
            for case, (tokens, _) in zip(at_once, answers, strict=True):
                assert tokens == expected[case], case
        check_use(cluster)
        cluster.check_pools()
        cluster.check_logs()


def _as_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def check_use(cluster: Cluster) -> None:
    """Decode accepted drafts, and evicted sequences."""
    decode = cluster.services["decode"]
    assert cluster.metric(decode, "pdserve_spec_decode_num_accepted_tokens_total") > 0
    assert cluster.metric(decode, "pdserve_preemptions_total") > 0
