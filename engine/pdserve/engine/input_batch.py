"""`InputBatch`: the running sequences as arrays that live from step to step, one row a sequence.

A step's inputs are gathered from them by row numbers in a few array operations, whatever the number of sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdserve.engine.config import EngineConfig
from pdserve.engine.request import Request
from pdserve.engine.sampler import SamplingMetadata


class InputBatch:
    """`max_num_seqs` rows."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        rows = config.max_num_seqs
        self._vocab_size = vocab_size
        self._free_rows = list(range(rows - 1, -1, -1))
        self.rows: dict[str, int] = {}
        """request_id -> row."""
        self.requests: dict[int, Request] = {}
        """row -> request."""
        self.token_ids = np.zeros((rows, config.max_model_len + 1), dtype=np.int64)
        self.num_tokens = np.zeros(rows, dtype=np.int64)
        self.num_computed = np.zeros(rows, dtype=np.int64)
        self.num_prompt = np.zeros(rows, dtype=np.int64)
        self.block_table = np.zeros((rows, config.blocks_for(config.max_model_len)), dtype=np.int64)
        self.num_blocks = np.zeros(rows, dtype=np.int64)
        self._temperature = np.zeros(rows, dtype=np.float32)
        self._top_p = np.ones(rows, dtype=np.float32)
        self._top_k = np.full(rows, vocab_size, dtype=np.int64)
        self._min_p = np.zeros(rows, dtype=np.float32)
        self._seeds = np.zeros(rows, dtype=np.int64)
        self._indexes = np.zeros(rows, dtype=np.int64)
        self._min_tokens: dict[int, tuple[int, tuple[int, ...]]] = {}

    def add(self, request: Request, block_ids: list[int]) -> None:
        """A sequence enters: everything it has is copied into its row."""
        row = self.rows[request.request_id] = self._free_rows.pop()
        self.requests[row] = request
        self.token_ids[row, : request.num_tokens] = request.token_ids
        self.num_tokens[row] = request.num_tokens
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_computed[row] = request.num_computed_tokens
        self.num_blocks[row] = 0
        self.add_blocks(request.request_id, block_ids)
        params = request.sampling_params
        self._temperature[row] = 0.0 if params.greedy else params.temperature
        self._top_p[row] = params.top_p
        self._top_k[row] = params.top_k if params.top_k > 0 else self._vocab_size
        self._min_p[row] = params.min_p
        self._seeds[row] = params.seed or 0
        self._indexes[row] = request.core.index
        if params.min_tokens > 0:
            stops = {*params.stop_token_ids, *(() if params.ignore_eos else request.core.eos_token_ids)}
            self._min_tokens[row] = (params.min_tokens, tuple(token for token in stops if token < self._vocab_size))

    def remove(self, request_id: str) -> None:
        """A sequence leaves; harmless when it never came."""
        row = self.rows.pop(request_id, None)
        if row is not None:
            del self.requests[row]
            self._min_tokens.pop(row, None)
            self._free_rows.append(row)

    def add_blocks(self, request_id: str, block_ids: list[int]) -> None:
        row = self.rows[request_id]
        first = self.num_blocks[row]
        self.block_table[row, first : first + len(block_ids)] = block_ids
        self.num_blocks[row] += len(block_ids)

    def append_tokens(self, rows: NDArray[np.int64], token_ids: NDArray[np.int64]) -> None:
        """One new token for each row."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def sampling_metadata(self, rows: NDArray[np.int64]) -> SamplingMetadata:
        """The parameters of the rows that are sampled now."""
        positions = self.num_tokens[rows] - self.num_prompt[rows]
        forbidden = (
            [
                (place, self._min_tokens[row][1])
                for place, row in enumerate(rows.tolist())
                if row in self._min_tokens and positions[place] < self._min_tokens[row][0]
            ]
            if self._min_tokens
            else []
        )
        return SamplingMetadata(
            temperature=self._temperature[rows],
            top_p=self._top_p[rows],
            top_k=self._top_k[rows],
            min_p=self._min_p[rows],
            seeds=self._seeds[rows],
            indexes=self._indexes[rows],
            positions=positions,
            forbidden=forbidden,
        )
