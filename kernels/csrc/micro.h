// The micro-kernels of this instruction set: MAX_ROWS, segment_sums and micro_dense.
#pragma once
#if defined(__AVX2__) && !defined(__AVX512VNNI__)
#include "micro_avx2.h"
#else
#include "micro_lanes.h"
#endif
