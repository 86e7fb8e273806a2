// Attention of one piece of keys, compiled once per instruction set (`build_library.py`): LEVEL is the level's symbol.
// Only plain code, without the standard library: an inline function that two levels share would be linked once, in either
// instruction set.
#include "attention/paged_decode.h"
#include "shared/level_vectors.h"
#include "shared/word_transpose.h"

#if defined(__AVX512F__)
#define GROUP 8
#define CHUNK 32
#elif defined(__AVX2__)
#define GROUP 4
#define CHUNK 16
#else
#define GROUP 2
#define CHUNK 16
#endif

namespace {

// Keys of a tile; numbers of a head are padded to multiples of PAD.
constexpr int TILE = 16, PAD = 32, MAX_HEAD = 512, VECTORS = TILE / WIDTH;

inline float largest(Floats values) {
  float found = values[0];
  for (int lane = 1; lane < WIDTH; ++lane) found = values[lane] > found ? values[lane] : found;
  return found;
}

// ---- tiles of 16 keys

// 16 rows of keys or values, `stride` numbers apart.
template <class Number>
struct Tile {
  const Number* rows;
  int64_t stride;
};

template <class Number>
struct Pages {
  const DecodeArguments& call;
  const Number* layer;
  const int64_t* table;
  int64_t block_stride, values, padded, first, end;
  bool is_direct;

  Pages(const DecodeArguments& given, int64_t row, int64_t head)
      : call(given),
        layer(static_cast<const Number*>(given.kv_cache) +
              (head * given.num_layers + given.layer) * 2 * given.block_size * given.head_dim),
        table(given.block_tables + row * given.table_stride),
        block_stride(given.num_kv_heads * given.num_layers * 2 * given.block_size * given.head_dim),
        values(given.block_size * given.head_dim),
        padded((given.head_dim + PAD - 1) / PAD * PAD),
        first(first_key(given, row)),
        end(given.seq_lens[row]),
        is_direct(given.block_size % TILE == 0 && given.head_dim % PAD == 0) {}

  // Address of a key; null for a block number outside the cache.
  const Number* key(int64_t position) const {
    // 32 bits: a division of 64 takes four times as long
    const uint32_t place = static_cast<uint32_t>(position), size = static_cast<uint32_t>(call.block_size);
    const int64_t block = table[place / size];
    if (block < 0 || block >= call.num_blocks) return nullptr;
    return layer + block * block_stride + place % size * call.head_dim;
  }

  // Keys from `start` on, or values if offset is `values`, in place if all 16 lie there; else copied to `room`, where rows that
  // nobody may look at are zeros. False for a block number outside the cache.
  bool find(int64_t start, int64_t offset, Number* room, Tile<Number>& tile) const {
    if (is_direct && start >= first && start + TILE <= end) {
      const Number* found = key(start);
      tile = {found + offset, call.head_dim};
      return found;
    }
    return copy(start, offset, room, tile);
  }

  OUTSIDE bool copy(int64_t start, int64_t offset, Number* room, Tile<Number>& tile) const {
    tile = {room, padded};
    for (int64_t position = start; position < start + TILE; ++position, room += padded) {
      int64_t length = 0;
      if (position >= first && position < end) {
        const Number* found = key(position);
        if (!found) return false;
        length = call.head_dim;
        __builtin_memcpy(room, found + offset, length * sizeof(Number));
      }
      __builtin_memset(static_cast<void*>(room + length), 0, (padded - length) * sizeof(Number));
    }
    return true;
  }

