// Rows times one block of a matrix of grouped integers, compiled once per instruction set (`build_library.py`): LEVEL is the level's
// symbol. A sum adds the inputs of a group in their order, then the groups in theirs, in float32: a row has the same bits in any number
// of rows.
#include "linear/grouped_rows.h"
#include "shared/level_vectors.h"

namespace {

constexpr int64_t CHANNELS = GROUPED_CHANNELS;
// Bytes of the matrix between what is prefetched and what is used.
constexpr int64_t AHEAD = 4096;
// Rows that are multiplied at a time, and vectors of channels, so that their sums are in registers.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6, VECTORS = 4;
#else
constexpr int MAX_ROWS = 4, VECTORS = 2;
#endif

// Input number K of each word.
template <int BITS, int K>
inline Floats value_of(Words words) {
  constexpr int PLACE = BITS == 4 ? K / 2 + 4 * (K % 2) : K;
#if defined(__AVX512F__)
  if constexpr (BITS == 4) {
    // the permutation reads the four lowest bits of each word
    const Floats table = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
    return (Floats)_mm512_permutexvar_ps((__m512i)(words >> (4 * PLACE)), (__m512)table);
  }
#endif
  return __builtin_convertvector((Ints)(words << (32 - BITS - BITS * PLACE)) >> (32 - BITS), Floats);
}

template <int BITS, int ROWS, int K>
inline void add_products(Floats (&found)[ROWS][VECTORS], const Words (&words)[VECTORS], const float* x, int64_t stride) {
  if constexpr (K < 32 / BITS) {
    Floats values[VECTORS];
    for (int v = 0; v < VECTORS; ++v) values[v] = value_of<BITS, K>(words[v]);
    for (int r = 0; r < ROWS; ++r) {
      const Floats input = all(x[r * stride + K]);
      for (int v = 0; v < VECTORS; ++v) found[r][v] = found[r][v] + input * values[v];
    }
    add_products<BITS, ROWS, K + 1>(found, words, x, stride);
  }
}

#if defined(__AVX512BF16__)
// Products of the inputs 2 K and 2 K + 1 of each word with bfloat16 rows, in one instruction.
template <int ROWS, int K>
inline void add_pairs(Floats (&found)[ROWS][VECTORS], const Words (&words)[VECTORS], const uint16_t* x, int64_t stride) {
  if constexpr (K < 4) {
    // entries are the bits of -8 to 7 in bfloat16; the permutation reads five bits, the fifth of which is another value's
    const __m512i table = _mm512_broadcast_i64x4(_mm256_setr_epi16(
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, static_cast<short>(0xc100), static_cast<short>(0xc0e0),
        static_cast<short>(0xc0c0), static_cast<short>(0xc0a0), static_cast<short>(0xc080), static_cast<short>(0xc040),
        static_cast<short>(0xc000), static_cast<short>(0xbf80)));
    __m512bh values[VECTORS];
    for (int v = 0; v < VECTORS; ++v)
      values[v] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16((__m512i)words[v], 4 * K), table);
    for (int r = 0; r < ROWS; ++r) {
      int32_t pair;
      __builtin_memcpy(&pair, x + r * stride + 2 * K, 4);
      const __m512bh input = (__m512bh)_mm512_set1_epi32(pair);
      for (int v = 0; v < VECTORS; ++v) found[r][v] = _mm512_dpbf16_ps(found[r][v], input, values[v]);
    }
    add_pairs<ROWS, K + 1>(found, words, x, stride);
  }
}
#endif

