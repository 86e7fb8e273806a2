// Rows of uint8 times one block of an int8 matrix, compiled once per instruction set (`build_library.py`): LEVEL is the level's
// symbol. Sums are exact in int32, and each float operation is rounded by itself (-ffp-contract=off): all levels have the same bits.
// Only plain code, without the standard library: an inline function that two levels share would be linked once, in either
// instruction set.
#include "linear/int8_rows.h"
#include "shared/level_vectors.h"

namespace {

// Vectors of channels that are summed at once.
constexpr int VECTORS = 4;
// Bytes of the matrix between what is prefetched and what is used.
constexpr int64_t AHEAD = 4096;

#if defined(__AVX512VNNI__)
typedef __m512i Vector;
constexpr int MAX_ROWS = 6;
struct Input {
  Vector x;
};
inline Input spread(uint32_t quad) { return {_mm512_set1_epi32(static_cast<int>(quad))}; }
inline Vector load_values(const int8_t* from) { return _mm512_loadu_si512(from); }
inline void store_sums(int32_t* to, Vector value) { _mm512_storeu_si512(to, value); }
inline Vector add_products(Vector sum, Input input, Vector values) { return _mm512_dpbusd_epi32(sum, input.x, values); }
#elif defined(__AVX2__)
// Bytes become words first: the instruction that multiplies bytes saturates.
typedef __m256i Vector;
constexpr int MAX_ROWS = 2;
struct Input {
  Vector even, odd;
};
inline Input spread(uint32_t quad) {
  return {_mm256_set1_epi32(static_cast<int>(quad & 0xff00ff)), _mm256_set1_epi32(static_cast<int>(quad >> 8 & 0xff00ff))};
}
inline Vector load_values(const int8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const Vector*>(from)); }
inline void store_sums(int32_t* to, Vector value) { _mm256_storeu_si256(reinterpret_cast<Vector*>(to), value); }
inline Vector add_products(Vector sum, Input input, Vector values) {
  const Vector even = _mm256_srai_epi16(_mm256_slli_epi16(values, 8), 8), odd = _mm256_srai_epi16(values, 8);
  return _mm256_add_epi32(sum, _mm256_add_epi32(_mm256_madd_epi16(even, input.even), _mm256_madd_epi16(odd, input.odd)));
}
#else
// 255 * 128 is within 16 bits.
typedef int32_t Vector __attribute__((vector_size(16)));
typedef int16_t Shorts __attribute__((vector_size(16)));
constexpr int MAX_ROWS = 2;
struct Input {
  Shorts even, odd;
};
inline Input spread(uint32_t quad) {
  const int32_t even = static_cast<int32_t>(quad & 0xff00ff), odd = static_cast<int32_t>(quad >> 8 & 0xff00ff);
  return {(Shorts)(Vector{even, even, even, even}), (Shorts)(Vector{odd, odd, odd, odd})};
}
inline Vector load_values(const int8_t* from) {
  Vector found;
  __builtin_memcpy(&found, from, sizeof(found));
  return found;
}
inline void store_sums(int32_t* to, Vector value) { __builtin_memcpy(to, &value, sizeof(value)); }
inline Vector add_products(Vector sum, Input input, Vector values) {
  const Shorts words = (Shorts)values;
  const Vector even = (Vector)(((words << 8) >> 8) * input.even), odd = (Vector)((words >> 8) * input.odd);
  return sum + ((even << 16) >> 16) + (even >> 16) + ((odd << 16) >> 16) + (odd >> 16);
}
#endif

