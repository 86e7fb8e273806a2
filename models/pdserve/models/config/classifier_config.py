"""`ClassifierConfig`: labels and activation of a classification head, from `config.json`."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.common.errors import UnsupportedModel
from pdserve.models.json_object import JsonObject
from pdserve.models.layers.classification_head import Activation

MAX_LABELS = 1 << 16
_DEFAULT_LABELS = 2
_OF_PROBLEM: dict[str, Activation] = {
    "regression": "identity",
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
}
"""`problem_type` -> activation."""
_OF_CLASS: dict[str, Activation] = {
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
    "torch.nn.modules.linear.Identity": "identity",
}
"""The class that sentence-transformers writes for a cross-encoder -> activation."""


@dataclass(frozen=True, slots=True)
class ClassifierConfig:
    """A head that gives one number per label of the last token's hidden state."""

    num_labels: int
    activation: Activation
    """Turns the head's numbers into the answer: a softmax over the labels, a sigmoid of each, or neither."""

    @classmethod
    def read(cls, config: JsonObject) -> ClassifierConfig:
        """Number of labels and activation as transformers defines them. Raises: ConfigError, UnsupportedModel."""
        num_labels = _num_labels(config)
        problem = config.text("problem_type", "")
        if problem and problem not in _OF_PROBLEM:
            raise config.error("problem_type", f"one of {', '.join(_OF_PROBLEM)}")
        activation = _OF_PROBLEM.get(problem, "softmax")
        if activation == "softmax" and num_labels == 1:
            activation = "sigmoid"  # a softmax over one label is always 1
        named = _named_class(config)
        if not named:
            return cls(num_labels, activation)
        if named not in _OF_CLASS:
            raise UnsupportedModel(
                f"{config.where}: the activation {named[:80]!r} of a cross-encoder; supported: {', '.join(_OF_CLASS)}"
            )
        return cls(num_labels, _OF_CLASS[named])


def _num_labels(config: JsonObject) -> int:
    """The entries of `id2label`, else `num_labels`, else 2."""
    labels = config.get("id2label")
    if labels is None:
        return config.integer("num_labels", _DEFAULT_LABELS, maximum=MAX_LABELS)
    if not isinstance(labels, dict) or not 0 < len(labels) <= MAX_LABELS:
        raise config.error("id2label", f"an object of 1 to {MAX_LABELS} labels")
    if config.integer("num_labels", len(labels), maximum=MAX_LABELS) != len(labels):
        raise config.error("num_labels", f"{len(labels)}, the number of entries of id2label")
    return len(labels)


def _named_class(config: JsonObject) -> str:
    """The activation's class where a cross-encoder names one; empty without one."""
    nested = config.child("sentence_transformers")
    if nested is not None and nested.has("activation_fn"):
        return nested.text("activation_fn")
    return config.text("sbert_ce_default_activation_function", "")
