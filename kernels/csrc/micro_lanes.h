// Micro-kernels in 16-lane vectors: one source for AVX-512 and for whatever the compiler makes of them elsewhere.
#pragma once
#include "dot.h"
#include "gemm.h"

// Sums of one segment, [ROWS * P][PANEL]: digits . (codes - offset).
template <int BITS, int P, int ROWS>
static inline void segment_sums(
    const uint8_t* codes, int64_t steps, const int8_t* digits, const int32_t* sums, const vi* offset, vi (*out)[2]) {
    constexpr int R = ROWS * P;
    vi sum[R][2];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2; ++c) sum[r][c] = -(offset[c] * sums[r]);
    const int32_t* x = (const int32_t*)digits;
    for (int64_t step = 0; step < steps; ++step) {
        constexpr int BYTES = BITS == 4 ? 128 : 256;
        if (R <= 8)
            for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(codes + 3072 + line);
        for (int half = 0; half < 2; ++half) {
            vi w[2];
            for (int c = 0; c < 2; ++c) {
                if (BITS == 4) {
                    w[c] = load<vi>(codes + 64 * c);
                    w[c] = (half ? (vi)((vu)w[c] >> 4) : w[c]) & 0x0f0f0f0f;
                } else {
                    w[c] = load<vi>(codes + 128 * half + 64 * c);
                }
            }
#pragma GCC unroll 12
            for (int r = 0; r < R; ++r)
                for (int c = 0; c < 2; ++c) sum[r][c] = dot4(sum[r][c], w[c], x[r]);
            x += R;
        }
        codes += BYTES;
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < 2; ++c) out[r][c] = sum[r][c];
}

template <int DTYPE, int ROWS>
static void micro_dense(const uint8_t* __restrict w, int64_t in_features, const float* __restrict x, float* __restrict acc) {
    vf sum[ROWS][2];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 2; ++c) sum[r][c] = vf{};
    constexpr int STEP = DTYPE == BF16 ? 2 : 1;
    for (int64_t k = 0; k < in_features; k += STEP) {
        vf v[STEP][2];
        for (int c = 0; c < 2; ++c) {
            if (DTYPE == BF16) {
                const vu pair = load<vu>(w + 64 * c);
                v[0][c] = (vf)(pair << 16);
                v[STEP - 1][c] = (vf)(pair & 0xffff0000u);
            } else {
                v[0][c] = DTYPE == F16 ? load_f16((const uint16_t*)(w + 32 * c)) : load<vf>(w + 64 * c);
            }
        }
        constexpr int BYTES = DTYPE == F16 ? 64 : 128;
        if (ROWS <= 4)
            for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(w + 3072 + line);
        w += BYTES;
#pragma GCC unroll 2
        for (int i = 0; i < STEP; ++i) {
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; ++r)
                for (int c = 0; c < 2; ++c) sum[r][c] = fma(splat(x[i * ROWS + r]), v[i][c], sum[r][c]);
        }
        x += STEP * ROWS;
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 2; ++c) store(acc + r * PANEL + c * LANES, sum[r][c]);
}
