// Attention of rows of a prompt chunk, compiled once per instruction set (`build_library.py`): LEVEL is the level's symbol.
//
// A vector has one number of each of WIDTH rows: scores lie as [key][row], so softmax needs no sum across a vector, keys and values
// are read number by number as factors, and only queries are transposed. Scores are in units of log2(e), so that weights are powers of two.
// Only plain code, without the standard library: an inline function that two levels share would be linked once, in either
// instruction set.
#include "attention/paged_prefill.h"
#include "shared/level_vectors.h"
#include "shared/word_transpose.h"
#if defined(__AMX_BF16__)
#include "attention/prefill_tiles.h"
#endif

namespace {

// The sums of STEP keys or numbers and of LANES rows are in registers.
#if defined(__AVX512F__)
#define LANES 48
constexpr int STEP = 8;
#elif defined(__AVX2__)
#define LANES 16
constexpr int STEP = 4;
#else
#define LANES 16
constexpr int STEP = 2;
#endif
// Pairs of numbers are multiplied in the tiles of AMX, 16 pairs at a time.
#if defined(__AMX_BF16__)
constexpr bool HAS_TILES = true;
#else
constexpr bool HAS_TILES = false;
#endif
constexpr double LOG2_E = 1.4426950408889634;
constexpr float INFINITE = __builtin_inff();

// True: numbers are bfloat16 and multiplied in pairs, of which each is a word.
template <class Number>
constexpr bool AS_PAIRS =
#if defined(__AVX512BF16__)
    sizeof(Number) == 2;
#else
    false;
#endif

// 2^x for x <= 0, exactly 1 at 0. Relative error: 1e-7, or 1e-4 if `is_rough`. The polynomials were fitted to the least relative error.
template <bool IS_ROUGH>
inline Floats power_of_two(Floats x) {
#if defined(__AVX512F__)
  const Floats rest = _mm512_reduce_ps(x, 1);  // from 0 to 1; 0 for infinity
  Floats sum;
  if (IS_ROUGH) {
    sum = rest * 7.706704289e-2f + 2.276449897e-1f;
    sum = sum * rest + 6.951167871e-1f;
  } else {
    sum = rest * 1.867130087e-3f + 9.017030275e-3f;
    sum = sum * rest + 5.579991315e-2f;
    sum = sum * rest + 2.401644501e-1f;
    sum = sum * rest + 6.931513118e-1f;
  }
  return _mm512_scalef_ps(sum * rest + 1.0f, x);
#else
  const Ints tiny = x < all(-126.0f);
  x = larger(x, all(-126.0f)) + (x - x);  // NaN stays
  const Floats shifted = x + 12582912.0f, rest = x - (shifted - 12582912.0f);
  Floats sum = rest * 1.326472707e-3f + 9.671512649e-3f;
  sum = sum * rest + 5.550733744e-2f;
  sum = sum * rest + 2.402224209e-1f;
  sum = sum * rest + 6.931469776e-1f;
  sum = sum * rest + 1.0f;
  const Ints exponent = ((Ints)shifted + 127) << 23;
  return (Floats)((Ints)(sum * (Floats)exponent) & ~tiny);
#endif
}

// A task's part of `PrefillArguments.rooms`.
struct Room {
  // Numbers of a key and of a value, in whole vectors.
  int64_t padded, padded_values;
  float *queries, *sums, *maxima, *totals, *factors, *scores, *keys, *values, *transposed, *line;
  int32_t* positions;

