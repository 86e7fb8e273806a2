// Arguments of a step through all layers in one call, shared by Python (`native_library.py`) and the entry point.
#pragma once
#include "attention/paged_decode.h"
#include "attention/paged_prefill.h"
#include "linear/bfloat_rows.h"

// Rows of a product in parts, at most.
constexpr int64_t PART_ROWS = 512;

struct FusedNorm {
  // weight of bfloat16 or float32 numbers, or null
  const void* weight;
  int64_t weight_dtype;
  double eps;
};

// All numbers are bfloat16, but for phases and the weights of norms.
struct FusedLayer {
  BfloatMatrix qkv, output, gate_up, down;
  // of each head of queries and keys, or null; after attention; after the MLP
  FusedNorm qk_norm, mlp_norm, next_norm;
  // indices into `attention` and `slots`, into `phases`, and of the layer in its cache
  int64_t spec, rope, index;
  // 1: gates and ups of `gate_up` are whole blocks of channels
  int64_t is_gated;
};

struct FusedCall {
  const FusedLayer* layers;
  int64_t num_layers, num_rows, hidden_size;
  // by spec: the step's calls, whose layer, q and out are set here; of decode rows, which come first and may be none, and of chunks of
  // prompts, or null; slots[num_rows]
  const DecodeArguments* const* decodes;
  const PrefillArguments* const* chunks;
  const int64_t* const* slots;
  // by rope: phases[num_rows, D / 2], pairs of cosine and sine
  const float* const* phases;
  // residual[num_rows, H], overwritten; x[num_rows, H]: its norm, and the result
  uint16_t* residual;
  uint16_t* x;
  // output_rows[num_outputs]: rows of the result; num_outputs -1: all. The last layer computes no others after its attention
  const int64_t* output_rows;
  int64_t num_outputs;
  // room of the largest layer: qkv[num_rows, (Hq + 2 Hkv) D], attended[num_rows, Hq D], gate_up[num_rows, 2 I] of
  // layers without `is_gated`, inner[num_rows, I], chosen[num_rows, H]
  uint16_t* qkv;
  uint16_t* attended;
  uint16_t* gate_up;
  uint16_t* inner;
  uint16_t* chosen;
  // sums of products in parts (`BfloatPart`), of `pdserve_fused_sum_rows` rows and the outputs of qkv, or H, in whole blocks
  float* sums;
  int64_t num_threads;
  // libgomp's GOMP_parallel and GOMP_barrier; null: one thread
  void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
  void (*barrier)();
};
