// Arguments of attention of several tokens of a sequence, shared by Python (`native_library.py`, PrefillArguments), the entry points and the
// compiled levels.
#pragma once
#include "shared/dtypes.h"

// Query rows of a task: a row is one query head of one token. A KV head's rows are in the order of tokens, then of query heads.
constexpr int64_t TASK_ROWS = 192;
// Keys of a tile. Tiles begin at multiples of it, whatever the chunk, so a row has the same bits however its prompt is cut.
constexpr int64_t TILE_KEYS = 64;
// Words of a row of the tiles of AMX.
constexpr int64_t TILE_WORDS = 16;
// Rows that are computed side by side, at most.
constexpr int64_t MAX_LANES = 48;

struct PrefillArguments {
  // kv_cache[num_blocks, Hkv, L, 2, bs, D], contiguous
  const void* kv_cache;
  int64_t num_blocks, num_kv_heads, num_layers, block_size, head_dim, dtype;
  // block_tables[num_chunks, table_width], rows table_stride apart
  const int64_t* block_tables;
  int64_t table_stride, table_width;
  // query_starts[num_chunks + 1]: tokens of q; seq_lens[num_chunks]: tokens of the sequence that ends with the chunk
  const int64_t *query_starts, *seq_lens;
  int64_t num_chunks;
  // query heads per KV head; 0 for no window
  int64_t group_size, window, is_causal;
  // softcap 0 for none
  double scale, softcap;
  // q[tokens, Hkv * group_size, D] with strides in numbers, D contiguous; out contiguous
  const void* q;
  int64_t q_stride, q_head_stride;
  void* out;
  int64_t layer;
  // task_starts[num_chunks + 1]; rooms[num_threads * room_size(head_dim)], at a whole cache line
  int64_t* task_starts;
  float* rooms;
  int64_t num_threads;
  // libgomp's, for the threads that torch already has; null: one thread
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

// A compiled level: the same source for one instruction set.
struct PrefillLevel {
  // Attention of rows part * TASK_ROWS to (part + 1) * TASK_ROWS - 1 of a KV head of a chunk. False for a block number outside the
  // cache.
  bool (*attend_rows)(const PrefillArguments& call, int64_t chunk, int64_t head, int64_t part, float* room);
};

static inline int64_t padded_head(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Floats of one thread: queries and sums of a task, maxima, totals and positions, factors and scores of MAX_LANES rows, a tile of keys
// with 16 more per key, one of values, its transposed pairs, and 16 rows of queries.
static inline int64_t room_size(int64_t head_dim) {
  const int64_t padded = padded_head(head_dim);
  return 2 * padded * TASK_ROWS + 3 * TASK_ROWS + (TILE_KEYS + 1) * MAX_LANES + TILE_KEYS * (2 * padded + 16) + TILE_KEYS / 2 * padded +
         16 * padded;
}

static inline int64_t chunk_tokens(const PrefillArguments& call, int64_t chunk) {
  return call.query_starts[chunk + 1] - call.query_starts[chunk];
}

// First of the keys that the token at a position attends to.
static inline int64_t first_visible(const PrefillArguments& call, int64_t position) {
  const int64_t first = position - call.window + 1;
  return call.window > 0 && first > 0 ? first : 0;
}