  Room(float* at, int64_t head_dim, int64_t value_dim) : padded(padded_head(head_dim)), padded_values(padded_head(value_dim)) {
    const auto take = [&at](int64_t size) { return (at += size) - size; };
    queries = take(padded * TASK_ROWS);
    sums = take(padded_values * TASK_ROWS);
    maxima = take(TASK_ROWS);
    totals = take(TASK_ROWS);
    positions = reinterpret_cast<int32_t*>(take(TASK_ROWS));
    factors = take(MAX_LANES);
    scores = take(TILE_KEYS * MAX_LANES);
    keys = take(TILE_KEYS * key_stride());
    values = take(TILE_KEYS * padded_values);
    transposed = take(TILE_KEYS / 2 * padded_values);
    line = take(16 * padded);
  }
  // More than the numbers of a key: keys at multiples of a large power of two would share a few places of the CPU's cache.
  int64_t key_stride() const { return padded + 16; }
};

template <class Number>
inline void copy_numbers(const Number* from, int64_t count, float* to) {
  if (AS_PAIRS<Number>) {
    __builtin_memcpy(static_cast<void*>(to), from, count * sizeof(Number));
    if (count % 2) __builtin_memset(reinterpret_cast<char*>(to) + count * sizeof(Number), 0, sizeof(Number));
  } else {
    for (int64_t number = 0; number < count; ++number) to[number] = wide(from[number]);
  }
}

// ---- keys and values

// True if values are read in the copies of their keys.
template <class Number>
inline bool shares_rows(const PrefillArguments& call) {
  return !AS_PAIRS<Number> && call.value_offset == 0;
}

// Keys `start` to `start + count - 1`, zeros outside of [first, end). False for a block number outside the cache.
template <class Number>
OUTSIDE bool copy_tile(const PrefillArguments& call, int64_t chunk, int64_t head, int64_t start, int64_t count, int64_t first, int64_t end,
                       const Room& room) {
  const int64_t length = call.head_dim, num_values = call.value_dim, key_stride = room.key_stride();
  const int64_t size = call.num_planes * call.block_size * call.row_dim;
  const bool is_shared = shares_rows<Number>(call);
  const Number* layer = static_cast<const Number*>(call.kv_cache) + (head * call.num_layers + call.layer) * size;
  const int64_t* table = call.block_tables + chunk * call.table_stride;
  const uint16_t* before = nullptr;  // the values of the key before, the first of a pair
  for (int64_t key = 0; key < count; ++key) {
    const int64_t position = start + key;
    const Number* found = nullptr;
    if (position >= first && position < end) {
      // 32 bits: a division of 64 takes four times as long
      const uint32_t place = static_cast<uint32_t>(position), block_size = static_cast<uint32_t>(call.block_size);
      const int64_t block = table[place / block_size];
      if (block < 0 || block >= call.num_blocks) return false;
      found = layer + block * call.num_kv_heads * call.num_layers * size + place % block_size * call.row_dim;
    }
    float* to = room.keys + key * key_stride;
    if (found) {
      copy_numbers(found, length, to);
    } else {
      __builtin_memset(to, 0, length * sizeof(float));
    }
    if (is_shared) continue;
    if (!AS_PAIRS<Number>) {
      to = room.values + key * room.padded_values;
      if (found) copy_numbers(found + call.value_offset, num_values, to);
      const int64_t done = found ? num_values : 0;
      __builtin_memset(to + done, 0, (room.padded_values - done) * sizeof(float));
      continue;
    }
    const uint16_t* values = found ? reinterpret_cast<const uint16_t*>(found + call.value_offset) : nullptr;
    if (key % 2) {
      uint32_t* pairs = reinterpret_cast<uint32_t*>(room.values + key / 2 * room.padded_values);
      if (before && values) {
        for (int64_t number = 0; number < num_values; ++number)
          pairs[number] = before[number] | static_cast<uint32_t>(values[number]) << 16;
      } else {
        for (int64_t number = 0; number < num_values; ++number)
          pairs[number] = (before ? before[number] : 0u) | (values ? static_cast<uint32_t>(values[number]) << 16 : 0u);
      }
      for (int64_t number = num_values; number < room.padded_values; ++number) pairs[number] = 0;
    }
    before = values;
  }
  return true;
}

// ---- products: STEP factors and N vectors of rows per word

template <int N, bool PAIRS>
inline void add_products(const float* factors, int64_t stride, int64_t word_stride, int64_t num_words, const float* rows,
                         Floats (&sums)[STEP][N]) {
  for (int64_t word = 0; word < num_words; ++word) {
    Floats found[N];
    for (int part = 0; part < N; ++part) found[part] = load(rows + (word * N + part) * WIDTH);
    for (int step = 0; step < STEP; ++step) {
      const float factor = factors[step * stride + word * word_stride];
      for (int part = 0; part < N; ++part) {
#if defined(__AVX512BF16__)
        if (PAIRS) {
          sums[step][part] = _mm512_dpbf16_ps(sums[step][part], (__m512bh)found[part], (__m512bh)_mm512_set1_ps(factor));
          continue;
        }
#endif
        sums[step][part] += factor * found[part];
      }
    }
  }
}

// scores[key][row] = scale * keys[key] queries[row]
template <int N, bool PAIRS>
OUTSIDE void score(const Room& room, const float* queries, int64_t num_keys, int64_t num_words, float scale) {
  for (int64_t key = 0; key < num_keys; key += STEP) {
    Floats sums[STEP][N] = {};
    add_products<N, PAIRS>(room.keys + key * room.key_stride(), room.key_stride(), 1, num_words, queries, sums);
    for (int step = 0; step < STEP; ++step)
      for (int part = 0; part < N; ++part) store(room.scores + ((key + step) * N + part) * WIDTH, sums[step][part] * scale);
  }
}

// sums[number][row] = factors[row] * sums[number][row] + values[key][number] * weights[key][row], added over keys
template <int N, bool PAIRS>
OUTSIDE void add_values(const Room& room, const float* values, int64_t stride, int64_t num_keys, int64_t value_dim, float* sums) {
  for (int64_t number = 0; number < value_dim; number += STEP) {
    Floats found[STEP][N];
    float* at = sums + number * N * WIDTH;
    for (int step = 0; step < STEP; ++step)
      for (int part = 0; part < N; ++part)
        found[step][part] = load(at + (step * N + part) * WIDTH) * load(room.factors + part * WIDTH);
    add_products<N, PAIRS>(values + number, 1, stride, PAIRS ? num_keys / 2 : num_keys, room.scores, found);
    for (int step = 0; step < STEP; ++step)
      for (int part = 0; part < N; ++part) store(at + (step * N + part) * WIDTH, found[step][part]);
  }
}

// ---- softmax

// scores = cap * tanh(scores), with the cap in units of log2(e)
template <int N>
OUTSIDE void cap_scores(const Room& room, int64_t num_keys, float cap) {
  for (int64_t at = 0; at < num_keys * N * WIDTH; at += WIDTH) store(room.scores + at, cap * hyperbolic(load(room.scores + at)));
}

// Scores of keys that come after a row's position, or lie before its window or its chunk, become -inf.
template <int N>
OUTSIDE void hide(const PrefillArguments& call, const Room& room, const int32_t* positions, int64_t start, int64_t num_keys) {
  for (int part = 0; part < N; ++part) {
    Ints last, first;
    for (int lane = 0; lane < WIDTH; ++lane) {
      last[lane] = static_cast<int32_t>(positions[part * WIDTH + lane] - start);
      first[lane] = static_cast<int32_t>(first_visible(call, positions[part * WIDTH + lane]) - start);
    }
    for (int64_t key = 0; key < num_keys; ++key) {
      float* at = room.scores + (key * N + part) * WIDTH;
      const Ints number = static_cast<int32_t>(key) - Ints{}, hidden = (number > last) | (number < first);
      store(at, (Floats)(((Ints)load(at) & ~hidden) | ((Ints)all(-INFINITE) & hidden)));
    }
  }
}

// Words of two bfloat16 numbers.
inline Words as_pair(Floats one, Floats other) {
#if defined(__AVX512BF16__)
  const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m512i order = (__m512i)(lanes | (lanes + 16) << 16);
  return (Words)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(other, one));
#else
  return rounded(one) | rounded(other) << 16;
#endif
}

