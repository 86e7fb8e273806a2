// Element types in the arguments of calls.
#pragma once
#include <cstdint>

enum Dtype : int64_t { FLOAT32 = 0, BFLOAT16 = 1 };
