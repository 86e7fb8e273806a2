// Rows times one block of a bfloat16 matrix, compiled once per instruction set (`build_library.py`): LEVEL is the level's symbol.
// A sum adds its inputs in their order, in float32, and is rounded once: a row has the same bits in any number of rows.
#include "bfloat_rows.h"
#include "level_vectors.h"
#if defined(__AMX_BF16__)
#include "tiles.h"
#endif

namespace {

constexpr int64_t CHANNELS = BFLOAT_CHANNELS;
// Bytes of a cache line, and lines of a pair of inputs of all channels.
constexpr int64_t LINE = 64, PAIR_LINES = CHANNELS * BFLOAT_PAIR * 2 / LINE;
// Bytes of the matrix between what is prefetched and what is used, with one group of rows.
constexpr int64_t AHEAD = 8192;
// Pairs of inputs whose values stay in the first cache while up to FEW_GROUPS groups of rows are multiplied by them, or more. Each group
// prefetches a part of the next chunk, so that memory is read all the time: with few groups a large part, of which more would leave the
// cache again. With more groups loading and storing sums takes longer than memory.
constexpr int64_t FEW_GROUPS = 4, FEW_CHUNK = 64, MANY_CHUNK = 448;

inline uint32_t pair_at(const uint16_t* x, int64_t pair) {
  uint32_t found;
  __builtin_memcpy(&found, x + pair * BFLOAT_PAIR, 4);
  return found;
}

#if defined(__AVX512BF16__)
// Rows of one of several groups, and of one alone: its sums need not be kept between chunks.
constexpr int MAX_ROWS = 6, MAX_ALONE = 7, VECTORS = 4;
typedef __m512bh Pairs;
struct Input {
  __m512bh both;
};
inline Input spread(uint32_t pair) { return {(__m512bh)_mm512_set1_epi32(static_cast<int>(pair))}; }
inline Pairs load_pairs(const uint16_t* from) { return (__m512bh)_mm512_loadu_si512(from); }
inline Floats add_products(Floats sum, Input x, Pairs values) { return _mm512_dpbf16_ps(sum, x.both, values); }
#else
constexpr int MAX_ROWS = 4, MAX_ALONE = 4, VECTORS = 2;
typedef Words Pairs;
struct Input {
  Floats first, second;
};
inline Input spread(uint32_t pair) { return {all(wide(BFloat{static_cast<uint16_t>(pair)})), all(wide(BFloat{static_cast<uint16_t>(pair >> 16)}))}; }
inline Pairs load_pairs(const uint16_t* from) { return *reinterpret_cast<const LooseWords*>(from); }
inline Floats add_products(Floats sum, Input x, Pairs values) {
  return sum + x.first * (Floats)(values << 16) + x.second * (Floats)(values & 0xffff0000);
}
#endif

// sums[r * CHANNELS] of ROWS rows and VECTORS vectors of channels, over `num_pairs` pairs of inputs. Prefetches LINES cache lines
// from `ahead` on per pair.
template <int ROWS, int LINES>
inline void multiply(const uint16_t* x, int64_t stride, const uint16_t* values, int64_t num_pairs, const char* ahead, float* sums) {
  Floats found[ROWS][VECTORS];
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) found[r][v] = load(sums + r * CHANNELS + v * WIDTH);
  for (int64_t pair = 0; pair < num_pairs; ++pair, values += CHANNELS * BFLOAT_PAIR, ahead += LINES * LINE) {
    Pairs loaded[VECTORS];
    for (int v = 0; v < VECTORS; ++v) loaded[v] = load_pairs(values + v * WIDTH * BFLOAT_PAIR);
    for (int line = 0; line < LINES; ++line) __builtin_prefetch(ahead + line * LINE, 0, 3);
    for (int r = 0; r < ROWS; ++r) {
      const Input input = spread(pair_at(x + r * stride, pair));
      for (int v = 0; v < VECTORS; ++v) found[r][v] = add_products(found[r][v], input, loaded[v]);
    }
  }
  for (int r = 0; r < ROWS; ++r)
    for (int v = 0; v < VECTORS; ++v) store(sums + r * CHANNELS + v * WIDTH, found[r][v]);
}

