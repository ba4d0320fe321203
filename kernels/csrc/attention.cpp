// Attention of a batch of query tokens over a slot KV cache, with grouped queries and tree masks.
//
// The keys a query sees are numbered in cache order, skipping those its mask hides, and every sum runs over
// these numbers. So a tree node gets bit for bit what it would get had its path been decoded token by token.
#include <vector>

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

namespace {

constexpr int64_t ROWS_PER_TASK = 16;  // (query, head) pairs that share a transposed tile of keys
constexpr int64_t PARALLEL_FROM = 1 << 17;  // multiply-adds below which starting threads costs more than it saves
constexpr int CHUNK = 4;               // vectors of head_dim accumulated at once

struct Task {
    int64_t segment, token, first, queries, kv_head;  // queries [first, first + queries) of the segment
};

struct Scratch {
    std::vector<float> scores, tile;
    std::vector<int64_t> visible;
};

vf load_part(const void* p, int64_t i, int32_t dtype, int64_t left) {
    if (left >= LANES) return load_as(p, i, dtype);
    vf v{};
    for (int64_t l = 0; l < left; ++l) v[l] = load_one(p, i + l, dtype);
    return v;
}

#if defined(__AVX512F__)
void transpose(vf* rows) {
    for (int step = 1; step < LANES; step *= 2) {
        vi low, high;
        for (int l = 0; l < LANES; ++l) {
            low[l] = l & step ? LANES + (l ^ step) : l;
            high[l] = l & step ? LANES + l : l ^ step;
        }
        for (int i = 0; i < LANES; ++i) {
            if (i & step) continue;
            const __m512 a = (__m512)rows[i], b = (__m512)rows[i + step];
            rows[i] = (vf)_mm512_permutex2var_ps(a, (__m512i)low, b);
            rows[i + step] = (vf)_mm512_permutex2var_ps(a, (__m512i)high, b);
        }
    }
}
#endif

// 16 keys [16][head_dim] -> tile [head_dim][16]; missing keys become zeros.
void load_tile(const AttentionJob& j, const void* keys, int64_t at, int64_t count, float* tile) {
    const int64_t dim = j.head_dim;
    int64_t d = 0;
#if defined(__AVX512F__)
    for (; d + LANES <= dim; d += LANES) {
        vf rows[LANES];
        for (int k = 0; k < LANES; ++k)
            rows[k] = k < count ? load_as(keys, at + k * dim + d, j.cache_dtype) : vf{};
        transpose(rows);
        for (int k = 0; k < LANES; ++k) store(tile + (d + k) * LANES, rows[k]);
    }
#endif
    for (; d < dim; ++d)
        for (int64_t k = 0; k < LANES; ++k)
            tile[d * LANES + k] = k < count ? load_one(keys, at + k * dim + d, j.cache_dtype) : 0.0f;
}

// Scores of 16 keys for R query rows: one chain of multiply-adds over head_dim each.
template <int R> void score_rows(const float* const* query, const float* tile, int64_t dim, vf* out) {
    vf sum[R];
    for (int r = 0; r < R; ++r) sum[r] = vf{};
    for (int64_t d = 0; d < dim; ++d) {
        const vf keys = load<vf>(tile + d * LANES);
        for (int r = 0; r < R; ++r) sum[r] = fma(splat(query[r][d]), keys, sum[r]);
    }
    for (int r = 0; r < R; ++r) out[r] = sum[r];
}

// Probabilities in place of n scores, padded with zeros to whole vectors; returns 1 / their sum.
float softmax(float* s, int64_t n, float scale) {
    float largest = s[0];
    for (int64_t i = 1; i < n; ++i) largest = s[i] > largest ? s[i] : largest;
    for (int64_t i = 0; i < n; ++i) s[i] = exp_one((s[i] - largest) * scale);
    for (int64_t i = n; i % LANES; ++i) s[i] = 0.0f;
    vf total{};
    for (int64_t i = 0; i < n; i += LANES) total += load<vf>(s + i);
    float lane[LANES];
    store(lane, total);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return 1.0f / lane[0];
}

// out[r][0..C*16) = inverse[r] * sum over visible keys of p[r][key] * v[key], keys in order.
template <int R, int C>
void mix_rows(
    const AttentionJob& j, int64_t base, int64_t d, const int64_t* visible, int64_t n, const float* p, int64_t stride,
    const float* inverse, float* out) {
    vf sum[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sum[r][c] = vf{};
    for (int64_t i = 0; i < n; ++i) {
        const int64_t at = base + visible[i] * j.head_dim + d;
        vf v[C];
        for (int c = 0; c < C; ++c) v[c] = load_part(j.v_cache, at + c * LANES, j.cache_dtype, j.head_dim - d - c * LANES);
        for (int r = 0; r < R; ++r)
            for (int c = 0; c < C; ++c) sum[r][c] = fma(splat(p[r * stride + i]), v[c], sum[r][c]);
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            const vf result = sum[r][c] * splat(inverse[r]);
            const int64_t left = j.head_dim - d - c * LANES;
            std::memcpy(out + r * j.head_dim + d + c * LANES, &result, size_t(left < LANES ? left : LANES) * 4);
        }
}

template <int R>
void mix(
    const AttentionJob& j, int64_t base, const int64_t* visible, int64_t n, const float* p, int64_t stride,
    const float* inverse, float* out) {
    int64_t d = 0;
    for (; d + CHUNK * LANES <= j.head_dim; d += CHUNK * LANES)
        mix_rows<R, CHUNK>(j, base, d, visible, n, p, stride, inverse, out);
    for (; d < j.head_dim; d += LANES) mix_rows<R, 1>(j, base, d, visible, n, p, stride, inverse, out);
}

void run_task(const AttentionJob& j, const Task& task, Scratch& s) {
    const SegmentStruct& segment = j.segments[task.segment];
    const int64_t group = j.heads / j.kv_heads, rows = task.queries * group, dim = j.head_dim;
    const int64_t base = (segment.slot * j.kv_heads + task.kv_head) * j.max_len * dim;
    const uint8_t* mask = segment.tree_mask;
    // Without a mask no query of the task looks past its last one.
    const int64_t end = segment.start + (mask ? segment.count : task.first + task.queries);
    const int64_t stride = (end / LANES + 2) * LANES;
    s.scores.resize(size_t(rows * stride));
    s.tile.resize(size_t(dim * LANES));
    std::vector<const float*> query(size_t(rows), nullptr);
    for (int64_t r = 0; r < rows; ++r)
        query[size_t(r)] = j.query + ((task.token + task.first + r / group) * j.heads + task.kv_head * group + r % group) * dim;
    std::vector<int64_t> seen(size_t(task.queries), 0);
    for (int64_t k = 0; k < end; k += LANES) {
        const int64_t count = end - k < LANES ? end - k : LANES;
        load_tile(j, j.k_cache, base + k * dim, count, s.tile.data());
        vf found[ROWS_PER_TASK];
        for (int64_t r = 0; r < rows;) {
            const int64_t left = rows - r;
            if (left >= 8) score_rows<8>(&query[size_t(r)], s.tile.data(), dim, found), r += 8;
            else if (left >= 4) score_rows<4>(&query[size_t(r)], s.tile.data(), dim, found), r += 4;
            else score_rows<1>(&query[size_t(r)], s.tile.data(), dim, found), r += 1;
            const int64_t done = left >= 8 ? 8 : left >= 4 ? 4 : 1;
            for (int64_t i = 0; i < done; ++i) {
                const int64_t row = r - done + i;
                float* to = s.scores.data() + row * stride;
                if (!mask || k + count <= segment.start) {
                    store(to + k, found[i]);
                    continue;
                }
                const uint8_t* allowed = mask + (task.first + row / group) * segment.count;
                int64_t at = k;
                for (int64_t hidden = 0; hidden < k - segment.start; ++hidden) at -= !allowed[hidden];
                for (int64_t l = 0; l < count; ++l)
                    if (k + l < segment.start || allowed[k + l - segment.start]) to[at++] = found[i][l];
            }
        }
    }
    std::vector<float> inverse(size_t(group), 0.0f);
    for (int64_t q = 0; q < task.queries; ++q) {
        const int64_t i = task.first + q;
        s.visible.clear();
        for (int64_t k = 0; k < segment.start; ++k) s.visible.push_back(k);
        for (int64_t k = 0; k < segment.count; ++k)
            if (mask ? mask[i * segment.count + k] : k <= i) s.visible.push_back(segment.start + k);
        const int64_t n = int64_t(s.visible.size());
        float* p = s.scores.data() + q * group * stride;
        for (int64_t h = 0; h < group; ++h) inverse[size_t(h)] = softmax(p + h * stride, n, j.scale);
        float* out = j.out + ((task.token + i) * j.heads + task.kv_head * group) * dim;
        for (int64_t h = 0; h < group;) {
            const auto step = [&](auto run, int64_t size) {
                run(j, base, s.visible.data(), n, p + h * stride, stride, &inverse[size_t(h)], out + h * dim);
                h += size;
            };
            if (group - h >= 4) step(mix<4>, 4);
            else if (group - h == 3) step(mix<3>, 3);
            else if (group - h == 2) step(mix<2>, 2);
            else step(mix<1>, 1);
        }
    }
}

}  // namespace

MQ_API void mq_attention(const AttentionJob* job) {
    const int64_t group = job->heads / job->kv_heads;
    const int64_t per_task = group >= ROWS_PER_TASK ? 1 : ROWS_PER_TASK / group;
    std::vector<Task> tasks;
    int64_t token = 0;
    for (int64_t s = 0; s < job->num_segments; ++s) {
        const int64_t count = job->segments[s].count;
        for (int64_t first = 0; first < count; first += per_task)
            for (int64_t h = 0; h < job->kv_heads; ++h)
                tasks.push_back({s, token, first, count - first < per_task ? count - first : per_task, h});
        token += count;
    }
    int64_t work = 0;  // multiply-adds of a query row over the keys, all rows
    for (const Task& t : tasks) work += t.queries * group * job->head_dim * (job->segments[t.segment].start + t.first);
    // Late tasks of a long prefill see the most keys: dynamic, so that no thread ends up with all of them.
#pragma omp parallel num_threads(job->threads) if (tasks.size() > 1 && work > PARALLEL_FROM)
    {
        Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int64_t t = 0; t < int64_t(tasks.size()); ++t) run_task(*job, tasks[size_t(t)], scratch);
    }
}
