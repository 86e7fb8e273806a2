// LoRA products of a few tokens, compiled once per instruction set (`build_library.py`): LEVEL is the level's symbol.
// The matrices of adapters come from main memory and are read once; the sums of a token are made in an order that depends on the
// layer's shape and the adapter's rank alone.
#include "level_vectors.h"
#include "lora_rows.h"

namespace {

// Rows of A, and vectors of columns of B, whose sums for TOKENS tokens fit the registers.
#if defined(__AVX512F__)
constexpr int ROWS = 4, VECTORS = 4;
#else
constexpr int ROWS = 2, VECTORS = 2;
#endif
constexpr int TOKENS = 4;
// Columns that B is asked for ahead: its rows lie too far apart for the hardware to foresee a block of each.
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

// Columns [from, from + size) of N tokens: all of `VECTORS` vectors, of one vector, or single ones.
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
  if (size == VECTORS * WIDTH) {
    add_vectors<N, VECTORS>(y, weights, b, call.out_size, rank);
  } else if (size == WIDTH) {
    add_vectors<N, 1>(y, weights, b, call.out_size, rank);
  } else {
    add_number<N>(y, weights, b, call.out_size, rank);
  }
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

#define JOINED(first, second) first##second
#define SYMBOL(first, second) JOINED(first, second)
}  // namespace

extern const LoraLevel SYMBOL(LORA_, LEVEL);
const LoraLevel SYMBOL(LORA_, LEVEL) = {shrink, add};
