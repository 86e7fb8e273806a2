// Arguments of steps that change states in a pool, one token per row, shared by Python (`native_library.py`, StatePool, ConvCall and
// RuleCall), the entry points and the compiled levels.
#pragma once
#include "shared/dtypes.h"

// The states of one layer in states[num_blocks, num_heads, num_layers, head_size], and the blocks of a step's rows.
struct StatePool {
  float* states;
  int64_t num_heads, num_layers, head_size, layer;
  // [num_rows]: the block of the state before a row's token, or -1 for a state of zeros, and of the one after it, which may be the
  // same, or -1 for padding: nothing is written, and its results are zeros
  const int64_t* before;
  const int64_t* after;
  int64_t num_rows, num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

constexpr int64_t MAX_TAPS = 16, CONV_CHANNELS = 64;

// Channels of a convolution whose columns a head keeps, [num_channels, taps - 1] from `place` of its state on. Several heads may keep
// those of a channel; one of them has has_out 1 and writes the channel's results.
struct ConvRun {
  int64_t head, place, first_channel, num_channels, has_out;
};

struct ConvCall {
  StatePool pool;
  // columns[num_rows, C] and out[num_rows, C], rows with strides in numbers; weight[C, taps], bias[C] or null; all of one dtype
  const void* columns;
  int64_t columns_stride;
  void* out;
  int64_t out_stride;
  const void* weight;
  const void* bias;
  int64_t dtype, taps, num_channels, has_silu;
  const ConvRun* runs;
  int64_t num_runs;
};

constexpr int64_t MAX_RULE_INPUTS = 5, MAX_DECAYS = 512;

struct RuleCall {
  StatePool pool;
  // Each head has `per_head` matrices [matrix_rows, matrix_columns], from `first` of its state on.
  int64_t first, per_head, matrix_rows, matrix_columns;
  // Of a matrix: 1, or in the delta rule matrix_rows, at most MAX_DECAYS, or in the scan matrix_rows * matrix_columns
  int64_t num_decays;
  // Vectors, or numbers, of matrix m for a step's row r: inputs[i] + r * row_strides[i] + m * strides[i]
  const float* inputs[MAX_RULE_INPUTS];
  int64_t row_strides[MAX_RULE_INPUTS], strides[MAX_RULE_INPUTS];
  // out[step's rows, matrices, size of a result]
  float* out;
};

// A compiled level: the same source for one instruction set.
struct StateLevel {
  // Writes CONV_CHANNELS channels of a run from `channel` of it on, for all rows.
  void (*convolve)(const ConvCall& call, const ConvRun& run, int64_t channel);
  // Each changes a matrix of a row. before: its first number, null for zeros; after: null for padding.
  //   delta: inputs query, key [matrix_rows], value [matrix_columns], decay (its logarithm) [num_decays], beta; out [matrix_columns]
  void (*delta)(const RuleCall& call, int64_t row, int64_t matrix, const float* before, float* after);
  //   scan: inputs x [matrix_rows], b, c [matrix_columns], rates [num_decays], steps, 1 or [matrix_rows], with decays
  //   exp(steps * rates); out [matrix_rows]
  void (*scan)(const RuleCall& call, int64_t row, int64_t matrix, const float* before, float* after);
};
