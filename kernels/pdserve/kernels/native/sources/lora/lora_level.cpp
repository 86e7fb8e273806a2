// LoRA products of a few tokens, compiled once per instruction set (`build_library.py`): LEVEL is the level's symbol.
// The matrices of adapters come from main memory and are read once; the sums of a token are made in an order that depends on the
// layer's shape and the adapter's rank only.
#include "lora/lora_rows.h"
#include "shared/level_vectors.h"

namespace {

// Rows of A, and vectors of columns of B, whose sums for TOKENS tokens fit the registers.
#if defined(__AVX512F__)
constexpr int ROWS = 4, VECTORS = 4;
#else
constexpr int ROWS = 2, VECTORS = 2;
#endif
constexpr int TOKENS = 4;
// Columns that B is prefetched ahead: its rows lie too far apart for the hardware to foresee a block of each.
constexpr int64_t AHEAD = 128;

// The products of N tokens with R adjacent rows of A: to[n][r] = x[n] a[r].
template <int N, int R, class Number>
inline void multiply(const Number* const* x, const Number* a, int64_t size, float* const* to) {
  Floats sums[R][N] = {};
  int64_t place = 0;
  for (; place + WIDTH <= size; place += WIDTH) {
    Floats values[N];
    for (int n = 0; n < N; ++n) values[n] = load(x[n] + place);
    for (int r = 0; r < R; ++r) {
      const Floats row = load(a + r * size + place);
      for (int n = 0; n < N; ++n) sums[r][n] += row * values[n];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) {
      float sum = 0;
      for (int lane = 0; lane < WIDTH; ++lane) sum += sums[r][n][lane];
      for (int64_t rest = place; rest < size; ++rest) sum += wide(a[r * size + rest]) * wide(x[n][rest]);
      to[n][r] = sum;
    }
}

#if defined(__AVX512BF16__)
// Pairs of numbers are multiplied and summed in one instruction, without a conversion.
template <int N, int R>
inline void multiply(const BFloat* const* x, const BFloat* a, int64_t size, float* const* to) {
  __m512 sums[R][N];
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) sums[r][n] = _mm512_setzero_ps();
  int64_t place = 0;
  for (; place + 32 <= size; place += 32) {
    __m512bh values[N];
    for (int n = 0; n < N; ++n) values[n] = (__m512bh)_mm512_loadu_si512(x[n] + place);
    for (int r = 0; r < R; ++r) {
      const __m512bh row = (__m512bh)_mm512_loadu_si512(a + r * size + place);
      for (int n = 0; n < N; ++n) sums[r][n] = _mm512_dpbf16_ps(sums[r][n], row, values[n]);
    }
  }
  if (place < size) {
    const __mmask32 rest = (1u << (size - place)) - 1;
    for (int r = 0; r < R; ++r)
      for (int n = 0; n < N; ++n)
        sums[r][n] = _mm512_dpbf16_ps(sums[r][n], (__m512bh)_mm512_maskz_loadu_epi16(rest, a + r * size + place),
                                      (__m512bh)_mm512_maskz_loadu_epi16(rest, x[n] + place));
  }
  for (int r = 0; r < R; ++r)
    for (int n = 0; n < N; ++n) to[n][r] = _mm512_reduce_add_ps(sums[r][n]);
}
#endif

template <int N, class Number>
OUTSIDE void shrink_tokens(const LoraCall& call, int64_t first, int64_t slot, int64_t row, int64_t end) {
  const int64_t all_rows = call.num_products * call.max_rank;
  const Number* x[N];
  float* to[N];
  for (int n = 0; n < N; ++n) {
    x[n] = static_cast<const Number*>(call.x) + call.tokens->tokens[first + n] * call.x_stride;
    to[n] = call.shrunk + (first + n) * all_rows + row;
  }
  const Number* a = static_cast<const Number*>(call.a) + (slot * all_rows + row) * call.in_size;
  while (row < end) {
    const int64_t taken = end - row >= ROWS ? ROWS : 1;
    if (taken == ROWS) {
      multiply<N, ROWS>(x, a, call.in_size, to);
    } else {
      multiply<N, 1>(x, a, call.in_size, to);
    }
    row += taken;
    a += taken * call.in_size;
    for (int n = 0; n < N; ++n) to[n] += taken;
  }
}

// y[n][0 .. V * WIDTH) += sum over r of weights[n][r] * b[r * stride ..]
template <int N, int V, class Number>
inline void add_vectors(Number* const* y, const float* const* weights, const Number* b, int64_t stride, int64_t rank) {
  Floats sums[N][V] = {};
  for (int64_t r = 0; r < rank; ++r, b += stride) {
    __builtin_prefetch(b + AHEAD, 0, 3);
    __builtin_prefetch(b + AHEAD + V * WIDTH - 1, 0, 3);
    Floats values[V];
    for (int v = 0; v < V; ++v) values[v] = load(b + v * WIDTH);
    for (int n = 0; n < N; ++n)
      for (int v = 0; v < V; ++v) sums[n][v] += weights[n][r] * values[v];
  }
  for (int n = 0; n < N; ++n)
    for (int v = 0; v < V; ++v) store(y[n] + v * WIDTH, load(y[n] + v * WIDTH) + sums[n][v]);
}

template <int N, class Number>
inline void add_number(Number* const* y, const float* const* weights, const Number* b, int64_t stride, int64_t rank) {
  for (int n = 0; n < N; ++n) {
    float sum = 0;
    for (int64_t r = 0; r < rank; ++r) sum += weights[n][r] * wide(b[r * stride]);
    narrow(wide(*y[n]) + sum, y[n]);
  }
}

// `size` columns: VECTORS vectors, one, or a single number.
template <int N, class Number>
inline void add_block(Number* const* y, const float* const* weights, const Number* b, int64_t stride, int64_t rank,
                      int64_t size) {
  if (size == VECTORS * WIDTH) {
    add_vectors<N, VECTORS>(y, weights, b, stride, rank);
  } else if (size == WIDTH) {
    add_vectors<N, 1>(y, weights, b, stride, rank);
  } else {
    add_number<N>(y, weights, b, stride, rank);
  }
}

#if defined(__AVX512BF16__)
// H blocks of 32 columns, of the last one those `here`. Weights are rounded to bfloat16, and two rows of B multiplied at once.
template <int N, int H>
inline void add_pairs(BFloat* const* y, const float* const* weights, const BFloat* b, int64_t stride, int64_t rank,
                      __mmask32 here) {
  alignas(64) uint32_t pairs[N][MAX_RANK / 2];
  for (int n = 0; n < N; ++n)
    for (int64_t r = 0; r < rank; r += 16) {
      const __mmask16 some = rank - r >= 16 ? 0xffff : (1u << (rank - r)) - 1;
      const __m256bh halves = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, weights[n] + r));
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs[n] + r / 2), (__m256i)halves);
    }
  __m512 low[N][H], high[N][H];
  for (int n = 0; n < N; ++n)
    for (int h = 0; h < H; ++h) low[n][h] = high[n][h] = _mm512_setzero_ps();
  for (int64_t r = 0; r < rank; r += 2) {
    const BFloat* first = b + r * stride;
    const BFloat* second = r + 1 < rank ? first + stride : first;  // with a weight of 0
    for (int h = 0; h < H; ++h) {
      __builtin_prefetch(first + AHEAD + 32 * h, 0, 3);
      __builtin_prefetch(second + AHEAD + 32 * h, 0, 3);
      const __m512i one = _mm512_maskz_loadu_epi16(here, first + 32 * h);
      const __m512i other = _mm512_maskz_loadu_epi16(here, second + 32 * h);
      const __m512bh lows = (__m512bh)_mm512_unpacklo_epi16(one, other);
      const __m512bh highs = (__m512bh)_mm512_unpackhi_epi16(one, other);
      for (int n = 0; n < N; ++n) {
        const __m512bh weight = (__m512bh)_mm512_set1_epi32(static_cast<int>(pairs[n][r / 2]));
        low[n][h] = _mm512_dpbf16_ps(low[n][h], lows, weight);
        high[n][h] = _mm512_dpbf16_ps(high[n][h], highs, weight);
      }
    }
  }
  // each half of low and high has 4 of 8 adjacent columns
  const __m512i first_half = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second_half = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  for (int n = 0; n < N; ++n)
    for (int h = 0; h < H; ++h) {
      alignas(64) BFloat held[32];
      _mm512_store_si512(held, _mm512_maskz_loadu_epi16(here, y[n] + 32 * h));
      store(held, load(held) + (Floats)_mm512_permutex2var_ps(low[n][h], first_half, high[n][h]));
      store(held + 16, load(held + 16) + (Floats)_mm512_permutex2var_ps(low[n][h], second_half, high[n][h]));
      _mm512_mask_storeu_epi16(y[n] + 32 * h, here, _mm512_load_si512(held));
    }
}

