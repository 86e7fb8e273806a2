// Rows times one block of a bfloat16 matrix, compiled once per instruction set (`build_library.py`): LEVEL is the level's symbol.
// A sum adds its inputs in their order, in float32, and is rounded once, or not at all: a row has the same bits in any number of rows.
#include "linear/bfloat_rows.h"
#include "shared/level_vectors.h"
#if defined(__AMX_BF16__)
#include "linear/bfloat_tiles.h"
#endif

namespace {

constexpr int64_t CHANNELS = BFLOAT_CHANNELS;
// Cache lines of a pair of inputs of all channels.
constexpr int64_t PAIR_LINES = PAIR_BYTES / CACHE_LINE;
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
// Rows of one of several groups, and of one only: its sums need not be kept between chunks.
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
  for (int64_t pair = 0; pair < num_pairs; ++pair, values += CHANNELS * BFLOAT_PAIR, ahead += LINES * CACHE_LINE) {
    Pairs loaded[VECTORS];
    for (int v = 0; v < VECTORS; ++v) loaded[v] = load_pairs(values + v * WIDTH * BFLOAT_PAIR);
    for (int line = 0; line < LINES; ++line) __builtin_prefetch(ahead + line * CACHE_LINE, 0, 3);
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
typedef Tiles Registers;
constexpr int64_t GROUP_ROWS = MOST_TILE_ROWS;
// Inputs of more bytes leave the second cache, which has 2 MiB, from block to block: to read them again takes longer than tiles do.
constexpr int64_t PART_BYTES = 768 << 10;
// Inputs of rows that stay in the first cache while both gates and ups are multiplied.
constexpr int64_t SHARED_INPUTS = MOST_STEPS * TILE_NUMBERS;
#else
struct Registers {};
// Rows that are multiplied at once, at most: more would leave the second cache.
constexpr int64_t GROUP_ROWS = 96;
constexpr int64_t PART_BYTES = INT64_MAX, SHARED_INPUTS = INT64_MAX;
#endif

// A block of channels, and inputs that are multiplied. `sums` are of those before `first`.
struct Part {
  int64_t block, first, end;
};

#if defined(__AMX_BF16__)
// As `multiply_some`, of the inputs that fill whole tiles. Returns their end.
int64_t multiply_in_tiles(Tiles& tiles, const BfloatCall& call, const Part& part, int64_t first, int64_t num_rows, float* sums) {
  const BfloatMatrix& matrix = call.matrix;
  const int64_t num_steps = (part.end - part.first) / TILE_NUMBERS;
  const char* values = reinterpret_cast<const char*>(matrix.values + (part.block * matrix.padded + part.first) * CHANNELS);
  const TileFactors factors = {call.x + first * call.x_stride + part.first, call.x_stride, num_rows, values, num_steps};
  if (num_steps > 0 && num_rows <= TILE_ROWS) {
    add_one_tile(tiles, factors, part.first == 0, first == 0, sums);
  } else if (num_steps > 0) {
    const int64_t num_groups = (call.num_rows + GROUP_ROWS - 1) / GROUP_ROWS;
    NextBlock next(first / GROUP_ROWS, num_groups, values + 2 * matrix.padded * CHANNELS, num_steps);
    add_two_tiles(tiles, factors, part.first == 0, first == 0, next, sums);
  }
  return part.first + num_steps * TILE_NUMBERS;
}
#endif

// Adds to sums[num_rows * CHANNELS] of the rows from `first` on.
void multiply_some(Registers& registers, const BfloatCall& call, const Part& part, int64_t first, int64_t num_rows, float* sums) {
  const BfloatMatrix& matrix = call.matrix;
  const uint16_t* values = matrix.values + part.block * matrix.padded * CHANNELS;
  int64_t begin = part.first;
#if defined(__AMX_BF16__)
  begin = multiply_in_tiles(registers, call, part, first, num_rows, sums);
#endif
  if (begin == 0) __builtin_memset(sums, 0, num_rows * CHANNELS * sizeof(float));
  const int64_t pairs = part.end / BFLOAT_PAIR;
  const int64_t num_groups = num_rows <= MAX_ALONE ? 1 : (num_rows + MAX_ROWS - 1) / MAX_ROWS;
  const bool is_few = num_groups <= FEW_GROUPS;
  const int64_t chunk = num_groups == 1 ? pairs : is_few ? FEW_CHUNK : MANY_CHUNK;
  const int64_t lines = (PAIR_LINES + num_groups - 1) / num_groups, num_prefetching = is_few ? num_groups : PAIR_LINES / lines;
  for (int64_t pair = begin / BFLOAT_PAIR; pair < pairs; pair += chunk) {
    const int64_t count = pairs - pair < chunk ? pairs - pair : chunk;
    const uint16_t* from = values + pair * CHANNELS * BFLOAT_PAIR;
    const char* ahead = reinterpret_cast<const char*>(from) + (num_groups == 1 ? BFLOAT_AHEAD : count * PAIR_BYTES);
    for (int64_t row = 0, group = num_groups; group > 0; --group, ahead += count * lines * CACHE_LINE) {
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
template <class Out>
void finish(const BfloatMatrix& matrix, int64_t first, const float* sums, Out* out, bool adds) {
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

// Calls task(first, num_rows) for all rows, at most GROUP_ROWS at a time.
template <class Task>
inline void for_all_rows(int64_t num_rows, const Task& task) {
  for (int64_t row = 0; row < num_rows; row += GROUP_ROWS) task(row, num_rows - row < GROUP_ROWS ? num_rows - row : GROUP_ROWS);
}

template <class Out>
void finish_rows_in(Out* out, const BfloatCall& call, int64_t block, int64_t first, int64_t num_rows, const float* sums) {
  out += block * CHANNELS;
  for (int64_t row = 0; row < num_rows; ++row)
    finish(call.matrix, block * CHANNELS, sums + row * CHANNELS, out + (first + row) * call.out_stride, call.adds);
}

// Writes the sums of rows to `float_out` or `out`.
void finish_rows(const BfloatCall& call, int64_t block, int64_t first, int64_t num_rows, const float* sums) {
  if (call.float_out) return finish_rows_in(call.float_out, call, block, first, num_rows, sums);
  finish_rows_in(reinterpret_cast<BFloat*>(call.out), call, block, first, num_rows, sums);
}

void multiply_block(const BfloatCall& call, int64_t block) {
  alignas(64) float sums[GROUP_ROWS * CHANNELS];
  const Part part = {block, 0, call.matrix.num_inputs};
  Registers registers;
  for_all_rows(call.num_rows, [&](int64_t first, int64_t num_rows) {
    multiply_some(registers, call, part, first, num_rows, sums);
    finish_rows(call, block, first, num_rows, sums);
  });
}

void multiply_part(const BfloatCall& call, const BfloatPart& given, int64_t block) {
  const Part part = {block, given.first_input, given.end_input};
  float* sums = given.sums + block * call.num_rows * CHANNELS;
  Registers registers;
  for_all_rows(call.num_rows, [&](int64_t first, int64_t num_rows) {
    float* of_rows = sums + first * CHANNELS;
    multiply_some(registers, call, part, first, num_rows, of_rows);
    if (part.end == call.matrix.num_inputs) finish_rows(call, block, first, num_rows, of_rows);
  });
}

void multiply_gated_block(const BfloatCall& call, int64_t block) {
  alignas(64) float gate_sums[GROUP_ROWS * CHANNELS], up_sums[GROUP_ROWS * CHANNELS];
  const int64_t num_gates = call.matrix.num_outputs / 2, first_gate = block * CHANNELS;
  const int64_t num_inputs = call.matrix.num_inputs;
  BFloat* out = reinterpret_cast<BFloat*>(call.out) + first_gate;
  Registers registers;
  for_all_rows(call.num_rows, [&](int64_t first, int64_t num_rows) {
    for (int64_t input = 0; input < num_inputs; input += SHARED_INPUTS) {
      const int64_t end = num_inputs - input > SHARED_INPUTS ? input + SHARED_INPUTS : num_inputs;
      multiply_some(registers, call, {block, input, end}, first, num_rows, gate_sums);
      multiply_some(registers, call, {num_gates / CHANNELS + block, input, end}, first, num_rows, up_sums);
    }
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
const BfloatLevel SYMBOL(BFLOAT_, LEVEL) = {multiply_block, multiply_gated_block, multiply_part, PART_BYTES};