// Scores become weights, 2^(score - maximum), in pairs of keys if PAIRS. `factors` are what earlier sums are multiplied with, since
// their maximum was another.
template <int N, bool PAIRS>
OUTSIDE void weigh(const Room& room, int64_t num_keys, float* maxima, float* totals) {
  constexpr int64_t LINE = N * WIDTH;
  float* scores = room.scores;
  Floats highest[N], added[N];
  for (int part = 0; part < N; ++part) highest[part] = load(maxima + part * WIDTH);
  for (int64_t key = 0; key < num_keys; key += 2)
    for (int part = 0; part < N; ++part) {
      const float* at = scores + key * LINE + part * WIDTH;
      highest[part] = larger(highest[part], larger(load(at), load(at + LINE)));
    }
  for (int part = 0; part < N; ++part) {
    const Floats before = load(maxima + part * WIDTH);
    store(maxima + part * WIDTH, highest[part]);
    const Ints is_none = highest[part] == all(-INFINITE);
    highest[part] = (Floats)((Ints)highest[part] & ~is_none);  // 0 where no key was visible: no difference of infinities
    store(room.factors + part * WIDTH, power_of_two<false>(before - highest[part]));
    added[part] = Floats{};
  }
  for (int64_t key = 0; key < num_keys; key += 2)
    for (int part = 0; part < N; ++part) {
      float* at = scores + key * LINE + part * WIDTH;
      Floats one = power_of_two<PAIRS>(load(at) - highest[part]), other = power_of_two<PAIRS>(load(at + LINE) - highest[part]);
      if (PAIRS) {  // rounded before they are added, so that weights add up to 1
        const Words pair = as_pair(one, other);
        one = (Floats)(pair << 16);
        other = (Floats)(pair & 0xffff0000u);
        store(scores + key / 2 * LINE + part * WIDTH, (Floats)pair);
      } else {
        store(at, one);
        store(at + LINE, other);
      }
      added[part] += one;
      added[part] += other;
    }
  for (int part = 0; part < N; ++part) {
    float* total = totals + part * WIDTH;
    store(total, load(total) * load(room.factors + part * WIDTH) + added[part]);
  }
}