template <int N>
inline void add_block(BFloat* const* y, const float* const* weights, const BFloat* b, int64_t stride, int64_t rank,
                      int64_t size) {
  if (size == VECTORS * WIDTH) {
    add_pairs<N, 2>(y, weights, b, stride, rank, ~0u);
  } else {
    add_pairs<N, 1>(y, weights, b, stride, rank, (1u << size) - 1);
  }
}
#endif

// Columns [from, from + size) of N tokens.
template <int N, class Number>
OUTSIDE void add_tokens(const LoraCall& call, int64_t first, int64_t slot, int64_t product, int64_t from, int64_t size) {
  const int64_t all_rows = call.num_products * call.max_rank, rank = call.ranks[slot * call.num_products + product];
  Number* y[N];
  const float* weights[N];
  for (int n = 0; n < N; ++n) {
    y[n] = static_cast<Number*>(call.y) + call.tokens->tokens[first + n] * call.y_stride + from;
    weights[n] = call.shrunk + (first + n) * all_rows + product * call.max_rank;
  }
  const Number* b = static_cast<const Number*>(call.b) + slot * call.max_rank * call.out_size + from;
  add_block<N>(y, weights, b, call.out_size, rank, size);
}

#define FOR_TOKENS(function, ...)              \
  switch (end - token < TOKENS ? end - token : TOKENS) { \
    case 1: function<1, Number>(__VA_ARGS__); break;     \
    case 2: function<2, Number>(__VA_ARGS__); break;     \
    case 3: function<3, Number>(__VA_ARGS__); break;     \
    case 4: function<4, Number>(__VA_ARGS__); break;     \
  }

