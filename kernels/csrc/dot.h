// acc[n] += sum over i < 4 of w[4n + i] * x[i]: 16 output features, 4 input features, unsigned weight codes
// and signed activation digits. The integer result is exact, so every ISA gives the same bits.
#pragma once
#include "vec.h"

#if defined(__AVX512VNNI__)

constexpr int MAX_ROWS = 12;  // rows of 2 accumulators that stay in registers
static inline vi dot4(vi acc, vi w, int32_t x) {
    return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)w, _mm512_set1_epi32(x));
}

#elif defined(__AVX2__)

constexpr int MAX_ROWS = 3;
static inline vi dot4(vi acc, vi w, int32_t x) {
    const __m256i xs = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1);
    vi r;
    for (int h = 0; h < 2; ++h) {
        const __m256i u = _mm256_loadu_si256((const __m256i*)&w + h);
        // maddubs saturates at int16; halving the codes' range by splitting off the top bit keeps it exact.
        const __m256i low = _mm256_and_si256(u, _mm256_set1_epi8(0x7f));
        const __m256i top = _mm256_and_si256(_mm256_srli_epi16(u, 7), _mm256_set1_epi8(1));
        const __m256i a = _mm256_madd_epi16(_mm256_maddubs_epi16(low, xs), ones);
        const __m256i b = _mm256_madd_epi16(_mm256_maddubs_epi16(top, xs), _mm256_set1_epi16(128));
        const __m256i sum = _mm256_add_epi32(
            _mm256_loadu_si256((const __m256i*)&acc + h), _mm256_add_epi32(a, b));
        std::memcpy((char*)&r + 32 * h, &sum, sizeof sum);
    }
    return r;
}
// int4 codes are at most 15, so one maddubs cannot saturate.
static inline vi dot4_small(vi acc, vi w, int32_t x) {
    const __m256i xs = _mm256_set1_epi32(x), ones = _mm256_set1_epi16(1);
    vi r;
    for (int h = 0; h < 2; ++h) {
        const __m256i u = _mm256_loadu_si256((const __m256i*)&w + h);
        const __m256i sum = _mm256_add_epi32(
            _mm256_loadu_si256((const __m256i*)&acc + h),
            _mm256_madd_epi16(_mm256_maddubs_epi16(u, xs), ones));
        std::memcpy((char*)&r + 32 * h, &sum, sizeof sum);
    }
    return r;
}
#define MQ_HAS_DOT4_SMALL

#else

constexpr int MAX_ROWS = 2;
static inline vi dot4(vi acc, vi w, int32_t x) {
    for (int i = 0; i < 4; ++i) acc += ((w >> (8 * i)) & 255) * int32_t(int8_t(uint32_t(x) >> (8 * i)));
    return acc;
}

#endif

template <int BITS> static inline vi dot(vi acc, vi w, int32_t x) {
#if defined(MQ_HAS_DOT4_SMALL)
    if (BITS == 4) return dot4_small(acc, w, x);
#endif
    return dot4(acc, w, x);
}