// ---- one task

template <class Number>
struct Task {
  const PrefillArguments& call;
  int64_t chunk, head, num_tokens, context, seq_len, num_words;
  // heads fill whole tiles
  bool in_tiles;
  // Keys of a product are a multiple of this.
  int64_t key_step;

  Task(const PrefillArguments& given, int64_t chunk, int64_t head)
      : call(given),
        chunk(chunk),
        head(head),
        num_tokens(chunk_tokens(given, chunk)),
        context(given.seq_lens[chunk] - num_tokens),
        seq_len(given.seq_lens[chunk]),
        num_words(AS_PAIRS<Number> ? (given.head_dim + 1) / 2 : given.head_dim),
        in_tiles(HAS_TILES && AS_PAIRS<Number> && given.head_dim % (2 * TILE_WORDS) == 0),
        key_step(in_tiles ? 2 * TILE_WORDS : STEP) {}

  // First key that is not read by a row, and by none before it.
  int64_t end_of(int64_t row) const { return call.is_causal ? context + row / call.group_size + 1 : seq_len; }

  int64_t token_of(int64_t row) const { return call.query_starts[chunk] + row / call.group_size; }

  int64_t head_of(int64_t row) const { return head * call.group_size + row % call.group_size; }

  // queries[word][lane] of the rows from `first` to `stop` - 1, and zeros in other lanes, with the position of the last row.
  void take_queries(const Room& room, int64_t first, int64_t stop, int64_t num_lanes, float* queries, int32_t* positions) const {
    const int64_t padded_words = (num_words + WORDS - 1) / WORDS * WORDS;
    for (int64_t lane = 0; lane < num_lanes; ++lane) {
      const int64_t row = first + lane < stop ? first + lane : stop - 1;
      positions[lane] = static_cast<int32_t>(end_of(row) - 1);
      float* line = room.line + lane % 16 * room.padded;
      const int64_t done = first + lane < stop ? num_words : 0;
      if (done) {
        const Number* q = static_cast<const Number*>(call.q) + token_of(row) * call.q_stride + head_of(row) * call.q_head_stride;
        copy_numbers(q, call.head_dim, line);
      }
      for (int64_t word = done; word < padded_words; ++word) line[word] = 0;
      if (lane % 16 == 15)
        for (int64_t word = 0; word < num_words; word += WORDS)
          transpose(reinterpret_cast<const uint32_t*>(room.line) + word, room.padded,
                    reinterpret_cast<uint32_t*>(queries) + word * num_lanes + lane - 15, num_lanes);
    }
  }

  Number* out_of(int64_t row) const {
    return static_cast<Number*>(call.out) + token_of(row) * call.out_stride + head_of(row) * call.value_dim;
  }

  // Writes results; with partial, which belongs to the row `first`, sums, maxima and totals.
  void write_rows(int64_t first, int64_t stop, int64_t num_lanes, const float* sums, const float* maxima, const float* totals,
                  float* partial) const {
    const int64_t length = call.value_dim;
    if (partial)
      for (int64_t row = 0; row < stop - first; ++row) {
        partial[row * (length + 2) + length] = maxima[row];
        partial[row * (length + 2) + length + 1] = totals[row];
      }
    alignas(64) uint32_t transposed[WORDS * 16];
    for (int64_t lane = 0; lane < num_lanes && first + lane < stop; lane += WORDS)
      for (int64_t number = 0; number < length; number += 16) {
        transpose(reinterpret_cast<const uint32_t*>(sums) + number * num_lanes + lane, num_lanes, transposed);
        for (int64_t row = first + lane; row < first + lane + WORDS && row < stop; ++row) {
          const float* from = reinterpret_cast<const float*>(transposed) + (row - first - lane) * 16;
          if (partial) {
            const int64_t count = number + 16 <= length ? 16 : length - number;
            __builtin_memcpy(partial + (row - first) * (length + 2) + number, from, count * sizeof(float));
            continue;
          }
          Number* to = out_of(row) + number;
          const float total = totals[row - first];
          if (number + 16 <= length) {
            for (int part = 0; part < 16; part += WIDTH) store(to + part, load(from + part) / total);
          } else {
            for (int64_t part = 0; part < length - number; ++part) narrow(from[part] / total, to + part);
          }
        }
      }
  }