template <int ROWS, int LINES>
inline void multiply_channels(
    const uint16_t* x, int64_t stride, const uint16_t* values, int64_t num_pairs, const char* ahead, float* sums) {
  constexpr int64_t AT_ONCE = VECTORS * WIDTH;
  multiply<ROWS, LINES>(x, stride, values, num_pairs, ahead, sums);
  for (int64_t channel = AT_ONCE; channel < CHANNELS; channel += AT_ONCE)
    multiply<ROWS, 0>(x, stride, values + channel * BFLOAT_PAIR, num_pairs, ahead, sums + channel);
}

// lines: of a pair's PAIR_LINES, those that this group of rows prefetches.
template <int ROWS>
OUTSIDE void multiply_rows(
    const uint16_t* x, int64_t stride, const uint16_t* values, int64_t num_pairs, int64_t lines, const char* ahead, float* sums) {
  switch (lines) {
    case 0:
      return multiply_channels<ROWS, 0>(x, stride, values, num_pairs, ahead, sums);
    case 1:
      return multiply_channels<ROWS, 1>(x, stride, values, num_pairs, ahead, sums);
    case 2:
      return multiply_channels<ROWS, 2>(x, stride, values, num_pairs, ahead, sums);
    default:
      return multiply_channels<ROWS, PAIR_LINES>(x, stride, values, num_pairs, ahead, sums);
  }
}

#if defined(__AMX_BF16__)
// Bytes of a pair of inputs of all channels: the rows of the second factor's tiles are this far apart.
constexpr int64_t PAIR_BYTES = PAIR_LINES * LINE, STEP_PAIRS = TILE_NUMBERS / BFLOAT_PAIR;
// Steps whose rows stay in the first cache while the other half of the channels is multiplied.
constexpr int64_t CHUNK_STEPS = 8;

// Prefetches the values of a step that lie AHEAD bytes behind `values`.
inline void prefetch_step(const char* values) {
  for (int64_t line = 0; line < STEP_PAIRS * PAIR_LINES; ++line) __builtin_prefetch(values + AHEAD + line * LINE, 0, 3);
}

// sums[num_rows * CHANNELS] of at most 16 rows.
void multiply_one_tile(
    Tiles& tiles, const uint16_t* x, int64_t stride, int64_t num_rows, const char* values, int64_t num_steps, float* sums) {
  const int64_t shapes[8] = {num_rows, num_rows, num_rows, num_rows, num_rows, TILE_ROWS, TILE_ROWS, TILE_ROWS};
  tiles.shape(shapes);
  for (int64_t step = 0; step < num_steps; ++step, values += STEP_PAIRS * PAIR_BYTES) {
    prefetch_step(values);
    _tile_loadd(4, x + step * TILE_NUMBERS, 2 * stride);
    _tile_loadd(5, values, PAIR_BYTES);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, values + TILE_BYTES, PAIR_BYTES);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, values + 2 * TILE_BYTES, PAIR_BYTES);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, values + 3 * TILE_BYTES, PAIR_BYTES);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, sums, CHANNELS * 4);
  _tile_stored(1, sums + 16, CHANNELS * 4);
  _tile_stored(2, sums + 32, CHANNELS * 4);
  _tile_stored(3, sums + 48, CHANNELS * 4);
}

