// Entry points of LoRA products: choose the level by the CPU, and spread rows of A and columns of B over threads.
#include "lora/lora_rows.h"
#include "shared/levels.h"

DECLARE_LEVELS(LoraLevel, LORA_LEVEL);

namespace {

const LoraLevel* const LEVELS[] = ALL_LEVELS(&LORA_LEVEL);

struct Work {
  const LoraCall* call;
  const LoraLevel* level;
  int64_t num_parts;
};

void shrink_part(const Work& work, int64_t task) {
  const int64_t num_products = work.call->num_products, part = task % work.num_parts, rest = task / work.num_parts;
  work.level->shrink(*work.call, rest / num_products, rest % num_products, part * SHRUNK_ROWS);
}

void add_part(const Work& work, int64_t task) {
  work.level->add(*work.call, task / work.num_parts, task % work.num_parts * ADDED_COLUMNS);
}

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_lora_call_size() { return sizeof(LoraCall); }

// Changes `y`. level: index of `pdserve_level_name`.
PUBLIC void pdserve_add_lora(const LoraCall* given, int64_t level) {
  const LoraCall& call = *given;
  const LoraLevel* const chosen = LEVELS[level_index(level)];
  const Threads threads = {call.num_threads, call.parallel};
  const int64_t num_groups = call.tokens->num_groups;
  const int64_t row_parts = (call.max_rank + SHRUNK_ROWS - 1) / SHRUNK_ROWS;
  const int64_t num_shrunk = num_groups * call.num_products * row_parts;
  threads.run_tasks<shrink_part>(Work{&call, chosen, row_parts}, num_shrunk, num_shrunk);
  const int64_t column_parts = (call.out_size + ADDED_COLUMNS - 1) / ADDED_COLUMNS;
  const int64_t num_added = num_groups * column_parts;
  threads.run_tasks<add_part>(Work{&call, chosen, column_parts}, num_added, num_added);
}
}