  // Adds the keys of one tile to N vectors of rows, the first of which is `first` and the last `stop` - 1.
  template <int N>
  void add_tile(const Room& room, int64_t start, int64_t first, int64_t stop, const float* queries, const int32_t* positions,
                float* maxima, float* totals, float* sums) const {
    constexpr bool PAIRS = AS_PAIRS<Number>;
    const int64_t end = end_of(stop - 1), last_first = first_visible(call, end - 1);
    const int64_t visible = end - start < TILE_KEYS ? end - start : TILE_KEYS;
    if (visible <= 0 || start + TILE_KEYS <= first_visible(call, end_of(first) - 1)) return;
    const int64_t num_keys = (visible + key_step - 1) / key_step * key_step;
    const double scale = call.softcap > 0 ? call.scale / call.softcap : call.scale * LOG2_E;
#if defined(__AMX_BF16__)
    if (in_tiles) {
      score_in_tiles<N>(room.keys, room.key_stride(), queries, num_keys, num_words, static_cast<float>(scale), room.scores);
    } else
#endif
      score<N, PAIRS>(room, queries, num_keys, num_words, static_cast<float>(scale));
    if (call.softcap > 0) cap_scores<N>(room, num_keys, static_cast<float>(call.softcap * LOG2_E));
    if (start + num_keys > end_of(first) || start < last_first) hide<N>(call, room, positions, start, num_keys);
    weigh<N, PAIRS>(room, num_keys, maxima, totals);
#if defined(__AMX_BF16__)
    if (in_tiles) return add_values_in_tiles<N>(room.transposed, room.scores, room.factors, num_keys, room.padded_values, sums);
#endif
    const bool is_shared = shares_rows<Number>(call);
    add_values<N, PAIRS>(room, is_shared ? room.keys : room.values, is_shared ? room.key_stride() : room.padded_values, num_keys,
                         call.value_dim, sums);
  }

  // Rows from..until - 1, over the keys of [begin, stop_key) that they see. partial: null for results.
  bool attend(int64_t from, int64_t until, int64_t begin, int64_t stop_key, const Room& room, float* partial) const {
#if defined(__AMX_BF16__)
    Tiles tiles;
    if (in_tiles) tiles.shape(WHOLE_TILES);
#endif
    const int64_t last_end = end_of(until - 1), end = last_end < stop_key ? last_end : stop_key;
    const int64_t first_key = first_visible(call, end_of(from) - 1), first_tile = first_key / TILE_KEYS * TILE_KEYS;
    const int64_t num_lanes = lanes_of(from, until);
    for (int64_t lane = 0; lane < num_lanes; ++lane) {
      room.maxima[lane] = -INFINITE;
      room.totals[lane] = 0;
    }
    for (int64_t at = 0; at < num_lanes * room.padded_values; ++at) room.sums[at] = 0;
    for (int64_t row = from; row < until; row += LANES) {
      const int64_t stop = until < row + LANES ? until : row + LANES, lane = row - from;
      take_queries(room, row, stop, lanes_of(row, stop), room.queries + lane * room.padded, room.positions + lane);
    }
    for (int64_t start = first_tile < begin ? begin : first_tile; start < end; start += TILE_KEYS) {
      const int64_t rest = (end - start + key_step - 1) / key_step * key_step, count = rest < TILE_KEYS ? rest : TILE_KEYS;
      if (!copy_tile<Number>(call, chunk, head, start, count, first_key, end, room)) return false;
#if defined(__AMX_BF16__)
      if (in_tiles) transpose_values(room.values, count, room.padded_values, room.transposed);
#endif
      for (int64_t row = from; row < until; row += LANES) {
        const int64_t stop = until < row + LANES ? until : row + LANES, lane = row - from;
        float *queries = room.queries + lane * room.padded, *sums = room.sums + lane * room.padded_values;
        switch (lanes_of(row, stop)) {
#define LANES_OF(n)                                                                                                            \
  case n:                                                                                                                      \
    add_tile<n / WIDTH>(room, start, row, stop, queries, room.positions + lane, room.maxima + lane, room.totals + lane, sums); \
    break;
          LANES_OF(16)
#if LANES > 16
          LANES_OF(32)
          LANES_OF(48)
#endif
        }
      }
    }
    for (int64_t row = from; row < until; row += LANES) {
      const int64_t stop = until < row + LANES ? until : row + LANES, lane = row - from;
      write_rows(row, stop, lanes_of(row, stop), room.sums + lane * room.padded_values, room.maxima + lane, room.totals + lane,
                 partial ? partial + lane * (call.value_dim + 2) : nullptr);
    }
    return true;
  }

