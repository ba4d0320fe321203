// fp32, fp16 and bf16 weights times fp32 activations: one fused multiply-add chain over K per output element,
// so a result depends on its own row only. Panels: fp32 and fp16 [panel][K][32]; bf16 [panel][K/2][32][2].
// bf16 weights times bf16 activations, where the CPU has the instruction: a chain of dot products of pairs.
#pragma once
#include "micro.h"

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

#if defined(__AVX512BF16__)

constexpr bool HAS_PAIRS = true;

// x: pairs of bf16 activations, [in_features / 2][ROWS].
template <int ROWS>
static void micro_pairs(const uint8_t* __restrict w, int64_t in_features, const float* __restrict x, float* __restrict acc) {
    vf sum[ROWS][2];
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 2; ++c) sum[r][c] = vf{};
    for (int64_t k = 0; k < in_features; k += 2) {
        const __m512bh v[2] = {load<__m512bh>(w), load<__m512bh>(w + 64)};
        if (ROWS <= 4)
            for (int line = 0; line < 128; line += 64) __builtin_prefetch(w + 3072 + line);
        w += 128;
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const __m512bh pair = (__m512bh)_mm512_set1_ps(x[r]);
            for (int c = 0; c < 2; ++c) sum[r][c] = (vf)_mm512_dpbf16_ps((__m512)sum[r][c], v[c], pair);
        }
        x += ROWS;
    }
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < 2; ++c) store(acc + r * PANEL + c * LANES, sum[r][c]);
}

template <int ROWS> struct PairsTable {
    static MicroDense find(int64_t rows) { return rows == ROWS ? micro_pairs<ROWS> : PairsTable<ROWS - 1>::find(rows); }
};
template <> struct PairsTable<0> {
    static MicroDense find(int64_t) { return nullptr; }
};
static MicroDense find_micro_pairs(int64_t rows) { return PairsTable<MAX_ROWS>::find(rows); }

#else

constexpr bool HAS_PAIRS = false;
static MicroDense find_micro_pairs(int64_t) { return nullptr; }

#endif

static MicroDense find_micro_dense(int32_t dtype, int64_t rows) {
    return dtype == F32   ? DenseTable<F32, MAX_ROWS>::find(rows)
           : dtype == F16 ? DenseTable<F16, MAX_ROWS>::find(rows)
                          : DenseTable<BF16, MAX_ROWS>::find(rows);
}
