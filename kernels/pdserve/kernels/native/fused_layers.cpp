// A decode step through all layers in one call and one parallel region: the functions of `paged_decode.h`, `layer_rows.h` and
// `bfloat_rows.h` in the order of a decoder layer, so that the result has the bits of calls one by one.
#include "fused_layers.h"

#include "layer_rows.h"
#include "levels.h"

extern const Level LEVEL_BASELINE;
extern const LayerLevel LAYER_LEVEL_BASELINE;
extern const BfloatLevel BFLOAT_LEVEL_BASELINE;
#ifdef HAS_X86_LEVELS
extern const Level LEVEL_AVX2, LEVEL_AVX512, LEVEL_AVX512_BF16;
extern const LayerLevel LAYER_LEVEL_AVX2, LAYER_LEVEL_AVX512, LAYER_LEVEL_AVX512_BF16;
extern const BfloatLevel BFLOAT_LEVEL_AVX2, BFLOAT_LEVEL_AVX512, BFLOAT_LEVEL_AVX512_BF16;
#endif

namespace {

const Level* const ATTENTION_LEVELS[] = ALL_LEVELS(&LEVEL);
const LayerLevel* const LAYER_LEVELS[] = ALL_LEVELS(&LAYER_LEVEL);
const BfloatLevel* const BFLOAT_LEVELS[] = ALL_LEVELS(&BFLOAT_LEVEL);

// Bytes of a layer's matrices below which a further thread waits longer at barriers than it multiplies.
constexpr int64_t THREAD_BYTES = 1 << 19;
// Parts into which a thread's share of a stage is cut, so that a thread that is late leaves work to the others.
constexpr int64_t PARTS = 4;

struct Work {
  const FusedCall* call;
  const Level* attention;
  const LayerLevel* layer;
  const BfloatLevel* bfloat;
  int64_t num_threads;
  // of the stage that runs and of the one before it
  int64_t next_task[2];
  int64_t is_bad;
};

// One thread's way through the stages; all threads pass the same stages in the same order.
struct Thread {
  Work& work;
  int64_t stage;

