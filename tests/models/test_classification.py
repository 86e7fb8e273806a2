"""Models with a classification head, by `transformers`' own classes in float32, and what config.json may say of the head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from pdserve.common.errors import ConfigError, UnsupportedModel
from pdserve.models.config.classifier_config import ClassifierConfig
from pdserve.models.layers.classification_head import ClassificationHead
from pdserve.models.loading import load_decoder
from pdserve.models.read_config import read_config
from pdserve.models.registry import CLASSIFIERS, FAMILIES
from tests.support.kernels.paged_run import PagedRun
from tests.support.models.checkpoints import edit_json, make_classifier
from tests.support.models.family_checkpoints import cases, make_family

ATOL = 3e-4
"""Largest difference of a label's number in float32: as of logits in `test_families.py`."""
FAMILIES_WITH_HEAD = {FAMILIES[causal].model_type: name for name, causal in CLASSIFIERS.items()}
CASES = [
    pytest.param(family, marks=() if family in ("gemma2", "phi3") else pytest.mark.slow)
    for family in FAMILIES_WITH_HEAD
]


def test_the_architectures_are_those_of_transformers() -> None:
    theirs = {
        family.model_type for family in FAMILIES.values() if not family.has_images
    } & MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.keys()
    assert {family: MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[family] for family in theirs} == FAMILIES_WITH_HEAD


@pytest.mark.parametrize("family", CASES)
def test_equal_to_transformers(family: str, tmp_path: Path) -> None:
    fields = cases(family)[0] | {"num_labels": 5}
    model = make_family(tmp_path, family, fields, kind=AutoModelForSequenceClassification)
    decoder = load_decoder(tmp_path, dtype="float32")
    assert decoder.config.classifier == ClassifierConfig(5, "softmax")
    prompts = {"long": [3 + 7 * place % 190 for place in range(41)], "short": [9, 4, 77]}
    run = PagedRun(decoder)
    run.step({}, {"long": prompts["long"][:17]})
    ours = run.step({}, {"long": prompts["long"][17:], "short": prompts["short"]})
    for name, prompt in prompts.items():
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt])).logits[0]
        assert float((ours[name][-1] - theirs).abs().max()) < ATOL
        assert float(theirs.std()) > 0.05, "the classes are degenerate and test nothing"


def test_the_head_is_float32_beside_a_body_in_bfloat16(tmp_path: Path) -> None:
    make_classifier(tmp_path)
    decoder = load_decoder(tmp_path, dtype="bfloat16")
    assert decoder.dtype is torch.bfloat16
    assert decoder.classifier is not None
    hidden = torch.randn(2, 64).bfloat16()
    assert decoder.classifier.forward(hidden, torch.zeros(2, dtype=torch.bool)).dtype is torch.float32
    with pytest.raises(RuntimeError, match="LlamaForCausalLM has a classification head and no language-model head"):
        decoder.compute_logits(hidden)


def test_rows_with_and_without_activation() -> None:
    weight, hidden = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[1.0, 1.0], [1.0, 1.0]])
    logits, activated = torch.tensor([1.0, 2.0]), torch.tensor([False, True])
    for activation, expected in (("softmax", logits.softmax(-1)), ("sigmoid", logits.sigmoid()), ("identity", logits)):
        found = ClassificationHead(weight, activation).forward(hidden, activated)  # type: ignore[arg-type]
        assert torch.equal(found[0], logits)
        assert torch.allclose(found[1], expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("classifier")
    make_classifier(path)
    return path


@pytest.fixture
def config(folder: Path, tmp_path: Path) -> Path:
    """A folder with config.json alone."""
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    return tmp_path


CROSS_ENCODER = {"activation_fn": "torch.nn.modules.linear.Identity"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (3, "softmax")),
        ({"id2label": ...}, (2, "softmax")),
        ({"id2label": ..., "num_labels": 7}, (7, "softmax")),
        ({"id2label": {"0": "yes"}, "num_labels": 1}, (1, "sigmoid")),
        ({"problem_type": "single_label_classification"}, (3, "softmax")),
        ({"problem_type": "multi_label_classification"}, (3, "sigmoid")),
        ({"problem_type": "regression", "id2label": {"0": "stars"}}, (1, "identity")),
        ({"id2label": {"0": "yes"}, "sentence_transformers": CROSS_ENCODER}, (1, "identity")),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, (3, "sigmoid")),
    ],
)
def test_labels_and_activation(config: Path, changes: dict[str, Any], expected: tuple[int, Any]) -> None:
    edit_json(config / "config.json", **changes)
    assert read_config(config).classifier == ClassifierConfig(*expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"problem_type": "ranking"}, 'problem_type must be one of regression, .*, not "ranking"'),
        ({"id2label": {}}, "id2label must be an object of 1 to 65536 labels"),
        ({"num_labels": 4}, "num_labels must be 3, the number of entries of id2label, not 4"),
        ({"id2label": ..., "num_labels": 1 << 20}, "num_labels must be at most 65536"),
        ({"sentence_transformers": {"activation_fn": "os.system"}}, "the activation 'os.system' of a cross-encoder"),
        ({"architectures": ["GraniteForSequenceClassification"]}, "architecture GraniteForSequenceClassification;"),
    ],
)
def test_other_heads_are_refused(config: Path, changes: dict[str, Any], message: str) -> None:
    edit_json(config / "config.json", **changes)
    with pytest.raises((ConfigError, UnsupportedModel), match=message):
        read_config(config)


def test_weights_that_do_not_fit_are_refused(folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    edit_json(tmp_path / "config.json", id2label={"0": "a", "1": "b"}, label2id=...)
    with pytest.raises(ConfigError, match=r"score\.weight"):
        load_decoder(tmp_path)
    edit_json(tmp_path / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        load_decoder(tmp_path)
