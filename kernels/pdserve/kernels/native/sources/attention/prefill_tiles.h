// Products of attention in the tiles of AMX, with the layouts of `prefill_level.cpp`: N vectors of rows lie side by side, pairs of bfloat16
// numbers are words, and all tiles are whole.
#pragma once
#include "attention/paged_prefill.h"
#include "shared/tiles.h"
#include "shared/word_transpose.h"

namespace {

constexpr int64_t WHOLE_TILES[8] = {TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS, TILE_ROWS};
// Keys of a word.
constexpr int64_t PAIR_KEYS = 2;
static_assert(TILE_WORDS * 4 == TILE_BYTES);
// Words between the rows of `transposed`.
constexpr int64_t TRANSPOSED_STRIDE = TILE_KEYS / PAIR_KEYS;

template <int N>
inline void load_sums(const float* from) {
  _tile_loadd(0, from, N * WIDTH * 4);
  if (N > 1) _tile_loadd(1, from + WIDTH, N * WIDTH * 4);
  if (N > 2) _tile_loadd(2, from + 2 * WIDTH, N * WIDTH * 4);
}

template <int N>
inline void store_sums(float* to) {
  _tile_stored(0, to, N * WIDTH * 4);
  if (N > 1) _tile_stored(1, to + WIDTH, N * WIDTH * 4);
  if (N > 2) _tile_stored(2, to + 2 * WIDTH, N * WIDTH * 4);
}

// Adds to the sums of 16 keys or numbers: factors[16][num_words], `stride` words apart, times rows[num_words][N * WIDTH].
template <int N>
inline void add_products(const float* factors, int64_t stride, int64_t num_words, const float* rows) {
  constexpr int64_t LINE = N * WIDTH * 4;
  for (int64_t word = 0; word < num_words; word += TILE_WORDS) {
    const float* from = rows + word * N * WIDTH;
    _tile_loadd(6, factors + word, stride * 4);
    _tile_loadd(3, from, LINE);
    _tile_dpbf16ps(0, 6, 3);
    if (N > 1) {
      _tile_loadd(4, from + WIDTH, LINE);
      _tile_dpbf16ps(1, 6, 4);
    }
    if (N > 2) {
      _tile_loadd(5, from + 2 * WIDTH, LINE);
      _tile_dpbf16ps(2, 6, 5);
    }
  }
}

// scores[key][row] = scale * keys[key] queries[row]
template <int N>
OUTSIDE void score_in_tiles(
    const float* keys, int64_t key_stride, const float* queries, int64_t num_keys, int64_t num_words, float scale, float* scores) {
  for (int64_t key = 0; key < num_keys; key += TILE_ROWS) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    add_products<N>(keys + key * key_stride, key_stride, num_words, queries);
    store_sums<N>(scores + key * N * WIDTH);
  }
  for (int64_t at = 0; at < num_keys * N * WIDTH; at += WIDTH) store(scores + at, load(scores + at) * scale);
}

// transposed[number][pair] = values[pair][number], pairs of keys
inline void transpose_values(const float* values, int64_t num_keys, int64_t padded, float* transposed) {
  for (int64_t pair = 0; pair < num_keys / PAIR_KEYS; pair += 16)
    for (int64_t number = 0; number < padded; number += WORDS)
      transpose(reinterpret_cast<const uint32_t*>(values) + pair * padded + number, padded,
                reinterpret_cast<uint32_t*>(transposed) + number * TRANSPOSED_STRIDE + pair, TRANSPOSED_STRIDE);
}

// sums[number][row] = factors[row] * sums[number][row] + values[key][number] * weights[key][row], added over keys
template <int N>
OUTSIDE void add_values_in_tiles(
    const float* transposed, const float* weights, const float* factors, int64_t num_keys, int64_t padded, float* sums) {
  for (int64_t number = 0; number < padded; number += TILE_ROWS) {
    float* at = sums + number * N * WIDTH;
    for (int64_t place = 0; place < TILE_ROWS * N; ++place)
      store(at + place * WIDTH, load(at + place * WIDTH) * load(factors + place % N * WIDTH));
    load_sums<N>(at);
    add_products<N>(transposed + number * TRANSPOSED_STRIDE, TRANSPOSED_STRIDE, num_keys / PAIR_KEYS, weights);
    store_sums<N>(at);
  }
}

}  // namespace
