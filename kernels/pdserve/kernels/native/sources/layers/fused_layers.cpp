// A step through all layers in one call and one parallel region: the functions of `paged_decode.h`, `paged_prefill.h`,
// `layer_rows.h` and `bfloat_rows.h` in the order of a decoder layer, so that the result has the bits of calls one by one.
#include "layers/fused_layers.h"

#include "layers/layer_rows.h"
#include "shared/levels.h"

DECLARE_TILED_LEVELS(Level, LEVEL);
DECLARE_TILED_LEVELS(PrefillLevel, PREFILL_LEVEL);
DECLARE_LEVELS(LayerLevel, LAYER_LEVEL);
DECLARE_TILED_LEVELS(BfloatLevel, BFLOAT_LEVEL);

namespace {

const Level* const DECODE_LEVELS[] = TILED_LEVELS(&LEVEL);
const PrefillLevel* const PREFILL_LEVELS[] = TILED_LEVELS(&PREFILL_LEVEL);
const LayerLevel* const LAYER_LEVELS[] = ALL_LEVELS(&LAYER_LEVEL);
const BfloatLevel* const BFLOAT_LEVELS[] = TILED_LEVELS(&BFLOAT_LEVEL);

// Bytes of a layer's matrices below which a further thread waits longer at barriers than it multiplies.
constexpr int64_t THREAD_BYTES = 1 << 19;
// Inputs of a part of a product are a multiple of this.
constexpr int64_t PART_UNIT = 64;
// Parts into which a thread's share of a stage is cut, so that a thread that is late leaves work to the others.
constexpr int64_t PARTS = 16;

struct Work {
  const FusedCall* call;
  const Level* decode;
  const PrefillLevel* prefill;
  const LayerLevel* layer;
  const BfloatLevel* bfloat;
  int64_t num_threads;
  // of the stage that runs and of the one before it
  int64_t next_task[2];
  int64_t next_thread, is_bad;
};

// One thread's way through the stages; all threads pass the same stages in the same order.
struct Thread {
  Work& work;
  int64_t number;
  // the residual stream: all rows of the step, then those of the result
  uint16_t* residual;
  int64_t num_rows;
  int64_t stage;

