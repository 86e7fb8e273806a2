// Entry points of attention of prompt chunks: choose the level by the CPU, and spread groups of rows over threads.
#include "attention/paged_prefill.h"
#include "shared/levels.h"

DECLARE_TILED_LEVELS(PrefillLevel, PREFILL_LEVEL);

namespace {

const PrefillLevel* const LEVELS[] = TILED_LEVELS(&PREFILL_LEVEL);

struct Work {
  const PrefillArguments* call;
  const PrefillLevel* level;
  int64_t next_task, next_room, is_bad;
};

// Tasks are taken from the last one on: with causal attention the last rows of a chunk take the longest.
void attend_tasks(void* data) {
  Work& work = *static_cast<Work*>(data);
  const PrefillArguments& call = *work.call;
  float* room = call.rooms + __atomic_fetch_add(&work.next_room, 1, __ATOMIC_RELAXED) * room_size(call.head_dim, call.value_dim);
  int64_t chunk = call.num_chunks - 1;
  for (;;) {
    const int64_t task = call.task_starts[call.num_chunks] - 1 - __atomic_fetch_add(&work.next_task, 1, __ATOMIC_RELAXED);
    if (task < 0) return;
    while (call.task_starts[chunk] > task) --chunk;
    if (!work.level->attend_rows(call, chunk, task - call.task_starts[chunk], room))
      __atomic_store_n(&work.is_bad, 1, __ATOMIC_RELAXED);
  }
}

void join_task(const Work& work, int64_t task) {
  const PrefillArguments& call = *work.call;
  int64_t chunk = 0;
  while (call.task_starts[chunk + 1] <= task) ++chunk;
  const int64_t number = task - call.task_starts[chunk];
  if (TaskPlace(call, chunk, number).piece == 0) work.level->join_pieces(call, chunk, number);
}

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_prefill_call_size() { return sizeof(PrefillArguments); }

// Floats of `rooms` for one thread.
PUBLIC int64_t pdserve_prefill_room(int64_t head_dim, int64_t value_dim) { return room_size(head_dim, value_dim); }

// Floats of `partials` for one task.
PUBLIC int64_t pdserve_prefill_partial(int64_t value_dim) { return MAX_LANES * (value_dim + 2); }

// Fills `task_starts`. Returns the number of tasks, or -1 - chunk for the first chunk with keys outside its table, or with a block
// number outside the cache.
PUBLIC int64_t pdserve_plan_prefill(const PrefillArguments* plan) {
  const PrefillArguments& call = *plan;
  int64_t total = 0;
  for (int64_t chunk = 0; chunk < call.num_chunks; ++chunk) {
    call.task_starts[chunk] = total;
    const int64_t num_tokens = chunk_tokens(call, chunk), length = call.seq_lens[chunk];
    if (num_tokens <= 0 || length <= 0) continue;
    const int64_t last_block = (length - 1) / call.block_size;
    if (num_tokens > length || last_block >= call.table_width) return -1 - chunk;
    const int64_t* table = call.block_tables + chunk * call.table_stride;
    for (int64_t column = first_visible(call, length - num_tokens) / call.block_size; column <= last_block; ++column)
      if (table[column] < 0 || table[column] >= call.num_blocks) return -1 - chunk;
    const int64_t rows = task_rows(call);
    total += (num_tokens * call.group_size + rows - 1) / rows * call.num_kv_heads * num_pieces(call, chunk);
  }
  call.task_starts[call.num_chunks] = total;
  return total;
}

// Writes `out`, but for padded sequences. level: index of `pdserve_level_name`. Returns 0, or 1 for a block number outside the cache.
PUBLIC int64_t pdserve_paged_prefill(const PrefillArguments* plan, int64_t level) {
  const PrefillArguments& call = *plan;
  Work work = {&call, LEVELS[level_index(level)], 0, 0, 0};
  const Threads threads = {call.num_threads, call.parallel};
  const int64_t num_tasks = call.task_starts[call.num_chunks];
  threads.run(attend_tasks, &work, num_tasks);
  if (call.piece_tokens > 0 && !work.is_bad) threads.run_tasks<join_task>(work, num_tasks, num_tasks / 4);
  return work.is_bad;
}
}
