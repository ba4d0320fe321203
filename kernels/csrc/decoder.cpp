// All layers of a Llama-family decoder in one call: at a few rows a step, going back to Python between
// operations costs more than the operations.
#include <cstdlib>

#include "gemm.h"
#include "ops.h"

MQ_API void mq_gemm(const Job* jobs, int64_t count, int32_t threads);

// One weight with its bias; planes as in Job.
struct LinearPart {
    const Weight* weight;
    const float* bias;
    int32_t planes;
};

struct DecoderLayer {
    const float *input_norm, *q_norm, *k_norm, *post_norm;  // q_norm, k_norm: null without
    LinearPart qkv, o, gate_up, down;
    void *k_cache, *v_cache;
};

struct DecoderJob {
    const DecoderLayer* layers;
    float* x;                 // [tokens][hidden]: embeddings in, hidden states before the final norm out
    const float *cos, *sin;   // [tokens][head_dim / 2]
    const SegmentStruct* segments;
    const int64_t *slot, *position;  // [tokens]
    int64_t num_layers, tokens, num_segments, hidden, inner, heads, kv_heads, head_dim, max_len;
    float eps;
    int32_t cache_dtype, threads;
};

namespace {

void multiply(const LinearPart& part, const float* x, int64_t rows, const float* residual, float* out, int32_t threads) {
    const int64_t width = part.weight->in_features, outputs = part.weight->out_features;
    const Job job{part.weight, x, part.bias, residual, out, rows, width, outputs, outputs, F32, F32, part.planes, 0};
    mq_gemm(&job, 1, threads);
}

}  // namespace

MQ_API void mq_decode(const DecoderJob* job) {
    const DecoderJob& j = *job;
    const int64_t q = j.heads * j.head_dim, kv = j.kv_heads * j.head_dim, width = q + 2 * kv, t = j.tokens;
    const int64_t widest = j.hidden > q ? j.hidden : q;
    float* memory = (float*)std::malloc(size_t(t * (2 * widest + width + 3 * j.inner)) * sizeof(float));
    if (!memory) std::abort();
    float *normed = memory, *mixed = normed + t * widest, *qkv = mixed + t * widest, *gated = qkv + t * width;
    float* active = gated + 2 * t * j.inner;
    for (int64_t l = 0; l < j.num_layers; ++l) {
        const DecoderLayer& layer = j.layers[l];
        mq_rms_norm(j.x, j.hidden, nullptr, layer.input_norm, j.eps, nullptr, normed, t, j.hidden, j.threads);
        multiply(layer.qkv, normed, t, nullptr, qkv, j.threads);
        if (layer.q_norm)
            for (int64_t i = 0; i < t; ++i) {
                float* row = qkv + i * width;
                mq_rms_norm(row, j.head_dim, nullptr, layer.q_norm, j.eps, nullptr, row, j.heads, j.head_dim, 1);
                mq_rms_norm(row + q, j.head_dim, nullptr, layer.k_norm, j.eps, nullptr, row + q, j.kv_heads, j.head_dim, 1);
            }
        const RopeJob rope{
            qkv, qkv + q, qkv + q + kv, j.cos, j.sin, mixed, layer.k_cache, layer.v_cache, j.slot, j.position,
            width, width, width, t, j.heads, j.kv_heads, j.head_dim, j.max_len, j.cache_dtype, j.threads};
        mq_rope_write_kv(&rope);
        const AttentionJob attention{
            mixed, layer.k_cache, layer.v_cache, j.segments, normed, j.num_segments, j.heads, j.kv_heads, j.head_dim,
            j.max_len, 1.0f / __builtin_sqrtf(float(j.head_dim)), j.cache_dtype, j.threads};
        mq_attention(&attention);
        multiply(layer.o, normed, t, j.x, j.x, j.threads);
        mq_rms_norm(j.x, j.hidden, nullptr, layer.post_norm, j.eps, nullptr, normed, t, j.hidden, j.threads);
        multiply(layer.gate_up, normed, t, nullptr, gated, j.threads);
        mq_swiglu(gated, gated + j.inner, 2 * j.inner, active, t, j.inner, j.threads);
        multiply(layer.down, active, t, j.x, j.x, j.threads);
    }
    std::free(memory);
}