  // Calls task(number) for each number below `num_tasks`, in one of the threads; ends when all have ended.
  template <class Task>
  void run(int64_t num_tasks, const Task& task) {
    if (work.num_threads == 1) {
      for (int64_t number = 0; number < num_tasks; ++number) task(number);
      return;
    }
    const int64_t parts = PARTS * work.num_threads, size = num_tasks < parts ? 1 : num_tasks / parts;
    int64_t* next = &work.next_task[stage % 2];
    // nobody has used the other counter since the last barrier
    __atomic_store_n(&work.next_task[(stage + 1) % 2], 0, __ATOMIC_RELAXED);
    for (;;) {
      const int64_t first = __atomic_fetch_add(next, size, __ATOMIC_RELAXED);
      if (first >= num_tasks) break;
      const int64_t end = first + size < num_tasks ? first + size : num_tasks;
      for (int64_t number = first; number < end; ++number) task(number);
    }
    work.call->barrier();
    ++stage;
  }
};

BfloatCall product(const Thread& thread, const BfloatMatrix& matrix, const uint16_t* x, uint16_t* out, int64_t out_size) {
  BfloatCall call = {};
  call.matrix = matrix;
  call.x = x;
  call.x_stride = matrix.num_inputs;
  call.out = out;
  call.out_stride = out_size;
  call.num_rows = thread.num_rows;
  return call;
}

// All blocks of channels, one by one.
void multiply_blocks(Thread& thread, const BfloatCall& call) {
  thread.run(num_channel_blocks(call.matrix), [&](int64_t block) { thread.work.bfloat->multiply_block(call, block); });
}

// The product in parts: all blocks of channels use the same inputs of rows, which stay in the second cache meanwhile.
void multiply_in_parts(Thread& thread, BfloatCall call) {
  const BfloatLevel& level = *thread.work.bfloat;
  const int64_t num_rows = call.num_rows, num_inputs = call.matrix.num_inputs;
  for (int64_t row = 0; row < num_rows; row += PART_ROWS) {
    call.num_rows = num_rows - row < PART_ROWS ? num_rows - row : PART_ROWS;
    const int64_t num_parts = (2 * call.num_rows * num_inputs + level.part_bytes - 1) / level.part_bytes;
    const int64_t size = (num_inputs / num_parts + PART_UNIT - 1) / PART_UNIT * PART_UNIT;
    for (int64_t input = 0; input < num_inputs; input += size) {
      const BfloatPart part = {input, num_inputs - input < size ? num_inputs : input + size, thread.work.call->sums};
      thread.run(num_channel_blocks(call.matrix), [&](int64_t block) { level.multiply_part(call, part, block); });
    }
    call.x += call.num_rows * call.x_stride;
    call.out += call.num_rows * call.out_stride;
  }
}

void multiply(Thread& thread, const BfloatMatrix& matrix, const uint16_t* x, uint16_t* out, int64_t adds) {
  BfloatCall call = product(thread, matrix, x, out, matrix.num_outputs);
  call.adds = adds;
  if (2 * call.num_rows * matrix.num_inputs > thread.work.bfloat->part_bytes) return multiply_in_parts(thread, call);
  multiply_blocks(thread, call);
}

void normalise(Thread& thread, const FusedNorm& norm) {
  const FusedCall& step = *thread.work.call;
  LayerCall call = {};
  call.x = thread.residual;
  call.out = step.x;
  call.x_stride = call.out_stride = call.size = step.hidden_size;
  call.weight = norm.weight;
  call.dtype = BFLOAT16;
  call.weight_dtype = norm.weight_dtype;
  call.num_heads = 1;
  call.eps = norm.eps;
  thread.run(thread.num_rows, [&](int64_t row) { thread.work.layer->norm(call, row); });
}

// Rotates queries and keys of a row, and writes keys and values to its slot. False for a slot outside the cache.
bool store(const DecodeArguments& pages, const uint16_t* row_of_qkv, int64_t slot, int64_t layer) {
  const int64_t size = pages.block_size * pages.head_dim, num_heads = pages.num_kv_heads;
  const int64_t block = slot / pages.block_size;
  if (slot < 0 || block >= pages.num_blocks) return false;
  const uint16_t* keys = row_of_qkv + num_heads * pages.group_size * pages.head_dim;
  // the interface of attention reads the cache; here this step's keys and values are written to it
  uint16_t* cache = static_cast<uint16_t*>(const_cast<void*>(pages.kv_cache));
  for (int64_t head = 0; head < num_heads; ++head) {
    uint16_t* to = cache + ((block * num_heads + head) * pages.num_layers + layer) * 2 * size + slot % pages.block_size * pages.head_dim;
    const uint16_t* key = keys + head * pages.head_dim;
    __builtin_memcpy(to, key, 2 * pages.head_dim);
    __builtin_memcpy(to + size, key + num_heads * pages.head_dim, 2 * pages.head_dim);
  }
  return true;
}

// Rotates queries and keys, and writes keys and values of all rows.
void rotate_and_store(Thread& thread, const FusedLayer& layer) {
  Work& work = thread.work;
  const FusedCall& step = *work.call;
  const DecodeArguments& pages = *step.decodes[layer.spec];
  LayerCall call = {};
  call.x = step.qkv;
  call.x_stride = layer.qkv.num_outputs;
  call.phases = step.phases[layer.rope];
  call.weight = layer.qk_norm.weight;
  call.dtype = BFLOAT16;
  call.weight_dtype = layer.qk_norm.weight_dtype;
  call.num_heads = pages.num_kv_heads * (pages.group_size + 1);
  call.size = pages.head_dim;
  call.eps = layer.qk_norm.eps;
  thread.run(step.num_rows, [&](int64_t row) {
    work.layer->rotate(call, row);
    if (!store(pages, step.qkv + row * call.x_stride, step.slots[layer.spec][row], layer.index))
      __atomic_store_n(&work.is_bad, 1, __ATOMIC_RELAXED);
  });
}

void attend_decodes(Thread& thread, const FusedLayer& layer) {
  Work& work = thread.work;
  DecodeArguments call = *work.call->decodes[layer.spec];
  if (!call.num_seqs) return;
  call.layer = layer.index;
  call.q = work.call->qkv;
  call.q_stride = layer.qkv.num_outputs;
  call.q_head_stride = call.head_dim;
  call.out = work.call->attended;
  const int64_t partial_size = call.group_size * (call.head_dim + 2), num_heads = call.num_kv_heads * call.group_size;
  thread.run(call.piece_starts[call.num_seqs] * call.num_kv_heads, [&](int64_t task) {
    const int64_t piece = task / call.num_kv_heads, head = task % call.num_kv_heads;
    int64_t row = 0;
    while (call.piece_starts[row + 1] <= piece) ++row;
    const int64_t number = first_key(call, row) / PIECE_TOKENS + piece - call.piece_starts[row];
    if (!work.decode->attend_piece(call, row, number, head, call.partials + task * partial_size))
      __atomic_store_n(&work.is_bad, 1, __ATOMIC_RELAXED);
  });
  // after a bad block number there may be pieces that nobody has written; their sums are of no use, and of no harm
  thread.run(call.num_seqs * num_heads, [&](int64_t task) { work.decode->join_pieces(call, task / num_heads, task % num_heads); });
}

void attend_chunks(Thread& thread, const FusedLayer& layer) {
  Work& work = thread.work;
  if (!work.call->chunks[layer.spec]) return;
  PrefillArguments call = *work.call->chunks[layer.spec];
  call.layer = layer.index;
  call.q = work.call->qkv;
  call.q_stride = layer.qkv.num_outputs;
  call.q_head_stride = call.head_dim;
  call.out = work.call->attended;
  call.out_stride = call.num_kv_heads * call.group_size * call.value_dim;
  float* room = call.rooms + thread.number * room_size(call.head_dim, call.value_dim);
  const int64_t num_tasks = call.task_starts[call.num_chunks];
  thread.run(num_tasks, [&](int64_t number) {
    const int64_t task = num_tasks - 1 - number;  // the last rows of a chunk take the longest
    int64_t chunk = 0;
    while (call.task_starts[chunk + 1] <= task) ++chunk;
    if (!work.prefill->attend_rows(call, chunk, task - call.task_starts[chunk], room))
      __atomic_store_n(&work.is_bad, 1, __ATOMIC_RELAXED);
  });
}

// Goes on with the rows of the result only. Returns their attention.
uint16_t* choose_rows(Thread& thread, int64_t size) {
  const FusedCall& step = *thread.work.call;
  // queries are no longer needed
  thread.run(step.num_outputs, [&](int64_t number) {
    const int64_t row = step.output_rows[number], hidden = step.hidden_size;
    __builtin_memcpy(step.chosen + number * hidden, step.residual + row * hidden, 2 * hidden);
    __builtin_memcpy(step.qkv + number * size, step.attended + row * size, 2 * size);
  });
  thread.residual = step.chosen;
  thread.num_rows = step.num_outputs;
  return step.qkv;
}

// step.inner = silu(gate) * up
void multiply_gated(Thread& thread, const FusedLayer& layer) {
  const FusedCall& step = *thread.work.call;
  const int64_t inner_size = layer.gate_up.num_outputs / 2;
  if (layer.is_gated) {
    const BfloatCall call = product(thread, layer.gate_up, step.x, step.inner, inner_size);
    thread.run(inner_size / BFLOAT_CHANNELS, [&](int64_t block) { thread.work.bfloat->multiply_gated_block(call, block); });
    return;
  }
  // so many outputs have too many sums for parts
  multiply_blocks(thread, product(thread, layer.gate_up, step.x, step.gate_up, layer.gate_up.num_outputs));
  LayerCall call = {};
  call.x = step.gate_up;
  call.x_stride = 2 * inner_size;
  call.out = step.inner;
  call.out_stride = call.size = inner_size;
  call.dtype = BFLOAT16;
  call.num_heads = 2;
  thread.run(thread.num_rows, [&](int64_t row) { thread.work.layer->gate(call, row); });
}

void run_layers(void* data) {
  Work& work = *static_cast<Work*>(data);
  const FusedCall& step = *work.call;
  const int64_t number = __atomic_fetch_add(&work.next_thread, 1, __ATOMIC_RELAXED);
  Thread thread = {work, number, step.residual, step.num_rows, 0};
  for (int64_t index = 0; index < step.num_layers; ++index) {
    const FusedLayer& layer = step.layers[index];
    const bool is_chosen = step.num_outputs >= 0 && index + 1 == step.num_layers;
    uint16_t* attended = step.attended;
    multiply(thread, layer.qkv, step.x, step.qkv, 0);
    rotate_and_store(thread, layer);
    if (is_chosen && !step.num_outputs) return;
    attend_decodes(thread, layer);
    attend_chunks(thread, layer);
    if (is_chosen) attended = choose_rows(thread, layer.output.num_inputs);
    multiply(thread, layer.output, attended, thread.residual, 1);
    normalise(thread, layer.mlp_norm);
    multiply_gated(thread, layer);
    multiply(thread, layer.down, step.inner, thread.residual, 1);
    normalise(thread, layer.next_norm);
  }
}

int64_t bytes_of(const BfloatMatrix& matrix) { return 2 * matrix.num_inputs * matrix.num_outputs; }

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_fused_layer_size() { return sizeof(FusedLayer); }
PUBLIC int64_t pdserve_fused_call_size() { return sizeof(FusedCall); }

// Rows for which `FusedCall.sums` needs room, of a step of `num_rows`.
PUBLIC int64_t pdserve_fused_sum_rows(int64_t num_rows) { return num_rows < PART_ROWS ? num_rows : PART_ROWS; }

// Writes keys and values of the step, `residual` and `x`. level: index of `pdserve_level_name`. Returns 0, or 1 for a slot or a block
// number outside its cache.
PUBLIC int64_t pdserve_fused_layers(const FusedCall* given, int64_t level) {
  const FusedCall& call = *given;
  const FusedLayer& first = call.layers[0];
  const int64_t bytes = bytes_of(first.qkv) + bytes_of(first.output) + bytes_of(first.gate_up) + bytes_of(first.down);
  const int64_t worth = bytes / THREAD_BYTES + 1;
  int64_t num_threads = worth < call.num_threads ? worth : call.num_threads;
  if (!call.parallel || !call.barrier || num_threads < 1) num_threads = 1;
  const int chosen = level_index(level);
  Work work = {given, DECODE_LEVELS[chosen], PREFILL_LEVELS[chosen], LAYER_LEVELS[chosen], BFLOAT_LEVELS[chosen], num_threads, {0, 0}, 0, 0};
  if (num_threads > 1) {
    call.parallel(run_layers, &work, static_cast<unsigned>(num_threads), 0);
  } else {
    run_layers(&work);
  }
  return work.is_bad;
}
}
