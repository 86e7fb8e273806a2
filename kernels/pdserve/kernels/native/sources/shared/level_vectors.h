// Vectors of float32 of one instruction set, for sources that are compiled once per level (`build_library.py`).
// Only plain code, without the standard library: an inline function that two levels share would be linked once, in either
// instruction set. Here each source has its own.
#pragma once
#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define WIDTH 8
#else
#define WIDTH 4
#endif

// The names of a level as text, and of its symbol: SYMBOL(LORA_, LEVEL) is LORA_LEVEL_AVX2 and so on.
#define TEXT(name) #name
#define NAME(name) TEXT(name)
#define JOINED(first, second) first##second
#define SYMBOL(first, second) JOINED(first, second)

// Not inlined: a function that is called with every number of rows would take most of the time to compile.
#define OUTSIDE __attribute__((noinline))

namespace {

typedef float Floats __attribute__((vector_size(4 * WIDTH)));
typedef int32_t Ints __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t Words __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDTH)));
typedef float LooseFloats __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint32_t LooseWords __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef uint16_t LooseHalves __attribute__((vector_size(2 * WIDTH), aligned(2), may_alias));

struct BFloat {
  uint16_t bits;
};

inline Floats load(const float* from) { return *reinterpret_cast<const LooseFloats*>(from); }
inline void store(float* to, Floats value) { *reinterpret_cast<LooseFloats*>(to) = value; }
inline Floats load(const BFloat* from) {
  const Halves halves = *reinterpret_cast<const LooseHalves*>(from);
#if defined(__AVX512F__)
  return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)halves) << 16);  // GCC widens each half and joins them
#else
  return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}
inline float wide(float value) { return value; }
inline float wide(BFloat value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float found;
  __builtin_memcpy(&found, &bits, 4);
  return found;
}
inline void narrow(float value, float* to) { *to = value; }
inline uint32_t rounded(float value) {  // to the nearest bfloat16, ties to even
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return value == value ? (bits + 0x7fff + ((bits >> 16) & 1)) >> 16 : 0x7fc0;
}
inline void narrow(float value, BFloat* to) { to->bits = static_cast<uint16_t>(rounded(value)); }
inline Words rounded(Floats value) {
  const Words bits = (Words)value, isnt = (Words)(value != value);
  return (((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) & ~isnt) | (isnt & 0x7fc0);
}
inline void store(BFloat* to, Floats value) {
#if defined(__AVX512BF16__)
  const __m256bh found = _mm512_cvtneps_pbh(value);  // as `rounded`, but for numbers below 1.2e-38, which become 0
  __builtin_memcpy(static_cast<void*>(to), &found, sizeof(found));
#else
  *reinterpret_cast<LooseHalves*>(to) = __builtin_convertvector(rounded(value), Halves);
#endif
}

inline Floats all(float value) { return value - Floats{}; }
#if defined(__AVX512F__)
inline Floats larger(Floats a, Floats b) { return _mm512_max_ps(a, b); }  // as below: b for NaN
#else
inline Floats larger(Floats a, Floats b) {
  const Ints mask = a > b;
  return (Floats)(((Ints)a & mask) | ((Ints)b & ~mask));
}
#endif

// exp(x) to 1e-7 relatively; 0 below -87. x is at most 88: beyond, AVX-512 finds infinity and others nothing useful.
inline Floats exponential(Floats x) {
#if defined(__AVX512F__)
  const Floats power = _mm512_roundscale_ps(x * 1.44269504f, 0);
#else
  const Ints tiny = x < all(-87.0f);
  x = larger(x, all(-87.0f)) + (x - x);  // NaN stays
  const Floats shifted = x * 1.44269504f + 12582912.0f, power = shifted - 12582912.0f;
#endif
  const Floats rest = x - power * 0.693359375f + power * 2.12194440e-4f;
  Floats sum = all(1.9875691500e-4f);
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * rest * rest + rest + 1.0f;
#if defined(__AVX512F__)
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, all(-87.0f), _CMP_NLT_UQ), sum, power);  // NaN stays
#else
  const Ints exponent = ((Ints)shifted + 127) << 23;
  return (Floats)((Ints)(sum * (Floats)exponent) & ~tiny);
#endif
}

inline Floats silu(Floats x) {
#if !defined(__AVX512F__)
  x = larger(x, all(-80.0f)) + (x - x);  // below, the result is 0 in any dtype; NaN stays
#endif
  return x / (exponential(-x) + 1.0f);
}

// tanh(x), to 1e-7 absolutely.
inline Floats hyperbolic(Floats x) {
  const Floats low = all(-40.0f), high = all(40.0f), doubled = 2.0f * x;
  const Floats cut = -larger(-larger(doubled, low), -high) + (x - x);
  return 1.0f - 2.0f / (exponential(cut) + 1.0f);
}

}  // namespace