// The rows that are multiplied: those of a call in bfloat16, or widened ones.
struct WideRows {
  const float* x;
  int64_t stride;
};
struct PairRows {
  const uint16_t* x;
  int64_t stride;
};
template <int BITS, int ROWS>
inline void add(Floats (&found)[ROWS][VECTORS], const Words (&words)[VECTORS], WideRows rows, int64_t input) {
  add_products<BITS, ROWS, 0>(found, words, rows.x + input, rows.stride);
}
#if defined(__AVX512BF16__)
template <int BITS, int ROWS>
inline void add(Floats (&found)[ROWS][VECTORS], const Words (&words)[VECTORS], PairRows rows, int64_t input) {
  add_pairs<ROWS, 0>(found, words, rows.x + input, rows.stride);
}
#endif

// totals[r * CHANNELS] of ROWS rows and VECTORS vectors of channels from `channel` on.
template <int BITS, int ROWS, class Rows>
void multiply(const GroupedCall& call, Rows rows, int64_t block, int64_t row, int64_t channel, float* totals) {
  constexpr int64_t COUNT = 32 / BITS;
  const int64_t num_groups = call.num_inputs / call.group_size;
  const uint32_t* words = call.words + block * (call.num_inputs / COUNT) * CHANNELS + channel;
  const int64_t first = (block * num_groups) * CHANNELS + channel;
  Floats whole[ROWS][VECTORS] = {};
  for (int64_t group = 0; group < num_groups; ++group) {
    Floats found[ROWS][VECTORS] = {};
    const int64_t end = (group + 1) * call.group_size;
    for (int64_t input = group * call.group_size; input < end; input += COUNT, words += CHANNELS) {
      Words loaded[VECTORS];
      for (int v = 0; v < VECTORS; ++v) loaded[v] = *reinterpret_cast<const LooseWords*>(words + v * WIDTH);
      for (int v = 0; v < VECTORS * WIDTH * 4; v += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(words) + AHEAD + v, 0, 3);
      add<BITS, ROWS>(found, loaded, rows, input);
    }
    for (int v = 0; v < VECTORS; ++v) {
      const int64_t place = first + group * CHANNELS + v * WIDTH;
      const Floats scale = load(call.scales + place);
      for (int r = 0; r < ROWS; ++r) whole[r][v] = whole[r][v] + found[r][v] * scale;
      if (call.offsets) {
        const Floats offset = load(call.offsets + place);
        for (int r = 0; r < ROWS; ++r) whole[r][v] = whole[r][v] + all(call.sums[(row + r) * num_groups + group]) * offset;
      }
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) store(totals + r * CHANNELS + v * WIDTH, whole[r][v]);
}

template <class Number>
void finish(const GroupedCall& call, int64_t first, int64_t row, const float* totals, Number* out) {
  const int64_t rest = call.num_outputs - first, count = rest < CHANNELS ? rest : CHANNELS;
  Number* to = out + row * call.out_stride + first;
  for (int64_t i = 0; i < count; ++i) {
    float y = totals[i];
    if (call.bias) y += call.bias[first + i];
    if (call.adds) y += wide(to[i]);
    narrow(y, to + i);
  }
}

template <int BITS, int ROWS>
OUTSIDE void multiply_rows(const GroupedCall& call, int64_t block, int64_t row) {
  alignas(64) float totals[ROWS * CHANNELS];
  for (int64_t channel = 0; channel < CHANNELS; channel += VECTORS * WIDTH) {
#if defined(__AVX512BF16__)
    if constexpr (BITS == 4) {
      if (call.dtype != FLOAT32) {
        const PairRows rows = {static_cast<const uint16_t*>(call.x) + row * call.x_stride, call.x_stride};
        multiply<BITS, ROWS>(call, rows, block, row, channel, totals + channel);
        continue;
      }
    }
#endif
    multiply<BITS, ROWS>(call, WideRows{call.rows + row * call.num_inputs, call.num_inputs}, block, row, channel, totals + channel);
  }
  for (int r = 0; r < ROWS; ++r) {
    const float* found = totals + r * CHANNELS;
    const int64_t first = block * CHANNELS;
    if (call.float_out) {
      finish(call, first, row + r, found, call.float_out);
    } else if (call.dtype == FLOAT32) {
      finish(call, first, row + r, found, static_cast<float*>(call.out));
    } else {
      finish(call, first, row + r, found, static_cast<BFloat*>(call.out));
    }
  }
}

template <int BITS>
void multiply_all(const GroupedCall& call, int64_t block) {
  for (int64_t row = 0; row < call.num_rows;) {
    const int64_t rest = call.num_rows - row;
    switch (rest < MAX_ROWS ? rest : MAX_ROWS) {
#define ROWS(n)                             \
  case n:                                   \
    multiply_rows<BITS, n>(call, block, row); \
    row += n;                               \
    break;
      ROWS(1)
      ROWS(2)
      ROWS(3)
      ROWS(4)
#if defined(__AVX512F__)
      ROWS(5)
      ROWS(6)
#endif
    }
  }
}

void multiply_block(const GroupedCall& call, int64_t block) {
  call.bits == 4 ? multiply_all<4>(call, block) : multiply_all<8>(call, block);
}

template <int BITS, int K, class Number>
inline void store_values(Words words, Floats scale, Floats offset, Number* out, int64_t stride) {
  if constexpr (K < 32 / BITS) {
    store(out + K * stride, value_of<BITS, K>(words) * scale + offset);
    store_values<BITS, K + 1>(words, scale, offset, out, stride);
  }
}

template <int BITS, class Number>
void widen_weights(const GroupedCall& call, int64_t block, Number* out, int64_t stride) {
  constexpr int64_t COUNT = 32 / BITS;
  const int64_t num_groups = call.num_inputs / call.group_size;
  const uint32_t* words = call.words + block * (call.num_inputs / COUNT) * CHANNELS;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t first = (block * num_groups + group) * CHANNELS;
    for (int64_t input = 0; input < call.group_size; input += COUNT, words += CHANNELS, out += COUNT * stride) {
      for (int64_t channel = 0; channel < CHANNELS; channel += WIDTH) {
        const Words loaded = *reinterpret_cast<const LooseWords*>(words + channel);
        const Floats offset = call.offsets ? load(call.offsets + first + channel) : Floats{};
        store_values<BITS, 0>(loaded, load(call.scales + first + channel), offset, out + channel, stride);
      }
    }
  }
}

