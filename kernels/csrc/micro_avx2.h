// Micro-kernels for AVX2 in registers of 8 lanes, spelled out: 16-lane vectors would live in memory here.
// At most 12 accumulators, so that weights and a broadcast digit fit beside them.
#pragma once
#include "gemm.h"

constexpr int MAX_ROWS = 6;
constexpr int CHUNKS = PANEL / 8;

constexpr int chunks_at_once(int accumulators_per_chunk) {
    return accumulators_per_chunk <= 3 ? 4 : accumulators_per_chunk <= 6 ? 2 : 1;
}

static inline __m256i load256(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }

// acc = v, opaque to the compiler: it would regroup the sums of several steps and run out of registers.
static inline void assign(__m256i& acc, __m256i v) {
    acc = v;
    __asm__("" : "+x"(acc));
}

// total[R][PANEL] += digits . nibbles for CH chunks from `first`. Products of a code's nibble (at most 15) and a
// digit are summed in int16 over 4 steps (8 pairs of at most 3840), then widened. int8 codes have two nibbles.
template <int BITS, int R, int CH>
static inline void nibble_dots(const uint8_t* codes, int64_t steps, const int32_t* x, int first, int32_t (*total)[PANEL]) {
    constexpr int NIBBLES = BITS / 4, BYTES = 32 * BITS, FLUSH = 4;
    const __m256i mask = _mm256_set1_epi8(0x0f);
    for (int64_t done = 0; done < steps; done += FLUSH) {
        __m256i t[NIBBLES][R][CH];
#pragma GCC unroll 12
        for (int i = 0; i < NIBBLES * R * CH; ++i) (&t[0][0][0])[i] = _mm256_setzero_si256();
        const int64_t stop = done + FLUSH < steps ? done + FLUSH : steps;
        for (int64_t s = done; s < stop; ++s) {
            const uint8_t* p = codes + s * BYTES + 32 * first;
            if (first == 0)
                for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(p + 3072 + line);
#pragma GCC unroll 2
            for (int half = 0; half < 2; ++half) {
                const int32_t* digit = x + (2 * s + half) * R;
#pragma GCC unroll 4
                for (int c = 0; c < CH; ++c) {
                    const __m256i u = load256(p + (BITS == 8 ? 128 * half : 0) + 32 * c);
                    const __m256i high = _mm256_and_si256(_mm256_srli_epi16(u, 4), mask);
                    const __m256i low = BITS == 4 && half ? high : _mm256_and_si256(u, mask);
#pragma GCC unroll 12
                    for (int r = 0; r < R; ++r) {
                        const __m256i v = _mm256_set1_epi32(digit[r]);
                        assign(t[0][r][c], _mm256_add_epi16(t[0][r][c], _mm256_maddubs_epi16(low, v)));
                        if (BITS == 8)
                            assign(t[NIBBLES - 1][r][c], _mm256_add_epi16(t[NIBBLES - 1][r][c], _mm256_maddubs_epi16(high, v)));
                    }
                }
            }
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int c = 0; c < CH; ++c) {
                __m256i* at = (__m256i*)&total[r][8 * (first + c)];
                __m256i sum = _mm256_add_epi32(_mm256_load_si256(at), _mm256_madd_epi16(t[0][r][c], _mm256_set1_epi16(1)));
                if (BITS == 8)
                    sum = _mm256_add_epi32(sum, _mm256_madd_epi16(t[NIBBLES - 1][r][c], _mm256_set1_epi16(16)));
                _mm256_store_si256(at, sum);
            }
    }
}

