// What a decoder does row by row: RMS norm, SwiGLU, rope with the cache write, top-k of logits. Each row (and
// head) is computed alike whatever the batch, so results do not depend on it.
#include "ops.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 14;  // elements below which starting threads costs more than it saves

// Lanes are summed in a fixed order: halves folded onto each other.
float sum_lanes(vf v) {
    float lane[LANES];
    store(lane, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}

// NaN orders above every number, as torch has it.
bool above(float a, float b) { return a != a ? b == b : a > b; }

}  // namespace

// out[r] = h / sqrt(mean(h^2) + eps) * weight with h = x[r] + residual[r]; h is stored where sum is given.
MQ_API void mq_rms_norm(
    const float* x, int64_t x_stride, const float* residual, const float* weight, float eps, float* sum, float* out,
    int64_t rows, int64_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width > PARALLEL_FROM)
    for (int64_t r = 0; r < rows; ++r) {
        const float* row = x + r * x_stride;
        float* to = out + r * width;
        vf squares{};
        for (int64_t i = 0; i < width; i += LANES) {
            vf h{};
            const int64_t left = width - i < LANES ? width - i : LANES;
            std::memcpy(&h, row + i, size_t(left) * 4);
            if (residual) {
                vf more{};
                std::memcpy(&more, residual + r * width + i, size_t(left) * 4);
                h += more;
                std::memcpy(sum + r * width + i, &h, size_t(left) * 4);
            }
            squares = fma(h, h, squares);
        }
        const float* h = residual ? sum + r * width : row;
        const float inverse = 1.0f / __builtin_sqrtf(sum_lanes(squares) / float(width) + eps);
        for (int64_t i = 0; i < width; ++i) to[i] = h[i] * inverse * weight[i];
    }
}

// out[r] = silu(gate[r]) * up[r].
MQ_API void mq_swiglu(
    const float* gate, const float* up, int64_t stride, float* out, int64_t rows, int64_t width, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width > PARALLEL_FROM)
    for (int64_t r = 0; r < rows; ++r) {
        const float *g = gate + r * stride, *u = up + r * stride;
        float* to = out + r * width;
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) store(to + i, silu_lanes(load<vf>(g + i)) * load<vf>(u + i));
        for (; i < width; ++i) to[i] = silu_one(g[i]) * u[i];
    }
}

// Rotates pairs (i, i + head_dim / 2) of queries and keys; keys and values go into the cache.
MQ_API void mq_rope_write_kv(const RopeJob* job) {
    const RopeJob& j = *job;
    const int64_t half = j.head_dim / 2;
#pragma omp parallel for num_threads(j.threads) if (j.tokens * j.heads * j.head_dim > PARALLEL_FROM)
    for (int64_t t = 0; t < j.tokens; ++t) {
        const float *cos = j.cos + t * half, *sin = j.sin + t * half;
        for (int64_t h = 0; h < j.heads; ++h) {
            const float* x = j.query + t * j.query_stride + h * j.head_dim;
            float* to = j.rotated + (t * j.heads + h) * j.head_dim;
            for (int64_t i = 0; i < half; ++i) {
                to[i] = x[i] * cos[i] - x[i + half] * sin[i];
                to[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
            }
        }
        for (int64_t h = 0; h < j.kv_heads; ++h) {
            const float* x = j.key + t * j.key_stride + h * j.head_dim;
            const float* v = j.value + t * j.value_stride + h * j.head_dim;
            const int64_t at = ((j.slot[t] * j.kv_heads + h) * j.max_len + j.position[t]) * j.head_dim;
            for (int64_t i = 0; i < half; ++i) {
                store_one(j.k_cache, at + i, j.cache_dtype, x[i] * cos[i] - x[i + half] * sin[i]);
                store_one(j.k_cache, at + i + half, j.cache_dtype, x[i + half] * cos[i] + x[i] * sin[i]);
            }
            for (int64_t i = 0; i < j.head_dim; ++i) store_one(j.v_cache, at + i, j.cache_dtype, v[i]);
        }
    }
}

// The k largest of each row, descending; equal values by ascending index. k <= width.
MQ_API void mq_top_k(
    const void* logits, int64_t stride, int32_t dtype, int64_t rows, int64_t width, int64_t k, float* values,
    int64_t* indices, int32_t threads) {
#pragma omp parallel for num_threads(threads) if (rows > 1 && rows * width > PARALLEL_FROM)
    for (int64_t r = 0; r < rows; ++r) {
        float* best = values + r * k;
        int64_t* where = indices + r * k;
        int64_t held = 0;
        const auto offer = [&](float v, int64_t i) {
            if (held == k && !above(v, best[k - 1])) return;
            int64_t at = held < k ? held++ : k - 1;
            for (; at > 0 && above(v, best[at - 1]); --at) {
                best[at] = best[at - 1];
                where[at] = where[at - 1];
            }
            best[at] = v;
            where[at] = i;
        };
        int64_t i = 0;
        for (; i + 4 * LANES <= width; i += 4 * LANES) {
            vf v[4];
            for (int c = 0; c < 4; ++c) v[c] = load_as(logits, r * stride + i + c * LANES, dtype);
            if (held == k) {
                const vf least = splat(best[k - 1]);
                // One test for 64 values: hardly any block holds a new winner.
                const vi within = (v[0] <= least) & (v[1] <= least) & (v[2] <= least) & (v[3] <= least);
                int32_t all = -1;
                for (int lane = 0; lane < LANES; ++lane) all &= within[lane];
                if (all) continue;
            }
            for (int c = 0; c < 4; ++c)
                for (int lane = 0; lane < LANES; ++lane) offer(v[c][lane], i + c * LANES + lane);
        }
        for (; i < width; ++i) offer(load_one(logits, r * stride + i, dtype), i);
    }
}
