// A mixture of experts, compiled once per instruction set (`build_library.py`): LEVEL is the level's symbol.
// A block of a matrix is read from memory once, for all rows of its expert. Sums are float32, and the order in which a token's are made
// depends on the shapes only.
#include "experts/expert_rows.h"
#include "shared/level_vectors.h"

namespace {

// Vectors of channels, and rows, whose sums fit the registers.
constexpr int VECTORS = 4;
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6;
#else
constexpr int MAX_ROWS = 2;
#endif
// Bytes of a matrix between what is prefetched and what is used.
constexpr int64_t AHEAD = 4096;

inline int64_t together(float) { return FLOATS_TOGETHER; }
inline int64_t together(BFloat) { return BFLOATS_TOGETHER; }

template <class Number>
inline int64_t padded(int64_t size) {
  const int64_t unit = together(Number{});
  return (size + unit - 1) / unit * unit;
}

template <class Number>
inline void prefetch(const Number* matrix) {
  constexpr int64_t BYTES = VECTORS * WIDTH * 4;
  const char* at = reinterpret_cast<const char*>(matrix) + AHEAD;
  for (int64_t byte = 0; byte < BYTES; byte += 64) __builtin_prefetch(at + byte, 0, 3);
}

// sums[n * CHANNELS ..] = rows[n] times matrix[size][CHANNELS], for VECTORS vectors of channels.
template <int N>
inline void multiply(const float* const* rows, int64_t size, const float* matrix, float* sums) {
  Floats found[N][VECTORS] = {};
  for (int64_t i = 0; i < size; ++i, matrix += CHANNELS) {
    Floats loaded[VECTORS];
    for (int v = 0; v < VECTORS; ++v) loaded[v] = load(matrix + v * WIDTH);
    prefetch(matrix);
    for (int n = 0; n < N; ++n)
      for (int v = 0; v < VECTORS; ++v) found[n][v] += rows[n][i] * loaded[v];
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < VECTORS; ++v) store(sums + n * CHANNELS + v * WIDTH, found[n][v]);
}

#if defined(__AVX512BF16__)
// Pairs of numbers are multiplied and summed in one instruction, without a conversion.
template <int N>
inline void multiply(const BFloat* const* rows, int64_t size, const BFloat* matrix, float* sums) {
  __m512 found[N][VECTORS];
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < VECTORS; ++v) found[n][v] = _mm512_setzero_ps();
  for (int64_t i = 0; i < size; i += 2, matrix += 2 * CHANNELS) {
    __m512bh loaded[VECTORS];
    for (int v = 0; v < VECTORS; ++v) loaded[v] = (__m512bh)_mm512_loadu_si512(matrix + 2 * v * WIDTH);
    prefetch(matrix);
    for (int n = 0; n < N; ++n) {
      int32_t pair;
      __builtin_memcpy(&pair, rows[n] + i, 4);
      const __m512bh x = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < VECTORS; ++v) found[n][v] = _mm512_dpbf16_ps(found[n][v], loaded[v], x);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < VECTORS; ++v) _mm512_storeu_ps(sums + n * CHANNELS + v * WIDTH, found[n][v]);
}
#else
template <int N>
inline void multiply(const BFloat* const* rows, int64_t size, const BFloat* matrix, float* sums) {
  Floats found[N][VECTORS] = {};
  for (int64_t i = 0; i < size; i += 2, matrix += 2 * CHANNELS) {
    prefetch(matrix);
    for (int v = 0; v < VECTORS; ++v) {
      const Words pair = *reinterpret_cast<const LooseWords*>(matrix + 2 * v * WIDTH);
      const Floats even = (Floats)(pair << 16), odd = (Floats)(pair & 0xffff0000u);
      for (int n = 0; n < N; ++n) {
        found[n][v] += wide(rows[n][i]) * even;
        found[n][v] += wide(rows[n][i + 1]) * odd;
      }
    }
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < VECTORS; ++v) store(sums + n * CHANNELS + v * WIDTH, found[n][v]);
}
#endif

// sums[n * CHANNELS + c] of N rows and all channels of a block.
template <int N, class Number>
OUTSIDE void multiply_block(const Number* const* rows, int64_t size, const Number* block, float* sums) {
  for (int64_t channel = 0; channel < CHANNELS; channel += VECTORS * WIDTH)
    multiply<N>(rows, size, block + channel * together(Number{}), sums + channel);
}