template <class Number>
void shrink_group(const LoraCall& call, int64_t group, int64_t product, int64_t row) {
  const int64_t slot = call.tokens->slots[group], rank = call.ranks[slot * call.num_products + product];
  const int64_t rest = rank - row, start = product * call.max_rank + row;
  if (rest <= 0) return;
  const int64_t stop = start + (rest < SHRUNK_ROWS ? rest : SHRUNK_ROWS), end = call.tokens->starts[group + 1];
  for (int64_t token = call.tokens->starts[group]; token < end; token += TOKENS) {
    FOR_TOKENS(shrink_tokens, call, token, slot, start, stop)
  }
}

template <class Number>
void add_group(const LoraCall& call, int64_t group, int64_t column) {
  const int64_t slot = call.tokens->slots[group], stop = column + ADDED_COLUMNS, end = call.tokens->starts[group + 1];
  int64_t start = 0;
  for (int64_t product = 0; product < call.num_products; ++product) {
    int64_t from = start > column ? start : column;
    const int64_t until = call.column_ends[product] < stop ? call.column_ends[product] : stop;
    start = call.column_ends[product];
    if (!call.ranks[slot * call.num_products + product]) continue;
    while (from < until) {
      const int64_t rest = until - from, size = rest >= VECTORS * WIDTH ? VECTORS * WIDTH : rest >= WIDTH ? WIDTH : 1;
      for (int64_t token = call.tokens->starts[group]; token < end; token += TOKENS) {
        FOR_TOKENS(add_tokens, call, token, slot, product, from, size)
      }
      from += size;
    }
  }
}

void shrink(const LoraCall& call, int64_t group, int64_t product, int64_t row) {
  call.dtype == FLOAT32 ? shrink_group<float>(call, group, product, row) : shrink_group<BFloat>(call, group, product, row);
}

void add(const LoraCall& call, int64_t group, int64_t column) {
  call.dtype == FLOAT32 ? add_group<float>(call, group, column) : add_group<BFloat>(call, group, column);
}

}  // namespace

extern const LoraLevel SYMBOL(LORA_, LEVEL);
const LoraLevel SYMBOL(LORA_, LEVEL) = {shrink, add};
