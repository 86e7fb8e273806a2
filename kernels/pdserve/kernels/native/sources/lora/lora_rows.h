// Arguments of LoRA products, shared by Python (`native_library.py`, LoraCall), the entry points and the compiled levels.
#pragma once
#include "shared/dtypes.h"

// The tokens of a step that have an adapter, sorted by slot.
struct LoraTokens {
  // Those of group g are tokens[starts[g]] to tokens[starts[g + 1] - 1], and all have slots[g].
  int64_t num_groups;
  const int64_t* slots;
  const int64_t* starts;
  const int64_t* tokens;
};

struct LoraCall {
  // a[slots, num_products * max_rank, in_size] and b[slots, max_rank, out_size], contiguous
  const void* a;
  const void* b;
  int64_t dtype, in_size, out_size, num_products, max_rank;
  // column_ends[num_products] in b and y; ranks[slots, num_products]: rows of a and b that count
  const int64_t* column_ends;
  const int64_t* ranks;
  // x[T, in_size], and y[T, out_size], which is changed; rows with strides in numbers
  const void* x;
  void* y;
  int64_t x_stride, y_stride;
  const LoraTokens* tokens;
  // shrunk[K, num_products * max_rank] for the K tokens: products with a
  float* shrunk;
  int64_t num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

// Rows of a, and columns of b, that one call takes at most.
constexpr int64_t SHRUNK_ROWS = 8, ADDED_COLUMNS = 512;
// Largest max_rank.
constexpr int64_t MAX_RANK = 512;

// A compiled level: the same source for one instruction set.
struct LoraLevel {
  // shrunk[k][row] = x a[row] for a group's tokens, and a product's rows from `row` on.
  void (*shrink)(const LoraCall& call, int64_t group, int64_t product, int64_t row);
  // y += shrunk b for a group's tokens, and the columns from `column` on.
  void (*add)(const LoraCall& call, int64_t group, int64_t column);
};
