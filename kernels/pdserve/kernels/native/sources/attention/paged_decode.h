// Arguments of paged decode attention, shared by Python (`native_library.py`, DecodeArguments), the entry points and the compiled levels.
#pragma once
#include "shared/dtypes.h"

// Keys of one piece. A row's keys are cut at multiples of it, by the row's own length only.
constexpr int64_t PIECE_TOKENS = 256;
// Query rows that one call of `attend_piece` takes at most.
constexpr int64_t MAX_GROUP = 8;

struct DecodeArguments {
  // kv_cache[num_blocks, Hkv, L, 2, bs, D], contiguous
  const void* kv_cache;
  int64_t num_blocks, num_kv_heads, num_layers, block_size, head_dim, dtype;
  // block_tables[num_seqs, table_width], rows table_stride apart; seq_lens[num_seqs], 0 for a padded row
  const int64_t* block_tables;
  int64_t table_stride, table_width;
  const int64_t* seq_lens;
  int64_t num_seqs;
  // query heads per KV head; 0 for no window, 0 for no chunks; at most one of the two is above 0
  int64_t group_size, window, chunk;
  // softcap 0 for none
  double scale, softcap;
  // q[num_seqs, Hkv * group_size, D] with strides in numbers, D contiguous; out contiguous
  const void* q;
  int64_t q_stride, q_head_stride;
  void* out;
  int64_t layer;
  // piece_starts[num_seqs + 1]; partials[pieces * Hkv * group_size * (D + 2)]: output sums, maximum, sum of weights
  int64_t* piece_starts;
  float* partials;
  int64_t num_threads;
  // libgomp's, for the threads that torch already has; null: one thread
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

// A compiled level: the same source for one instruction set.
struct Level {
  const char* name;
  // Attention of all query heads of a KV head to the keys of one piece. False for a block number outside the cache.
  bool (*attend_piece)(const DecodeArguments& call, int64_t row, int64_t piece, int64_t head, float* partial);
  // Joins the pieces of one row and query head.
  void (*join_pieces)(const DecodeArguments& call, int64_t row, int64_t query_head);
};

// First and last + 1 of the keys that a row attends to.
static inline int64_t first_key(const DecodeArguments& call, int64_t row) {
  if (call.chunk > 0 && call.seq_lens[row] > 0) return (call.seq_lens[row] - 1) / call.chunk * call.chunk;
  const int64_t behind = call.seq_lens[row] - call.window;
  return call.window > 0 && behind > 0 ? behind : 0;
}