  // Calls task(number) for each number below `num_tasks`, in one of the threads; ends when all have ended.
  template <class Task>
  void run(int64_t num_tasks, const Task& task) {
    if (work.num_threads == 1) {
      for (int64_t number = 0; number < num_tasks; ++number) task(number);
      return;
    }
    const int64_t size = num_tasks / (PARTS * work.num_threads) + 1;
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

void multiply(Thread& thread, const BfloatMatrix& matrix, const uint16_t* x, uint16_t* out, int64_t adds) {
  BfloatCall call = {};
  call.matrix = matrix;
  call.x = x;
  call.x_stride = matrix.num_inputs;
  call.out = out;
  call.out_stride = matrix.num_outputs;
  call.num_rows = thread.work.call->num_rows;
  call.adds = adds;
  thread.run(num_channel_blocks(matrix), [&](int64_t block) { thread.work.bfloat->multiply_block(call, block); });
}

void normalise(Thread& thread, const FusedNorm& norm) {
  const FusedCall& step = *thread.work.call;
  LayerCall call = {};
  call.x = step.residual;
  call.out = step.x;
  call.x_stride = call.out_stride = call.size = step.hidden_size;
  call.weight = norm.weight;
  call.dtype = BFLOAT16;
  call.weight_dtype = norm.weight_dtype;
  call.num_heads = 1;
  call.eps = norm.eps;
  thread.run(step.num_rows, [&](int64_t row) { thread.work.layer->norm(call, row); });
}

// Rotates queries and keys of a row, and writes keys and values to its slot. False for a slot outside the cache.
bool store(const DecodeCall& pages, const uint16_t* row_of_qkv, int64_t slot, int64_t layer) {
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

void attend(Thread& thread, const FusedLayer& layer) {
  Work& work = thread.work;
  const FusedCall& step = *work.call;
  const DecodeCall& pages = *step.attention[layer.spec];
  const int64_t num_query_heads = pages.num_kv_heads * pages.group_size;

  LayerCall rotation = {};
  rotation.x = step.qkv;
  rotation.x_stride = (num_query_heads + 2 * pages.num_kv_heads) * pages.head_dim;
  rotation.phases = step.phases[layer.rope];
  rotation.weight = layer.qk_norm.weight;
  rotation.dtype = BFLOAT16;
  rotation.weight_dtype = layer.qk_norm.weight_dtype;
  rotation.num_heads = num_query_heads + pages.num_kv_heads;
  rotation.size = pages.head_dim;
  rotation.eps = layer.qk_norm.eps;
  thread.run(step.num_rows, [&](int64_t row) {
    work.layer->rotate(rotation, row);
    if (!store(pages, step.qkv + row * rotation.x_stride, step.slots[layer.spec][row], layer.index))
      __atomic_store_n(&work.is_bad, 1, __ATOMIC_RELAXED);
  });

  DecodeCall call = pages;
  call.layer = layer.index;
  call.q = step.qkv;
  call.q_stride = rotation.x_stride;
  call.q_head_stride = call.head_dim;
  call.out = step.attended;
  const int64_t partial_size = call.group_size * (call.head_dim + 2);
  thread.run(call.piece_starts[call.num_seqs] * call.num_kv_heads, [&](int64_t task) {
    const int64_t piece = task / call.num_kv_heads, head = task % call.num_kv_heads;
    int64_t row = 0;
    while (call.piece_starts[row + 1] <= piece) ++row;
    const int64_t number = first_key(call, row) / PIECE_TOKENS + piece - call.piece_starts[row];
    if (!work.attention->attend_piece(call, row, number, head, call.partials + task * partial_size))
      __atomic_store_n(&work.is_bad, 1, __ATOMIC_RELAXED);
  });
  // after a bad block number there may be pieces that nobody has written; their sums are of no use, and of no harm
  thread.run(step.num_rows * num_query_heads, [&](int64_t task) {
    work.attention->join_pieces(call, task / num_query_heads, task % num_query_heads);
  });
}

void gate(Thread& thread, int64_t inner_size) {
  const FusedCall& step = *thread.work.call;
  LayerCall call = {};
  call.x = step.gate_up;
  call.x_stride = 2 * inner_size;
  call.out = step.inner;
  call.out_stride = call.size = inner_size;
  call.dtype = BFLOAT16;
  call.num_heads = 2;
  thread.run(step.num_rows, [&](int64_t row) { thread.work.layer->gate(call, row); });
}

void run_layers(void* data) {
  Work& work = *static_cast<Work*>(data);
  const FusedCall& step = *work.call;
  Thread thread = {work, 0};
  for (int64_t index = 0; index < step.num_layers; ++index) {
    const FusedLayer& layer = step.layers[index];
    multiply(thread, layer.qkv, step.x, step.qkv, 0);
    attend(thread, layer);
    multiply(thread, layer.output, step.attended, step.residual, 1);
    normalise(thread, layer.mlp_norm);
    multiply(thread, layer.gate_up, step.x, step.gate_up, 0);
    gate(thread, layer.down.num_inputs);
    multiply(thread, layer.down, step.inner, step.residual, 1);
    normalise(thread, layer.next_norm);
  }
}

int64_t bytes_of(const BfloatMatrix& matrix) { return 2 * matrix.num_inputs * matrix.num_outputs; }

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_fused_layer_size() { return sizeof(FusedLayer); }
PUBLIC int64_t pdserve_fused_call_size() { return sizeof(FusedCall); }

// Writes keys and values of the step, `residual` and `x`. level: index of `pdserve_level_name`. Returns 0, or 1 for a slot or a block
// number outside its cache.
PUBLIC int64_t pdserve_fused_layers(const FusedCall* given, int64_t level) {
  const FusedCall& call = *given;
  int found[NUM_LEVELS];
  find_levels(found);
  const FusedLayer& first = call.layers[0];
  const int64_t bytes = bytes_of(first.qkv) + bytes_of(first.output) + bytes_of(first.gate_up) + bytes_of(first.down);
  const int64_t worth = bytes / THREAD_BYTES + 1;
  int64_t num_threads = worth < call.num_threads ? worth : call.num_threads;
  if (!call.parallel || !call.barrier || num_threads < 1) num_threads = 1;
  const int chosen = found[level];
  Work work = {given, ATTENTION_LEVELS[chosen], LAYER_LEVELS[chosen], BFLOAT_LEVELS[chosen], num_threads, {0, 0}, 0};
  if (num_threads > 1) {
    call.parallel(run_layers, &work, static_cast<unsigned>(num_threads), 0);
  } else {
    run_layers(&work);
  }
  return work.is_bad;
}
}
