// Entry points of mixtures of experts: sort tokens by expert, choose the level by the CPU, and spread blocks over threads.
#include "experts/expert_rows.h"
#include "shared/levels.h"

DECLARE_LEVELS(ExpertLevel, EXPERT_LEVEL);

namespace {

const ExpertLevel* const LEVELS[] = ALL_LEVELS(&EXPERT_LEVEL);

// Numbers of matrices below which a thread takes longer to wake than to multiply.
constexpr int64_t THREAD_NUMBERS = 1 << 15;

struct Work {
  const ExpertsCall* call;
  const ExpertLevel* level;
  const Int8Level* int8;
  int64_t num_blocks;
};

// ---- tasks

void activate_block(const Work& work, int64_t task) {
  work.level->activate(*work.call, work.call->used[task / work.num_blocks], task % work.num_blocks);
}

void combine_block(const Work& work, int64_t block) { work.level->combine(*work.call, block); }

// Rounds a row to eight bits. sizes: any of its matrices.
void quantize(const Work& work, const Int8Call& sizes, int64_t dtype, const void* x, int64_t place) {
  Int8Call row = sizes;
  row.dtype = dtype;
  row.x = x;
  row.rows = work.call->rows + place * row.padded;
  row.row_scales = work.call->row_scales + place;
  work.int8->quantize_row(row, 0);
}

void quantize_input(const Work& work, int64_t place) {
  const ExpertsCall& call = *work.call;
  const int64_t token = call.places[place] / call.top_k, bytes = call.dtype == FLOAT32 ? 4 : 2;
  quantize(work, call.int8_gate_ups[0], call.dtype, static_cast<const char*>(call.x) + token * call.x_stride * bytes, place);
}

void multiply_block(const Work& work, int64_t task) {
  const ExpertsCall& call = *work.call;
  const int64_t expert = call.used[task / work.num_blocks], first = call.starts[expert];
  Int8Call product = call.int8_gate_ups[expert];
  product.dtype = FLOAT32;
  product.adds = 0;
  product.num_rows = call.starts[expert + 1] - first;
  product.rows = call.rows + first * product.padded;
  product.row_scales = call.row_scales + first;
  product.out_stride = product.num_outputs;
  product.out = static_cast<float*>(call.inner) + first * product.out_stride;
  work.int8->multiply_block(product, task % work.num_blocks);
}

void activate_place(const Work& work, int64_t place) {
  const ExpertsCall& call = *work.call;
  work.level->activate_place(call, place);
  quantize(work, call.int8_downs[0], FLOAT32, static_cast<const float*>(call.inner) + place * call.parts * call.inner_size, place);
}

void combine_int8(const Work& work, int64_t block) { work.level->combine_int8(*work.call, *work.int8, block); }

// Fills `starts`, `places` and `used`. Returns the number of experts that have a place, or -1 for one that is not there.
int64_t sort(const ExpertsCall& call) {
  const int64_t num_places = call.num_tokens * call.top_k;
  for (int64_t expert = 0; expert <= call.num_experts; ++expert) call.starts[expert] = 0;
  for (int64_t place = 0; place < num_places; ++place) {
    const int64_t expert = call.experts[place];
    if (expert < 0 || expert >= call.num_experts) return -1;
    ++call.starts[expert + 1];
  }
  int64_t num_used = 0;
  for (int64_t expert = 0; expert < call.num_experts; ++expert) {
    if (call.starts[expert + 1]) call.used[num_used++] = expert;
    call.starts[expert + 1] += call.starts[expert];
  }
  // starts[e] moves to starts[e + 1] while the places of e are filled, and back
  for (int64_t place = 0; place < num_places; ++place) call.places[call.starts[call.experts[place]]++] = place;
  for (int64_t expert = call.num_experts; expert > 0; --expert) call.starts[expert] = call.starts[expert - 1];
  call.starts[0] = 0;
  return num_used;
}

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_experts_call_size() { return sizeof(ExpertsCall); }

// Writes `out`. level: index of `pdserve_level_name`, int8: of `pdserve_int8_level_name`. Returns 0, or 1 for an expert that is not
// there.
PUBLIC int64_t pdserve_apply_experts(const ExpertsCall* given, int64_t level, int64_t int8) {
  const ExpertsCall& call = *given;
  const int64_t num_used = sort(call);
  if (num_used < 0) return 1;
  const int64_t hidden_blocks = blocks_of(call.hidden_size), num_places = call.num_tokens * call.top_k;
  const int64_t worth = num_used * call.inner_size * call.hidden_size / THREAD_NUMBERS;
  Work work = {&call, LEVELS[level_index(level)], int8_level(int8), 0};
  const Threads threads = {call.num_threads, call.parallel};
  if (call.int8_downs) {
    work.num_blocks = blocks_of(call.parts * call.inner_size);
    threads.run_tasks<quantize_input>(work, num_places, num_places * call.hidden_size / THREAD_NUMBERS);
    threads.run_tasks<multiply_block>(work, num_used * work.num_blocks, worth);
    threads.run_tasks<activate_place>(work, num_places, num_places * call.inner_size / THREAD_NUMBERS);
    threads.run_tasks<combine_int8>(work, hidden_blocks, worth / 2);
  } else {
    work.num_blocks = blocks_of(call.inner_size);
    threads.run_tasks<activate_block>(work, num_used * work.num_blocks, call.parts * worth);
    threads.run_tasks<combine_block>(work, hidden_blocks, worth);
  }
  return 0;
}
}
