// Rows times one block of a bfloat16 matrix in the tiles of AMX, for `bfloat_level.cpp`: 32 rows and 32 channels at a time. The rate of
// the second cache is the limit: values come from there and do not displace the rows' tiles from the first one, which both halves of the
// channels use.
#pragma once
#include "linear/bfloat_rows.h"
#include "shared/tiles.h"

namespace {

// Rows that are multiplied at once, at most.
constexpr int64_t MOST_TILE_ROWS = 2 * TILE_ROWS;
// Bytes of the matrix of the inputs of one tile. The rows of its tiles are PAIR_BYTES apart.
constexpr int64_t STEP_BYTES = TILE_NUMBERS / BFLOAT_PAIR * PAIR_BYTES;
// Steps of half of the channels, at most, before the same of the other half: the rows' tiles stay in the first cache.
constexpr int64_t MOST_STEPS = 14;
// Cache lines of the next block that are prefetched per step, at most: more would delay the loads of this one.
constexpr int64_t MOST_LINES = 4;

// The factors of `add_tiles`. x: of num_rows <= MOST_TILE_ROWS rows, `stride` numbers apart; values: of num_steps * TILE_NUMBERS inputs
// and of all channels.
struct TileFactors {
  const uint16_t* x;
  int64_t stride, num_rows;
  const char* values;
  int64_t num_steps;
};

// The values of the next block, which all rows but the first MOST_TILE_ROWS prefetch into the second cache, a part each.
struct NextBlock {
  const char* line;
  int64_t per_step = 0;

  // group: of MOST_TILE_ROWS rows among num_groups; values: of the next block, num_steps steps of each of two halves of the channels
  NextBlock(int64_t group, int64_t num_groups, const char* values, int64_t num_steps) : line(values) {
    if (group == 0) return;
    const int64_t needed = (STEP_BYTES / CACHE_LINE / 2 + num_groups - 2) / (num_groups - 1);
    const int64_t lines = needed < MOST_LINES ? needed : MOST_LINES;
    line += (group - 1) * 2 * num_steps * lines * CACHE_LINE;
    if (line < values + num_steps * STEP_BYTES) per_step = lines;
  }

  void prefetch() {
    for (int64_t i = 0; i < per_step; ++i, line += CACHE_LINE) __builtin_prefetch(line, 0, 2);
  }
};

// Prefetches the values of a step that lie BFLOAT_AHEAD bytes after `values`.
inline void prefetch_step(const char* values) {
  for (int64_t byte = 0; byte < STEP_BYTES; byte += CACHE_LINE) __builtin_prefetch(values + BFLOAT_AHEAD + byte, 0, 3);
}

// Prefetches what half of the channels will need MOST_STEPS steps later.
inline void prefetch_half(const char* values) {
  for (int64_t pair = 0; pair < STEP_BYTES; pair += PAIR_BYTES)
    for (int64_t byte = 0; byte < PAIR_BYTES / 2; byte += CACHE_LINE)
      __builtin_prefetch(values + MOST_STEPS * STEP_BYTES + pair + byte, 0, 2);
}

// Registers 0 and 1 have the sums of 32 channels at `first`, 2 and 3 those at `second`; with `begins` all are zero.
inline void load_sums(const float* first, const float* second, bool begins) {
  if (begins) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    return;
  }
  _tile_loadd(0, first, BFLOAT_CHANNELS * 4);
  _tile_loadd(1, first + TILE_ROWS, BFLOAT_CHANNELS * 4);
  _tile_loadd(2, second, BFLOAT_CHANNELS * 4);
  _tile_loadd(3, second + TILE_ROWS, BFLOAT_CHANNELS * 4);
}

inline void store_sums(float* first, float* second) {
  _tile_stored(0, first, BFLOAT_CHANNELS * 4);
  _tile_stored(1, first + TILE_ROWS, BFLOAT_CHANNELS * 4);
  _tile_stored(2, second, BFLOAT_CHANNELS * 4);
  _tile_stored(3, second + TILE_ROWS, BFLOAT_CHANNELS * 4);
}

// Adds to sums[num_rows * CHANNELS] of at most 16 rows. begins: `sums` has no numbers yet. is_first: `values` may not be in a cache yet.
void add_one_tile(Tiles& tiles, const TileFactors& factors, bool begins, bool is_first, float* sums) {
  const int64_t rows = factors.num_rows;
  tiles.shape({rows, rows, rows, rows, rows, TILE_ROWS, TILE_ROWS, TILE_ROWS});
  load_sums(sums, sums + 2 * TILE_ROWS, begins);
  const char* values = factors.values;
  for (int64_t step = 0; step < factors.num_steps; ++step, values += STEP_BYTES) {
    if (is_first) prefetch_step(values);
    _tile_loadd(4, factors.x + step * TILE_NUMBERS, 2 * factors.stride);
    _tile_loadd(5, values, PAIR_BYTES);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, values + TILE_BYTES, PAIR_BYTES);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, values + 2 * TILE_BYTES, PAIR_BYTES);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, values + 3 * TILE_BYTES, PAIR_BYTES);
    _tile_dpbf16ps(3, 4, 5);
  }
  store_sums(sums, sums + 2 * TILE_ROWS);
}

// The same of 17 to 32 rows, half of the channels at a time, which is 0 or 1.
void add_half(const TileFactors& factors, int64_t half, bool begins, bool is_first, NextBlock& next, float* sums) {
  float* upper = sums + half * 2 * TILE_ROWS;
  float* lower = upper + TILE_ROWS * BFLOAT_CHANNELS;
  load_sums(upper, lower, begins);
  const char* values = factors.values + half * 2 * TILE_BYTES;
  for (int64_t step = 0; step < factors.num_steps; ++step, values += STEP_BYTES) {
    const uint16_t* x = factors.x + step * TILE_NUMBERS;
    if (is_first) prefetch_half(values);
    next.prefetch();
    _tile_loadd(4, x, 2 * factors.stride);
    _tile_stream_loadd(6, values, PAIR_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, x + TILE_ROWS * factors.stride, 2 * factors.stride);
    _tile_dpbf16ps(2, 5, 6);
    _tile_stream_loadd(7, values + TILE_BYTES, PAIR_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
  store_sums(upper, lower);
}

// The same of both halves.
void add_two_tiles(Tiles& tiles, const TileFactors& factors, bool begins, bool is_first, NextBlock& next, float* sums) {
  const int64_t rest = factors.num_rows - TILE_ROWS, all = factors.num_steps;
  tiles.shape({TILE_ROWS, TILE_ROWS, rest, rest, TILE_ROWS, rest, TILE_ROWS, TILE_ROWS});
  const int64_t num_pieces = (all + MOST_STEPS - 1) / MOST_STEPS, at_once = (all + num_pieces - 1) / num_pieces;
  for (int64_t step = 0; step < all; step += at_once) {
    TileFactors some = factors;
    some.x += step * TILE_NUMBERS;
    some.values += step * STEP_BYTES;
    some.num_steps = all - step < at_once ? all - step : at_once;
    for (int64_t half = 0; half < 2; ++half) add_half(some, half, begins && step == 0, is_first, next, sums);
  }
}

}  // namespace
