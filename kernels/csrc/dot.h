// acc[n] += sum over i < 4 of w[4n + i] * x[i]: 16 output features, 4 input features, unsigned weight codes
// and signed activation digits. The integer result is exact, so every ISA gives the same bits.
#pragma once
#include "vec.h"

#if defined(__AVX512VNNI__)

constexpr int MAX_ROWS = 12;  // rows of 2 accumulators that stay in registers
static inline vi dot4(vi acc, vi w, int32_t x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
}

#else

constexpr int MAX_ROWS = 2;
static inline vi dot4(vi acc, vi w, int32_t x) {
    for (int i = 0; i < 4; ++i) acc += ((w >> (8 * i)) & 255) * int32_t(int8_t(uint32_t(x) >> (8 * i)));
    return acc;
}

#endif
