// Entry points of products with int8 matrices: choose the level by the processor, and spread blocks of channels over threads.
#include "int8_rows.h"
#include "levels.h"

extern const Int8Level INT8_LEVEL_BASELINE;
#ifdef HAS_X86_LEVELS
extern const Int8Level INT8_LEVEL_AVX2, INT8_LEVEL_AVX512_VNNI;
#endif

namespace {

// From the fastest that the processor has to the one that every processor has. Returns their number.
int find_int8_levels(const Int8Level* found[3]) {
  int count = 0;
#ifdef HAS_X86_LEVELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    found[count++] = &INT8_LEVEL_AVX512_VNNI;
  if (avx2) found[count++] = &INT8_LEVEL_AVX2;
#endif
  found[count++] = &INT8_LEVEL_BASELINE;
  return count;
}

struct Work {
  const Int8Call* call;
  const Int8Level* level;
  int64_t next_block;
};

int64_t num_blocks(const Int8Call& call) { return (call.num_outputs + CHANNELS - 1) / CHANNELS; }

void multiply_blocks(void* data) {
  Work& work = *static_cast<Work*>(data);
  const int64_t total = num_blocks(*work.call);
  for (;;) {
    const int64_t block = __atomic_fetch_add(&work.next_block, 1, __ATOMIC_RELAXED);
    if (block >= total) return;
    work.level->multiply_block(*work.call, block);
  }
}

}  // namespace

extern "C" {

PUBLIC int64_t pdserve_int8_call_size() { return sizeof(Int8Call); }

// Name of the level at `index` of those that this processor has, the fastest first; null behind the last.
PUBLIC const char* pdserve_int8_level_name(int64_t index) {
  const Int8Level* found[3];
  return index >= 0 && index < find_int8_levels(found) ? found[index]->name : nullptr;
}

// Writes `out`. level: index of `pdserve_int8_level_name`.
PUBLIC void pdserve_multiply_rows(const Int8Call* given, int64_t level) {
  const Int8Call& call = *given;
  const Int8Level* found[3];
  find_int8_levels(found);
  for (int64_t row = 0; row < call.num_rows; ++row) found[level]->quantize_row(call, row);
  Work work = {&call, found[level], 0};
  const Threads threads = {call.num_threads, call.parallel};
  threads.run(multiply_blocks, &work, num_blocks(call));
}
}
