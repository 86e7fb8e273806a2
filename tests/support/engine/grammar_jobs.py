"""`Ask`: jobs at a grammar compiler, without an engine."""

from __future__ import annotations

import threading
from typing import Any

from pdserve.common.errors import PdServeError
from pdserve.common.request.structured_outputs import StructuredOutputsParams
from pdserve.engine.structured_outputs.grammar import Grammar, GrammarJob
from pdserve.engine.structured_outputs.grammar_compiler import GrammarCompiler
from tests.support.run.waiting import HANG_S

_EOS = 2
"""As in `tiny_checkpoints`."""


class Ask:
    """Jobs at a compiler, without an engine."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self.compiler = compiler
        self._arrived = threading.Condition()
        self._results: dict[int, Grammar | PdServeError] = {}
        self.begun: list[int] = []
        self._count = 0

    def submit(self, tenant: bytes = b"", output: tuple[int, ...] = (), **form: Any) -> int:
        number = self._count
        self._count += 1

        def deliver(result: Grammar | PdServeError) -> None:
            with self._arrived:
                self._results[number] = result
                self._arrived.notify_all()

        params = StructuredOutputsParams(**form)
        self.compiler.submit(
            GrammarJob(params, (_EOS,), output, lambda: True, lambda: self.begun.append(number), deliver, tenant)
        )
        return number

    def result(self, number: int) -> Grammar | PdServeError:
        with self._arrived:
            assert self._arrived.wait_for(lambda: number in self._results, HANG_S), "no answer"
            return self._results[number]

    def grammar(self, number: int) -> Grammar:
        result = self.result(number)
        assert not isinstance(result, PdServeError), result
        return result