// The same of 17 to 32 rows: half of the channels at a time. prefetches: `values` are not in the cache yet.
void multiply_two_tiles(
    Tiles& tiles, const uint16_t* x, int64_t stride, int64_t num_rows, const char* values, int64_t num_steps, bool prefetches, float* sums) {
  const int64_t rest = num_rows - TILE_ROWS;
  const int64_t shapes[8] = {TILE_ROWS, TILE_ROWS, rest, rest, TILE_ROWS, rest, TILE_ROWS, TILE_ROWS};
  tiles.shape(shapes);
  for (int64_t first = 0; first < num_steps; first += CHUNK_STEPS) {
    const int64_t end = first + CHUNK_STEPS < num_steps ? first + CHUNK_STEPS : num_steps;
    for (int half = 0; half < 2; ++half) {
      float* to = sums + half * 32;
      float* other = to + TILE_ROWS * CHANNELS;
      if (first) {
        _tile_loadd(0, to, CHANNELS * 4);
        _tile_loadd(1, to + 16, CHANNELS * 4);
        _tile_loadd(2, other, CHANNELS * 4);
        _tile_loadd(3, other + 16, CHANNELS * 4);
      } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
      }
      for (int64_t step = first; step < end; ++step) {
        const char* from = values + step * STEP_PAIRS * PAIR_BYTES + half * 2 * TILE_BYTES;
        if (prefetches && half == 0) prefetch_step(from);
        _tile_loadd(4, x + step * TILE_NUMBERS, 2 * stride);
        _tile_loadd(6, from, PAIR_BYTES);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, x + TILE_ROWS * stride + step * TILE_NUMBERS, 2 * stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_loadd(7, from + TILE_BYTES, PAIR_BYTES);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
      _tile_stored(0, to, CHANNELS * 4);
      _tile_stored(1, to + 16, CHANNELS * 4);
      _tile_stored(2, other, CHANNELS * 4);
      _tile_stored(3, other + 16, CHANNELS * 4);
    }
  }
}

// As `multiply_some`, of the inputs that fill whole tiles. A row's sums have the same bits in a tile with any number of others.
void multiply_tiles(const BfloatCall& call, int64_t block, int64_t first, int64_t num_rows, float* sums) {
  const BfloatMatrix& matrix = call.matrix;
  const char* values = reinterpret_cast<const char*>(matrix.values + block * matrix.padded * CHANNELS);
  const int64_t num_steps = matrix.num_inputs / TILE_NUMBERS;
  Tiles tiles;
  for (int64_t row = 0; row < num_rows; row += 2 * TILE_ROWS) {
    const int64_t count = num_rows - row < 2 * TILE_ROWS ? num_rows - row : 2 * TILE_ROWS;
    const uint16_t* x = call.x + (first + row) * call.x_stride;
    if (count <= TILE_ROWS) {
      multiply_one_tile(tiles, x, call.x_stride, count, values, num_steps, sums + row * CHANNELS);
    } else {
      multiply_two_tiles(tiles, x, call.x_stride, count, values, num_steps, row == 0, sums + row * CHANNELS);
    }
  }
}
#endif

// Rows that are multiplied at once, at most: more would leave the second cache.
constexpr int64_t GROUPS_ROWS = 96;

// sums[num_rows * CHANNELS] of one block of channels and the rows from `first` on.
void multiply_some(const BfloatCall& call, int64_t block, int64_t first, int64_t num_rows, float* sums) {
  const BfloatMatrix& matrix = call.matrix;
  const uint16_t* values = matrix.values + block * matrix.padded * CHANNELS;
  const int64_t pairs = matrix.num_inputs / BFLOAT_PAIR;
#if defined(__AMX_BF16__)
  const int64_t in_tiles = pairs / STEP_PAIRS * STEP_PAIRS;
  if (in_tiles > 0) multiply_tiles(call, block, first, num_rows, sums);
#else
  constexpr int64_t in_tiles = 0;
#endif
  if (in_tiles == 0) __builtin_memset(sums, 0, num_rows * CHANNELS * sizeof(float));
  const int64_t num_groups = num_rows <= MAX_ALONE ? 1 : (num_rows + MAX_ROWS - 1) / MAX_ROWS;
  const bool is_few = num_groups <= FEW_GROUPS;
  const int64_t chunk = num_groups == 1 ? pairs : is_few ? FEW_CHUNK : MANY_CHUNK;
  const int64_t lines = (PAIR_LINES + num_groups - 1) / num_groups, num_prefetching = is_few ? num_groups : PAIR_LINES / lines;
  for (int64_t pair = in_tiles; pair < pairs; pair += chunk) {
    const int64_t count = pairs - pair < chunk ? pairs - pair : chunk;
    const uint16_t* from = values + pair * CHANNELS * BFLOAT_PAIR;
    const char* ahead = reinterpret_cast<const char*>(from) + (num_groups == 1 ? AHEAD : count * PAIR_LINES * LINE);
    for (int64_t row = 0, group = num_groups; group > 0; --group, ahead += count * lines * LINE) {
      const int64_t fetched = num_groups - group < num_prefetching ? lines : 0;
      const int64_t size = (num_rows - row + group - 1) / group;  // groups of about the same size
      const uint16_t* x = call.x + (first + row) * call.x_stride + pair * BFLOAT_PAIR;
      float* to = sums + row * CHANNELS;
      switch (size) {
#define ROWS(n)                                                                \
  case n:                                                                      \
    multiply_rows<n>(x, call.x_stride, from, count, fetched, ahead, to);       \
    break;
        ROWS(1)
        ROWS(2)
        ROWS(3)
        ROWS(4)
#if defined(__AVX512BF16__)
        ROWS(5)
        ROWS(6)
        ROWS(7)
#endif
      }
      row += size;
    }
  }
}