template <class Number>
void multiply_rows(int64_t num_rows, const Number* const* rows, int64_t size, const Number* block, float* sums) {
  switch (num_rows) {
#define ROWS(n) \
  case n: return multiply_block<n>(rows, size, block, sums);
    ROWS(1)
    ROWS(2)
#if defined(__AVX512F__)
    ROWS(3)
    ROWS(4)
    ROWS(5)
    ROWS(6)
#endif
  }
}

// Of `rest` rows, so that no call has much fewer than another.
inline int64_t rows_at_once(int64_t rest) {
  const int64_t num_calls = (rest + MAX_ROWS - 1) / MAX_ROWS;
  return (rest + num_calls - 1) / num_calls;
}

// The bias of a block's channels, zeros after `size`.
inline void load_bias(const float* bias, int64_t block, int64_t size, float* to) {
  for (int64_t c = 0; c < CHANNELS; ++c) to[c] = bias && block * CHANNELS + c < size ? bias[block * CHANNELS + c] : 0.0f;
}

inline Floats activated(const ExpertsCall& call, Floats gate, Floats up) {
  // the operands' order lets NaN pass
  const Floats limit = all(call.limit), cut = -larger(-limit, -gate), bounded = larger(-limit, -larger(-limit, -up));
  const Floats power = -larger(all(-87.0f), call.alpha * cut);
  return cut / (1.0f + exponential(power)) * (bounded + call.shift);
}

inline Floats squared(Floats up) {
  const Floats cut = larger(all(0.0f), up);
  return cut * cut;
}

template <class Number>
void activate_rows(const ExpertsCall& call, int64_t expert, int64_t block) {
  const int64_t size = padded<Number>(call.hidden_size), stride = blocks_of(call.inner_size) * CHANNELS;
  const Number* gate = call.gates ? static_cast<const Number*>(call.gates[expert]) + block * size * CHANNELS : nullptr;
  const Number* up = static_cast<const Number*>(call.ups[expert]) + block * size * CHANNELS;
  const float* bias = call.inner_biases ? call.inner_biases + expert * call.parts * call.inner_size : nullptr;
  alignas(64) float gate_bias[CHANNELS], up_bias[CHANNELS], gates[MAX_ROWS * CHANNELS], ups[MAX_ROWS * CHANNELS];
  load_bias(bias, block, call.inner_size, gate_bias);
  load_bias(bias ? bias + (call.parts - 1) * call.inner_size : nullptr, block, call.inner_size, up_bias);
  const int64_t end = call.starts[expert + 1];
  int64_t num_rows;
  for (int64_t place = call.starts[expert]; place < end; place += num_rows) {
    num_rows = rows_at_once(end - place);
    const Number* rows[MAX_ROWS];
    for (int64_t n = 0; n < num_rows; ++n)
      rows[n] = static_cast<const Number*>(call.x) + call.places[place + n] / call.top_k * call.x_stride;
    if (gate) multiply_rows(num_rows, rows, size, gate, gates);
    multiply_rows(num_rows, rows, size, up, ups);
    Number* inner = static_cast<Number*>(call.inner) + place * stride + block * CHANNELS;
    for (int64_t n = 0; n < num_rows; ++n, inner += stride)
      for (int64_t c = 0; c < CHANNELS; c += WIDTH) {
        const Floats own = load(ups + n * CHANNELS + c) + load(up_bias + c);
        store(inner + c, gate ? activated(call, load(gates + n * CHANNELS + c) + load(gate_bias + c), own) : squared(own));
      }
  }
}

inline float weight_of(const ExpertsCall& call, int64_t number) {
  return call.dtype == FLOAT32 ? static_cast<const float*>(call.weights)[number]
                               : wide(static_cast<const BFloat*>(call.weights)[number]);
}

// Adds the products of `num_rows` rows of an expert, from `place` on, to their tokens.
inline void add_rows(const ExpertsCall& call, int64_t place, int64_t num_rows, const float* products, const float* bias,
                     float* sums) {
  for (int64_t n = 0; n < num_rows; ++n) {
    const int64_t number = call.places[place + n];
    const float weight = weight_of(call, number);
    float* sum = sums + number / call.top_k * CHANNELS;
    for (int64_t c = 0; c < CHANNELS; c += WIDTH)
      store(sum + c, load(sum + c) + weight * (load(products + n * CHANNELS + c) + load(bias + c)));
  }
}

