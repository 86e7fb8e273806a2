"""Fields of a beam search, for both front ends."""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.common.errors import InvalidRequest
from pdserve.common.request.sampling_params import SamplingParams
from pdserve.router.bodies.request_body import shown
from pdserve.router.requests.fields.output_constraint import OutputConstraint
from pdserve.text.beam_search import MAX_LENGTH_PENALTY, BeamSearchParams

_SUPPORTED = {
    "n", "best_of", "max_tokens", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "detokenize",
    "output_kind",
    # without effect: nothing is sampled
    "temperature", "top_p", "top_k", "min_p", "seed",
}  # fmt: skip
"""Sampling parameters that a beam search may come with; others must have their defaults."""


class BeamFields(msgspec.Struct, kw_only=True):
    """Fields of a beam search by vLLM's names, `early_stopping` as in transformers; None: not given."""

    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None

    def params(self, sampling: SamplingParams, form: OutputConstraint) -> BeamSearchParams | None:
        """None without `use_beam_search`. sampling: the client's, without defaults of the model. Raises: InvalidRequest."""
        length_penalty = 1.0 if self.length_penalty is None else self.length_penalty
        early_stopping: bool | Literal["never"]
        match self.early_stopping:
            case None | False:
                early_stopping = False
            case True | "never":
                early_stopping = self.early_stopping
            case _:
                raise InvalidRequest(
                    f"early_stopping is {shown(self.early_stopping)}, true, false or never is needed", "early_stopping"
                )
        if not self.use_beam_search:
            for name, given in (("length_penalty", length_penalty != 1.0), ("early_stopping", early_stopping)):
                if given:
                    raise InvalidRequest(f"{name} needs use_beam_search to be true", name)
            return None
        if not abs(length_penalty) <= MAX_LENGTH_PENALTY:
            raise InvalidRequest(
                f"length_penalty must be from {-MAX_LENGTH_PENALTY:g} to {MAX_LENGTH_PENALTY:g}, not {length_penalty}",
                "length_penalty",
            )
        defaults = SamplingParams()
        for name in SamplingParams.__struct_fields__:
            if name not in _SUPPORTED and getattr(sampling, name) != getattr(defaults, name):
                name = form.field if name == "structured_outputs" else name
                raise InvalidRequest(f"{name} is not supported with use_beam_search", name)
        return BeamSearchParams(
            beam_width=max(1, sampling.num_sequences), length_penalty=length_penalty, early_stopping=early_stopping
        )
