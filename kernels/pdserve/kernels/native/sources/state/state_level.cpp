// Steps of states, compiled once per instruction set (`build_library.py`): LEVEL is the level's symbol. Sums and products are float32;
// a row's bits depend on that row only.
#include "state/state_rows.h"

#include "shared/level_vectors.h"

namespace {

// ---- convolutions

// `y` as it is after a rounding to Number.
template <class Number>
inline Floats rounded_to(Floats y) {
  Number held[WIDTH];
  store(held, y);
  return load(held);
}

// KEPT: columns of a channel that are kept, 0 for any number.
template <class Number, int KEPT>
void convolve_channels(const ConvCall& call, const ConvRun& run, int64_t channel) {
  const StatePool& pool = call.pool;
  const int64_t left = run.num_channels - channel, num = left < CONV_CHANNELS ? left : CONV_CHANNELS;
  const int64_t first = run.first_channel + channel, kept = KEPT ? KEPT : call.taps - 1;
  // by tap, so that channels lie side by side; zeros after the last channel
  float weights[MAX_TAPS][CONV_CHANNELS] = {}, biases[CONV_CHANNELS] = {}, taps[MAX_TAPS][CONV_CHANNELS] = {};
  const Number* weight = static_cast<const Number*>(call.weight) + first * (kept + 1);
  const Number* bias = static_cast<const Number*>(call.bias);
  for (int64_t place = 0; run.has_out && place < num; ++place) {
    for (int64_t tap = 0; tap <= kept; ++tap) weights[tap][place] = wide(weight[place * (kept + 1) + tap]);
    if (bias) biases[place] = wide(bias[first + place]);
  }
  const int64_t head = (run.head * pool.num_layers + pool.layer) * pool.head_size + run.place + channel * kept;
  const int64_t block_size = pool.num_heads * pool.num_layers * pool.head_size;
  for (int64_t row = 0; row < pool.num_rows; ++row) {
    Number* out = static_cast<Number*>(call.out) + row * call.out_stride + first;
    if (pool.after[row] < 0) {
      for (int64_t place = 0; run.has_out && place < num; ++place) narrow(0.0f, out + place);
      continue;
    }
    const Number* columns = static_cast<const Number*>(call.columns) + row * call.columns_stride + first;
    float* after = pool.states + pool.after[row] * block_size + head;
    const bool is_new = pool.before[row] < 0;
    const float* before = is_new ? after : pool.states + pool.before[row] * block_size + head;
    for (int64_t place = 0; is_new && place < num * kept; ++place) after[place] = 0;
    if (run.has_out) {
      for (int64_t place = 0; place < num; ++place) {
        for (int64_t tap = 0; tap < kept; ++tap) taps[tap][place] = before[place * kept + tap];
        taps[kept][place] = wide(columns[place]);
      }
    }
    // one column further is the next number, but for a channel's last; the target may be where the source is
    int64_t moved = 0;
    for (; moved + WIDTH < num * kept; moved += WIDTH) store(after + moved, load(before + moved + 1));
    for (; moved + 1 < num * kept; ++moved) after[moved] = before[moved + 1];
    for (int64_t place = 0; place < num; ++place) after[place * kept + kept - 1] = wide(columns[place]);
    for (int64_t place = 0; run.has_out && place < num; place += WIDTH) {
      Floats sum = {};
      for (int64_t tap = 0; tap <= kept; ++tap) sum += load(weights[tap] + place) * load(taps[tap] + place);
      sum += load(biases + place);
      if (call.has_silu) sum = silu(rounded_to<Number>(sum));
      if (place + WIDTH <= num) {
        store(out + place, sum);
      } else {
        for (int64_t rest = place; rest < num; ++rest) narrow(sum[rest - place], out + rest);
      }
    }
  }
}

template <class Number>
void convolve_numbers(const ConvCall& call, const ConvRun& run, int64_t channel) {
  switch (call.taps) {
    case 3:
      return convolve_channels<Number, 2>(call, run, channel);
    case 4:
      return convolve_channels<Number, 3>(call, run, channel);
    default:
      return convolve_channels<Number, 0>(call, run, channel);
  }
}

void convolve(const ConvCall& call, const ConvRun& run, int64_t channel) {
  call.dtype == FLOAT32 ? convolve_numbers<float>(call, run, channel) : convolve_numbers<BFloat>(call, run, channel);
}

// ---- matrices

inline const float* input(const RuleCall& call, int which, int64_t row, int64_t matrix) {
  return call.inputs[which] + row * call.row_strides[which] + matrix * call.strides[which];
}

inline float exponential_of(float x) { return exponential(all(x))[0]; }

inline void fill_zeros(float* to, int64_t size) {
  for (int64_t place = 0; place < size; ++place) to[place] = 0;
}

// A row's factor in the sum that the update corrects.
template <bool BY_ROW>
inline float key_factor(const float* key, const float* decays, int64_t row) {
  return BY_ROW ? key[row] * decays[row] : key[row];
}

// The step of the gated delta rule for VECTORS * WIDTH columns of a matrix; `before` and `after` are their first numbers. decays: one,
// or BY_ROW one of each row.
template <int VECTORS, bool BY_ROW>
inline void delta_columns(const float* before, float* after, const float* query, const float* key, const float* value,
                          const float* decays, float beta, int64_t num_rows, int64_t stride, float* out) {
  Floats sums[2][VECTORS] = {};
  int64_t row = 0;
  for (; row + 2 <= num_rows; row += 2) {
    for (int part = 0; part < 2; ++part) {
      const float factor = key_factor<BY_ROW>(key, decays, row + part);
      for (int each = 0; each < VECTORS; ++each) sums[part][each] += factor * load(before + (row + part) * stride + each * WIDTH);
    }
  }
  for (; row < num_rows; ++row) {
    const float factor = key_factor<BY_ROW>(key, decays, row);
    for (int each = 0; each < VECTORS; ++each) sums[0][each] += factor * load(before + row * stride + each * WIDTH);
  }
  Floats update[VECTORS], found[VECTORS] = {};
  for (int each = 0; each < VECTORS; ++each) {
    const Floats sum = sums[0][each] + sums[1][each];
    update[each] = (load(value + each * WIDTH) - (BY_ROW ? sum : decays[0] * sum)) * beta;
  }
  for (row = 0; row < num_rows; ++row) {
    for (int each = 0; each < VECTORS; ++each) {
      const int64_t place = row * stride + each * WIDTH;
      const Floats changed = decays[BY_ROW ? row : 0] * load(before + place) + key[row] * update[each];
      store(after + place, changed);
      found[each] += query[row] * changed;
    }
  }
  for (int each = 0; each < VECTORS; ++each) store(out + each * WIDTH, found[each]);
}

template <bool BY_ROW>
void delta_matrix(const RuleCall& call, int64_t row, int64_t matrix, const float* before, float* after) {
  const int64_t num_rows = call.matrix_rows, num_columns = call.matrix_columns;
  const int64_t num_matrices = call.pool.num_heads * call.per_head;
  float* out = call.out + (row * num_matrices + matrix) * num_columns;
  if (!after) return fill_zeros(out, num_columns);
  if (!before) {
    fill_zeros(after, num_rows * num_columns);
    before = after;
  }
  const float *query = input(call, 0, row, matrix), *key = input(call, 1, row, matrix), *value = input(call, 2, row, matrix);
  const float *logarithms = input(call, 3, row, matrix), beta = *input(call, 4, row, matrix);
  float decays[BY_ROW ? MAX_DECAYS : 1];
  int64_t decay = 0;
  for (; decay + WIDTH <= call.num_decays; decay += WIDTH) store(decays + decay, exponential(load(logarithms + decay)));
  for (; decay < call.num_decays; ++decay) decays[decay] = exponential_of(logarithms[decay]);
  int64_t column = 0;
  for (; column + 4 * WIDTH <= num_columns; column += 4 * WIDTH) {
    delta_columns<4, BY_ROW>(before + column, after + column, query, key, value + column, decays, beta, num_rows, num_columns,
                             out + column);
  }
  for (; column + WIDTH <= num_columns; column += WIDTH) {
    delta_columns<1, BY_ROW>(before + column, after + column, query, key, value + column, decays, beta, num_rows, num_columns,
                             out + column);
  }
  for (; column < num_columns; ++column) {
    float sum = 0, found = 0;
    for (int64_t place = 0; place < num_rows; ++place) {
      sum += key_factor<BY_ROW>(key, decays, place) * before[place * num_columns + column];
    }
    const float update = (value[column] - (BY_ROW ? sum : decays[0] * sum)) * beta;
    for (int64_t place = 0; place < num_rows; ++place) {
      const float changed = decays[BY_ROW ? place : 0] * before[place * num_columns + column] + key[place] * update;
      after[place * num_columns + column] = changed;
      found += query[place] * changed;
    }
    out[column] = found;
  }
}

void delta(const RuleCall& call, int64_t row, int64_t matrix, const float* before, float* after) {
  (call.num_decays > 1 ? delta_matrix<true> : delta_matrix<false>)(call, row, matrix, before, after);
}

// From the numbers of a matrix that are changed to those that are asked for: without it loads wait behind stores.
constexpr int64_t AHEAD = 1024;

// The step of the selective scan for ROWS rows of a matrix. decay: of the matrix, or BY_ELEMENT what rates and steps make. ahead: as
// `AHEAD`.
template <int ROWS, bool BY_ELEMENT>
inline void scan_rows(const float* before, float* after, const float* x, const float* b, const float* c, float decay,
                      const float* rates, const float* steps, int64_t ahead, int64_t num_columns, float* out) {
  Floats sums[ROWS] = {};
  int64_t column = 0;
  for (; column + WIDTH <= num_columns; column += WIDTH) {
    const Floats added = load(b + column), read = load(c + column);
    for (int row = 0; row < ROWS; ++row) {
      const int64_t place = row * num_columns + column;
      __builtin_prefetch(before + place + ahead);
      const Floats kept = BY_ELEMENT ? exponential(steps[row] * load(rates + place)) : all(decay);
      const Floats changed = kept * load(before + place) + x[row] * added;
      store(after + place, changed);
      sums[row] += changed * read;
    }
  }
  for (int row = 0; row < ROWS; ++row) {
    float sum = 0;
    for (int lane = 0; lane < WIDTH; ++lane) sum += sums[row][lane];
    for (int64_t rest = column; rest < num_columns; ++rest) {
      const int64_t place = row * num_columns + rest;
      const float kept = BY_ELEMENT ? exponential_of(steps[row] * rates[place]) : decay;
      const float changed = kept * before[place] + x[row] * b[rest];
      after[place] = changed;
      sum += changed * c[rest];
    }
    out[row] = sum;
  }
}

template <bool BY_ELEMENT>
void scan_matrix(const RuleCall& call, int64_t row, int64_t matrix, const float* before, float* after) {
  const int64_t num_rows = call.matrix_rows, num_columns = call.matrix_columns;
  const int64_t num_matrices = call.pool.num_heads * call.per_head;
  float* out = call.out + (row * num_matrices + matrix) * num_rows;
  if (!after) return fill_zeros(out, num_rows);
  if (!before) {
    fill_zeros(after, num_rows * num_columns);
    before = after;
  }
  const float *x = input(call, 0, row, matrix), *b = input(call, 1, row, matrix), *c = input(call, 2, row, matrix);
  const float *rates = input(call, 3, row, matrix), *steps = input(call, 4, row, matrix);
  // matrices with decays of elements are small, and the next one is in the state of the next head
  const int64_t ahead = BY_ELEMENT ? call.pool.num_layers * call.pool.head_size : AHEAD;
  const float decay = BY_ELEMENT ? 0 : exponential_of(*steps * *rates);
  int64_t place = 0;
  for (; place + 4 <= num_rows; place += 4) {
    const int64_t skipped = place * num_columns;
    scan_rows<4, BY_ELEMENT>(before + skipped, after + skipped, x + place, b, c, decay, rates + skipped, steps + place, ahead,
                             num_columns, out + place);
  }
  for (; place < num_rows; ++place) {
    const int64_t skipped = place * num_columns;
    scan_rows<1, BY_ELEMENT>(before + skipped, after + skipped, x + place, b, c, decay, rates + skipped, steps + place, ahead,
                             num_columns, out + place);
  }
}

void scan(const RuleCall& call, int64_t row, int64_t matrix, const float* before, float* after) {
  (call.num_decays > 1 ? scan_matrix<true> : scan_matrix<false>)(call, row, matrix, before, after);
}

}  // namespace

extern const StateLevel SYMBOL(STATE_, LEVEL);
const StateLevel SYMBOL(STATE_, LEVEL) = {convolve, delta, scan};
