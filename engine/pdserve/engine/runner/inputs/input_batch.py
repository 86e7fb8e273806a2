"""`InputBatch`: the running sequences as persistent arrays, one row per sequence.

A step's inputs are gathered by row numbers in a constant number of array operations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pdserve.common.request.multimodal import MultiModalFeatureSpec
from pdserve.engine.arrays import IntArray
from pdserve.engine.config import EngineConfig
from pdserve.engine.runner.inputs.block_table import BlockTable
from pdserve.engine.runner.inputs.mrope_positions import MropePositions
from pdserve.engine.runner.inputs.prompt_embeds_table import PromptEmbedsTable
from pdserve.engine.runner.results.pooler import Pooler
from pdserve.engine.runner.results.prompt_logprobs import PromptLogprobsTable
from pdserve.engine.sampling.logits_plugin_stage import PluginTable
from pdserve.engine.sampling.logits_processors import LogitsProcessors
from pdserve.engine.sampling.logprobs import LogprobsRows
from pdserve.engine.sampling.penalties import PenaltyTable
from pdserve.engine.sampling.sampler import SamplingMetadata
from pdserve.engine.sampling.token_mask import TokenRuleTable
from pdserve.engine.sampling.token_texts import TokenTexts
from pdserve.engine.scheduler_output import NewRequestData

_SMALLEST_TOP_P = float(np.finfo(np.float32).tiny)
"""A smaller top_p counts as this much, which keeps one token, too: as float32 it may be 0, which would keep none."""


class InputBatch:
    """Arrays of `max_num_seqs` rows."""

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        processors: LogitsProcessors,
        num_kv_cache_groups: int,
        token_texts: TokenTexts | None = None,
    ) -> None:
        rows, max_blocks = config.max_num_seqs, config.blocks_for(config.max_model_len)
        self._vocab_size = vocab_size
        self._free_rows = list(range(rows - 1, -1, -1))
        self.rows: dict[str, int] = {}
        """req_id -> row."""
        self.req_ids: dict[int, str] = {}
        """row -> req_id."""
        self.token_ids = np.zeros((rows, config.max_model_len + 1), dtype=np.int64)
        self.num_tokens = np.zeros(rows, dtype=np.int64)
        self.num_computed = np.zeros(rows, dtype=np.int64)
        self.num_prompt = np.zeros(rows, dtype=np.int64)
        self.is_pending = np.zeros(rows, dtype=np.bool_)
        """True if the row's newest token has been sampled and is not in `token_ids` yet."""
        self.num_pending = 0
        """Rows of which `is_pending` may be True."""
        self.num_drafts = np.zeros(rows, dtype=np.int64)
        """Number of drafts in `token_ids` after the row's known tokens."""
        self.num_speculative = np.zeros(rows, dtype=np.int64)
        """Tokens to draft for the row after a step, at most."""
        self._block_size = config.block_size
        self._tail_columns = np.full(rows, -1, dtype=np.int64)
        """Column in the block table of the block in which the row's last decode step ended; -1: no decode step yet."""
        self.block_tables = [BlockTable(rows, max_blocks, config.block_size) for _ in range(num_kv_cache_groups)]
        self._temperature = np.zeros(rows, dtype=np.float32)
        self._top_p = np.ones(rows, dtype=np.float32)
        self._top_k = np.full(rows, vocab_size, dtype=np.int64)
        self._min_p = np.zeros(rows, dtype=np.float32)
        self._seeds = np.zeros(rows, dtype=np.int64)
        self._indexes = np.zeros(rows, dtype=np.int64)
        self.num_sequences = np.ones(rows, dtype=np.int64)
        """Tokens to sample when all tokens of the row are computed: n at the end of the prompt of n sequences, then 1."""
        self.lora_slots = np.full(rows, -1, dtype=np.int64)
        """Slot of the row's adapter; -1: none."""
        self._num_logprobs = np.full(rows, -1, dtype=np.int64)
        prompts = config.encoder_decoder
        suppressed = ((), ()) if prompts is None else (prompts.suppressed_token_ids, prompts.begin_suppressed_token_ids)
        self._token_rules = TokenRuleTable(rows, vocab_size, *suppressed, token_texts)
        self._penalties = PenaltyTable(rows)
        self._plugins = PluginTable(processors)
        self.pooler = Pooler(rows)
        self.prompt_embeds = PromptEmbedsTable()
        self.prompt_logprobs = PromptLogprobsTable()
        self._merge_size = 1 if config.encoder is None else config.encoder.merge_size
        self.mm_features: dict[int, list[MultiModalFeatureSpec]] = {}
        """Row -> images or sound of its prompt; without rows that have none."""
        self.mrope = MropePositions(rows)
        self.encoder_tokens = np.zeros(rows, dtype=np.int64)
        """Tokens that the encoder reads, at the beginning of the sequence; 0: the model has no encoder."""
        self.encoder_slots = np.zeros(rows, dtype=np.int64)
        """The same with the padding: the place of the decoder's first token."""

    def add(self, request: NewRequestData) -> None:
        """Copy a sequence's state into a free row."""
        row = self.rows[request.req_id] = self._free_rows.pop()
        self.req_ids[row] = request.req_id
        num_tokens = len(request.token_ids)
        self.token_ids[row, :num_tokens] = request.token_ids
        self.num_tokens[row] = num_tokens
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_computed[row] = request.num_computed_tokens
        self._tail_columns[row] = -1
        self.lora_slots[row] = request.lora_slot
        self.num_drafts[row] = 0
        self.num_speculative[row] = request.num_speculative_tokens
        for table in self.block_tables:
            table.clear(row)
        self.add_blocks(request.req_id, request.block_ids)
        if request.mm_features:
            self.mm_features[row] = request.mm_features
            if request.encoder_prompt is None:
                self.mrope.add(row, request.num_prompt_tokens, request.mm_features, self._merge_size)
        if request.pooling_params is not None:
            self.pooler.add(row, request.pooling_params)
            return
        if (encoder_prompt := request.encoder_prompt) is not None:
            self.encoder_tokens[row], self.encoder_slots[row] = encoder_prompt.num_tokens, encoder_prompt.num_slots
        params = request.sampling_params
        self._temperature[row] = 0.0 if params.greedy else params.temperature
        self._top_p[row] = max(params.top_p, _SMALLEST_TOP_P)
        self._top_k[row] = params.top_k if params.top_k > 0 else self._vocab_size
        self._min_p[row] = params.min_p
        self._seeds[row] = params.seed or 0
        self._indexes[row] = request.index
        self.num_sequences[row] = request.num_sequences
        self._num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        if request.collects_prompt_logprobs and params.prompt_logprobs is not None:
            self.prompt_logprobs.add(row, params.prompt_logprobs)
        self._token_rules.add(row, params, request.eos_token_ids)
        self._plugins.add(row, params.logits_processors)
        knows_prompt = not request.has_prompt_embeds and request.encoder_prompt is None
        self._penalties.set(row, params, knows_prompt=knows_prompt)

    def remove(self, req_id: str) -> None:
        """Free a sequence's row; no effect if it has none."""
        row = self.rows.pop(req_id, None)
        if row is not None:
            del self.req_ids[row]
            self.is_pending[row] = False
            self._token_rules.remove(row)
            self._plugins.remove(row)
            self.pooler.remove(row)
            self.prompt_embeds.remove(row)
            self.prompt_logprobs.remove(row)
            self.mm_features.pop(row, None)
            self.mrope.remove(row)
            self._free_rows.append(row)

    def add_blocks(self, req_id: str, block_ids: list[list[int]]) -> None:
        """block_ids: by KV cache group."""
        row = self.rows[req_id]
        for table, new in zip(self.block_tables, block_ids, strict=True):
            table.append(row, new)

    def take_new_tails(self, rows: IntArray, counts: IntArray, seq_lens: IntArray) -> IntArray:
        """Places of the decode rows whose last block no decode step of the row ended in before, see `AttentionBatch.new_tails`.

        rows, counts, seq_lens `[S]`: the step's, decode rows first. Afterwards these blocks count as known.
        """
        columns = (seq_lens - 1) // self._block_size
        is_new = (counts == 1) & (self._tail_columns[rows] != columns)
        self._tail_columns[rows] = np.where(counts == 1, columns, self._tail_columns[rows])
        return np.flatnonzero(is_new)

    def expect_tokens(self, rows: IntArray) -> None:
        """Note that one token per row has been sampled; `append_tokens` follows, then `expect_none`."""
        self.is_pending[rows] = True
        self.num_pending = len(rows)

    def expect_none(self) -> None:
        """Note that all sampled tokens are known."""
        if self.num_pending:
            self.is_pending[:] = False
            self.num_pending = 0

    def append_tokens(self, rows: IntArray, token_ids: IntArray) -> None:
        """Append one token per row; a row that represented several sequences then represents the first of them."""
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1
        self.num_sequences[rows] = 1

    def put_drafts(self, req_id: str, token_ids: list[int]) -> None:
        """Put drafts after a row's known tokens; `append_run` follows."""
        row = self.rows[req_id]
        end = self.num_tokens[row]
        self.token_ids[row, end : end + len(token_ids)] = token_ids
        self.num_drafts[row] = len(token_ids)

    def append_run(self, row: int, token_ids: list[int]) -> None:
        """Append the tokens of a step with drafts, and drop the blocks after them. token_ids: none if the step is repeated."""
        end = self.num_tokens[row]
        self.token_ids[row, end : end + len(token_ids)] = token_ids
        self.num_tokens[row] += len(token_ids)
        self.num_drafts[row] = 0
        self.num_computed[row] = self.num_tokens[row] - 1
        for table in self.block_tables:
            table.truncate(row, int(self.num_tokens[row]))

    def decodes_first(
        self, num_tokens: Mapping[str, int], tentative: Sequence[str] = ()
    ) -> tuple[IntArray, IntArray, list[int]]:
        """Rows of these requests and their token counts, `[S]` each, and the places of the tentative ones.

        Rows with one token come first, and of these the tentative ones last, as `AttentionBatch` requires.
        """
        rows = np.fromiter((self.rows[req_id] for req_id in num_tokens), np.int64)
        counts = np.fromiter(num_tokens.values(), np.int64)
        if not tentative:
            order = np.argsort(counts > 1, kind="stable")
            return rows[order], counts[order], []
        is_tentative = np.isin(rows, [self.rows[req_id] for req_id in tentative])
        order = np.lexsort((is_tentative, counts > 1))
        return rows[order], counts[order], np.flatnonzero(is_tentative[order]).tolist()

    def are_complete(self, rows: IntArray) -> NDArray[np.bool_]:
        """True for each row whose last token, pending ones and drafts included, has been computed."""
        ends = self.num_tokens[rows] + self.is_pending[rows] + self.num_drafts[rows]
        complete: NDArray[np.bool_] = self.num_computed[rows] == ends
        return complete

    def sampling_parameters(
        self, rows: IntArray, drafts: IntArray | int = 0, offsets: IntArray | int = 0
    ) -> SamplingMetadata:
        """Sampling parameters of these rows, without rules.

        drafts: number of drafts before each position. offsets: added to the sequence indexes, for rows that are sampled for several
        sequences.
        """
        return SamplingMetadata(
            temperature=self._temperature[rows],
            top_p=self._top_p[rows],
            top_k=self._top_k[rows],
            min_p=self._min_p[rows],
            seeds=self._seeds[rows],
            indexes=self._indexes[rows] + offsets,
            positions=self.num_tokens[rows] + self.is_pending[rows] + drafts - self.num_prompt[rows],
        )

    def with_rules(self, parameters: SamplingMetadata, rows: IntArray, drafts: IntArray | int = 0) -> SamplingMetadata:
        """The parameters with the rules of these rows, of which no token may be pending. drafts: as in `sampling_parameters`."""
        lengths = self.num_tokens[rows] + drafts
        return replace(
            parameters,
            token_rules=self._token_rules.of_step(rows, lengths, self.token_ids, self.num_prompt),
            plugins=self._plugins.of_step(rows, lengths, self.token_ids, self.num_prompt),
            penalties=self._penalties.of_step(rows, lengths, self.token_ids, self.num_prompt),
            logprobs=LogprobsRows.of(self._num_logprobs[rows]),
        )
