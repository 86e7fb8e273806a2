// Operations between matrix products, compiled once per instruction set (`build_library.py`): LEVEL is the level's symbol.
// Sums and products are float32 and are rounded once; a row's bits depend on that row only.
#include "layers/layer_rows.h"
#include "shared/level_vectors.h"

namespace {

template <class Number>
inline float factor_of(const Number* x, int64_t size, double eps) {
  Floats sums[2] = {};
  int64_t place = 0;
  for (; place + 2 * WIDTH <= size; place += 2 * WIDTH) {
    const Floats first = load(x + place), second = load(x + place + WIDTH);
    sums[0] += first * first;
    sums[1] += second * second;
  }
  float sum = 0;
  for (int lane = 0; lane < WIDTH; ++lane) sum += sums[0][lane] + sums[1][lane];
  for (; place < size; ++place) sum += wide(x[place]) * wide(x[place]);
  return 1.0f / __builtin_sqrtf(sum / static_cast<float>(size) + static_cast<float>(eps));
}

// x and out may be the same.
template <class Number, class Weight>
inline void normalise(const Number* x, const Weight* weight, Number* out, int64_t size, double eps) {
  const float factor = factor_of(x, size, eps);
  int64_t place = 0;
  for (; place + WIDTH <= size; place += WIDTH) store(out + place, load(x + place) * factor * load(weight + place));
  for (; place < size; ++place) narrow(wide(x[place]) * factor * wide(weight[place]), out + place);
}

template <class Number>
void norm_row(const LayerCall& call, int64_t row) {
  const Number* x = static_cast<const Number*>(call.x) + row * call.x_stride;
  Number* out = static_cast<Number*>(call.out) + row * call.out_stride;
  if (call.weight_dtype == call.dtype) {
    normalise(x, static_cast<const Number*>(call.weight), out, call.size, call.eps);
  } else {
    normalise(x, static_cast<const float*>(call.weight), out, call.size, call.eps);
  }
}

template <class Number>
void gate_row(const LayerCall& call, int64_t row) {
  const Number *gate = static_cast<const Number*>(call.x) + row * call.x_stride, *up = gate + call.size;
  Number* out = static_cast<Number*>(call.out) + row * call.out_stride;
  const int64_t size = call.size;
  int64_t place = 0;
  for (; place + WIDTH <= size; place += WIDTH) store(out + place, silu(load(gate + place)) * load(up + place));
  if (place < size) {
    float gates[WIDTH] = {}, ups[WIDTH] = {};
    for (int64_t rest = place; rest < size; ++rest) {
      gates[rest - place] = wide(gate[rest]);
      ups[rest - place] = wide(up[rest]);
    }
    const Floats found = silu(load(gates)) * load(ups);
    for (int64_t rest = place; rest < size; ++rest) narrow(found[rest - place], out + rest);
  }
}

// Neighbours share 64 bits, the first in the low half.
typedef uint64_t Pairs __attribute__((vector_size(4 * WIDTH)));
constexpr uint64_t LOW = 0xffffffff;

// Neighbours of a head, `size` numbers: (a, b) -> (a c - b s, a s + b c).
template <class Number>
inline void turn(Number* x, const float* phases, int64_t size) {
  int64_t place = 0;
  for (; place + WIDTH <= size; place += WIDTH) {
    const Floats values = load(x + place);
    const Pairs pairs = (Pairs)values, angles = (Pairs)load(phases + place);
    const Floats swapped = (Floats)((pairs >> 32) | (pairs << 32));
    const Floats cosines = (Floats)((angles & LOW) | (angles << 32));
    const Floats sines = (Floats)(((angles >> 32) | (angles & ~LOW)) ^ 0x80000000);  // minus in the low half
    store(x + place, values * cosines + swapped * sines);
  }
  for (; place < size; place += 2) {
    const float a = wide(x[place]), b = wide(x[place + 1]), cosine = phases[place], sine = phases[place + 1];
    narrow(a * cosine - b * sine, x + place);
    narrow(a * sine + b * cosine, x + place + 1);
  }
}

template <class Number, class Weight>
inline void rotate_heads(const LayerCall& call, int64_t row) {
  Number* x = static_cast<Number*>(call.x) + row * call.x_stride;
  const Weight* weight = static_cast<const Weight*>(call.weight);
  const float* phases = call.phases + row * call.size;
  for (int64_t head = 0; head < call.num_heads; ++head, x += call.size) {
    if (weight) normalise(x, weight + head * call.size, x, call.size, call.eps);
    turn(x, phases, call.size);
  }
}

template <class Number>
void rotate_row(const LayerCall& call, int64_t row) {
  call.weight_dtype == call.dtype ? rotate_heads<Number, Number>(call, row) : rotate_heads<Number, float>(call, row);
}

void norm(const LayerCall& call, int64_t row) {
  call.dtype == FLOAT32 ? norm_row<float>(call, row) : norm_row<BFloat>(call, row);
}

void gate(const LayerCall& call, int64_t row) {
  call.dtype == FLOAT32 ? gate_row<float>(call, row) : gate_row<BFloat>(call, row);
}

void rotate(const LayerCall& call, int64_t row) {
  call.dtype == FLOAT32 ? rotate_row<float>(call, row) : rotate_row<BFloat>(call, row);
}

}  // namespace

extern const LayerLevel SYMBOL(LAYER_, LEVEL);
const LayerLevel SYMBOL(LAYER_, LEVEL) = {norm, gate, rotate};