  // Lanes of the rows, in vectors of 16: queries are transposed 16 at a time.
  static int64_t lanes_of(int64_t row, int64_t stop) { return (stop - row + 15) / 16 * 16; }
};

constexpr int64_t ALL_KEYS = INT64_MAX;

inline int64_t partial_size(const PrefillArguments& call) { return MAX_LANES * (call.value_dim + 2); }

template <class Number>
bool attend_part(const PrefillArguments& call, int64_t chunk, int64_t number, float* room) {
  const TaskPlace at(call, chunk, number);
  const Task<Number> task(call, chunk, at.head);
  const int64_t num_rows = task.num_tokens * call.group_size, rows = task_rows(call), first = at.part * rows;
  const int64_t stop = num_rows < first + rows ? num_rows : first + rows;
  const Room its_room(room, call.head_dim, call.value_dim);
  if (call.piece_tokens <= 0) return task.attend(first, stop, 0, ALL_KEYS, its_room, nullptr);
  const int64_t begin = (first_visible(call, task.context) / call.piece_tokens + at.piece) * call.piece_tokens;
  float* partial = call.partials + (call.task_starts[chunk] + number) * partial_size(call);
  return task.attend(first, stop, begin, begin + call.piece_tokens, its_room, partial);
}

bool attend_rows(const PrefillArguments& call, int64_t chunk, int64_t number, float* room) {
  return call.dtype == FLOAT32 ? attend_part<float>(call, chunk, number, room) : attend_part<BFloat>(call, chunk, number, room);
}

template <class Number>
void join(const PrefillArguments& call, int64_t chunk, int64_t number) {
  const TaskPlace at(call, chunk, number);
  const Task<Number> task(call, chunk, at.head);
  const int64_t length = call.value_dim, count = num_pieces(call, chunk), stride = partial_size(call);
  const int64_t num_rows = task.num_tokens * call.group_size, rows = task_rows(call), first = at.part * rows;
  for (int64_t row = first; row < first + rows && row < num_rows; ++row) {
    float* partial = call.partials + (call.task_starts[chunk] + number) * stride + (row - first) * (length + 2);
    float highest = -INFINITE, total = 0;
    for (int64_t piece = 0; piece < count; ++piece) {
      const float maximum = partial[piece * stride + length];
      highest = maximum > highest ? maximum : highest;
    }
    for (int64_t piece = 0; piece < count; ++piece) {
      float* part = partial + piece * stride;
      part[length] = power_of_two<false>(all(part[length] - highest))[0];  // from here on the piece's weight
      total += part[length] * part[length + 1];
    }
    Number* to = task.out_of(row);
    for (int64_t from = 0; from < length; from += WIDTH) {
      Floats sums = {};
      for (int64_t piece = 0; piece < count; ++piece) {
        const float* part = partial + piece * stride;
        if (from + WIDTH <= length) {
          sums += part[length] * load(part + from);
        } else {
          for (int64_t lane = 0; lane < length - from; ++lane) sums[lane] += part[length] * part[from + lane];
        }
      }
      sums /= all(total);
      if (from + WIDTH <= length) {
        store(to + from, sums);
      } else {
        for (int64_t lane = 0; lane < length - from; ++lane) narrow(sums[lane], to + from + lane);
      }
    }
  }
}

void join_pieces(const PrefillArguments& call, int64_t chunk, int64_t number) {
  call.dtype == FLOAT32 ? join<float>(call, chunk, number) : join<BFloat>(call, chunk, number);
}

}  // namespace

extern const PrefillLevel SYMBOL(PREFILL_, LEVEL);
const PrefillLevel SYMBOL(PREFILL_, LEVEL) = {attend_rows, join_pieces};
