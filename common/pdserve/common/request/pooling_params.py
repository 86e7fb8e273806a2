"""`PoolingParams`: a client's choice of what is computed from a prompt's hidden states; the name is vLLM's."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from pdserve.common.errors import InvalidRequest

PoolingType = Literal["last", "mean"]
POOLING_TYPES: tuple[PoolingType, ...] = get_args(PoolingType)
PoolingTask = Literal["embed", "classify", "score"]
POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)


def verify_generates(num_labels: int) -> None:
    """num_labels: of the model's classification head; 0: it has none. Raises: InvalidRequest for a model that generates no text."""
    if num_labels:
        raise InvalidRequest(
            f"the model classifies into {num_labels} labels: it has a classification head and generates no text",
            "model",
        )


class PoolingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True, gc=False
):
    """How the last hidden states of a prompt become one vector.

    `embed` pools them, cuts to `dimensions`, then normalises. `classify` and `score` apply the model's classification head to the
    last token's, and its activation. None, given for any field, is its default.
    """

    task: PoolingTask | None = None
    """None: what `LLM` or the endpoint asks for; in an engine `embed`. `score` needs a head with one label."""
    pooling_type: PoolingType = "last"
    """`last` takes the last token's hidden state, `mean` the mean over all tokens."""
    normalize: bool = True
    """True if the vector is scaled to length 1."""
    dimensions: int | None = None
    """Keep only this number of leading values, for models trained for that; None is all."""
    use_activation: bool = True
    """With a classification head: False gives its numbers as they are."""

    def __post_init__(self) -> None:
        for name, default in (("pooling_type", "last"), ("normalize", True), ("use_activation", True)):
            if getattr(self, name) is None:
                msgspec.structs.force_setattr(self, name, default)

    @property
    def reads_prefix_cache(self) -> bool:
        """True if a cached prefix helps: a mean needs the hidden state of every token, and a cache has none."""
        return self.pooling_type != "mean"

    @property
    def is_embedding(self) -> bool:
        """True if hidden states are pooled; False if the classification head is applied."""
        return self.task in (None, "embed")

    def verify_task(self, num_labels: int) -> None:
        """num_labels: of the model's classification head; 0: it has none. Raises: InvalidRequest if the model lacks the task."""
        if self.is_embedding:
            if num_labels:
                raise InvalidRequest(
                    "the model has a classification head and gives no embeddings (task 'embed')", "model"
                )
        elif not num_labels:
            raise InvalidRequest(f"the model has no classification head (task {self.task!r})", "model")
        elif self.task == "score" and num_labels > 1:
            raise InvalidRequest(
                f"the model's classification head has {num_labels} labels, and one is needed (task 'score')", "model"
            )

    def verify(self, hidden_size: int | None = None) -> None:
        """Raise `InvalidRequest` naming the field, its value and its limit.

        hidden_size: when known, `dimensions` is held against it.
        """
        if self.task is not None and self.task not in POOLING_TASKS:
            known = ", ".join(map(repr, POOLING_TASKS))
            raise InvalidRequest(f"task must be one of {known}, not {self.task!r:.60}", "task")
        self._verify_fields_of_task()
        if self.pooling_type not in POOLING_TYPES:
            known = " or ".join(map(repr, POOLING_TYPES))
            raise InvalidRequest(f"pooling_type must be {known}, not {self.pooling_type!r:.60}", "pooling_type")
        if self.dimensions is None:
            return
        if self.dimensions < 1 or (hidden_size is not None and self.dimensions > hidden_size):
            limit = "at least 1" if hidden_size is None else f"from 1 to {hidden_size}, the model's hidden size"
            raise InvalidRequest(f"dimensions must be {limit}, not {self.dimensions}", "dimensions")

    def _verify_fields_of_task(self) -> None:
        """Refuse a field that has no effect on the task. Raises: InvalidRequest."""
        for name in ("use_activation",) if self.is_embedding else ("pooling_type", "normalize", "dimensions"):
            if getattr(self, name) != getattr(_DEFAULTS, name):
                raise InvalidRequest(
                    f"{name} is {getattr(self, name)!r:.60}, and has no effect on the task {self.task or 'embed'!r}",
                    name,
                )

    def is_served_by(self, hidden_size: int, num_labels: int) -> bool:
        """True if a worker with these values in its identity serves the task."""
        if self.is_embedding:
            return hidden_size > 0
        return num_labels == 1 if self.task == "score" else num_labels > 0

    def num_values(self, hidden_size: int, num_labels: int = 0) -> int:
        """Numbers in the vector. hidden_size, num_labels: of the model."""
        if not self.is_embedding:
            return num_labels
        return hidden_size if self.dimensions is None else self.dimensions


_DEFAULTS = PoolingParams()
