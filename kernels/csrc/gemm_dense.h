// fp32, fp16 and bf16 weights times fp32 activations: one fused multiply-add chain over K per output element,
// so a result depends on its own row only. Panels: fp32 and fp16 [panel][K][32]; bf16 [panel][K/2][32][2].
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

static MicroDense find_micro_dense(int32_t dtype, int64_t rows) {
    return dtype == F32   ? DenseTable<F32, MAX_ROWS>::find(rows)
           : dtype == F16 ? DenseTable<F16, MAX_ROWS>::find(rows)
                          : DenseTable<BF16, MAX_ROWS>::find(rows);
}
