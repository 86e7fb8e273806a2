// What the entry points share: instruction sets of the library and of this CPU, and threads.
#pragma once
#include <cstdint>

#define PUBLIC __attribute__((visibility("default")))

// The symbols of a function table in every level that is compiled: prefix_BASELINE and so on, the slowest first. TILED_LEVELS are of
// sources that have code for the tiles of AMX; others have the functions of AVX512_BF16 in their place.
#if defined(HAS_AMX_LEVEL)
#define DECLARE_LEVELS(Table, prefix) \
  extern const Table prefix##_BASELINE, prefix##_AVX2, prefix##_AVX512, prefix##_AVX512_BF16
#define DECLARE_TILED_LEVELS(Table, prefix) \
  DECLARE_LEVELS(Table, prefix);            \
  extern const Table prefix##_AMX_BF16
#define ALL_LEVELS(prefix) \
  {prefix##_BASELINE, prefix##_AVX2, prefix##_AVX512, prefix##_AVX512_BF16, prefix##_AVX512_BF16}
#define TILED_LEVELS(prefix) {prefix##_BASELINE, prefix##_AVX2, prefix##_AVX512, prefix##_AVX512_BF16, prefix##_AMX_BF16}
constexpr int NUM_LEVELS = 5;
#elif defined(HAS_X86_LEVELS)
#define DECLARE_LEVELS(Table, prefix) \
  extern const Table prefix##_BASELINE, prefix##_AVX2, prefix##_AVX512, prefix##_AVX512_BF16
#define DECLARE_TILED_LEVELS(Table, prefix) DECLARE_LEVELS(Table, prefix)
#define ALL_LEVELS(prefix) {prefix##_BASELINE, prefix##_AVX2, prefix##_AVX512, prefix##_AVX512_BF16}
#define TILED_LEVELS(prefix) ALL_LEVELS(prefix)
constexpr int NUM_LEVELS = 4;
#else
#define DECLARE_LEVELS(Table, prefix) extern const Table prefix##_BASELINE
#define DECLARE_TILED_LEVELS(Table, prefix) DECLARE_LEVELS(Table, prefix)
#define ALL_LEVELS(prefix) {prefix##_BASELINE}
#define TILED_LEVELS(prefix) ALL_LEVELS(prefix)
constexpr int NUM_LEVELS = 1;
#endif

#ifdef HAS_AMX_LEVEL
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

// True if the CPU has AMX for bfloat16, and Linux permits this process to use it, which takes one request.
static inline bool may_use_tiles() {
  constexpr int UNKNOWN = 2, REQUEST = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  constexpr unsigned AMX_BF16 = 1u << 22, AMX_TILE = 1u << 24;
  static int known = UNKNOWN;
  int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
  if (found != UNKNOWN) return found;
  unsigned a, b, c, d;
  found = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & AMX_BF16) && (d & AMX_TILE) &&
          syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  __atomic_store_n(&known, found, __ATOMIC_RELAXED);
  return found;
}
#endif

// Indices into ALL_LEVELS of those that the CPU has, the fastest first. Returns their number.
static inline int find_levels(int found[NUM_LEVELS]) {
  int count = 0;
#ifdef HAS_X86_LEVELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
#ifdef HAS_AMX_LEVEL
  if (avx512_bf16 && may_use_tiles()) found[count++] = 4;
#endif
  if (avx512_bf16) found[count++] = 3;
  if (avx512) found[count++] = 2;
  if (avx2) found[count++] = 1;
#endif
  found[count++] = 0;
  return count;
}

// Index into ALL_LEVELS of the level that callers name by its place among those of this CPU, the fastest at 0.
static inline int level_index(int64_t place) {
  int found[NUM_LEVELS];
  find_levels(found);
  return found[place];
}

// libgomp's GOMP_parallel, for the threads that torch already has; null: one thread.
typedef void (*Parallel)(void (*)(void*), void*, unsigned, unsigned);

struct Threads {
  int64_t num_threads;
  Parallel parallel;

  // Calls `function` in as many threads as there are tasks for; it takes tasks until none is left.
  void run(void (*function)(void*), void* data, int64_t num_tasks) const {
    const int64_t num = num_tasks < num_threads ? num_tasks : num_threads;
    if (num > 1 && parallel) {
      parallel(function, data, static_cast<unsigned>(num), 0);
    } else {
      function(data);
    }
  }

  // Calls TASK(work, number) for each number below `num_tasks`. Threads take the numbers one by one. worth: number of threads that
  // are worth waking.
  template <auto TASK, class Work>
  void run_tasks(const Work& work, int64_t num_tasks, int64_t worth) const {
    Tasks<Work> tasks = {&work, num_tasks, 0};
    run(take_tasks<TASK, Work>, &tasks, worth < num_tasks ? worth : num_tasks);
  }

 private:
  template <class Work>
  struct Tasks {
    const Work* work;
    int64_t num_tasks, next_task;
  };

  template <auto TASK, class Work>
  static void take_tasks(void* data) {
    Tasks<Work>& tasks = *static_cast<Tasks<Work>*>(data);
    for (;;) {
      const int64_t task = __atomic_fetch_add(&tasks.next_task, 1, __ATOMIC_RELAXED);
      if (task >= tasks.num_tasks) return;
      TASK(*tasks.work, task);
    }
  }
};
