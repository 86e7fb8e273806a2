// Entry point of products with bfloat16 matrices: choose the level by the CPU, and spread blocks of channels over threads.
#include "linear/bfloat_rows.h"
#include "shared/levels.h"

DECLARE_TILED_LEVELS(BfloatLevel, BFLOAT_LEVEL);

namespace {

const BfloatLevel* const LEVELS[] = TILED_LEVELS(&BFLOAT_LEVEL);

// Bytes of the matrix below which a thread takes longer to wake than to multiply.
constexpr int64_t THREAD_BYTES = 1 << 17;

struct Work {
  const BfloatCall* call;
  const BfloatLevel* level;
};

void multiply_block(const Work& work, int64_t block) { work.level->multiply_block(*work.call, block); }

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_bfloat_call_size() { return sizeof(BfloatCall); }

// Writes `out`. level: index of `pdserve_level_name`.
PUBLIC void pdserve_multiply_bfloats(const BfloatCall* given, int64_t level) {
  const BfloatCall& call = *given;
  const int64_t num_blocks = num_channel_blocks(call.matrix);
  const Work work = {&call, LEVELS[level_index(level)]};
  const Threads threads = {call.num_threads, call.parallel};
  const int64_t worth = 2 * num_blocks * BFLOAT_CHANNELS * call.matrix.padded / THREAD_BYTES;
  threads.run_tasks<multiply_block>(work, num_blocks, worth);
}
}
