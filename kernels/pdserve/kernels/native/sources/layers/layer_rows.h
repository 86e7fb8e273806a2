// Arguments of the operations between matrix products, shared by Python (`native_library.py`, LayerCall), the entry points and the
// compiled levels.
#pragma once
#include "shared/dtypes.h"

struct LayerCall {
  // x[num_rows, num_heads * size] and out[num_rows, size], rows with strides in numbers; heads are adjacent
  void* x;
  int64_t x_stride;
  void* out;
  int64_t out_stride;
  // weight[num_heads, size] of a norm, or null; of x's dtype or float32
  const void* weight;
  // phases[num_rows, size / 2] of a rotation, pairs of cosine and sine with the magnitude in both
  const float* phases;
  int64_t dtype, weight_dtype, num_rows, num_heads, size;
  double eps;
  int64_t num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

// A compiled level: the same source for one instruction set. Each function computes one row.
struct LayerLevel {
  // out = x / sqrt(mean(x^2) + eps) * weight
  void (*norm)(const LayerCall& call, int64_t row);
  // out = silu(x[:size]) * x[size:], of two heads
  void (*gate)(const LayerCall& call, int64_t row);
  // Each head of x is normalised, if there are weights, and its neighbours are turned, in place.
  void (*rotate)(const LayerCall& call, int64_t row);
};
