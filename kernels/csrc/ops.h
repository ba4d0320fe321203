// What a decoder does beside GEMMs, as Python's ctypes structures mirror it (kernels/cpu/library.py).
#pragma once
#include "vec.h"

struct SegmentStruct {
    int64_t slot, start, count;
    const uint8_t* tree_mask;  // [count][count], or null for causal
};

struct AttentionJob {
    const float* query;  // [tokens][heads][head_dim]
    const void *k_cache, *v_cache;
    const SegmentStruct* segments;
    float* out;  // [tokens][heads][head_dim]
    int64_t num_segments, heads, kv_heads, head_dim, max_len;
    float scale;
    int32_t cache_dtype, threads;
};

struct RopeJob {
    const float *query, *key, *value, *cos, *sin;  // cos, sin [tokens][head_dim / 2]
    float* rotated;                                // [tokens][heads][head_dim]
    void *k_cache, *v_cache;                       // [slots][kv_heads][max_len][head_dim]
    const int64_t *slot, *position;                // [tokens] where each token's key and value go
    int64_t query_stride, key_stride, value_stride;  // between tokens
    int64_t tokens, heads, kv_heads, head_dim, max_len;
    int32_t cache_dtype, threads;
};

MQ_API void mq_attention(const AttentionJob* job);
MQ_API void mq_rope_write_kv(const RopeJob* job);
MQ_API void mq_rms_norm(
    const float* x, int64_t x_stride, const float* residual, const float* weight, float eps, float* sum, float* out,
    int64_t rows, int64_t width, int32_t threads);
MQ_API void mq_swiglu(
    const float* gate, const float* up, int64_t stride, float* out, int64_t rows, int64_t width, int32_t threads);
