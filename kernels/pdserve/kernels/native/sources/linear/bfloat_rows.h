// Arguments of a product of rows with a bfloat16 matrix, shared by Python (`native_library.py`, BfloatCall), the entry point and the
// compiled levels.
#pragma once
#include "shared/dtypes.h"

// Output channels of one block of the matrix, and inputs that lie side by side.
constexpr int64_t BFLOAT_CHANNELS = 64, BFLOAT_PAIR = 2;

// Bytes of a cache line, and of a pair of inputs of all channels.
constexpr int64_t CACHE_LINE = 64, PAIR_BYTES = BFLOAT_CHANNELS * BFLOAT_PAIR * 2;
// Bytes of the matrix between what is prefetched from memory and what is used, where nothing else is read meanwhile.
constexpr int64_t BFLOAT_AHEAD = 8192;

struct BfloatMatrix {
  // values[blocks][padded / BFLOAT_PAIR][BFLOAT_CHANNELS][BFLOAT_PAIR]
  const uint16_t* values;
  // bias[out] in float32, or null
  const float* bias;
  // num_inputs is even
  int64_t num_inputs, num_outputs, padded;
};

struct BfloatCall {
  BfloatMatrix matrix;
  // x[num_rows, in] and out[num_rows, out] in bfloat16, rows with strides in numbers; out is another memory than x
  const uint16_t* x;
  int64_t x_stride;
  uint16_t* out;
  // not null: takes the place of `out`, in float32
  float* float_out;
  int64_t out_stride, num_rows;
  // 1: add to what `out` contains
  int64_t adds;
  int64_t num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

// Inputs of a product from `first_input` on, before `end_input`; both are multiples of 64, but for the last one. sums[blocks][num_rows]
// [BFLOAT_CHANNELS]: of the inputs before, and of these afterwards.
struct BfloatPart {
  int64_t first_input, end_input;
  float* sums;
};

struct BfloatLevel {
  // Writes `out` of one block of channels.
  void (*multiply_block)(const BfloatCall& call, int64_t block);
  // Writes `out`[num_rows, num_outputs / 2] of one block of channels: silu(gate) * up, of which the matrix has the gates first, both in
  // whole blocks.
  void (*multiply_gated_block)(const BfloatCall& call, int64_t block);
  // As `multiply_block`, in parts; the last one writes `out`. It has the same bits.
  void (*multiply_part)(const BfloatCall& call, const BfloatPart& part, int64_t block);
  // Bytes of all rows' inputs from which on parts take less time.
  int64_t part_bytes;
};

static inline int64_t num_channel_blocks(const BfloatMatrix& matrix) {
  return (matrix.num_outputs + BFLOAT_CHANNELS - 1) / BFLOAT_CHANNELS;
}