  // Ask for a tile that comes later: the next block's address is in no pattern that hardware could find. Always inlined: a function
  // that does nothing else has no result and no effect, and calls of it are removed.
  __attribute__((always_inline)) void prefetch(int64_t start, int64_t offset) const {
    if (!is_direct || start < first || start >= end) return;
    const Number* found = key(start);
    if (!found) return;
    const char* at = reinterpret_cast<const char*>(found + offset);
    const int64_t bytes = TILE * call.head_dim * static_cast<int64_t>(sizeof(Number));
    for (int64_t byte = 0; byte < bytes; byte += 256) {
      __builtin_prefetch(at + byte, 0, 3);
      __builtin_prefetch(at + byte + 64, 0, 3);
      __builtin_prefetch(at + byte + 128, 0, 3);
      __builtin_prefetch(at + byte + 192, 0, 3);
    }
  }
};

OUTSIDE void transpose_tile(const uint32_t* rows, int64_t stride, int64_t num_words, uint32_t* to) {
  for (int64_t word = 0; word < num_words; word += WORDS) transpose(rows + word, stride, to + word * TILE);
}

// ---- scores of a tile: keys[word][16], transposed; scores of query row g at scores[g * PIECE_TOKENS]

template <int N>
inline void tile_scores(const uint32_t* keys, const float* q, int64_t padded, float* scores, float) {
  Floats sums[N][VECTORS] = {};
  for (int64_t word = 0; word < padded; ++word)
    for (int part = 0; part < VECTORS; ++part) {
      const Floats key = load(reinterpret_cast<const float*>(keys + word * TILE + part * WIDTH));
      for (int g = 0; g < N; ++g) sums[g][part] += q[g * padded + word] * key;
    }
  for (int g = 0; g < N; ++g)
    for (int part = 0; part < VECTORS; ++part) store(scores + g * PIECE_TOKENS + part * WIDTH, sums[g][part]);
}

#if defined(__AVX512BF16__)
#define HAS_BFLOAT_PRODUCTS
#define PAIRS(number) ((__m512bh)_mm512_set1_epi32(static_cast<int>(number)))
// q: pairs of bfloat16 numbers, in words
template <int N>
inline void tile_scores(const uint32_t* keys, const float* q, int64_t padded, float* scores, BFloat) {
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(q);
  __m512 sums[N];
  for (int g = 0; g < N; ++g) sums[g] = _mm512_setzero_ps();
  for (int64_t word = 0; word < padded / 2; ++word) {
    const __m512bh key = (__m512bh)_mm512_load_si512(keys + word * TILE);
    for (int g = 0; g < N; ++g) sums[g] = _mm512_dpbf16_ps(sums[g], key, PAIRS(pairs[g * padded + word]));
  }
  for (int g = 0; g < N; ++g) _mm512_storeu_ps(scores + g * PIECE_TOKENS, sums[g]);
}
#else
template <int N>
inline void tile_scores(const uint32_t* keys, const float* q, int64_t padded, float* scores, BFloat) {
  Floats sums[N][VECTORS] = {};
  for (int64_t word = 0; word < padded / 2; ++word)
    for (int part = 0; part < VECTORS; ++part) {
      const Words pair = *reinterpret_cast<const LooseWords*>(keys + word * TILE + part * WIDTH);
      const Floats even = (Floats)(pair << 16), odd = (Floats)(pair & 0xffff0000u);
      for (int g = 0; g < N; ++g) {
        sums[g][part] += q[g * padded + 2 * word] * even;
        sums[g][part] += q[g * padded + 2 * word + 1] * odd;
      }
    }
  for (int g = 0; g < N; ++g)
    for (int part = 0; part < VECTORS; ++part) store(scores + g * PIECE_TOKENS + part * WIDTH, sums[g][part]);
}
#endif

// ---- weights and values of a tile: sums[g * padded ..] += weights[g][key] * values[key]

template <int N, class Number>
inline void tile_values(const Tile<Number>& tile, const float* weights, int64_t padded, float* sums) {
  for (int64_t chunk = 0; chunk < padded; chunk += CHUNK) {
    Floats found[N][CHUNK / WIDTH];
    for (int g = 0; g < N; ++g)
      for (int part = 0; part < CHUNK / WIDTH; ++part) found[g][part] = load(sums + g * padded + chunk + part * WIDTH);
    for (int key = 0; key < TILE; ++key)
      for (int part = 0; part < CHUNK / WIDTH; ++part) {
        const Floats value = load(tile.rows + key * tile.stride + chunk + part * WIDTH);
        for (int g = 0; g < N; ++g) found[g][part] += weights[g * PIECE_TOKENS + key] * value;
      }
    for (int g = 0; g < N; ++g)
      for (int part = 0; part < CHUNK / WIDTH; ++part) store(sums + g * padded + chunk + part * WIDTH, found[g][part]);
  }
}

template <int N>
inline void add_values(const Tile<float>& tile, const float* weights, int64_t padded, float* sums) {
  tile_values<N>(tile, weights, padded, sums);
}

#ifdef HAS_BFLOAT_PRODUCTS
// weights: pairs of bfloat16 numbers in words, at weights[g * PIECE_TOKENS / 2]. Sums of 32 numbers lie in the order of
// `ordered`.
template <int N>
inline void add_values(const Tile<BFloat>& tile, const float* weights, int64_t padded, float* sums) {
  const uint32_t* pairs = reinterpret_cast<const uint32_t*>(weights);
  for (int64_t chunk = 0; chunk < padded; chunk += 32) {
    __m512 low[N], high[N];
    for (int g = 0; g < N; ++g) {
      low[g] = _mm512_loadu_ps(sums + g * padded + chunk);
      high[g] = _mm512_loadu_ps(sums + g * padded + chunk + 16);
    }
    for (int key = 0; key < TILE; key += 2) {
      const BFloat* at = tile.rows + key * tile.stride + chunk;
      const __m512i one = _mm512_loadu_si512(at), other = _mm512_loadu_si512(at + tile.stride);
      const __m512bh lows = (__m512bh)_mm512_unpacklo_epi16(one, other);
      const __m512bh highs = (__m512bh)_mm512_unpackhi_epi16(one, other);
      for (int g = 0; g < N; ++g) {
        const __m512bh weight = PAIRS(pairs[g * PIECE_TOKENS + key / 2]);
        low[g] = _mm512_dpbf16_ps(low[g], lows, weight);
        high[g] = _mm512_dpbf16_ps(high[g], highs, weight);
      }
    }
    for (int g = 0; g < N; ++g) {
      _mm512_storeu_ps(sums + g * padded + chunk, low[g]);
      _mm512_storeu_ps(sums + g * padded + chunk + 16, high[g]);
    }
  }
}
inline int64_t place(int64_t number) {
  const int64_t within = number % 32;
  return number - within + within / 8 * 4 + within % 4 + (within % 8 >= 4 ? 16 : 0);
}
#else
template <int N>
inline void add_values(const Tile<BFloat>& tile, const float* weights, int64_t padded, float* sums) {
  tile_values<N>(tile, weights, padded, sums);
}
#endif

// ---- one piece

// Scores become weights, exp(score - maximum) -> maximum and sum. Scores outside of [first, end) have no weight.
OUTSIDE void weigh(const DecodeArguments& call, float* scores, int64_t num_keys, int64_t first, int64_t end, bool as_pairs,
                  float* maximum, float* total) {
  const float scale = static_cast<float>(call.scale), cap = static_cast<float>(call.softcap);
  Floats highest = all(-__builtin_inff());
  for (int64_t key = 0; key < num_keys; key += WIDTH) {
    Floats score = load(scores + key) * scale;
    if (cap > 0) score = cap * hyperbolic(score / cap);
    for (int lane = 0; lane < WIDTH; ++lane)
      if ((key < first && key + lane < first) || (key + WIDTH > end && key + lane >= end)) score[lane] = -__builtin_inff();
    store(scores + key, score);
    highest = larger(highest, score);
  }
  *maximum = largest(highest);
  const Floats border = all(*maximum == -__builtin_inff() ? 0.0f : *maximum);
  Floats sums = {};
  for (int64_t key = 0; key < num_keys; key += WIDTH) {
    Floats weight = exponential(load(scores + key) - border);
    if (as_pairs) {  // rounded before they are added, so that weights add up to 1
      const Words half = rounded(weight);
      weight = (Floats)(half << 16);
      *reinterpret_cast<LooseHalves*>(reinterpret_cast<uint16_t*>(scores) + key) = __builtin_convertvector(half, Halves);
    } else {
      store(scores + key, weight);
    }
    sums += weight;
  }
  *total = 0;
  for (int lane = 0; lane < WIDTH; ++lane) *total += sums[lane];
}

// Query rows g..g + N - 1 of a KV head.
template <int N, class Number>
bool attend_rows(const Pages<Number>& pages, int64_t row, int64_t piece, int64_t query_head, float* partial) {
  constexpr int64_t AHEAD = 3 * TILE;
  const DecodeArguments& call = pages.call;
  const int64_t length = call.head_dim, padded = pages.padded;
  const int64_t from = piece * PIECE_TOKENS, until = pages.end < from + PIECE_TOKENS ? pages.end : from + PIECE_TOKENS;
  const int64_t start = pages.first > from ? pages.first / TILE * TILE : from;
#ifdef HAS_BFLOAT_PRODUCTS
  constexpr bool as_pairs = sizeof(Number) == 2;
#else
  constexpr bool as_pairs = false;
#endif
  alignas(64) float q[N * MAX_HEAD], scores[N * PIECE_TOKENS], sums[N * MAX_HEAD];
  alignas(64) uint32_t keys[MAX_HEAD * TILE];
  alignas(64) Number room[TILE * MAX_HEAD];

  for (int g = 0; g < N; ++g) {
    const Number* from_q = static_cast<const Number*>(call.q) + row * call.q_stride + (query_head + g) * call.q_head_stride;
    for (int64_t number = 0; number < padded; ++number) {
      sums[g * padded + number] = 0;
      const Number value = number < length ? from_q[number] : Number();
      if (as_pairs) {
        reinterpret_cast<Number*>(q + g * padded)[number] = value;
      } else {
        q[g * padded + number] = wide(value);
      }
    }
  }
  const int64_t num_words = padded * static_cast<int64_t>(sizeof(Number)) / 4;
  Tile<Number> tile;
  for (int64_t position = start; position < until; position += TILE) {
    const int64_t later = position + AHEAD;
    pages.prefetch(later < until ? later : start + later - until, later < until ? 0 : pages.values);
    if (!pages.find(position, 0, room, tile)) return false;
    const int64_t stride = tile.stride * static_cast<int64_t>(sizeof(Number)) / 4;
    transpose_tile(reinterpret_cast<const uint32_t*>(tile.rows), stride, num_words, keys);
    tile_scores<N>(keys, q, padded, scores + position - start, Number());
  }
  const int64_t num_keys = (until - start + TILE - 1) / TILE * TILE;
  for (int g = 0; g < N; ++g)
    weigh(call, scores + g * PIECE_TOKENS, num_keys, pages.first - start, until - start, as_pairs,
          partial + g * (length + 2) + length, partial + g * (length + 2) + length + 1);
  for (int64_t position = start; position < until; position += TILE) {
    if (position + AHEAD < until) pages.prefetch(position + AHEAD, pages.values);
    if (!pages.find(position, pages.values, room, tile)) return false;
    add_values<N>(tile, as_pairs ? scores + (position - start) / 2 : scores + position - start, padded, sums);
  }
  for (int g = 0; g < N; ++g)
    for (int64_t number = 0; number < length; ++number) {
#ifdef HAS_BFLOAT_PRODUCTS
      partial[g * (length + 2) + number] = sums[g * padded + (as_pairs ? place(number) : number)];
#else
      partial[g * (length + 2) + number] = sums[g * padded + number];
#endif
    }
  return true;
}

template <class Number>
bool attend_group(const DecodeArguments& call, int64_t row, int64_t piece, int64_t head, float* partial) {
  const Pages<Number> pages(call, row, head);
  for (int64_t done = 0; done < call.group_size;) {
    const int64_t rest = call.group_size - done, query_head = head * call.group_size + done;
    float* to = partial + done * (call.head_dim + 2);
    bool is_good = false;
    switch (rest < GROUP ? rest : GROUP) {
#define ROWS(n)                                                       \
  case n:                                                             \
    is_good = attend_rows<n>(pages, row, piece, query_head, to);      \
    done += n;                                                        \
    break;
      ROWS(1)
      ROWS(2)
#if GROUP > 2
      ROWS(3)
      ROWS(4)
#endif
#if GROUP > 4
      ROWS(5)
      ROWS(6)
      ROWS(7)
      ROWS(8)
#endif
    }
    if (!is_good) return false;
  }
  return true;
}

bool attend_piece(const DecodeArguments& call, int64_t row, int64_t piece, int64_t head, float* partial) {
  return call.dtype == FLOAT32 ? attend_group<float>(call, row, piece, head, partial)
                               : attend_group<BFloat>(call, row, piece, head, partial);
}

template <class Number>
void join(const DecodeArguments& call, int64_t row, int64_t query_head) {
  const int64_t length = call.head_dim, first = call.piece_starts[row], end = call.piece_starts[row + 1];
  const int64_t head = query_head / call.group_size, size = length + 2;
  const float* partial = call.partials + ((first * call.num_kv_heads + head) * call.group_size + query_head % call.group_size) * size;
  const int64_t stride = call.num_kv_heads * call.group_size * size;
  Number* out = static_cast<Number*>(call.out) + (row * call.num_kv_heads * call.group_size + query_head) * length;
  float highest = -__builtin_inff(), total = 0;
  float sums[MAX_HEAD];
  for (int64_t number = 0; number < length; ++number) sums[number] = 0;
  for (int64_t piece = first; piece < end; ++piece) {
    const float maximum = partial[(piece - first) * stride + length];
    highest = maximum > highest ? maximum : highest;
  }
  for (int64_t piece = first; piece < end; ++piece) {
    const float* part = partial + (piece - first) * stride;
    const float weight = exponential(all(part[length] - highest))[0];
    total += weight * part[length + 1];
    for (int64_t number = 0; number < length; ++number) sums[number] += weight * part[number];
  }
  for (int64_t number = 0; number < length; ++number) narrow(first < end ? sums[number] / total : 0.0f, out + number);
}

void join_pieces(const DecodeArguments& call, int64_t row, int64_t query_head) {
  call.dtype == FLOAT32 ? join<float>(call, row, query_head) : join<BFloat>(call, row, query_head);
}

}  // namespace

extern const Level LEVEL;
const Level LEVEL = {NAME(LEVEL_NAME), attend_piece, join_pieces};