template <class Number>
void write_block(const ExpertsCall& call, int64_t block, const float* sums) {
  const int64_t rest = call.hidden_size - block * CHANNELS, count = rest < CHANNELS ? rest : CHANNELS;
  Number* out = static_cast<Number*>(call.out) + block * CHANNELS;
  for (int64_t token = 0; token < call.num_tokens; ++token, out += call.hidden_size, sums += CHANNELS) {
    int64_t c = 0;
    for (; c + WIDTH <= count; c += WIDTH) store(out + c, load(sums + c));
    for (; c < count; ++c) narrow(sums[c], out + c);
  }
}

inline float* clear_block(const ExpertsCall& call, int64_t block) {
  float* sums = call.sums + block * call.num_tokens * CHANNELS;
  __builtin_memset(sums, 0, call.num_tokens * CHANNELS * sizeof(float));
  return sums;
}

template <class Number>
void combine_block(const ExpertsCall& call, int64_t block) {
  const int64_t size = padded<Number>(call.inner_size), stride = blocks_of(call.inner_size) * CHANNELS;
  float* sums = clear_block(call, block);
  alignas(64) float bias[CHANNELS], products[MAX_ROWS * CHANNELS];
  for (int64_t expert = 0; expert < call.num_experts; ++expert) {
    const int64_t end = call.starts[expert + 1];
    if (call.starts[expert] == end) continue;
    const Number* down = static_cast<const Number*>(call.downs[expert]) + block * size * CHANNELS;
    load_bias(call.biases ? call.biases + expert * call.hidden_size : nullptr, block, call.hidden_size, bias);
    int64_t num_rows;
    for (int64_t place = call.starts[expert]; place < end; place += num_rows) {
      num_rows = rows_at_once(end - place);
      const Number* rows[MAX_ROWS];
      for (int64_t n = 0; n < num_rows; ++n) rows[n] = static_cast<const Number*>(call.inner) + (place + n) * stride;
      multiply_rows(num_rows, rows, size, down, products);
      add_rows(call, place, num_rows, products, bias, sums);
    }
  }
  write_block<Number>(call, block, sums);
}

void activate_place(const ExpertsCall& call, int64_t place) {
  const int64_t size = call.inner_size;
  float* row = static_cast<float*>(call.inner) + place * call.parts * size;
  for (int64_t i = 0; i < size; i += WIDTH) {
    const int64_t count = size - i < WIDTH ? size - i : WIDTH;
    Floats gate = {}, up = {};
    __builtin_memcpy(&gate, row + i, count * sizeof(float));
    __builtin_memcpy(&up, row + (call.parts - 1) * size + i, count * sizeof(float));
    const Floats inner = call.parts > 1 ? activated(call, gate, up) : squared(up);
    __builtin_memcpy(row + i, &inner, count * sizeof(float));
  }
}

void combine_int8(const ExpertsCall& call, const Int8Level& level, int64_t block) {
  constexpr int64_t MOST = 32;
  float* sums = clear_block(call, block);
  alignas(64) float bias[CHANNELS] = {}, products[MOST * CHANNELS] = {};
  for (int64_t expert = 0; expert < call.num_experts; ++expert) {
    const int64_t end = call.starts[expert + 1];
    if (call.starts[expert] == end) continue;
    // a matrix of this block only
    Int8Call down = call.int8_downs[expert];
    const int64_t first = block * CHANNELS, rest = call.hidden_size - first;
    down.values += first * down.padded;
    down.offsets += first;
    down.scales += first;
    if (down.bias) down.bias += first;
    down.num_outputs = rest < CHANNELS ? rest : CHANNELS;
    down.dtype = FLOAT32;
    down.adds = 0;
    down.out = products;
    down.out_stride = CHANNELS;
    for (int64_t place = call.starts[expert]; place < end; place += MOST) {
      down.num_rows = end - place < MOST ? end - place : MOST;
      down.rows = call.rows + place * down.padded;
      down.row_scales = call.row_scales + place;
      level.multiply_block(down, 0);
      add_rows(call, place, down.num_rows, products, bias, sums);
    }
  }
  call.dtype == FLOAT32 ? write_block<float>(call, block, sums) : write_block<BFloat>(call, block, sums);
}

void activate(const ExpertsCall& call, int64_t expert, int64_t block) {
  call.dtype == FLOAT32 ? activate_rows<float>(call, expert, block) : activate_rows<BFloat>(call, expert, block);
}

void combine(const ExpertsCall& call, int64_t block) {
  call.dtype == FLOAT32 ? combine_block<float>(call, block) : combine_block<BFloat>(call, block);
}

}  // namespace

extern const ExpertLevel SYMBOL(EXPERT_, LEVEL);
const ExpertLevel SYMBOL(EXPERT_, LEVEL) = {activate, combine, activate_place, combine_int8};