// Writes a row's sums of the channels from `first` on, with the bias, to `out`; adds: and with what `out` contains.
void finish(const BfloatMatrix& matrix, int64_t first, const float* sums, BFloat* out, bool adds) {
  const int64_t rest = matrix.num_outputs - first, count = rest < CHANNELS ? rest : CHANNELS;
  const float* bias = matrix.bias ? matrix.bias + first : nullptr;
  int64_t i = 0;
  for (; i + WIDTH <= count; i += WIDTH) {
    Floats y = load(sums + i);
    if (bias) y += load(bias + i);
    if (adds) y += load(out + i);
    store(out + i, y);
  }
  for (; i < count; ++i) {
    float y = sums[i];
    if (bias) y += bias[i];
    if (adds) y += wide(out[i]);
    narrow(y, out + i);
  }
}

// Calls task(first, num_rows) for all rows, at most GROUPS_ROWS at a time.
template <class Task>
inline void for_all_rows(int64_t num_rows, const Task& task) {
  for (int64_t row = 0; row < num_rows; row += GROUPS_ROWS) task(row, num_rows - row < GROUPS_ROWS ? num_rows - row : GROUPS_ROWS);
}

void multiply_block(const BfloatCall& call, int64_t block) {
  alignas(64) float sums[GROUPS_ROWS * CHANNELS];
  BFloat* out = reinterpret_cast<BFloat*>(call.out) + block * CHANNELS;
  for_all_rows(call.num_rows, [&](int64_t first, int64_t num_rows) {
    multiply_some(call, block, first, num_rows, sums);
    for (int64_t row = 0; row < num_rows; ++row)
      finish(call.matrix, block * CHANNELS, sums + row * CHANNELS, out + (first + row) * call.out_stride, call.adds);
  });
}

void multiply_gated_block(const BfloatCall& call, int64_t block) {
  alignas(64) float gate_sums[GROUPS_ROWS * CHANNELS], up_sums[GROUPS_ROWS * CHANNELS];
  const int64_t num_gates = call.matrix.num_outputs / 2, first_gate = block * CHANNELS;
  BFloat* out = reinterpret_cast<BFloat*>(call.out) + first_gate;
  for_all_rows(call.num_rows, [&](int64_t first, int64_t num_rows) {
    multiply_some(call, block, first, num_rows, gate_sums);
    multiply_some(call, num_gates / CHANNELS + block, first, num_rows, up_sums);
    for (int64_t row = 0; row < num_rows; ++row) {
      BFloat gates[CHANNELS], ups[CHANNELS];  // rounded, as between a product and a gate of their own
      finish(call.matrix, first_gate, gate_sums + row * CHANNELS, gates, false);
      finish(call.matrix, num_gates + first_gate, up_sums + row * CHANNELS, ups, false);
      for (int64_t i = 0; i < CHANNELS; i += WIDTH)
        store(out + (first + row) * call.out_stride + i, silu(load(gates + i)) * load(ups + i));
    }
  });
}

}  // namespace

extern const BfloatLevel SYMBOL(BFLOAT_, LEVEL);
const BfloatLevel SYMBOL(BFLOAT_, LEVEL) = {multiply_block, multiply_gated_block};
