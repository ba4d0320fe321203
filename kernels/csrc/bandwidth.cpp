// The read bandwidth that memory floors are computed from, measured as the GEMM reads: each thread a stream.
#include "vec.h"

MQ_API void mq_read(const uint8_t* data, int64_t bytes, uint64_t* result, int32_t threads) {
    constexpr int64_t BLOCK = 1 << 16;
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total)
    for (int64_t block = 0; block < bytes / BLOCK; ++block) {
        vi sum[4] = {};
        for (const uint8_t *p = data + block * BLOCK, *end = p + BLOCK; p < end; p += 256) {
            for (int c = 0; c < 4; ++c) __builtin_prefetch(p + 3072 + 64 * c);
            for (int c = 0; c < 4; ++c) sum[c] += load<vi>(p + 64 * c);
        }
        sum[0] += sum[1] + sum[2] + sum[3];
        for (int lane = 0; lane < LANES; ++lane) total += uint64_t(uint32_t(sum[0][lane]));
    }
    *result = total;
}
