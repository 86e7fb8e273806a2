// Entry points of products with int8 matrices: choose the level by the CPU, and spread blocks of channels over threads.
#include "linear/int8_rows.h"
#include "shared/levels.h"

extern const Int8Level INT8_LEVEL_BASELINE;
#ifdef HAS_X86_LEVELS
extern const Int8Level INT8_LEVEL_AVX2, INT8_LEVEL_AVX512_VNNI;
#endif

namespace {

// From the fastest that the CPU has to the one that every CPU has. Returns their number.
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

// Bytes of the matrix times rows below which a thread takes longer to wake than to multiply.
constexpr int64_t THREAD_BYTES = 1 << 16;

struct Work {
  const Int8Call* call;
  const Int8Level* level;
};

void quantize_row(const Work& work, int64_t row) { work.level->quantize_row(*work.call, row); }

void multiply_block(const Work& work, int64_t block) { work.level->multiply_block(*work.call, block); }

}  // namespace

const Int8Level* int8_level(int64_t index) {
  const Int8Level* found[3];
  return index >= 0 && index < find_int8_levels(found) ? found[index] : nullptr;
}

extern "C" {

PUBLIC int64_t pdserve_int8_call_size() { return sizeof(Int8Call); }

// Name of the level at `index` of those that this CPU has, the fastest first; null after the last.
PUBLIC const char* pdserve_int8_level_name(int64_t index) {
  const Int8Level* found = int8_level(index);
  return found ? found->name : nullptr;
}

// Writes `out`. level: index of `pdserve_int8_level_name`.
PUBLIC void pdserve_multiply_rows(const Int8Call* given, int64_t level) {
  const Int8Call& call = *given;
  const int64_t num_blocks = (call.num_outputs + CHANNELS - 1) / CHANNELS;
  const Threads threads = {call.num_threads, call.parallel};
  const Work work = {&call, int8_level(level)};
  threads.run_tasks<quantize_row>(work, call.num_rows, call.num_rows * call.padded / THREAD_BYTES);
  const int64_t worth = num_blocks * CHANNELS * call.padded * call.num_rows / THREAD_BYTES;
  threads.run_tasks<multiply_block>(work, num_blocks, worth);
}
}