inline uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}
inline float of_bits(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// As `quantize_rows` of `int8_linear.py`.
template <class Number>
void quantize(const Int8Call& call, int64_t row) {
  const Number* x = static_cast<const Number*>(call.x) + row * call.x_stride;
  uint8_t* to = call.rows + row * call.padded;
  int32_t largest = 0;
  for (int64_t i = 0; i < call.num_inputs; ++i) {  // as integers: NaN is above infinity
    const int32_t magnitude = static_cast<int32_t>(bits_of(wide(x[i])) & 0x7fffffff);
    largest = magnitude > largest ? magnitude : largest;
  }
  const float found = of_bits(static_cast<uint32_t>(largest)), range = found < 1e-30f ? 1e-30f : found;
  const float factor = 1.0f / range * 127.0f;  // two roundings, as in torch
  for (int64_t i = 0; i < call.num_inputs; ++i) {
    const float scaled = wide(x[i]) * factor, place = scaled + 128.5f;
    to[i] = static_cast<uint8_t>(static_cast<int32_t>(place == place ? place : 0.0f));
  }
  for (int64_t i = call.num_inputs; i < call.padded; ++i) to[i] = 0;
  call.row_scales[row] = range / 127.0f;
}

void quantize_row(const Int8Call& call, int64_t row) {
  call.dtype == FLOAT32 ? quantize<float>(call, row) : quantize<BFloat>(call, row);
}

// sums[r * CHANNELS] of ROWS rows and VECTORS vectors of channels.
template <int ROWS>
inline void multiply(const uint8_t* rows, int64_t padded, const int8_t* values, int32_t* sums) {
  Vector found[ROWS][VECTORS] = {};
  for (int64_t input = 0; input < padded; input += QUAD, values += CHANNELS * QUAD) {
    Vector loaded[VECTORS];
    for (int v = 0; v < VECTORS; ++v) loaded[v] = load_values(values + v * WIDTH * QUAD);
    for (int v = 0; v < VECTORS * WIDTH * QUAD; v += 64) __builtin_prefetch(values + AHEAD + v, 0, 3);
    for (int r = 0; r < ROWS; ++r) {
      uint32_t quad;
      __builtin_memcpy(&quad, rows + r * padded + input, 4);
      const Input x = spread(quad);
      for (int v = 0; v < VECTORS; ++v) found[r][v] = add_products(found[r][v], x, loaded[v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) store_sums(sums + r * CHANNELS + v * WIDTH, found[r][v]);
}

template <int ROWS>
void multiply_rows(const Int8Call& call, int64_t block, int64_t row, int32_t* sums) {
  const int8_t* values = call.values + block * call.padded * CHANNELS;
  for (int64_t channel = 0; channel < CHANNELS; channel += VECTORS * WIDTH)
    multiply<ROWS>(call.rows + row * call.padded, call.padded, values + channel * QUAD, sums + channel);
}

template <class Number>
void finish(const Int8Call& call, int64_t first, int64_t row, const int32_t* sums) {
  const int64_t rest = call.num_outputs - first, count = rest < CHANNELS ? rest : CHANNELS;
  Number* out = static_cast<Number*>(call.out) + row * call.out_stride + first;
  const float row_scale = call.row_scales[row];
  float y[CHANNELS];
  for (int64_t i = 0; i < count; ++i) {
    // wraps as the sums did
    const uint32_t sum = static_cast<uint32_t>(sums[i]) - static_cast<uint32_t>(call.offsets[first + i]);
    y[i] = static_cast<float>(static_cast<int32_t>(sum)) * call.scales[first + i] * row_scale;
  }
  if (call.bias)
    for (int64_t i = 0; i < count; ++i) y[i] += call.bias[first + i];
  if (call.adds) {
    for (int64_t i = 0; i < count; ++i) {  // rounded before it is added, as in two operations
      Number rounded;
      narrow(y[i], &rounded);
      y[i] = wide(out[i]) + wide(rounded);
    }
  }
  for (int64_t i = 0; i < count; ++i) narrow(y[i], out + i);
}

void multiply_block(const Int8Call& call, int64_t block) {
  alignas(64) int32_t sums[MAX_ROWS * CHANNELS];
  for (int64_t row = 0; row < call.num_rows;) {
    const int64_t rest = call.num_rows - row, first = row;
    switch (rest < MAX_ROWS ? rest : MAX_ROWS) {
#define ROWS(n)                               \
  case n:                                     \
    multiply_rows<n>(call, block, row, sums); \
    row += n;                                 \
    break;
      ROWS(1)
      ROWS(2)
#if defined(__AVX512VNNI__)
      ROWS(3)
      ROWS(4)
      ROWS(5)
      ROWS(6)
#endif
    }
    for (int64_t r = first; r < row; ++r) {
      const int32_t* found = sums + (r - first) * CHANNELS;
      if (call.dtype == FLOAT32) {
        finish<float>(call, block * CHANNELS, r, found);
      } else {
        finish<BFloat>(call, block * CHANNELS, r, found);
      }
    }
  }
}

}  // namespace

extern const Int8Level SYMBOL(INT8_, LEVEL);
const Int8Level SYMBOL(INT8_, LEVEL) = {NAME(LEVEL_NAME), quantize_row, multiply_block};
