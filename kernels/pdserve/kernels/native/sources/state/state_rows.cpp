// Entry points of steps of states: choose the level by the CPU, and spread channels and matrices over threads.
#include "state/state_rows.h"

#include "shared/levels.h"

DECLARE_LEVELS(StateLevel, STATE_LEVEL);

namespace {

const StateLevel* const LEVELS[] = ALL_LEVELS(&STATE_LEVEL);

// Numbers of states below which a thread takes longer to wake than to compute.
constexpr int64_t THREAD_NUMBERS = 1 << 14;

struct ConvWork {
  const ConvCall* call;
  const StateLevel* level;
  int64_t most_parts;
};

void convolve_part(const ConvWork& work, int64_t task) {
  const ConvRun& run = work.call->runs[task / work.most_parts];
  const int64_t channel = task % work.most_parts * CONV_CHANNELS;
  if (channel < run.num_channels) work.level->convolve(*work.call, run, channel);
}

struct RuleWork {
  const RuleCall* call;
  void (*change)(const RuleCall& call, int64_t row, int64_t matrix, const float* before, float* after);
};

void change_matrix(const RuleWork& work, int64_t task) {
  const RuleCall& call = *work.call;
  const StatePool& pool = call.pool;
  const int64_t num_matrices = pool.num_heads * call.per_head, row = task / num_matrices, matrix = task % num_matrices;
  const int64_t head = matrix / call.per_head, size = call.matrix_rows * call.matrix_columns;
  const int64_t place = (head * pool.num_layers + pool.layer) * pool.head_size + call.first + matrix % call.per_head * size;
  const int64_t block_size = pool.num_heads * pool.num_layers * pool.head_size;
  const int64_t before = pool.before[row], after = pool.after[row];
  work.change(call, row, matrix, before < 0 ? nullptr : pool.states + before * block_size + place,
              after < 0 ? nullptr : pool.states + after * block_size + place);
}

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_conv_call_size() { return sizeof(ConvCall); }
PUBLIC int64_t pdserve_rule_call_size() { return sizeof(RuleCall); }

// Writes `out` and the columns after the step. level: index of `pdserve_level_name`.
PUBLIC void pdserve_convolve_states(const ConvCall* given, int64_t level) {
  const ConvCall& call = *given;
  int64_t most_channels = 0;
  for (int64_t run = 0; run < call.num_runs; ++run) {
    if (call.runs[run].num_channels > most_channels) most_channels = call.runs[run].num_channels;
  }
  const ConvWork work = {&call, LEVELS[level_index(level)], (most_channels + CONV_CHANNELS - 1) / CONV_CHANNELS};
  const Threads threads = {call.pool.num_threads, call.pool.parallel};
  const int64_t numbers = call.pool.num_rows * call.num_channels * call.taps;
  threads.run_tasks<convolve_part>(work, call.num_runs * work.most_parts, numbers / THREAD_NUMBERS);
}

// Writes `out` and the matrices after the step. rule: 0 delta, 1 scan. level: index of `pdserve_level_name`.
PUBLIC void pdserve_change_states(const RuleCall* given, int64_t rule, int64_t level) {
  const RuleCall& call = *given;
  const StateLevel& chosen = *LEVELS[level_index(level)];
  const Threads threads = {call.pool.num_threads, call.pool.parallel};
  const int64_t num_tasks = call.pool.num_rows * call.pool.num_heads * call.per_head;
  const int64_t numbers = num_tasks * call.matrix_rows * call.matrix_columns;
  threads.run_tasks<change_matrix>(RuleWork{&call, rule == 0 ? chosen.delta : chosen.scan}, num_tasks,
                                   numbers / THREAD_NUMBERS);
}
}
