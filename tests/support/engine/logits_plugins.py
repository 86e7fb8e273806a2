"""Logits processors for tests, in the form of installed plug-ins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pdserve.engine.sampling.logits_processors import LogitsProcessors, LogitsRow


class Ban:
    """`tokens` are out; with `after`, only from that output position on."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.num_rows = 0

    def check(self, args: Mapping[str, Any], vocab_size: int) -> None:
        tokens = args.get("tokens")
        if not isinstance(tokens, list) or not all(type(t) is int and 0 <= t < vocab_size for t in tokens):
            raise ValueError(f"tokens must be token ids below {vocab_size}, not {tokens!r}")

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        self.num_calls += 1
        self.num_rows += len(rows)
        for row, asked in enumerate(rows):
            if len(asked.output_token_ids) >= asked.args.get("after", 0):
                logits[row, torch.tensor(asked.args["tokens"]).to(logits.device)] = -torch.inf


class Only:
    """`token` becomes the most likely by far, wherever it stood before."""

    def check(self, args: Mapping[str, Any], vocab_size: int) -> None: ...

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for row, asked in enumerate(rows):
            logits[row, asked.args["token"]] = 1000.0


class Broken:
    """Fails at output position `at` of each row; `how` is `raise`, `nan` or `write`."""

    def check(self, args: Mapping[str, Any], vocab_size: int) -> None: ...

    def apply(self, logits: Tensor, rows: Sequence[LogitsRow]) -> None:
        for row, asked in enumerate(rows):
            if len(asked.output_token_ids) != asked.args.get("at", 0):
                continue
            match asked.args.get("how"):
                case "raise":
                    raise RuntimeError("this rule has a bug")
                case "nan":
                    logits[row, 3] = torch.nan
                case "write":
                    asked.prompt_token_ids[0] = 1


def installed() -> LogitsProcessors:
    return LogitsProcessors({"ban": Ban(), "only": Only(), "broken": Broken()})
