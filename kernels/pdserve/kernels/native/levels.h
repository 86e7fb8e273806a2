// What the entry points share: instruction sets of the library and of this processor, and threads.
#pragma once
#include <cstdint>

#define PUBLIC __attribute__((visibility("default")))

// The symbols of a function table in every level that is compiled: prefix_BASELINE and so on, the slowest first.
#ifdef HAS_X86_LEVELS
#define ALL_LEVELS(prefix) {prefix##_BASELINE, prefix##_AVX2, prefix##_AVX512, prefix##_AVX512_BF16}
constexpr int NUM_LEVELS = 4;
#else
#define ALL_LEVELS(prefix) {prefix##_BASELINE}
constexpr int NUM_LEVELS = 1;
#endif

// Indices into ALL_LEVELS of those that the processor has, the fastest first. Returns their number.
static inline int find_levels(int found[NUM_LEVELS]) {
  int count = 0;
#ifdef HAS_X86_LEVELS
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) found[count++] = 3;
  if (avx512) found[count++] = 2;
  if (avx2) found[count++] = 1;
#endif
  found[count++] = 0;
  return count;
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
