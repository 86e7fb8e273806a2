// Arguments of attention of several tokens of a sequence, or of one with many query heads per row of the cache, shared by Python
// (`native_library.py`, PrefillArguments), the entry points and the compiled levels.
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
  // kv_cache[num_blocks, Hkv, L, num_planes, bs, row_dim], contiguous. A key is the first head_dim numbers of a row of the first plane;
  // its value, value_dim numbers, begins value_offset numbers after the key's beginning.
  const void* kv_cache;
  int64_t num_blocks, num_kv_heads, num_layers, block_size, head_dim, dtype;
  int64_t num_planes, row_dim, value_dim, value_offset;
  // block_tables[num_chunks, table_width], rows table_stride apart
  const int64_t* block_tables;
  int64_t table_stride, table_width;
  // query_starts[num_chunks + 1]: tokens of q; seq_lens[num_chunks]: tokens of the sequence that ends with the chunk
  const int64_t *query_starts, *seq_lens;
  int64_t num_chunks;
  // query heads per KV head; 0 for no window, 0 for no chunks; at most one of the two is above 0
  int64_t group_size, window, chunk, is_causal;
  // softcap 0 for none
  double scale, softcap;
  // q[tokens, Hkv * group_size, head_dim] and out[tokens, Hkv * group_size, value_dim] with strides in numbers, a head's contiguous
  const void* q;
  int64_t q_stride, q_head_stride;
  void* out;
  int64_t out_stride, layer;
  // task_starts[num_chunks + 1]; rooms[num_threads * room_size(...)], at a whole cache line
  int64_t* task_starts;
  float* rooms;
  // 0: a task has all keys of its rows. Else they are cut at multiples of it, which is one of TILE_KEYS, and tasks leave sums, maximum and
  // sum of weights of their rows in partials[tasks * MAX_LANES * (value_dim + 2)].
  int64_t piece_tokens;
  float* partials;
  int64_t num_threads;
  // libgomp's, for the threads that torch already has; null: one thread
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

// A compiled level: the same source for one instruction set.
struct PrefillLevel {
  // Attention of one task of a chunk, by its number among the chunk's. False for a block number outside the cache.
  bool (*attend_rows)(const PrefillArguments& call, int64_t chunk, int64_t number, float* room);
  // Joins the pieces of the rows of one part of a KV head of a chunk: task `number` has their first piece.
  void (*join_pieces)(const PrefillArguments& call, int64_t chunk, int64_t number);
};

static inline int64_t padded_head(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Floats of one thread: queries and sums of a task, maxima, totals and positions, factors and scores of MAX_LANES rows, a tile of keys
// with 16 more per key, one of values, its transposed pairs, and 16 rows of queries.
static inline int64_t room_size(int64_t head_dim, int64_t value_dim) {
  const int64_t padded = padded_head(head_dim), values = padded_head(value_dim);
  return (padded + values) * TASK_ROWS + 3 * TASK_ROWS + (TILE_KEYS + 1) * MAX_LANES + TILE_KEYS * (padded + values + 16) +
         TILE_KEYS / 2 * values + 16 * padded;
}

static inline int64_t chunk_tokens(const PrefillArguments& call, int64_t chunk) {
  return call.query_starts[chunk + 1] - call.query_starts[chunk];
}

// First of the keys that the token at a position attends to.
static inline int64_t first_visible(const PrefillArguments& call, int64_t position) {
  if (call.chunk > 0) return position - position % call.chunk;
  const int64_t first = position - call.window + 1;
  return call.window > 0 && first > 0 ? first : 0;
}

// Rows of a task: with pieces there are many tasks, and few rows are divided among more threads.
static inline int64_t task_rows(const PrefillArguments& call) { return call.piece_tokens > 0 ? MAX_LANES : TASK_ROWS; }

static inline int64_t num_pieces(const PrefillArguments& call, int64_t chunk) {
  if (call.piece_tokens <= 0) return 1;
  const int64_t length = call.seq_lens[chunk], first = first_visible(call, length - chunk_tokens(call, chunk));
  return (length - 1) / call.piece_tokens - first / call.piece_tokens + 1;
}

// Where a task is in its chunk: pieces of the same rows are neighbours, then come the KV heads.
struct TaskPlace {
  int64_t head, part, piece;

  TaskPlace(const PrefillArguments& call, int64_t chunk, int64_t number) {
    const int64_t count = num_pieces(call, chunk), rows = number / count;
    piece = number % count;
    head = rows % call.num_kv_heads;
    part = rows / call.num_kv_heads;
  }
};
