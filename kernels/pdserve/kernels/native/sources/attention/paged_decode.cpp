// Entry points of attention: choose the level by the CPU, cut the rows into pieces, and spread pieces over threads.
#include "attention/paged_decode.h"
#include "shared/levels.h"

DECLARE_TILED_LEVELS(Level, LEVEL);

namespace {

const Level* const LEVELS[] = TILED_LEVELS(&LEVEL);

struct Work {
  const DecodeArguments* call;
  const Level* level;
  int64_t next_piece, is_bad;
};

int64_t partial_size(const DecodeArguments& call) { return call.group_size * (call.head_dim + 2); }

void attend_pieces(void* data) {
  Work& work = *static_cast<Work*>(data);
  const DecodeArguments& call = *work.call;
  const int64_t total = call.piece_starts[call.num_seqs] * call.num_kv_heads;
  int64_t row = 0;
  for (;;) {
    const int64_t task = __atomic_fetch_add(&work.next_piece, 1, __ATOMIC_RELAXED);
    if (task >= total) return;
    const int64_t piece = task / call.num_kv_heads, head = task % call.num_kv_heads;
    while (call.piece_starts[row + 1] <= piece) ++row;
    const int64_t number = first_key(call, row) / PIECE_TOKENS + piece - call.piece_starts[row];
    if (!work.level->attend_piece(call, row, number, head, call.partials + task * partial_size(call)))
      __atomic_store_n(&work.is_bad, 1, __ATOMIC_RELAXED);
  }
}

void join_row(const Work& work, int64_t task) {
  const int64_t num_heads = work.call->num_kv_heads * work.call->group_size;
  work.level->join_pieces(*work.call, task / num_heads, task % num_heads);
}

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_call_size() { return sizeof(DecodeArguments); }

// Name of the level at `index` of those that this CPU has, the fastest first; null after the last.
PUBLIC const char* pdserve_level_name(int64_t index) {
  int found[NUM_LEVELS];
  return index >= 0 && index < find_levels(found) ? LEVELS[found[index]]->name : nullptr;
}

// Fills `piece_starts`. Returns the number of pieces, or -1 - row for the first row with keys outside its table, or with a
// block number outside the cache.
PUBLIC int64_t pdserve_plan_decode(const DecodeArguments* plan) {
  const DecodeArguments& call = *plan;
  int64_t total = 0;
  for (int64_t row = 0; row < call.num_seqs; ++row) {
    call.piece_starts[row] = total;
    const int64_t length = call.seq_lens[row];
    if (length <= 0) continue;
    const int64_t first = first_key(call, row), last_block = (length - 1) / call.block_size;
    if (last_block >= call.table_width) return -1 - row;
    const int64_t* table = call.block_tables + row * call.table_stride;
    for (int64_t column = first / call.block_size; column <= last_block; ++column)
      if (table[column] < 0 || table[column] >= call.num_blocks) return -1 - row;
    total += (length - 1) / PIECE_TOKENS - first / PIECE_TOKENS + 1;
  }
  call.piece_starts[call.num_seqs] = total;
  return total;
}

// Writes `out`. level: index of `pdserve_level_name`. Returns 0, or 1 for a block number outside the cache.
PUBLIC int64_t pdserve_paged_decode(const DecodeArguments* plan, int64_t level) {
  const DecodeArguments& call = *plan;
  Work work = {&call, LEVELS[level_index(level)], 0, 0};
  const Threads threads = {call.num_threads, call.parallel};
  threads.run(attend_pieces, &work, call.piece_starts[call.num_seqs] * call.num_kv_heads);
  const int64_t num_heads = call.num_seqs * call.num_kv_heads * call.group_size;
  if (!work.is_bad) threads.run_tasks<join_row>(work, num_heads, num_heads / 32);
  return work.is_bad;
}
}