// The same for int8 codes taken as signed and digits of at most 127: moving a code's sign to the digit leaves
// pairs of at most 2 * 128 * 127, which int16 holds, in one multiplication instead of two.
template <int R, int CH>
static inline void signed_dots(const uint8_t* codes, int64_t steps, const int32_t* x, int first, int32_t (*total)[PANEL]) {
    const __m256i flip = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
    __m256i sum[R][CH];
#pragma GCC unroll 12
    for (int i = 0; i < R * CH; ++i) (&sum[0][0])[i] = _mm256_setzero_si256();
    for (int64_t s = 0; s < steps; ++s) {
        const uint8_t* p = codes + s * 256 + 32 * first;
        if (first == 0)
            for (int line = 0; line < 256; line += 64) __builtin_prefetch(p + 3072 + line);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const int32_t* digit = x + (2 * s + half) * R;
#pragma GCC unroll 4
            for (int c = 0; c < CH; ++c) {
                const __m256i w = _mm256_xor_si256(load256(p + 128 * half + 32 * c), flip);
                const __m256i magnitude = _mm256_abs_epi8(w);
#pragma GCC unroll 12
                for (int r = 0; r < R; ++r) {
                    const __m256i v = _mm256_sign_epi8(_mm256_set1_epi32(digit[r]), w);
                    assign(sum[r][c], _mm256_add_epi32(sum[r][c], _mm256_madd_epi16(_mm256_maddubs_epi16(magnitude, v), ones)));
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < CH; ++c) _mm256_store_si256((__m256i*)&total[r][8 * (first + c)], sum[r][c]);
}

// Sums of one segment, [ROWS * P][PANEL]: digits . (codes - offset).
template <int BITS, int P, int ROWS>
static inline void segment_sums(
    const uint8_t* codes, int64_t steps, const int8_t* digits, const int32_t* sums, const vi* offset, vi (*out)[2]) {
    constexpr int R = ROWS * P;
    constexpr bool SIGNED = BITS == 8 && P == 1;
    constexpr int CH = chunks_at_once(SIGNED ? R : R * BITS / 4);
    alignas(64) int32_t total[R][PANEL];
    if (!SIGNED) std::memset(total, 0, sizeof total);
    const int32_t* x = (const int32_t*)digits;
    for (int first = 0; first < CHUNKS; first += CH) {
        if (SIGNED) signed_dots<R, CH>(codes, steps, x, first, total);
        else nibble_dots<BITS, R, CH>(codes, steps, x, first, total);
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2; ++c)
            out[r][c] = load<vi>(&total[r][c * LANES]) - (SIGNED ? offset[c] - 128 : offset[c]) * sums[r];
}

template <int DTYPE, int ROWS, int CH>
static inline void dense_sums(const uint8_t* w, int64_t in_features, const float* x, int first, float* acc) {
    constexpr int STEP = DTYPE == BF16 ? 2 : 1, BYTES = DTYPE == F16 ? 64 : 128;
    __m256 sum[ROWS][CH];
#pragma GCC unroll 12
    for (int i = 0; i < ROWS * CH; ++i) (&sum[0][0])[i] = _mm256_setzero_ps();
    for (int64_t k = 0; k < in_features; k += STEP) {
        const uint8_t* p = w + k / STEP * BYTES;
        if (first == 0)
            for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(p + 3072 + line);
#pragma GCC unroll 2
        for (int i = 0; i < STEP; ++i) {
            __m256 v[CH];
#pragma GCC unroll 4
            for (int c = 0; c < CH; ++c) {
                const uint8_t* at = p + (first + c) * (BYTES / CHUNKS);
                if (DTYPE == F32) v[c] = _mm256_loadu_ps((const float*)at);
                else if (DTYPE == F16) v[c] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at));
                else
                    v[c] = _mm256_castsi256_ps(
                        i ? _mm256_and_si256(load256(at), _mm256_set1_epi32(int(0xffff0000u)))
                          : _mm256_slli_epi32(load256(at), 16));
            }
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r) {
                const __m256 b = _mm256_broadcast_ss(x + (k + i) * ROWS + r);
#pragma GCC unroll 4
                for (int c = 0; c < CH; ++c) sum[r][c] = _mm256_fmadd_ps(b, v[c], sum[r][c]);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int c = 0; c < CH; ++c) _mm256_storeu_ps(acc + r * PANEL + 8 * (first + c), sum[r][c]);
}

template <int DTYPE, int ROWS>
static void micro_dense(const uint8_t* __restrict w, int64_t in_features, const float* __restrict x, float* __restrict acc) {
    constexpr int CH = chunks_at_once(ROWS);
    for (int first = 0; first < CHUNKS; first += CH) dense_sums<DTYPE, ROWS, CH>(w, in_features, x, first, acc);
}
