// Transposition of 32-bit words in vectors of one instruction set, for sources that are compiled once per level.
#pragma once
#include "shared/level_vectors.h"

namespace {

// to[word * to_stride + row] = rows[row * stride + word], WORDS words of 16 rows. Rows of `to` begin at whole vectors.
#if defined(__AVX512F__)
inline void transpose(const uint32_t* rows, int64_t stride, uint32_t* to, int64_t to_stride = 16) {
  __m512i a[16], b[16];
  for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows + i * stride);
  for (int i = 0; i < 16; i += 2) {
    b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
    b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
    b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    a[i] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88);
    a[i + 8] = _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd);
    a[i + 4] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88);
    a[i + 12] = _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd);
  }
  for (int i = 0; i < 16; ++i) _mm512_store_si512(to + to_stride * i, a[i]);
}
constexpr int WORDS = 16;
#elif defined(__AVX2__)
inline void transpose(const uint32_t* rows, int64_t stride, uint32_t* to, int64_t to_stride = 16) {
  for (int half = 0; half < 16; half += 8) {
    __m256 a[8], b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(rows + (half + i) * stride));
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
    }
    for (int i = 0; i < 4; ++i) {
      float* at = reinterpret_cast<float*>(to + to_stride * i + half);
      _mm256_store_ps(at, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
      _mm256_store_ps(at + to_stride * 4, _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
    }
  }
}
constexpr int WORDS = 8;
#else
inline void transpose(const uint32_t* rows, int64_t stride, uint32_t* to, int64_t to_stride = 16) {
  for (int word = 0; word < 4; ++word)
    for (int row = 0; row < 16; ++row) to[to_stride * word + row] = rows[row * stride + word];
}
constexpr int WORDS = 4;
#endif

}  // namespace
