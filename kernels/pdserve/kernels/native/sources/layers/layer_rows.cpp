// Entry point of the operations between matrix products: choose the level by the CPU, and spread rows over threads.
#include "layers/layer_rows.h"
#include "shared/levels.h"

DECLARE_LEVELS(LayerLevel, LAYER_LEVEL);

namespace {

const LayerLevel* const LEVELS[] = ALL_LEVELS(&LAYER_LEVEL);

// Numbers below which a thread takes longer to wake than to compute.
constexpr int64_t THREAD_NUMBERS = 1 << 14;

struct Work {
  const LayerCall* call;
  void (*compute)(const LayerCall& call, int64_t row);
  int64_t rows_per_task;
};

void compute_rows(const Work& work, int64_t task) {
  const int64_t first = task * work.rows_per_task, num_rows = work.call->num_rows;
  const int64_t end = first + work.rows_per_task < num_rows ? first + work.rows_per_task : num_rows;
  for (int64_t row = first; row < end; ++row) work.compute(*work.call, row);
}

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_layer_call_size() { return sizeof(LayerCall); }

// operation: 0 norm, 1 gate, 2 rotate. level: index of `pdserve_level_name`.
PUBLIC void pdserve_layer_rows(const LayerCall* given, int64_t operation, int64_t level) {
  const LayerCall& call = *given;
  const LayerLevel& chosen = *LEVELS[level_index(level)];
  const int64_t row_numbers = call.num_heads * call.size + 1;
  const int64_t rows_per_task = THREAD_NUMBERS / row_numbers + 1;
  const Work work = {&call, operation == 0 ? chosen.norm : operation == 1 ? chosen.gate : chosen.rotate, rows_per_task};
  const Threads threads = {call.num_threads, call.parallel};
  const int64_t num_tasks = (call.num_rows + rows_per_task - 1) / rows_per_task;
  threads.run_tasks<compute_rows>(work, num_tasks, num_tasks);
}
}
