"""`GrammarCompiler`: compiles what requests ask of their outputs' form, in threads of its own.

A schema may take seconds to compile. The engine's thread hands it over and hears of the result between two steps; the
compiling itself holds no interpreter lock, and its threads give way to others for the processor. What comes before the
first does hold that lock, a second of imports and tables: it is done at full priority, or on a machine whose cores are
all busy the whole worker would wait for a thread that is given no processor.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pdserve.common.errors import InternalError, PdServeError
from pdserve.common.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from pdserve.engine.sequence_grammar import SequenceGrammar, Vocabulary

log = logging.getLogger(__name__)

NUM_THREADS = 2
_NICENESS = 10
"""More than what the service was started with."""
_LOWEST_PRIORITY = 19
Deliver = Callable[["SequenceGrammar | PdServeError"], None]


@dataclass(frozen=True, slots=True)
class GrammarJob:
    """What one sequence needs."""

    params: StructuredOutputsParams
    eos_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    """Output that the sequence begins with: its grammar goes on after it."""
    is_wanted: Callable[[], bool]
    """Whether anybody still waits when its turn comes. Any thread calls it."""
    begins: Callable[[], None]
    """Called when its turn has come. From here on it is the grammar that takes the time, not those before it."""
    deliver: Deliver
    """Takes the grammar, or why there is none. Called once, in a compiling thread; never for a job not wanted."""


class GrammarCompiler:
    """For one model folder. Nothing is read or started before the first job; its threads end with the process."""

    def __init__(self, folder: Path, vocab_size: int, num_threads: int = NUM_THREADS) -> None:
        """vocab_size: of the model's logits. num_threads: how many grammars compile at a time."""
        self._folder = folder
        self._vocab_size = vocab_size
        self._num_threads = num_threads
        # threads inherit the affinity of the thread that starts them, and the engine's may be pinned
        self._cpus = os.sched_getaffinity(0)
        self._jobs: queue.SimpleQueue[GrammarJob] = queue.SimpleQueue()
        self._started = False
        self._making = threading.Lock()
        self._vocabulary: Vocabulary | None = None

    def submit(self, job: GrammarJob) -> None:
        """Compile it when its turn comes. The engine's thread calls this."""
        if not self._started:
            self._started = True
            for number in range(self._num_threads):
                # a compile that never ends must not keep the process from ending
                threading.Thread(target=self._work, name=f"grammar-{number}", daemon=True).start()
        self._jobs.put(job)

    def _work(self) -> None:
        os.sched_setaffinity(0, self._cpus)
        with contextlib.suppress(Exception):  # each job says why
            self._make_vocabulary()
        thread_id = threading.get_native_id()
        # never below what the service was started with: that takes rights which it may not have
        mine = os.getpriority(os.PRIO_PROCESS, thread_id)
        os.setpriority(os.PRIO_PROCESS, thread_id, min(mine + _NICENESS, _LOWEST_PRIORITY))
        while True:
            job = self._jobs.get()
            if not job.is_wanted():
                continue
            job.begins()
            try:
                job.deliver(self._grammar(job))
            except PdServeError as error:
                job.deliver(error)
            except Exception:
                log.exception("a grammar could not be compiled")
                job.deliver(InternalError("the grammar could not be compiled; the worker's log has the details"))

    def _make_vocabulary(self) -> Vocabulary:
        """Once, for all threads."""
        # not with this module: an engine that never sees a grammar must not pay the second that this import takes
        from pdserve.engine.sequence_grammar import Vocabulary

        with self._making:
            if self._vocabulary is None:
                self._vocabulary = Vocabulary(self._folder, self._vocab_size)
            return self._vocabulary

    def _grammar(self, job: GrammarJob) -> SequenceGrammar:
        vocabulary = self._make_vocabulary()
        from pdserve.engine.sequence_grammar import SequenceGrammar, compile_grammar

        return SequenceGrammar(compile_grammar(vocabulary, job.params), job.eos_token_ids, job.output_token_ids)
