// fp32, fp16 and bf16 weights times fp32 activations: one fused multiply-add chain over K per output element,
// so a result depends on its own row only. Panels: fp32 and fp16 [panel][K][32]; bf16 [panel][K/2][32][2].
#pragma once
#include "dot.h"
#include "gemm.h"

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

typedef void (*MicroDense)(const uint8_t*, int64_t, const float*, float*);

template <int DTYPE, int ROWS> struct DenseTable {
    static MicroDense find(int64_t rows) {
        if (rows == ROWS) return micro_dense<DTYPE, ROWS>;
        return DenseTable<DTYPE, ROWS - 1>::find(rows);
    }
};
template <int DTYPE> struct DenseTable<DTYPE, 0> {
    static MicroDense find(int64_t) { return nullptr; }
};

static MicroDense find_micro_dense(int32_t dtype, int64_t rows) {
    return dtype == F32   ? DenseTable<F32, MAX_ROWS>::find(rows)
           : dtype == F16 ? DenseTable<F16, MAX_ROWS>::find(rows)
                          : DenseTable<BF16, MAX_ROWS>::find(rows);
}
