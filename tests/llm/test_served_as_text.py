"""Checkpoints whose encoders of images are not computed: they answer texts, and refuse images by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pdserve.common.errors import InvalidRequest
from pdserve.common.image_processor_config import SERVED_AS_TEXT
from pdserve.llm import LLM
from pdserve.models.registry import FAMILIES
from tests.support.engine.llm_requests import greedy
from tests.support.models.checkpoints import save_tokenizer
from tests.support.models.family_checkpoints import WHOLES, cases, make_family


def test_the_router_and_the_worker_know_the_same_models() -> None:
    assert {family.model_type for family in FAMILIES.values() if family.unserved_parts} == SERVED_AS_TEXT
    assert set(WHOLES) == SERVED_AS_TEXT


@pytest.mark.parametrize("family", sorted(WHOLES))
def test_images_are_refused_by_name(family: str, tmp_path: Path) -> None:
    """The folder has no preprocessor_config.json, or one of another image processor."""
    make_family(tmp_path, family, cases(family)[0])
    save_tokenizer(tmp_path)
    with LLM(str(tmp_path), dtype="float32", num_blocks=32) as llm:
        [answer] = llm.generate([[5, 6, 7]], greedy(max_tokens=4), use_tqdm=False)
        assert len(answer.outputs[0].token_ids) == 4
        prompt: Any = {"prompt": "a", "multi_modal_data": {"image": Image.new("RGB", (32, 32))}}
        with pytest.raises(InvalidRequest, match="multi_modal_data is given, and this model takes text alone"):
            llm.generate([prompt], greedy(), use_tqdm=False)
