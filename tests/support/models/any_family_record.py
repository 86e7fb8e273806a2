"""The causal language models of the installed `transformers`: served by their own code, or refused, and how exact they are.

`make family-records` measures the families whose row in `tests/models/any_family.json` is missing or out of date;
`python -m tests.support.models.any_family_record FAMILY ...` measures some, and `all` instead of names every one.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from tests.support.models.any_family import (
    FLOAT32,
    bfloat16_errors,
    causal_families,
    configuration_digest,
    logits_of,
    make_any_family,
    refusal,
)
from tests.support.models.family_records import Row, renew
from tests.support.transfers.pair_tokens import pair_tokens

RECORD = Path(__file__).resolve().parents[2] / "models" / "any_family.json"


def measure(model_type: str, architecture: str) -> Row:
    """A row of the record. Raises: AssertionError if the tokens are others, or show nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reason = refusal(folder, model_type, architecture)
        if reason is not None:
            return {"architecture": architecture, "refused": reason}
        model = make_any_family(folder, model_type)
        logits = logits_of(folder, model)
        tokens = pair_tokens(folder, model, "transformers")
    is_tie = logits.theirs.topk(2).values.diff(dim=-1).abs().flatten() < 2 * FLOAT32
    assert ((logits.ours.argmax(-1) == logits.theirs.argmax(-1)) | is_tie).all(), "the most likely tokens are others"
    assert tokens.equal == tokens.compared > 30, f"{tokens.equal} tokens of {tokens.compared} are equal"
    assert tokens.distinct > 5, f"{tokens.distinct} different tokens show nothing"
    with tempfile.TemporaryDirectory() as name:
        ours, theirs = bfloat16_errors(Path(name), model_type)
    return {
        "architecture": architecture,
        "tokens": [tokens.equal, tokens.compared],
        "float32": float(f"{logits.difference:.1g}"),
        "bfloat16": [round(ours, 3), round(theirs, 3)],
    }


def _main() -> int:
    disable_progress_bar()
    set_verbosity_error()
    families = dict(sorted(causal_families()))
    digests = {family: configuration_digest(family) for family in families}
    return renew(RECORD, digests, lambda family: measure(family, families[family]), sys.argv[1:])


if __name__ == "__main__":
    sys.exit(min(_main(), 1))
