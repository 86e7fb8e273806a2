"""`DyingPair`: prefill and decode engines that die, and requests that continue as a router places them again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from pdserve.common.errors import TransferFailed
from pdserve.engine.scheduler.kv_messages import ReceiveFailed
from tests.support.engine.engine_harness import Answer, Harness
from tests.support.engine.engine_pair import Pair, Transfer

RETRIED = ("transfer_failed",)
"""Errors of decode after which the request is placed again; `Pair` does it for evicted ones."""


@dataclass
class Asked:
    """A request, and what its client has of it."""

    prompt: list[int]
    max_tokens: int
    fields: dict[str, Any]
    said: list[int] = field(default_factory=list)
    """Output of attempts that have ended."""
    has_ended: bool = False
    is_aborted: bool = False


class DyingPair:
    """Ask, then `run` or `round`; `kill_prefill` and `kill_decode` at any moment. Requests are greedy, of one sequence each."""

    def __init__(self, make_p: Callable[[], Harness], make_d: Callable[[], Harness], seed: int) -> None:
        self._make_p, self._make_d = make_p, make_d
        self.pair = Pair(make_p(), make_d(), seed)
        self.asked: dict[str, Asked] = {}
        self.num_local = 0
        """Attempts without a prefill engine, in which decode computes the prompt."""
        self._first: dict[str, list[int]] = {}
        """Attempt -> what prefill said."""

    @property
    def unfinished(self) -> list[str]:
        return [name for name, asked in self.asked.items() if not asked.has_ended]

    def ask(self, name: str, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        """fields: of the request, such as `mm_features`."""
        self.asked[name] = Asked(prompt, max_tokens, fields)
        self.pair.attempts[name] = []
        self._place(name)

    def abort(self, name: str) -> None:
        asked = self.asked[name]
        if not asked.has_ended:
            self.pair.abort(name)
            asked.has_ended = asked.is_aborted = True
            asked.said += self.tokens(name)

    def attempt(self, name: str) -> str:
        """The engines' name of its last attempt."""
        return self.pair.attempts[name][-1]

    def tokens(self, name: str) -> list[int]:
        """Output of the last attempt."""
        attempt = self.attempt(name)
        return self._first.get(attempt, []) + self.pair.d.answers.get(attempt, Answer()).token_ids

    def round(self) -> None:
        """One of the pair's; then requests that failed are placed again."""
        self.pair.round()
        self.pair.d.collect()
        for name in self.unfinished:
            attempt = self.attempt(name)
            first = self.pair.p.answers.get(attempt)
            if first is not None and not self.pair.transfers[attempt].stopped:
                self._first[attempt] = list(first.token_ids)
            ended = self.pair.d.answers.get(attempt, Answer())
            if ended.finish_reason is None or ended.error_code == "evicted":
                continue
            if ended.error_code in RETRIED:
                self._place_again(name)
            else:
                assert not ended.error_code, ended.error_message
                self.asked[name].said += self.tokens(name)
                self.asked[name].has_ended = True

    def run(self, max_rounds: int = 3000) -> None:
        """To the end of all requests, and until every hold is returned."""
        for _ in range(max_rounds):
            if not self.unfinished and not self.pair._busy:
                return
            self.round()
        raise AssertionError(f"not done after {max_rounds} rounds: {self.unfinished}")

    def kill_prefill(self) -> None:
        """Another engine takes its place. Requests whose blocks have not all landed fail at decode."""
        self.pair.p.must_be_idle = False
        for name, transfer in self.pair.transfers.items():
            transfer.source_holds = []
            if not transfer.over:
                transfer.over = True
                if not transfer.stopped:
                    transfer.stopped = True
                    self.pair._post("d", ReceiveFailed(name, TransferFailed("the source died")))
        self.pair._mail["p"].clear()
        self.pair.p = self._make_p()

    def kill_decode(self) -> None:
        """Another engine takes its place, and every request continues there."""
        self.pair.d.must_be_idle = False
        ended = {name: self.tokens(name) for name in self.unfinished}
        for transfer in self.pair.transfers.values():
            transfer.room, transfer.stopped = None, True
        self.pair._mail["d"].clear()
        self.pair.d = self._make_d()
        for name, tokens in ended.items():
            self._place_again(name, tokens)

    def _place_again(self, name: str, tokens: list[int] | None = None) -> None:
        """tokens: of the attempt that has ended, if its engine is gone."""
        asked = self.asked[name]
        asked.said += self.tokens(name) if tokens is None else tokens
        self.pair.abort(name)
        if len(asked.said) == asked.max_tokens:
            asked.has_ended = True
        else:
            self._place(name)

    def _place(self, name: str) -> None:
        asked, attempts = self.asked[name], self.pair.attempts[name]
        attempts.append(f"{name}#{len(attempts)}")
        fields = asked.fields | {"output": list(asked.said), "params": {"max_tokens": asked.max_tokens}}
        # prefill alone would give a last token, and nothing would be transferred
        if len(asked.said) + 1 < asked.max_tokens and self.pair.random.random() < 0.85:
            self.pair._place(asked.prompt, attempts[-1], fields)
            return
        self.num_local += 1
        self.pair.transfers[attempts[-1]] = Transfer(asked.prompt, over=True, fields=fields)
        self.pair.d.add(asked.prompt, attempts[-1], prefill_here=True, **fields)
