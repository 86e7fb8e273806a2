// Arguments of a product of rows with a matrix of 4- or 8-bit integers in groups, shared by Python (`native_library.py`, GroupedCall),
// the entry point and the compiled levels.
#pragma once
#include "shared/dtypes.h"

// Output channels of one block of the matrix.
constexpr int64_t GROUPED_CHANNELS = 64;

struct GroupedCall {
  // words[blocks][num_inputs / (32 / bits)][GROUPED_CHANNELS]: 32 / bits inputs of a channel, signed. Of 8 bits: the first in the lowest
  // bits. Of 4 bits: inputs 0, 2, 4, 6 in the low half, 1, 3, 5, 7 in the high one.
  const uint32_t* words;
  // scales[blocks][groups][GROUPED_CHANNELS] and, or null, offsets: a weight is value * scale + offset
  const float* scales;
  const float* offsets;
  // bias[out] in float32, or null
  const float* bias;
  // group_size: inputs of a group, a multiple of 32 / bits
  int64_t bits, num_inputs, num_outputs, group_size, dtype;
  // x[num_rows, in] with rows x_stride numbers apart; out[num_rows, out], rows out_stride numbers apart
  const void* x;
  int64_t num_rows, x_stride;
  void* out;
  // not null: takes the place of `out`, in float32
  float* float_out;
  int64_t out_stride;
  // 1: add to what `out` contains
  int64_t adds;
  // room: rows[num_rows, in] in float32, sums[num_rows, groups] of a group's inputs
  float* rows;
  float* sums;
  int64_t num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

// Weights of some blocks as numbers: out[num_inputs][stride], the channels of `first_block` first.
struct GroupedWeights {
  int64_t first_block, num_blocks;
  void* out;
  int64_t stride, dtype;
};

struct GroupedLevel {
  // Fills `rows` and `sums` of one row.
  void (*widen_row)(const GroupedCall& call, int64_t row);
  // Writes `out` of one block of channels.
  void (*multiply_block)(const GroupedCall& call, int64_t block);
  // Writes the weights of one block, counted from the first.
  void (*widen_block)(const GroupedCall& call, const GroupedWeights& weights, int64_t block);
};
