// The most that one core multiplies in bfloat16: twelve independent sums of `vdpbf16ps` over registers, 64 operations each, in one
// thread and in two at once. What a matrix product reaches is to be compared with this.
//
// Usage: g++ -O3 -march=native -pthread benchmarks/bfloat_peak.cpp -o /tmp/bfloat_peak && /tmp/bfloat_peak
#include <immintrin.h>

#include <chrono>
#include <cstdio>
#include <thread>

namespace {

constexpr int NUM_SUMS = 12, OPERATIONS = 64;
constexpr long ROUNDS = 1L << 26;

// Billions of operations per second.
double measure() {
  __m512 sums[NUM_SUMS];
  for (__m512& sum : sums) sum = _mm512_setzero_ps();
  __m512bh one = (__m512bh)_mm512_set1_epi32(0x3f803f80), other = one;
  const auto began = std::chrono::steady_clock::now();
  for (long round = 0; round < ROUNDS; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < NUM_SUMS; ++i) sums[i] = _mm512_dpbf16_ps(sums[i], one, other);
    asm volatile("" : "+v"(one), "+v"(other));  // so that no product is computed once for all rounds
  }
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - began;
  float total = 0;
  for (const __m512& sum : sums) total += _mm512_reduce_add_ps(sum);
  if (!(total > 0)) std::puts("the sums are wrong");
  return 1e-9 * ROUNDS * NUM_SUMS * OPERATIONS / taken.count();
}

}  // namespace

int main() {
  std::printf("one thread %.0f\n", measure());
  double found[2];
  std::thread first([&] { found[0] = measure(); }), second([&] { found[1] = measure(); });
  first.join();
  second.join();
  std::printf("two threads %.0f and %.0f\n", found[0], found[1]);
}
