// Arguments of a mixture of experts, shared by Python (`native_library.py`, ExpertsCall), the entry points and the compiled levels.
#pragma once
#include "linear/int8_rows.h"

// Numbers of an expert's matrices that lie side by side for one output channel: what one instruction multiplies and adds.
constexpr int64_t FLOATS_TOGETHER = 1, BFLOATS_TOGETHER = 2;

struct ExpertsCall {
  // Of each expert: gates[e] and ups[e] [I, H], downs[e] [H, I] as [blocks][padded / together][CHANNELS][together], zeros after
  // the last input and channel. gates is null for experts without a gate
  const void* const* gates;
  const void* const* ups;
  const void* const* downs;
  // inner_biases[E, parts * I], gates first, and biases[E, H], or null
  const float* inner_biases;
  const float* biases;
  int64_t num_experts, hidden_size, inner_size, dtype;
  // act(g, u) = g' / (1 + exp(-alpha g')) * (clamp(u, -limit, limit) + shift) with g' = min(g, limit); without a gate max(u, 0)^2
  float alpha, limit, shift;
  // 2: gate and up; 1: up
  int32_t parts;
  // x[T, H], rows x_stride apart, with a zero after an odd number of bfloat16; experts[T, k] and weights[T, k]; out[T, H]
  const void* x;
  int64_t num_tokens, x_stride, top_k;
  const int64_t* experts;
  const void* weights;
  void* out;
  // Room. starts[E + 1]: expert e has places[starts[e]] to places[starts[e + 1] - 1], numbers in `experts`; used[E]: experts that
  // have a place; inner[T * k, I padded to CHANNELS], in the order of `places`; sums[blocks of H][T][CHANNELS]
  int64_t* starts;
  int64_t* places;
  int64_t* used;
  void* inner;
  float* sums;
  // Of int8 experts the matrices [parts * I, H] and [H, I], with their biases; gates, ups, downs and biases are null then, and inner
  // is float32 [T * k, parts * I]. Else null. Room: rows[T * k, the larger padded], row_scales[T * k]
  const Int8Call* int8_gate_ups;
  const Int8Call* int8_downs;
  uint8_t* rows;
  float* row_scales;
  int64_t num_threads;
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
};

static inline int64_t blocks_of(int64_t size) { return (size + CHANNELS - 1) / CHANNELS; }

// A compiled level: the same source for one instruction set.
struct ExpertLevel {
  // Writes a block of `inner`, for all rows of an expert.
  void (*activate)(const ExpertsCall& call, int64_t expert, int64_t block);
  // Writes a block of `out`.
  void (*combine)(const ExpertsCall& call, int64_t block);
  // Of int8 experts: activates a row of `inner` in place, and writes a block of `out`.
  void (*activate_place)(const ExpertsCall& call, int64_t place);
  void (*combine_int8)(const ExpertsCall& call, const Int8Level& level, int64_t block);
};
