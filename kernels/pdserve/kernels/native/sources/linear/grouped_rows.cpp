// Entry point of products with matrices of grouped integers: choose the level by the CPU, and spread blocks of channels over threads.
#include "linear/grouped_rows.h"
#include "shared/levels.h"

DECLARE_LEVELS(GroupedLevel, GROUPED_LEVEL);

namespace {

const GroupedLevel* const LEVELS[] = ALL_LEVELS(&GROUPED_LEVEL);

// Weights times rows below which a thread takes longer to wake than to multiply.
constexpr int64_t THREAD_WEIGHTS = 1 << 17;

struct Work {
  const GroupedCall* call;
  const GroupedLevel* level;
};

void widen_row(const Work& work, int64_t row) { work.level->widen_row(*work.call, row); }

struct Widening {
  const GroupedCall* call;
  const GroupedWeights* weights;
  const GroupedLevel* level;
};

void widen_block(const Widening& work, int64_t block) { work.level->widen_block(*work.call, *work.weights, block); }

void multiply_block(const Work& work, int64_t block) { work.level->multiply_block(*work.call, block); }

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_grouped_call_size() { return sizeof(GroupedCall); }

// Writes `out`. level: index of `pdserve_level_name`.
PUBLIC void pdserve_multiply_grouped(const GroupedCall* given, int64_t level) {
  const GroupedCall& call = *given;
  const int64_t num_blocks = (call.num_outputs + GROUPED_CHANNELS - 1) / GROUPED_CHANNELS;
  const Work work = {&call, LEVELS[level_index(level)]};
  const Threads threads = {call.num_threads, call.parallel};
  threads.run_tasks<widen_row>(work, call.num_rows, call.num_rows * call.num_inputs / THREAD_WEIGHTS);
  const int64_t worth = num_blocks * GROUPED_CHANNELS * call.num_inputs * call.num_rows / THREAD_WEIGHTS;
  threads.run_tasks<multiply_block>(work, num_blocks, worth);
}

PUBLIC int64_t pdserve_grouped_weights_size() { return sizeof(GroupedWeights); }

// Writes the weights of some blocks. level: index of `pdserve_level_name`.
PUBLIC void pdserve_widen_grouped(const GroupedCall* given, const GroupedWeights* weights, int64_t level) {
  const Widening work = {given, weights, LEVELS[level_index(level)]};
  const Threads threads = {given->num_threads, given->parallel};
  threads.run_tasks<widen_block>(work, weights->num_blocks, weights->num_blocks);
}
}