template <class Number>
void widen_weights(const GroupedCall& call, const GroupedWeights& weights, int64_t block) {
  Number* out = static_cast<Number*>(weights.out) + block * CHANNELS;
  const int64_t stored = weights.first_block + block;
  call.bits == 4 ? widen_weights<4>(call, stored, out, weights.stride) : widen_weights<8>(call, stored, out, weights.stride);
}

void widen_block(const GroupedCall& call, const GroupedWeights& weights, int64_t block) {
  weights.dtype == FLOAT32 ? widen_weights<float>(call, weights, block) : widen_weights<BFloat>(call, weights, block);
}

template <class Number>
void widen(const GroupedCall& call, int64_t row) {
  const Number* x = static_cast<const Number*>(call.x) + row * call.x_stride;
  float* to = call.rows + row * call.num_inputs;
  for (int64_t i = 0; i < call.num_inputs; ++i) to[i] = wide(x[i]);
  if (!call.offsets) return;
  const int64_t num_groups = call.num_inputs / call.group_size;
  for (int64_t group = 0; group < num_groups; ++group) {
    float sum = 0.0f;
    for (int64_t i = 0; i < call.group_size; ++i) sum += to[group * call.group_size + i];
    call.sums[row * num_groups + group] = sum;
  }
}

void widen_row(const GroupedCall& call, int64_t row) {
  call.dtype == FLOAT32 ? widen<float>(call, row) : widen<BFloat>(call, row);
}

}  // namespace

extern const GroupedLevel SYMBOL(GROUPED_, LEVEL);
const GroupedLevel SYMBOL(GROUPED_, LEVEL) = {widen_row, multiply_block, widen_block};
