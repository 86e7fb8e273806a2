// Arguments of a product of rows with an int8 matrix, shared by Python (`native_library.py`, Int8Call), the entry points and the levels.
#pragma once
#include "shared/dtypes.h"

// Output channels of one block of the matrix, and inputs that one instruction multiplies and adds.
constexpr int64_t CHANNELS = 64, QUAD = 4;

struct Int8Call {
  // values[blocks][padded / QUAD][CHANNELS][QUAD], zeros after the last input and channel
  const int8_t* values;
  // of each channel: offsets[out] = 128 * the sum of its values; scales[out]; bias[out] in float32, or null
  const int32_t* offsets;
  const float* scales;
  const float* bias;
  int64_t num_inputs, num_outputs, padded, dtype;
  // x[num_rows, in] with rows x_stride numbers apart; out[num_rows, out], rows out_stride numbers apart
  const void* x;
  int64_t num_rows, x_stride;
  void* out;
  int64_t out_stride;
  // 1: add to what `out` contains
  int64_t adds;
  // room for quantized rows: rows[num_rows, padded], row_scales[num_rows]
  uint8_t* rows;
  float* row_scales;
  int64_t num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

struct Int8Level {
  const char* name;
  // Fills `rows` and `row_scales` of one row.
  void (*quantize_row)(const Int8Call& call, int64_t row);
  // Writes `out` of one block of channels.
  void (*multiply_block)(const Int8Call& call, int64_t block);
};

// The level at `index` of those that this CPU has, the fastest first; null after the last.
const Int8Level* int8_level(int64_t index);
